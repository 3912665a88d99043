"""A ring for benchmarks and fault tests: real processes, TLS, and a delay proxy on every node's link to the hub.

    client ── gateway (front, hub) ═══ link ═══ stage 0 ... stage n-1
                                   ═══ link ═══ worker 0 ... worker m-1

Every node is ``kvasir-console --headless`` with its own home and wallet. It reaches the gateway by an address of its
own on loopback, where its link listens; the gateway's certificate names them all, so nothing is trusted for being
local. There is no ledger here: what is earned is counted and not paid out. A process that ends is started again at
once, as a service manager would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import psutil

from kvasir_console.bench.links import Links
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import KvasirError, SystemResourceError
from kvasir_console.local.certificates import Certificates, make_certificates
from kvasir_console.local.chat import Gateway
from kvasir_console.local.members import Member, free_port, make_member, secret_file
from kvasir_console.node.phase import Phase
from kvasir_console.node.supervisor import ChildProcess
from kvasir_console.paths import private_directory

log = logging.getLogger(__name__)

Say = Callable[[str], None]
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 5.0
SETTLE_S = 60.0
"""A gateway that was started again may say so long that its models are not served yet."""
_NO_LEDGER = "http://127.0.0.1:9"
"""Loopback's discard port: nothing listens there, and nobody is asked for money by mistake."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the network serves, and on how many machines."""

    model: Path
    windows: Sequence[tuple[int, int]]
    """Layers [begin, end) of each stage; one window for the whole model is a ring of one."""
    workers: int = 0
    standbys: int = 0
    """Nodes that stand by for every window."""
    standby_grace_s: float = 60.0
    max_experts: int = 64
    """Most experts a worker takes, of one layer."""
    rtt_ms: float = 0.0
    """Of every node's link."""
    threads: int = 1
    """Compute threads of each node's engine."""
    whole_threads: int = 0
    """Not 0: the gateway serves the model a second time, whole, with so many threads."""
    max_requests: int = 64
    direct: bool = False
    """Stages listen for each other: edges go past the relay, and past the delays of its links."""
    seed: int = 0


class Kept:
    """A process that is started again whenever it ends, while ``keep`` is set."""

    def __init__(self, child: ChildProcess, say: Say) -> None:
        self.child = child
        self.restarts = 0
        self.keep = asyncio.Event()
        self.keep.set()
        self.ended_s = -inf
        """When it last ended, on the event loop's clock."""
        self._say = say

    async def run(self) -> None:
        """Until cancelled; the process then still runs."""
        while True:
            report = await self.child.wait()
            self.ended_s = asyncio.get_running_loop().time()
            self.restarts += 1
            await self.keep.wait()
            self._say(f"{report.reason} It is started again.")
            await self.child.start()


