"""The coverage report: what a node holds or stands by for, as it tells its gateway again and again."""

from __future__ import annotations

from kvasir_console.node import hardware
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.direct import DirectEdges
from kvasir_console.node.holding import Holding, RingHolding
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.placement.plan import Plan


class Coverage:
    """One worker's reports. ``device`` is the engine's."""

    def __init__(
        self, market: Market, credentials: Credentials, direct: DirectEdges, wallet: str, worker_id: str, device: str
    ) -> None:
        self._market = market
        self._credentials = credentials
        self._direct = direct
        self._wallet = wallet
        self._worker_id = worker_id
        self._device = device

    async def report(self, holding: Holding | None, info: GatewayInfo, stands_by: Plan | None = None) -> bool:
        """Report once; whether the gateway has sessions wired for what is held.

        A node that has what it stands by for says so, and names the plan's model (``stands_by``).

        Raises ``KvasirError``.
        """
        machine = hardware.probe(self._device)
        report = {
            "worker_id": self._worker_id,
            "owner": self._wallet,
            "os": machine.os,
            "device_kind": machine.device_kind,
            "accelerator": machine.accelerator,
            "backend": machine.backend,
            **(holding.coverage() if holding is not None else _nothing_held(stands_by)),
        }
        if self._direct.enabled and info.direct_edges and isinstance(holding, RingHolding):
            report |= {"direct": self._direct.announcement(), "direct_live": self._direct.live}
        if not info.dispatch_wires:
            report.pop("wires", None)  # an extension, used only where it is announced
        reply = await self._credentials.with_token(lambda token: self._market.report(token, report))
        return holding is not None and (reply.wired or isinstance(holding, RingHolding))


def _nothing_held(stands_by: Plan | None) -> dict[str, object]:
    if stands_by is None:
        return {"model": "none", "segments": []}
    return {"model": stands_by.model, "segments": [], "stands_by": True}
