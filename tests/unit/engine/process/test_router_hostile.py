"""The router against workers that come back as somebody else, keep silent, or lie where they think nobody looks.

The stage and its experts are real; a worker is whatever a test makes of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.process import accounts as accounts_module
from kvasir_console.engine.process import evidence
from kvasir_console.engine.process.accounts import Accounts
from kvasir_console.engine.process.elastic import Dispatch
from kvasir_console.engine.process.examiner import Answered
from kvasir_console.engine.process.roster import Policy
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.star import Part
from kvasir_console.engine.process.sums import Pairs
from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.process.worker import SessionStats, Slice
from kvasir_console.engine.stage import Stage
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice, Hello
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire

import builders

N_EXPERT = 8
DIGEST = bytes(32)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    path = Path(tmp_path_factory.mktemp("m")) / "moe.gguf"
    builders.write_tiny_llama(path, n_layer=2, n_expert=N_EXPERT, n_expert_used=2, seed=4)
    with Checkpoint.open(path) as checkpoint:
        return Stage.load(checkpoint, 0, 2)


class StubWorker:
    """A connection that answers as ``how`` says: called with the request and the right answer."""

    wire, dtype = Wire.V3, "f32"
    broken = draining = False
    in_flight = 0

    def __init__(
        self, router: Router, stage: Stage, name: str, wallet: str, layer: int, how: Callable[..., Any]
    ) -> None:
        self.name, self.wallet = name, wallet
        self.slices = (Slice(layer, 0, N_EXPERT),)
        self.stats = {layer: router._accounts.of(name, wallet, self.slices[0])}
        self._bank = stage.banks[layer]
        self._how = how
        self.requests: list[dispatch.Request] = []

    def holds(self, layer: int) -> range | None:
        return range(N_EXPERT) if layer in self.stats else None

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        return True

    def as_received(self, request: dispatch.Request) -> Any:
        return request.rows, request.weights

    async def ask(self, layer: int, request: dispatch.Request, *, pay: bool = True) -> Any:
        self.requests.append(request)
        rows, ids = (torch.from_numpy(each.astype(np.int64)) for each in (request.row_idx, request.ids))
        weights = torch.from_numpy(np.asarray(request.weights))
        right = self._bank.weighted_sum(torch.from_numpy(request.rows), rows, ids, weights).numpy()
        return await self._how(request, right)

    def drop(self, why: str) -> None:
        self.broken = True


async def honest(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
    return right


async def crooked(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
    return right * np.float32(1.5)


async def silent(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
    raise TimeoutError


def router_of(stage: Stage, evidence_directory: Path | None = None, **policy: Any) -> Router:
    made = {"trial_pairs": 0, "check_share": 0.0, "hedge_share": 0.0, "seed": 3} | policy
    options: Any = {"policy": Policy(**made), "evidence_directory": evidence_directory}
    # Who is late here is so by seconds: a machine that is busy makes nobody late.
    return Router(stage, DIGEST, wire=Wire.V3, timeout_s=120.0, clock=lambda: time.monotonic() / 100, **options)


def join(router: Router, stage: Stage, name: str, how: Any, *, wallet: str = "w", layer: int = 0) -> Any:
    worker: Any = StubWorker(router, stage, name, wallet, layer, how)
    router._roster.add(f"{name}@{wallet}", worker, 0.0)
    return worker


async def step(
    router: Router, rows: int = 6, layer: int = 0, *, infinite: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's step: what the router gives, and what the local experts give. One row may be ``infinite``."""
    rng = np.random.default_rng(rows)
    x = torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32))
    if infinite:
        x[2, 5] = torch.inf
    ids = torch.from_numpy(np.argsort(rng.random((rows, N_EXPERT)), axis=1)[:, :2].copy())
    weights = torch.from_numpy(rng.random((rows, 2)).astype(np.float32))
    found = await asyncio.to_thread(router._compute, layer, x, ids, weights, StepTally([True] * rows))
    pairs = Pairs.of(ids, weights)
    bank = router._stage.banks[layer]
    chosen = (torch.from_numpy(pairs.rows), torch.from_numpy(pairs.ids), torch.from_numpy(pairs.weights))
    await asyncio.sleep(0.01)  # what the step left behind runs on the loop
    return found, bank.weighted_sum(x, *chosen)