class RingNetwork:
    """Starts everything on entry, stops everything on exit. ``say`` hears one line for each step."""

    model_id = "ring"
    whole_id = "whole"

    def __init__(self, layout: Layout, say: Say, keep: Path | None = None) -> None:
        self.layout = layout
        self._say = say
        self._keep = keep
        self._stack = contextlib.AsyncExitStack()
        self.kept: dict[str, Kept] = {}

    async def __aenter__(self) -> RingNetwork:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def members(self) -> tuple[Member, ...]:
        """Stages by rank, then workers, then nodes that stand by."""
        return (*self.stages, *self.workers, *self.standbys)

    async def _start(self) -> None:
        self.directory = private_directory(self._keep or Path(tempfile.mkdtemp(prefix="kvb-")))
        if self._keep is None:
            self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        layout, stages = self.layout, len(self.layout.windows)
        kinds = (("stage", stages), ("worker", layout.workers), ("standby", layout.standbys))
        names = ["gateway", *(f"{kind}-{n}" for kind, count in kinds for n in range(count))]
        self.certificates: Certificates = make_certificates(self.directory, [_address(n) for n in range(len(names))])
        made = [await asyncio.to_thread(make_member, self.directory, name) for name in names]
        self.operator, self.stages = made[0], made[1 : 1 + stages]
        self.workers = made[1 + stages : 1 + stages + layout.workers]
        self.standbys = made[1 + stages + layout.workers :]
        for member in made:
            self._stack.callback(member.forget)
        self.port = free_port()
        self.url = f"https://localhost:{self.port}"
        self.links = await self._stack.enter_async_context(Links(layout.seed))
        self._say(f"Starting a gateway, {stages} stages and {layout.workers} workers, {layout.rtt_ms:g} ms to the hub")
        await self._start_gateway()
        for number, member in enumerate(self.members):
            address = _address(number)
            await self.links.open(member.name, self.port, host=address, port=self.port, rtt_ms=layout.rtt_ms)
            await self._start_node(member, f"https://{address}:{self.port}")
        self.client = await self._stack.enter_async_context(Gateway(self))
        await self.wait_until(self.whole, "the network does not become whole")

    async def _start_gateway(self) -> None:
        layout, operator = self.layout, self.operator
        token_file = operator.paths.state / "service-token"
        self.service_token = secret_file(token_file)
        standbys = [member.address for member in self.standbys]
        named = zip(self.stages, layout.windows, strict=True)
        ring = [[member.address, *window, *standbys] for member, window in named]
        served = [{"id": self.model_id, "path": str(layout.model), "placement": "ring", "ring": ring}]
        if layout.whole_threads:
            served.append({"id": self.whole_id, "path": str(layout.model), "placement": "trunk"})
        operator.configure(
            _common(layout.whole_threads or 1)
            | {
                "gateway": {
                    "host": "127.0.0.1",
                    "port": self.port,
                    "tls_cert": str(self.certificates.chain),
                    "tls_key": str(self.certificates.key),
                    "database": f"sqlite:///{operator.paths.data / 'gateway.sqlite'}",
                    "target_replicas": 1,
                    "settlement_poll_s": 5.0,
                    "service_token_file": str(token_file),
                    "max_requests": layout.max_requests,
                    "standby_grace_s": layout.standby_grace_s,
                    "models": served,
                }
            }
        )
        await self._keep_running(operator.name, operator.gateway())

    async def _start_node(self, member: Member, gateway: str) -> None:
        member.configure(
            _common(self.layout.threads)
            | {
                "network": {
                    "gateway": gateway,
                    "ca_file": str(self.certificates.authority),
                    "redial_min_s": 0.1,
                    "redial_max_s": 2.0,
                },
                "node": {
                    "name": member.name,
                    "serve": "experts" if member in self.workers else "ring",
                    "max_experts": self.layout.max_experts,
                    "poll_s": 2.0,
                    "retry_s": 0.3,
                    **({"direct": True, "direct_listen": "127.0.0.1:0"} if self.layout.direct else {}),
                },
            }
        )
        await self._keep_running(member.name, member.node())

    async def _keep_running(self, name: str, child: ChildProcess) -> None:
        await child.start()
        kept = self.kept[name] = Kept(child, self._say)
        task = asyncio.create_task(kept.run(), name=f"keep {name}")

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await child.stop()

        self._stack.push_async_callback(end)

    async def wait_until(self, ready: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises ``SystemResourceError`` if it does not come true in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await ready():
            if asyncio.get_running_loop().time() > deadline:
                raise SystemResourceError("bench_not_started", f"Within {timeout_s:g} s {what}.", f"{self.directory}")
            await asyncio.sleep(0.2)

    async def whole(self) -> bool:
        """Whether every node serves, the ring answers, every worker is joined to its stage and standbys are ready."""
        if not await self._standbys_ready():
            return False
        snapshots = await asyncio.gather(*(member.snapshot() for member in (*self.stages, *self.workers)))
        if not all(each is not None and each.state.phase is Phase.SERVING for each in snapshots):
            return False
        try:
            ready = {model["id"].split(":", 1)[-1] for model in (await self.client.get("/api/pay/models"))["models"]}
        except KvasirError:
            return False
        if not ready >= ({self.model_id, self.whole_id} if self.layout.whole_threads else {self.model_id}):
            return False
        rings = [(await self.engine_stats(stage) or {}).get("ring") or {} for stage in self.stages]
        if not all(ring.get("next_ready") and ring.get("prev_ready") for ring in rings):
            return False
        return sum(1 for each in await self.coverage() if each["connected"]) >= len(self.workers)

    async def all_direct(self) -> bool:
        """Whether every edge between ranks goes past the hub."""
        return set(await self.edge_states()) == {"direct"}

    async def edge_states(self) -> list[str]:
        """Of both ends of each edge between ranks, as far as the nodes answer."""
        seen = await asyncio.gather(*(stage.snapshot() for stage in self.stages))
        relays = [relay for each in seen if each is not None for relay in each.relays]
        return [relay.state for relay in relays if relay.session.split("/")[1].isdigit()]

    async def _standbys_ready(self) -> bool:
        if not self.standbys:
            return True
        try:
            rings = await self.rings()
        except KvasirError:
            return False
        return all(each["ready"] for ring in rings for stage in ring["stages"] for each in stage["replicas"])

    async def rings(self) -> list[dict[str, Any]]:
        """What the gateway says of its rings. Raises ``KvasirError``."""
        found: list[dict[str, Any]] = (await self.client.get("/api/rings"))["rings"]
        return found

    async def engine_stats(self, member: Member) -> dict[str, Any] | None:
        """The counters of a member's engine, ``None`` if it does not answer."""
        stats: dict[str, Any] | None = await self._ask_engine(member, EngineClient.stats)
        return stats

    async def coverage(self) -> list[dict[str, Any]]:
        """What each stage's router says of its workers, as far as the stages answer; with ``stage``, the rank."""
        answers = await asyncio.gather(*(self._ask_engine(stage, EngineClient.coverage) for stage in self.stages))
        return [{**each, "stage": rank} for rank, found in enumerate(answers) for each in found or ()]

    async def _ask_engine(self, member: Member, ask: Callable[[EngineClient], Any]) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                client = await EngineClient.connect(member.paths.runtime / "node.ctl", timeout_s=1.0)
                try:
                    return await ask(client)
                finally:
                    await client.close()
        except (KvasirError, TimeoutError, OSError):
            return None

    @property
    def gateway_deaths(self) -> int:
        return self.kept[self.operator.name].restarts

    @property
    def gateway_settled(self) -> bool:
        """Whether the gateway has run long enough for a request to be its own failure."""
        return asyncio.get_running_loop().time() - self.kept[self.operator.name].ended_s > SETTLE_S

    def console_pid(self, name: str) -> int | None:
        """The console process of a member, or of the gateway (``gateway``)."""
        child = self.kept[name].child
        return child.pid if child.running else None

    def engine_pid(self, name: str) -> int | None:
        """The engine that a member's console runs now."""
        console = self.console_pid(name)
        if console is None:
            return None
        try:
            children = psutil.Process(console).children()
            return next((each.pid for each in children if "kvasir_console.engine.process" in each.cmdline()), None)
        except psutil.Error:
            return None


def _common(threads: int) -> dict[str, Any]:
    return {"engine": {"threads": threads}, "wallet": {"rpc_url": _NO_LEDGER, "kdf": "interactive"}}


def _address(number: int) -> str:
    """The address of a node's link; a link of its own port would be another domain than the certificate proves."""
    return f"127.0.1.{number + 1}"
