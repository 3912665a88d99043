"""The worker's side of the dispatch stream: rows and expert ids in, weighted sums out.

One server serves any number of banks: experts of several layers, several ranges, or several models. A connection's
preamble says which of them its requests mean, and expert ids count from a range's beginning. Its first word says which
wire it speaks. On the older ones requests are answered in turn, the first window is served, and a bad request closes
its connection. On version 3 (``v3_server``) all windows are served and a bad request is answered by an error. Either
way nothing else is touched, and counts are checked before anything is allocated for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.served import HeldBank, Served, ServedSlice, expert_reply
from kvasir_console.engine.process.v3_server import V3Session
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.dispatch_v3 import DEFAULT_BYTE_BUDGET, OPENING, Hello, V3Error
from kvasir_console.relay.wire.preamble import Preamble
from kvasir_console.relay.wire.values import ALL_DTYPES

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
LEAVING = "the worker is being stopped"


class ExpertServer:
    """Serves banks to any number of connections."""

    def __init__(self, held: Sequence[HeldBank], compute: Compute, *, byte_budget: int = DEFAULT_BYTE_BUDGET) -> None:
        """
        Args:
            byte_budget: requests and replies of one connection that are held at once, in bytes.
        """
        self._held = held
        self._compute = compute
        self._byte_budget = byte_budget
        self._sessions: set[V3Session] = set()
        self._closing = False
        self.served = Served()

    def stats(self) -> dict[str, Any]:
        return asdict(self.served)

    async def serve(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the peer leaves, breaks the contract or was let go by ``drain``.

        Raises:
            ValueError: no bank here holds what the preamble names first.
        """
        windows = [self._slice(preamble.model_digest, *window) for window in preamble.windows]
        if windows[0] is None:
            raise ValueError(f"no experts [{preamble.begin}, {preamble.end}) of layer {preamble.layer} are held here")
        slices = [each for each in windows if each is not None]
        try:
            first = await reader.readexactly(len(OPENING))
        except asyncio.IncompleteReadError as error:
            self.served.rejected += bool(error.partial)
            return
        if first == OPENING:
            await self._serve_v3(preamble.model_digest, slices, first, reader, writer)
        else:
            await self._serve_legacy(slices[0], first, reader, writer)

    async def drain(self, timeout_s: float) -> bool:
        """Ask every trunk for no more work and wait until each has left; whether all did within ``timeout_s``.

        Trunks that speak an older wire cannot be told; their sessions go on until they are cut.
        """
        self._closing = True
        for session in self._sessions:
            session.goodbye(LEAVING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._sessions:
                    await next(iter(self._sessions)).over.wait()
        return not self._sessions

    def _slice(self, model_digest: bytes, layer: int, begin: int, end: int) -> ServedSlice | None:
        found = (held.slice(model_digest, layer, begin, end) for held in self._held)
        return next((each for each in found if each is not None), None)

    async def _serve_v3(
        self,
        model_digest: bytes,
        slices: Sequence[ServedSlice],
        first: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        held = tuple(each.held for each in slices)
        hello = Hello(slices[0].bank.n_embd, held, model_digest, ALL_DTYPES, self._byte_budget)
        session = V3Session(slices, hello, self._compute, self.served, reader, writer)
        self._sessions.add(session)
        try:
            if self._closing:
                session.goodbye(LEAVING)
            await session.run(first)
        except V3Error as error:
            self.served.rejected += 1
            log.warning("a dispatch session is closed: %s", error)
        finally:
            self._sessions.discard(session)

    async def _serve_legacy(
        self, served: ServedSlice, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        bank, begin = served.bank, served.held.begin
        decoder = dispatch.RequestDecoder(bank.n_embd, served.held.end - begin)
        data = first
        try:
            while data:
                decoder.feed(data)
                while (request := decoder.next()) is not None:
                    array = await self._compute.run(functools.partial(expert_reply, bank, request, begin))
                    self.served.count(request)
                    writer.write(dispatch.encode_reply(request.wire, array))
                    await writer.drain()
                data = await reader.read(_READ_BYTES)
            decoder.eof()
        except dispatch.DispatchError as error:
            self.served.rejected += 1
            log.warning("a dispatch request is refused and its connection closed: %s", error)
