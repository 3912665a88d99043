"""The worker's side of the dispatch stream: rows and expert ids in, weighted sums out.

A connection says by its first word which wire it speaks. On the older ones requests of a connection are answered in
turn, and a bad one closes its connection. On version 3 (``v3_server``) a bad one is answered by an error. Either way
nothing else is touched, and counts are checked before anything is allocated for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.served import Served, ServedSlice, expert_reply
from kvasir_console.engine.process.v3_server import V3Session
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.dispatch_v3 import DEFAULT_BYTE_BUDGET, OPENING, Hello, V3Error
from kvasir_console.relay.wire.preamble import Preamble
from kvasir_console.relay.wire.values import ALL_DTYPES

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
LEAVING = "the worker is being stopped"


class ExpertServer:
    """Serves expert banks, at most one a layer, to any number of connections."""

    def __init__(
        self,
        slices: Sequence[ServedSlice],
        compute: Compute,
        *,
        model_digest: bytes = bytes(32),
        byte_budget: int = DEFAULT_BYTE_BUDGET,
    ) -> None:
        """
        Args:
            byte_budget: requests and replies of one connection that are held at once, in bytes.
        """
        self._slices = slices
        self._compute = compute
        held = tuple(each.held for each in slices)
        self._hello = Hello(slices[0].bank.n_embd, held, model_digest, ALL_DTYPES, byte_budget)
        self._sessions: set[V3Session] = set()
        self._closing = False
        self.served = Served()

    def stats(self) -> dict[str, Any]:
        return asdict(self.served)

    async def serve(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the peer leaves, breaks the contract or was let go by ``drain``."""
        try:
            first = await reader.readexactly(len(OPENING))
        except asyncio.IncompleteReadError as error:
            self.served.rejected += bool(error.partial)
            return
        if first != OPENING:
            await self._serve_legacy(self._bank_of(preamble), first, reader, writer)
            return
        session = V3Session(self._slices, self._hello, self._compute, self.served, reader, writer)
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

    def _bank_of(self, preamble: Preamble) -> ExpertBank:
        """The bank that a session of an older wire is for: its wire cannot say."""
        window = (preamble.layer, preamble.begin, preamble.end)
        banks = [each.bank for each in self._slices]
        return next((bank for bank in banks if (bank.layer, bank.begin, bank.end) == window), banks[0])

    async def _serve_legacy(
        self, bank: ExpertBank, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        decoder = dispatch.RequestDecoder(bank.n_embd, bank.end - bank.begin)
        data = first
        try:
            while data:
                decoder.feed(data)
                while (request := decoder.next()) is not None:
                    array = await self._compute.run(functools.partial(expert_reply, bank, request))
                    self.served.count(request)
                    writer.write(dispatch.encode_reply(request.wire, array))
                    await writer.drain()
                data = await reader.read(_READ_BYTES)
            decoder.eof()
        except dispatch.DispatchError as error:
            self.served.rejected += 1
            log.warning("a dispatch request is refused and its connection closed: %s", error)
