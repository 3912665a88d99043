"""The whole network on this machine: real processes, real wss, a real ledger. Nothing here is simulated.

    ledger · gateway (front, hub, trunk engine) · payout · two ring nodes · N expert nodes

Every node is ``kvasir-console --headless`` with its own home and wallet; it knows the gateway's URL, the authority's
certificate and the ledger's RPC, and nothing else of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.errors import SystemResourceError
from kvasir_console.local.certificates import Certificates, make_certificates
from kvasir_console.local.members import Member, check_port, free_port, make_member, secret_file
from kvasir_console.node.admin import AdminClient
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.node.supervisor import ChildProcess, module_argv
from kvasir_console.paths import private_directory
from kvasir_console.wallet.chain import Chain
from kvasir_console.wallet.localnet.auth import read_auth_file
from kvasir_console.wallet.localnet.bootstrap import bootstrap
from kvasir_console.wallet.vault import open_vault

RING_MODEL = "smollm2-135m"
MOE_MODEL = "smollm2-8x135m"
Say = Callable[[str], None]
START_TIMEOUT_S = 240.0
KV_BUDGET_MIB = 512
"""For each of three engines that do not know of each other: half of what is free would be too much."""


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints on this disk: the ring's dense model and the trunk's mixture of experts."""

    ring: Path
    moe: Path
    moe_id: str = MOE_MODEL
    ring_layers: int = 30


