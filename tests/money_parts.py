"""Money under fire: ledger, gateway, payout, work and a node as real processes, killed at random, and the books after.

What has to hold at the end, whatever was killed when: credited + carried is the formula, exactly; the payouts on the
chain are the paid claims, exactly; no claim and no send moved money twice.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from kvasir_console import cli
from kvasir_console.child import die_with_parent
from kvasir_console.node.gateway import payout, tables
from kvasir_console.node.gateway.ledger import ClaimState, Ledger
from kvasir_console.node.gateway.payout import MEMO_PREFIX
from kvasir_console.node.gateway.store import Store
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, token
from kvasir_console.wallet.chain import Chain, TransactionView
from kvasir_console.wallet.localnet import __main__ as localnet
from kvasir_console.wallet.localnet.bootstrap import bootstrap
from kvasir_console.wallet.outbox import Outbox, SendState
from kvasir_console.wallet.vault import open_vault

import money_node
import money_trunk
from ledger_process import LedgerProcess
from money_node import wallet_key
from money_trunk import LAYERS, PLAN_CUTS

PASSPHRASE = "a passphrase for tests"
WALLETS = 3
SLOT_MS = 25
"""A blockhash lives for less than four seconds, so transactions do expire while someone is being restarted."""
EXPIRY_S = (150 + 32) * SLOT_MS / 1000 + 0.5
LATE = 0.08
PARTS = ("ledger", "gateway", "payout", "node", "trunk")
SOL = 10**9

# A server that has imported everything forks the parts: each is a process of its own, which starts in no time.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["money_parts", "kvasir_console.cli", "kvasir_console.headless", "kvasir_console.node.gateway.service"]
)


def run_part(part: str, arguments: list[str], directory: Path) -> None:
    """One part, in the process that is to be killed. It dies with the tests."""
    die_with_parent(os.getppid())
    os.environ["KVASIR_HOME"] = str(directory / "home")
    log = os.open(directory / f"{part}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    match part:
        case "ledger":
            sys.exit(localnet.main(arguments))
        case "gateway":
            sys.exit(cli.main(arguments))
        case "payout":
            sys.exit(payout.main(arguments))
        case "node":
            asyncio.run(money_node.run(json.loads(Path(arguments[0]).read_text()), finish="--finish" in arguments))
        case "trunk":
            asyncio.run(money_trunk.run(json.loads(Path(arguments[0]).read_text())))


@dataclass
class Report:
    """What happened, for a person to read."""

    seed: int
    killed: Counter[str] = field(default_factory=Counter)
    claims_when_killed: Counter[str] = field(default_factory=Counter)
    """Claims by state, over all kills: what a kill could have hit."""
    sends_when_killed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Kills after which the next process came only when signed transactions had expired."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        lines = [
            f"{sum(self.killed.values())} kills in {self.seconds:.0f} s, {self.late} with a late successor "
            f"(seed {self.seed}): {_counts(self.killed)}",
            f"claims at the moments of the kills: {_counts(self.claims_when_killed)}",
            f"sends at the moments of the kills: {_counts(self.sends_when_killed)}",
            *(f"{name}: {value}" for name, value in self.figures.items()),
        ]
        return "\n".join(lines)


class Money:
    """``async with`` makes the network and its money; then ``rampage``, ``finish``, ``check``."""

    def __init__(self, directory: Path, database: str = "", seed: int | None = None) -> None:
        self.directory = directory
        self.database = database or f"sqlite:///{directory / 'gateway.sqlite'}"
        self.report = Report(random.SystemRandom().randrange(2**32) if seed is None else seed)
        self.random = random.Random(self.report.seed)
        self.gateway_port, ledger_port = _free_port(), _free_port()
        self.ledger = LedgerProcess(directory, SLOT_MS, ledger_port)
        self.paths = Paths.from_environment({"KVASIR_HOME": str(directory / "treasury")})
        self.outbox = directory / "node" / "outbox.sqlite"
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self.mint = ""
        self.settings_file = directory / "money.json"

    async def __aenter__(self) -> Money:
        commands.create_wallet(self.paths.ensure(), PASSPHRASE, words=12, kdf="interactive")
        self.passphrase_file = self.directory / "passphrase"
        self.passphrase_file.touch(0o600)
        self.passphrase_file.write_text(PASSPHRASE)
        with open_vault(self.paths.vault_file, PASSPHRASE) as vault, vault.key() as key:
            treasury = key.keypair()
        self.treasury = str(treasury.pubkey())
        self.start("ledger")
        await _until(lambda: self.ledger.auth_file.exists() and _listens(self.ledger.port), 240)
        async with self.chain() as chain:
            self.mint = await bootstrap(chain, treasury)
            for number in range(WALLETS):
                await chain.airdrop(str(wallet_key(number).pubkey()), 10 * SOL)
        self.collector = str(wallet_key(100).pubkey())
        self.settings_file.write_text(
            json.dumps(
                {
                    "database": self.database,
                    "gateway": f"http://127.0.0.1:{self.gateway_port}",
                    "rpc": f"http://127.0.0.1:{self.ledger.port}",
                    "auth_file": str(self.ledger.auth_file),
                    "outbox": str(self.outbox),
                    "mint": self.mint,
                    "collector": self.collector,
                    "n": WALLETS,
                }
            )
        )
        for part in PARTS[1:]:
            self.start(part)
        return self

    async def __aexit__(self, *_: object) -> None:
        for part in self.processes:
            self._end(part)

    def chain(self) -> Chain:
        return Chain(f"http://127.0.0.1:{self.ledger.port}", self.ledger.auth, poll_s=0.05)

    # -- killing -------------------------------------------------------------------------------------------------

    def start(self, part: str, *more: str) -> None:
        arguments = (part, [*self._arguments(part), *more], self.directory)
        self.processes[part] = _SERVER.Process(target=run_part, args=arguments, name=part)
        self.processes[part].start()

    def _arguments(self, part: str) -> list[str]:
        rpc = ["--rpc", f"http://127.0.0.1:{self.ledger.port}", "--rpc-auth-file", str(self.ledger.auth_file)]
        settings = {
            "port": self.gateway_port,
            "database": self.database,
            "minimum_claim_micro_kvr": 1,
            "settlement_poll_s": 0.2,
        }
        return {
            "ledger": self.ledger.command()[3:],
            "gateway": [
                *(each for name, value in settings.items() for each in ("--set", f"gateway.{name}={value}")),
                "gateway",
            ],
            "payout": [
                *("--database", self.database, *rpc, "--mint", self.mint, "--treasury", str(self.paths.vault_file)),
                *("--passphrase-file", str(self.passphrase_file), "--poll-s", "0.1"),
            ],
            "node": [str(self.settings_file)],
            "trunk": [str(self.settings_file)],
        }[part]

    async def kill(self, part: str) -> None:
        """SIGKILL, and the next one in its place: at once, or so late that what was signed has expired meanwhile."""
        self._look()
        self._end(part)
        self.report.killed[part] += 1
        if self.random.random() < LATE:
            self.report.late += 1
            await asyncio.sleep(EXPIRY_S)
        self.start(part)

    async def rampage(self, kills: int, pause_s: float) -> None:
        """Kill ``kills`` parts, each at a random moment of ``pause_s`` seconds on average after the last."""
        begun = time.monotonic()
        dying: dict[str, asyncio.Task[None]] = {}
        while sum(self.report.killed.values()) + len(dying) < kills or dying:
            dying = {part: task for part, task in dying.items() if not task.done() or task.result()}
            await asyncio.sleep(self.random.uniform(0, 2 * pause_s))
            part = self.random.choice(PARTS)
            if part not in dying and sum(self.report.killed.values()) < kills:
                dying[part] = asyncio.create_task(self.kill(part))
        self.report.seconds = time.monotonic() - begun

    def _look(self) -> None:
        try:
            with self._store() as store:
                states = Counter(str(claim.state) for claim in Ledger(store).open_claims())
            self.report.claims_when_killed += states
            if self.outbox.exists():
                with Outbox.open(self.outbox) as outbox:
                    self.report.sends_when_killed += Counter(str(each.state) for each in outbox.sends(WALLETS))
        except Exception as error:  # the look is for the report only
            self.report.claims_when_killed[f"not seen ({type(error).__name__})"] += 1

    # -- the end -------------------------------------------------------------------------------------------------

    async def finish(self, timeout_s: float = 300) -> None:
        """Let no more work come in, and everything that is under way come to its end."""
        self._end("trunk")
        with self._store() as store:
            ledger = Ledger(store)
            await _until(lambda: all(booked == done for booked, done in _units(store, ledger).values()), timeout_s)
        self._end("node")
        self.start("node", "--finish")
        await _until(lambda: not self.processes["node"].is_alive(), timeout_s)
        assert self.processes["node"].exitcode == 0, (self.directory / "node.log").read_text()[-3000:]

    def _end(self, part: str) -> None:
        self.processes[part].kill()
        self.processes[part].join()

    async def check(self) -> None:
        """Every sum, made from what is stored and from what the chain says. Raises ``AssertionError``."""
        with self._store() as store:
            ledger = Ledger(store)
            assert ledger.audit() == ()
            self._check_credits(store, ledger)
            claims = ledger.claims(limit=10**6)
            assert {claim.state for claim in claims} == {ClaimState.CONFIRMED}
            attempts = [attempt for claim in claims for attempt in ledger.attempts(claim.claim_id)]
            async with self.chain() as chain:
                payouts = await self._check_payouts(chain, claims)
                sends = await self._check_sends(chain)
                await self._check_supply(chain)
        assert len({signature for signature, _ in attempts}) == len(attempts)
        self.report.figures |= {
            "claims": f"{len(claims)}, all confirmed, {sum(claim.micro_kvr for claim in claims)} micro-KVR",
            "payouts on the chain": f"{payouts[0]}, {payouts[1]} micro-KVR",
            "payout transactions signed": f"{len(attempts)} ({_counts(Counter(end for _, end in attempts))})",
            "sends": sends,
        }

    def _check_credits(self, store: Store, ledger: Ledger) -> None:
        units = _units(store, ledger)
        assert all(credited == metered for credited, metered in units.values())
        accounts = ledger.accounts()
        assert {(each.wallet, each.worker_id, each.kind) for each in accounts} == set(units)
        for account in accounts:
            assert account.credited_micro_kvr + account.carried == Fraction(account.micro_units) / 100
            assert 0 <= account.carried < 1
            assert account.pending_micro_kvr == 0
        self.report.figures |= {
            "micro-units metered and credited": sum(account.micro_units for account in accounts),
            "micro-KVR credited": sum(account.credited_micro_kvr for account in accounts),
            "carried": str(sum((account.carried for account in accounts), Fraction(0))),
        }

    async def _check_payouts(self, chain: Chain, claims: Any) -> tuple[int, int]:
        views = await _landed(chain, token.associated_token_address(self.treasury, self.mint))
        paid = [view for view in views if view.memos and view.memos[0].startswith(MEMO_PREFIX) and not view.error]
        by_claim = {view.memos[0].removeprefix(MEMO_PREFIX): view for view in paid}
        assert len(by_claim) == len(paid)  # no claim twice
        assert set(by_claim) == {claim.claim_id for claim in claims}
        for claim in claims:
            view = by_claim[claim.claim_id]
            assert view.signature == claim.signature
            assert view.received_by_owner(claim.wallet, self.mint) == claim.micro_kvr
            assert view.received_by_owner(self.treasury, self.mint) == -claim.micro_kvr
        return len(paid), sum(-view.received_by_owner(self.treasury, self.mint) for view in paid)

    async def _check_sends(self, chain: Chain) -> str:
        with Outbox.open(self.outbox) as outbox:
            sends = outbox.sends(10**6)
            signed = sum(len(outbox.signatures(each.request_id)) for each in sends)
        assert {each.state for each in sends} == {SendState.CONFIRMED}
        views = await _landed(chain, token.associated_token_address(self.collector, self.mint))
        received = {
            view.memos[0]: view.received_by_owner(self.collector, self.mint) for view in views if not view.error
        }
        assert len(received) == sum(not view.error for view in views)  # no send twice
        assert received == {each.request_id: each.intent.micro_kvr for each in sends}
        total = sum(received.values())
        assert await chain.balance_micro_kvr(self.collector, self.mint) == total
        return f"{len(sends)}, all confirmed, {signed} signed, {total} micro-KVR"

    async def _check_supply(self, chain: Chain) -> None:
        owners = [self.treasury, self.collector, *(str(wallet_key(number).pubkey()) for number in range(WALLETS))]
        held = [await chain.balance_micro_kvr(owner, self.mint) for owner in owners]
        assert sum(held) == token.INITIAL_SUPPLY_MICRO_KVR

    def _store(self) -> Any:
        return _Opened(self.database)


class _Opened:
    def __init__(self, database: str) -> None:
        self._database = database

    def __enter__(self) -> Store:
        self._store = Store.open(self._database)
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def _units(store: Store, ledger: Ledger) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Micro-units in the books and micro-units metered, by wallet, worker and kind."""
    metered: Counter[tuple[str, str, str]] = Counter()
    with store.read() as connection:
        for row in connection.execute(sa.select(tables.meter)):
            metered[row.wallet, row.worker_id, row.kind] += row.micro_units
        for row in connection.execute(sa.select(tables.ring_totals)):
            for rank in range(2):
                edges = (PLAN_CUTS[rank], PLAN_CUTS[rank + 1])
                below, above = (row.token_rows * 1000 * edge // LAYERS for edge in edges)
                metered[str(wallet_key(rank).pubkey()), f"ring-ring-{rank}", "ring"] += above - below
    booked = {(each.wallet, each.worker_id, each.kind): each.micro_units for each in ledger.accounts()}
    return {
        key: (booked.get(key, 0), metered[key]) for key in {*booked, *metered} if booked.get(key, 0) or metered[key]
    }


async def _landed(chain: Chain, account: str) -> list[TransactionView]:
    """Everything that ever named ``account``."""
    views: list[TransactionView] = []
    before: str | None = None
    while page := await chain.history(account, limit=1000, before=before):
        before = page[-1].signature
        found = [await chain.transaction(each.signature) for each in page]
        views += [view for view in found if view is not None]
    assert len({view.signature for view in views}) == len(views)
    return views


async def _until(true: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.1)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
