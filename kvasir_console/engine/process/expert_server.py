"""The worker's side of the dispatch stream: rows and expert ids in, weighted sums out, one request at a time.

One server serves any number of banks: experts of several layers, several ranges, or several models. A connection's
preamble says which of them its requests mean, and expert ids count from its range's beginning. A bad request closes its
connection and nothing else; the process serves on. Counts are checked before anything is allocated for them
(``wire.dispatch``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.compute import Compute
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Preamble, Wire

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024


@dataclass(slots=True)
class Served:
    """What this worker answered over its life."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class HeldBank:
    """A bank, and the model it is of."""

    bank: ExpertBank
    model_digest: bytes

    def holds(self, preamble: Preamble) -> bool:
        bank = self.bank
        return (self.model_digest, bank.layer) == (preamble.model_digest, preamble.layer) and (
            bank.begin <= preamble.begin < preamble.end <= bank.end
        )


class ExpertServer:
    """Serves banks to any number of connections; requests of one connection are answered in order."""

    def __init__(self, held: Sequence[HeldBank], compute: Compute) -> None:
        self._held = held
        self._compute = compute
        self.served = Served()

    def stats(self) -> dict[str, Any]:
        return asdict(self.served)

    async def serve(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the peer leaves or sends one that is refused.

        Raises:
            ValueError: no bank here holds what the preamble names.
        """
        bank = next((held.bank for held in self._held if held.holds(preamble)), None)
        if bank is None:
            raise ValueError(f"no experts [{preamble.begin}, {preamble.end}) of layer {preamble.layer} are held here")
        decoder = dispatch.RequestDecoder(bank.n_embd, preamble.end - preamble.begin)
        try:
            while data := await reader.read(_READ_BYTES):
                decoder.feed(data)
                while (request := decoder.next()) is not None:
                    reply = await self._answer(bank, request, preamble.begin)
                    writer.write(reply)
                    await writer.drain()
            decoder.eof()
        except dispatch.DispatchError as error:
            self.served.rejected += 1
            log.warning("a dispatch request is refused and its connection closed: %s", error)

    async def _answer(self, bank: ExpertBank, request: dispatch.Request, begin: int) -> bytes:
        array = await self._compute.run(lambda: expert_reply(bank, request, begin))
        self.served.requests += 1
        self.served.rows += request.rows.shape[0]
        self.served.pairs += len(request.ids)
        return dispatch.encode_reply(request.wire, array)


def expert_reply(bank: ExpertBank, request: dispatch.Request, begin: int) -> np.ndarray[Any, Any]:
    """The reply's values: (pairs, D) raw outputs for v1, (rows, D) weighted sums otherwise; f32.

    ``begin`` is the expert of the layer that the request's ids count from.
    """
    rows = torch.from_numpy(np.array(request.rows, dtype=np.float32))
    row_idx = torch.from_numpy(request.row_idx.astype(np.int64))
    ids = torch.from_numpy(request.ids.astype(np.int64) + (begin - bank.begin))
    if request.wire is Wire.V1 or request.weights is None:
        out = bank.outputs(rows, row_idx, ids)
    else:
        weights = torch.from_numpy(np.array(request.weights, dtype=np.float32))
        out = bank.weighted_sum(rows, row_idx, ids, weights)
    values: np.ndarray[Any, Any] = out.cpu().numpy()
    return values