class LocalNetwork:
    """Starts everything on entry, stops everything on exit. ``say`` hears one line for each step."""

    def __init__(self, models: Models, *, experts: int, port: int, directory: Path | None, say: Say) -> None:
        self._models = models
        self._expert_count = experts
        self._port = port
        self._kept = directory
        self._say = say
        self._children: list[ChildProcess] = []
        self._watchers: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] | None = None

    async def __aenter__(self) -> LocalNetwork:
        self.directory = private_directory(self._kept or Path(tempfile.mkdtemp(prefix="kvasir-local-")))
        self.failed = asyncio.get_running_loop().create_future()
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        self._say("Making wallets and a certificate authority")
        self.certificates = make_certificates(self.directory)
        self.port = self._port or free_port()
        check_port(self.port)
        self.url = f"https://localhost:{self.port}"
        names = ["treasury", "ring-0", "ring-1"] + [f"expert-{n}" for n in range(self._expert_count)]
        members = await asyncio.gather(*(asyncio.to_thread(make_member, self.directory, name) for name in names))
        self.treasury, self.ring, self.experts = members[0], members[1:3], members[3:]
        await self._start_ledger()
        await self._start_gateway()
        for member in (*self.ring, *self.experts):
            await self._start_node(member)
        self._say(f"Waiting for {len(self.ring)} ring stages and {len(self.experts)} expert nodes")
        await asyncio.gather(*(self._serving(member) for member in (*self.ring, *self.experts)))

    async def wait_ready(self, ready: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until the gateway says so; a process that ends meanwhile ends the wait. Raises as on entry."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not await ready():
            if self.failed is not None and self.failed.done():
                raise _not_started(self.failed.result(), self.directory)
            if asyncio.get_running_loop().time() > deadline:
                raise _not_started(what, self.directory)
            await asyncio.sleep(0.2)

    async def _start_ledger(self) -> None:
        self._say("Starting the ledger and minting KVR")
        data = private_directory(self.directory / "ledger")
        self.rpc_auth_file = data / "auth"
        argv = module_argv(
            "kvasir_console.wallet.localnet", "--data", str(data), "--auth-file", str(self.rpc_auth_file)
        )
        ledger = ChildProcess("ledger", argv, data / "ledger.log", stdout=subprocess.PIPE)
        await self._child(ledger)
        assert ledger.stdout is not None  # noqa: S101 - it was asked for
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = json.loads(await ledger.stdout.readline())
        except (TimeoutError, ValueError) as error:
            raise _not_started("ledger", data / "ledger.log") from error
        self.rpc_url = f"http://127.0.0.1:{ready['port']}"
        async with self.chain() as chain:
            passphrase = self.treasury.passphrase_file.read_text()
            with await asyncio.to_thread(open_vault, self.treasury.paths.vault_file, passphrase) as vault:
                self.mint = str(await bootstrap(chain, vault.key().keypair()))

    def chain(self) -> Chain:
        return Chain(self.rpc_url, auth=read_auth_file(self.rpc_auth_file))

    async def _start_gateway(self) -> None:
        self._say(f"Starting the gateway on {self.url}")
        self._service_token_file = self.treasury.paths.state / "service-token"
        self.service_token = secret_file(self._service_token_file)
        half = self._models.ring_layers // 2
        windows = [(0, half), (half, self._models.ring_layers)]
        ring = [[member.address, begin, end] for member, (begin, end) in zip(self.ring, windows, strict=True)]
        database = f"sqlite:///{self.treasury.paths.data / 'gateway.sqlite'}"
        config = self._common() | {
            "gateway": {
                "host": "127.0.0.1",
                "port": self.port,
                "tls_cert": str(self.certificates.chain),
                "tls_key": str(self.certificates.key),
                "database": database,
                "target_replicas": 1,
                "minimum_claim_micro_kvr": 1,
                "dispatch_trial_pairs": 8,  # one short prompt brings a worker so many; its pay is held until then
                "settlement_poll_s": 1.0,
                "service_token_file": str(self._service_token_file),
                "models": [
                    {"id": self._models.moe_id, "path": str(self._models.moe), "placement": "trunk"},
                    {"id": RING_MODEL, "path": str(self._models.ring), "placement": "ring", "ring": ring},
                ],
            }
        }
        self.treasury.configure(config)
        logs = self.treasury.paths.state
        await self._child(self.treasury.gateway())
        payout = module_argv(
            "kvasir_console.node.gateway.payout",
            *("--database", database, "--rpc", self.rpc_url, "--rpc-auth-file", str(self.rpc_auth_file)),
            *("--mint", self.mint, "--treasury", str(self.treasury.paths.vault_file)),
            *("--passphrase-file", str(self.treasury.passphrase_file)),
        )
        await self._child(ChildProcess("payout", payout, logs / "payout.log", env=self.treasury.environment))

    async def _start_node(self, member: Member) -> None:
        serve = "ring" if member in self.ring else "experts"
        config = self._common() | {
            "network": {
                "gateway": self.url,
                "ca_file": str(self.certificates.authority),
                "redial_min_s": 0.5,
                "redial_max_s": 5.0,
            },
            "node": {
                "name": member.name,
                "serve": serve,
                "max_experts": 4,
                "poll_s": 5.0,
                "retry_s": 0.5,
            },
        }
        member.configure(config)
        await self._child(member.node())

    def _common(self) -> dict[str, Any]:
        return {
            "engine": {"threads": 1, "kv_budget_mib": KV_BUDGET_MIB},
            "wallet": {"rpc_url": self.rpc_url, "rpc_auth_file": str(self.rpc_auth_file), "mint": self.mint},
        }

    async def _child(self, child: ChildProcess) -> None:
        await child.start()
        self._children.append(child)
        self._watchers.append(asyncio.create_task(self._watch(child)))

    async def _watch(self, child: ChildProcess) -> None:
        report = await child.wait()
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(report.reason)

    async def _serving(self, member: Member) -> None:
        """Wait until a node serves; say each change of its phase."""
        shown = ""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            if self.failed is not None and self.failed.done():
                raise _not_started(self.failed.result(), self.directory)
            snapshot = await self.snapshot(member)
            if snapshot is not None:
                if snapshot.state.phase.value != shown:
                    shown = snapshot.state.phase.value
                    self._say(f"  {member.name}: {shown} - {snapshot.state.why}")
                if snapshot.state.phase is Phase.SERVING:
                    return
            if asyncio.get_running_loop().time() > deadline:
                raise _not_started(f"{member.name} ({shown or 'no answer'})", self.directory)
            await asyncio.sleep(0.1)

    async def snapshot(self, member: Member) -> NodeSnapshot | None:
        """A node's snapshot, ``None`` while it does not answer."""
        return await member.snapshot()

    async def claim(self, member: Member) -> dict[str, Any]:
        """Ask a node to claim what it earned; it signs with its own wallet."""
        client = AdminClient(member.node_socket)
        try:
            claim: dict[str, Any] = (await client.call("claim"))["claim"]
            return claim
        finally:
            await client.close()

    async def _stop(self) -> None:
        self.failed = None
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(child.stop() for child in reversed(self._children)))
        with contextlib.suppress(OSError):
            for member in (*getattr(self, "experts", ()), *getattr(self, "ring", ())):
                member.forget()
            if self._kept is None:
                shutil.rmtree(self.directory, ignore_errors=True)


def _not_started(what: str, logs: Path) -> SystemResourceError:
    return SystemResourceError("local_not_started", f"The local network did not start: {what}.", f"Logs are in {logs}.")


__all__ = ["Certificates", "LocalNetwork", "Member", "Models"]