async def test_an_answer_of_a_connection_that_was_replaced_is_nobodys(stage: Stage) -> None:
    """It answers, and comes back with experts of another layer before its answer is looked at."""
    router = router_of(stage)
    back: list[Any] = []

    async def and_come_back(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
        back.append(join(router, stage, "a", honest, layer=1))
        return right * np.float32(3)

    first = join(router, stage, "a", and_come_back)
    found, due = await step(router)
    assert back
    assert torch.equal(found, due)
    assert first.stats[0].paid_bytes == back[0].stats[1].paid_bytes == 0


async def test_a_late_answer_of_a_connection_that_was_replaced_is_not_paid_to_the_next(stage: Stage) -> None:
    router = router_of(stage)
    go = asyncio.Event()

    async def late(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
        await go.wait()
        return right * np.float32(3)

    join(router, stage, "a", late)
    session = router._roster.get("a@w")
    assert session is not None
    for _ in range(20):
        session.pace.record(12, 1.0)  # it counts as late soon
    found, due = await step(router)
    assert torch.equal(found, due)
    newer = join(router, stage, "a", honest)
    go.set()
    await asyncio.sleep(0.01)
    await step(router)
    assert newer.stats[0].paid_bytes == len(newer.requests) * dispatch.paid_bytes(64, 6, 12)
    assert not router._accounts.quarantined("a", "w")


@pytest.mark.parametrize("other", [silent, honest, crooked], ids=["silent", "honest", "crooked alike"])
async def test_a_check_that_another_wallets_worker_does_not_answer_is_made_here(stage: Stage, other: Any) -> None:
    """Under load drawn rows go to a stranger. One that is silent must not let a liar pass; one that lies alike does."""
    router = router_of(stage, check_share=1.0, dispatch=Dispatch.ELASTIC, busy_streams=1)
    router.observe(4)
    join(router, stage, "a", crooked)
    stranger = join(router, stage, "b", other, wallet="v")
    session = router._roster.get("b@v")
    assert session is not None
    for _ in range(20):
        session.pace.record(12, 5000.0)  # so slow that the other is asked first
    await step(router)
    assert stranger.requests, "nobody was asked for the drawn rows"
    await step(router)  # what is in doubt is settled at the next occasion
    assert router._accounts.quarantined("a", "w") is (other is not crooked)
    assert not router._accounts.quarantined("b", "v") or other is crooked


async def test_nobody_checks_an_answer_of_his_own(stage: Stage) -> None:
    """The worker that was to be asked for the drawn rows answers instead of one that is late, and lies both times."""
    router = router_of(stage, check_share=1.0, hedge_share=1.0, dispatch=Dispatch.ELASTIC, busy_streams=1)
    router.observe(4)
    go = asyncio.Event()

    async def late(request: dispatch.Request, right: np.ndarray) -> np.ndarray:
        await go.wait()
        raise ConnectionResetError

    join(router, stage, "a", late)
    liar = join(router, stage, "b", crooked, wallet="v")
    fast, slow = router._roster.get("a@w"), router._roster.get("b@v")
    assert fast is not None
    assert slow is not None
    for _ in range(20):
        fast.pace.record(12, 1.0)
        slow.pace.record(12, 5000.0)
    found, due = await step(router)
    assert liar.requests, "nobody was asked instead of who is late"
    assert torch.equal(found, due)
    assert router._accounts.quarantined("b", "v")
    assert liar.stats[0].paid_bytes == 0
    go.set()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("policy", [{"trial_pairs": 64}, {"check_share": 1.0}], ids=["on trial", "proven"])
async def test_rows_that_no_kernel_carries_convict_nobody(stage: Stage, policy: dict[str, Any]) -> None:
    """A ring's stage gets its rows from a stranger, whose infinite one makes right answers no numbers."""
    router = router_of(stage, **policy)
    worker = join(router, stage, "a", honest)
    found, due = await step(router, infinite=True)
    torch.testing.assert_close(found, due, rtol=0, atol=0, equal_nan=True)
    assert worker.requests
    assert not router._accounts.quarantined("a", "w")
    await step(router)
    assert worker.stats[0].checked_pairs > 0  # and the next answer is looked at


async def test_a_worker_that_comes_back_with_another_layer_while_it_is_about_to_be_asked(stage: Stage) -> None:
    router = router_of(stage, check_share=1.0)
    worker = join(router, stage, "a", honest)
    back: list[Any] = []

    def and_come_back(n_rows: int, n_pairs: int) -> bool:
        if not back:
            back.append(join(router, stage, "a", honest, layer=1))
        return True

    worker.fits = and_come_back
    found, due = await step(router)
    assert back
    assert torch.equal(found, due)
    assert not back[0].requests


async def test_who_is_late_on_purpose_cannot_know_which_row_is_looked_at(stage: Stage) -> None:
    router = router_of(stage)
    worker = join(router, stage, "a", honest)
    rows = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    row_idx, ids = np.arange(16), np.zeros(16, np.int64)
    request = dispatch.Request(Wire.V3, rows, row_idx.astype(np.int32), ids.astype(np.int32), np.ones(16, np.float32))
    pairs = Pairs(row_idx, row_idx, ids, np.ones(16, np.float32))
    part = Part(0, pairs, row_idx, row_idx, request, np.arange(0))
    looked_at = set()
    for _ in range(64):
        router._examiner.compare(part, row_idx, Answered(worker, np.zeros_like(rows)), None)
        dispute = router._examiner._disputes.pop()
        looked_at |= {at for at in range(16) if np.array_equal(dispute.request.rows[0], rows[at])}
    assert len(looked_at) > 12


async def test_a_worker_caught_while_it_greets_again_is_refused(stage: Stage) -> None:
    router = router_of(stage)
    router._accounts.of("a", "w", Slice(0, 0, N_EXPERT))
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    preamble = Preamble(Kind.DISPATCH, "a", "w", DIGEST, 1, 0, N_EXPERT, wires=Wire.V3)
    serving = asyncio.create_task(router.serve(preamble, *await asyncio.open_connection(sock=ours)))
    await reader.readexactly(4)  # it passed the first look, and waits for our greeting
    assert router.quarantine("a", "w")
    writer.write(v3.encode_hello(Hello(64, (HeldSlice(1, 0, N_EXPERT),))))
    with pytest.raises(ValueError, match="quarantined"):
        await serving
    assert not len(router._roster)
    writer.close()


async def test_the_evidence_of_a_large_wrong_answer_is_bounded(stage: Stage, tmp_path: Path) -> None:
    router = router_of(stage, tmp_path, trial_pairs=32)
    join(router, stage, "a", crooked)
    found, due = await step(router, rows=500)
    assert torch.equal(found, due)
    assert router._accounts.quarantined("a", "w")
    [arrays] = tmp_path.glob("*.npz")
    with np.load(arrays) as kept:
        assert len(kept["rows"]) == len(kept["answered"]) == evidence.MAX_ROWS
        assert set(kept["row_idx"].tolist()) == set(range(evidence.MAX_ROWS))
        assert len(kept["terms"]) == len(kept["ids"]) == len(kept["weights"]) == 2 * evidence.MAX_ROWS
        sums = np.zeros_like(kept["answered"])
        np.add.at(sums, kept["row_idx"], kept["terms"])
        assert np.abs(sums * 1.5 - kept["answered"]).max() < 1e-4 * np.abs(sums).max()
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["session"] == "a"


def test_slices_that_did_nothing_make_room_and_those_that_worked_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker names its slices itself: any part of its window, another with each dial."""
    monkeypatch.setattr(accounts_module, "MAX_ACCOUNTS", 50)
    accounts = Accounts(0)
    worked = accounts.of("honest", "w", Slice(0, 0, 8))
    request = dispatch.Request(
        Wire.V3, np.ones((1, 4), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
    )
    accounts.pay(worked, request)
    for end in range(1, 300):
        accounts.of("hostile", "v", Slice(1, 0, end))
    assert len(accounts.coverage()) <= 50
    assert accounts.of("honest", "w", Slice(0, 0, 8)) is worked
    for end in range(1, 50):
        accounts.pay(accounts.of("busy", "v", Slice(2, 0, end)), request)
    with pytest.raises(ValueError, match="account already"):
        accounts.of("one more", "v", Slice(3, 0, 1))
    fresh = dataclasses.replace(worked)
    assert isinstance(fresh, SessionStats)
    assert fresh.requests == 1


def test_one_session_cannot_have_all_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works a little with each dial, for another slice each time."""
    monkeypatch.setattr(accounts_module, "MAX_OF_SESSION", 20)
    accounts = Accounts(0)
    request = dispatch.Request(
        Wire.V3, np.ones((1, 4), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
    )
    for end in range(1, 21):
        accounts.pay(accounts.of("busy", "v", Slice(2, 0, end)), request)
    with pytest.raises(ValueError, match="20 slices already"):
        accounts.of("busy", "v", Slice(2, 0, 21))
    assert accounts.of("busy", "v", Slice(2, 0, 20)).requests == 1
    accounts.of("honest", "v", Slice(2, 0, 21))
