"""What a node holds: how it is reported and dialled, and which plan it follows."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from nacl.signing import SigningKey
from node_parts import HUB, A, B, C, address, signed

from kvasir_console.errors import EngineError, NetworkError, SystemResourceError
from kvasir_console.node.holding import ExpertHolding, RingHolding, choose_plan, ring_fields, session_name
from kvasir_console.node.market import Assignment
from kvasir_console.node.placement.plan import Plan, PlannedStage
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire

OTHER_HUB = SigningKey(bytes(32))
DIGEST = "ab" * 32
WORKER = "server-AKnL4NNf-box"
ASSIGNMENT = Assignment("moe", layer=3, begin=2, end=6, n_embd=576, n_layer=30, n_expert=8)


def plan(*wallets: str, model: str = "smollm2", generation: int = 4) -> Plan:
    stages = tuple(PlannedStage(rank, wallet, 10 * rank, 10 * rank + 10) for rank, wallet in enumerate(wallets))
    return Plan(model, model, DIGEST, 10 * len(wallets), generation, stages)


class Loader:
    """The part of an engine's client that loading needs."""

    def __init__(self, **info: Any) -> None:
        self.info, self.fields = info, {}

    async def load(self, progress: Any, **fields: Any) -> dict[str, Any]:
        self.fields = fields
        return self.info


# Experts


async def test_experts_are_reported_as_the_contract_says():
    holding = ExpertHolding(ASSIGNMENT, WORKER, A)
    assert holding.coverage() == {
        "model": "moe",
        "segments": [[3, 2, 6]],
        "n_layer": 30,
        "n_expert": 8,
        "url": f"relay:expert-{WORKER}",
        "wires": ["v1", "v2", "v2f16", "v3"],
    }


async def test_experts_are_loaded_and_dialled_under_the_workers_session():
    holding = ExpertHolding(ASSIGNMENT, WORKER, A, file=Path("/cache/x.gguf"))
    engine = Loader(n_embd=576, model_digest=DIGEST, tensor_bytes=99)
    await holding.load(engine, lambda *_: None)
    assert engine.fields == {
        "path": "/cache/x.gguf",
        "model": "moe",
        "role": "experts",
        "layer": 3,
        "experts": [2, 6],
    }
    (session,) = holding.sessions("https://gate.example.net")
    assert session.name == session_name(WORKER) == f"expert-{WORKER}"
    assert session.url == f"wss://gate.example.net/api/expert-relay?session=expert-{WORKER}"
    preamble = Preamble.decode(session.preamble.encode())
    assert (preamble.kind, preamble.session, preamble.wallet) == (Kind.EXPERTS, session.name, A)
    assert (preamble.layer, preamble.begin, preamble.end) == (3, 2, 6)
    assert preamble.model_digest.hex() == DIGEST
    assert preamble.wires == Wire.V1 | Wire.V2 | Wire.V2F16 | Wire.V3
    view = holding.view()
    assert (view.kind, view.layer, view.begin, view.end, view.total, view.tensor_bytes) == ("experts", 3, 2, 6, 8, 99)


async def test_slices_of_several_layers_are_held_on_one_session() -> None:
    more = (Assignment("moe", layer=4, begin=0, end=2, n_embd=576, n_layer=30, n_expert=8),)
    holding = ExpertHolding(ASSIGNMENT, WORKER, A, file=Path("/x"), more=more, files=(Path("/y"),))
    assert holding.describe() == "experts 2 to 5 of layer 3, 0 to 1 of layer 4 of moe"
    assert holding.coverage()["segments"] == [[3, 2, 6], [4, 0, 2]]
    engine = Loader(n_embd=576, model_digest=DIGEST)
    await holding.load(engine, lambda *_: None)
    assert engine.fields == {
        "model": "moe",
        "role": "experts",
        "slices": [
            {"path": "/x", "layer": 3, "experts": [2, 6]},
            {"path": "/y", "layer": 4, "experts": [0, 2]},
        ],
    }
    (session,) = holding.sessions("https://gate.example.net")
    assert session.preamble.windows == ((3, 2, 6), (4, 0, 2))


async def test_a_further_slice_that_does_not_fit_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shard.gguf"
    file.write_bytes(bytes(600))
    asked: list[tuple[int, int]] = []

    async def fetch(*_: Any, budget_bytes: int, **__: Any) -> Path:
        asked.append((_[3].layer, budget_bytes))
        if budget_bytes < 600:
            raise SystemResourceError("memory_short", "It does not fit.")
        return file

    monkeypatch.setattr("kvasir_console.node.holding.fetch_expert_shard", fetch)
    more = tuple(Assignment("moe", layer, 0, 2, 576, 30, 8) for layer in (4, 5))
    holding = ExpertHolding(ASSIGNMENT, WORKER, A, more=more)
    await holding.fetch(None, "t", tmp_path, 1300, lambda *_: None)
    assert asked == [(3, 1300), (4, 700), (5, 100)]
    assert [each.layer for each in holding.assignments] == [3, 4]
    assert (holding.file, holding.files) == (file, (file,))
    with pytest.raises(SystemResourceError):
        await ExpertHolding(ASSIGNMENT, WORKER, A).fetch(None, "t", tmp_path, 100, lambda *_: None)


async def test_an_assignment_with_another_width_than_its_shard_is_refused():
    with pytest.raises(NetworkError) as caught:
        await ExpertHolding(ASSIGNMENT, WORKER, A).load(Loader(n_embd=64, model_digest=DIGEST), lambda *_: None)
    assert caught.value.code == "assignment_mismatch"


def test_before_it_is_loaded_a_slice_has_no_size():
    assert ExpertHolding(ASSIGNMENT, WORKER, A).view().tensor_bytes is None
    assert RingHolding(plan(A, B), A, 0).view().tensor_bytes is None


# A window of layers


def test_a_window_is_reported_without_segments():
    assert RingHolding(plan(A, B), B, 0).coverage() == {"model": "smollm2", "segments": [], "n_layer": 20}


@pytest.mark.parametrize(
    ("wallet", "edges"),
    [
        (A, [("0", "P", Kind.RING_NEXT), ("2", "N", Kind.RING_PREV), ("entry", "N", Kind.ENTRY)]),
        (B, [("1", "P", Kind.RING_NEXT), ("0", "N", Kind.RING_PREV)]),
        (C, [("2", "P", Kind.RING_NEXT), ("1", "N", Kind.RING_PREV)]),
    ],
)
def test_each_rank_dials_its_two_edges_and_the_first_one_the_entry(wallet, edges):
    holding = RingHolding(plan(A, B, C), wallet, 0)
    sessions = holding.sessions("http://127.0.0.1:8791")
    dialled = []
    for session in sessions:
        parts = urlsplit(session.url)
        assert (parts.scheme, parts.netloc, parts.path) == ("ws", "127.0.0.1:8791", "/api/ring-relay")
        query = {key: value for key, (value,) in parse_qs(parts.query).items()}
        assert query["controller_id"] == "smollm2"
        preamble = Preamble.decode(session.preamble.encode())
        assert (preamble.epoch, preamble.wallet, preamble.model_digest.hex()) == (4, wallet, DIGEST)
        assert (preamble.begin, preamble.end) == (holding.stage.begin, holding.stage.end)
        dialled.append((query["edge"], query["role"], preamble.kind))
    assert dialled == edges
    assert len({session.name for session in sessions}) == len(sessions)


def test_every_edge_of_a_ring_is_dialled_from_both_ends():
    ring = plan(A, B, C)
    ends = [
        (parse_qs(urlsplit(session.url).query)["edge"][0], parse_qs(urlsplit(session.url).query)["role"][0])
        for wallet in (A, B, C)
        for session in RingHolding(ring, wallet, 0).sessions("https://h")
    ]
    assert sorted(ends) == [("0", "N"), ("0", "P"), ("1", "N"), ("1", "P"), ("2", "N"), ("2", "P"), ("entry", "N")]


async def test_a_window_is_loaded_with_its_place_in_the_ring():
    engine = Loader(tensor_bytes=7)
    holding = RingHolding(plan(A, B), B, context_length=512, kv_budget_bytes=4096, file=Path("/x"))
    await holding.load(engine, lambda *_: None)
    assert engine.fields == {
        "path": "/x",
        "model": "smollm2",
        "role": "stage",
        "layers": [10, 20],
        "context_length": 512,
        "kv_budget_bytes": 4096,
        "ring": {"id": "smollm2", "epoch": 4, "rank": 1, "size": 2, "n_layer": 20},
    }
    assert holding.view().tensor_bytes == 7


def test_a_newer_plan_leaves_a_window_only_where_it_was():
    held = RingHolding(plan(A, B, C), B, 0)
    newer = replace(plan(A, B, C), generation=5)
    assert held.stays(newer)
    assert held.stays(replace(plan(C, B, A), generation=5))  # others changed places
    assert not held.stays(held.plan)
    assert not held.stays(replace(newer, generation=3))
    assert not held.stays(replace(newer, ring="another"))
    assert not held.stays(replace(newer, model_digest="cd" * 32))
    assert not held.stays(replace(plan(B, A, C), generation=5))
    assert not held.stays(replace(plan(A, C), generation=5))
    assert ring_fields(newer, held.stage) == {"id": "smollm2", "epoch": 5, "rank": 1, "size": 3, "n_layer": 30}


def test_a_wallet_outside_the_plan_has_no_window():
    with pytest.raises(NetworkError, match="does not name this wallet"):
        _ = RingHolding(plan(A), B, 0).stage


# Which plan


@pytest.fixture
def pin(tmp_path: Path) -> Path:
    return tmp_path / "hub-key"


def test_the_first_plan_that_names_the_wallet_is_taken(pin):
    offered = [signed(plan(B, model="one")), signed(plan(B, A, model="two")), signed(plan(A, model="three"))]
    chosen = choose_plan(offered, address(HUB), A, pin)
    assert chosen is not None
    assert chosen.model == "two"
    assert choose_plan(offered, address(HUB), C, pin) is None


def test_the_hubs_key_is_pinned_on_first_sight(pin):
    assert choose_plan([signed(plan(A))], address(HUB), A, pin) is not None
    assert pin.read_text() == f"{address(HUB)}\n"
    with pytest.raises(NetworkError) as caught:
        choose_plan([signed(plan(A), OTHER_HUB)], address(OTHER_HUB), A, pin)
    assert caught.value.code == "hub_key_changed"
    assert str(pin) in caught.value.hint
    assert pin.read_text() == f"{address(HUB)}\n"
    assert choose_plan([signed(plan(A))], address(HUB), A, pin) is not None  # the known key still works


def test_a_key_is_pinned_only_after_it_signed_something(pin):
    with pytest.raises(NetworkError):
        choose_plan([signed(plan(A), OTHER_HUB)], address(HUB), A, pin)
    assert not pin.exists()
    assert choose_plan([], address(HUB), A, pin) is None
    assert not pin.exists()


def test_without_a_key_no_plan_is_followed(pin):
    assert choose_plan([signed(plan(A))], "", A, pin) is None


def test_one_bad_plan_spoils_the_answer(pin):
    forged = signed(plan(A))
    forged["signature"] = base64.b64encode(bytes(64)).decode()
    with pytest.raises(NetworkError, match="not signed"):
        choose_plan([signed(plan(A)), forged], address(HUB), A, pin)


def test_a_pin_that_is_not_readable_text_pins_nothing_else(pin):
    pin.write_bytes(b"\xff\xfe")
    with pytest.raises(NetworkError) as caught:
        choose_plan([signed(plan(A))], address(HUB), A, pin)
    assert caught.value.code == "hub_key_changed"


def test_a_pin_that_cannot_be_used_is_named(pin):
    with pytest.raises(SystemResourceError, match="gone"):
        choose_plan([signed(plan(A))], address(HUB), A, pin.parent / "gone" / "hub-key")
    pin.mkdir()
    with pytest.raises(SystemResourceError):
        choose_plan([signed(plan(A))], address(HUB), A, pin)


def test_a_window_stays_whoever_stands_by_for_it_and_whoever_takes_another():
    mine = replace(plan(A, B), stages=(*plan(A).stages, replace(plan(A, B).stages[1], replicas=(C,))))
    holding = RingHolding(mine, A, 0)
    assert holding.stays(mine.moved(1, C, 5))
    assert RingHolding(mine, B, 0).stays(replace(mine, generation=5, stages=plan(A, B).stages))
    assert not RingHolding(mine, B, 0).stays(mine.moved(1, C, 5))


class OnceTold:
    """The part of an engine's client that takes one verb, and is gone for the next."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    async def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        if self.told:
            raise EngineError("engine_gone", "It ended.")
        self.told.append((verb, fields))
        return {}


async def test_an_engine_is_told_of_a_newer_plan_before_the_window_counts_as_its():
    engine, holding = OnceTold(), RingHolding(plan(A, B), B, 0)
    await holding.replan(engine, plan(A, B, generation=5))
    assert engine.told == [("replan", {"ring": ring_fields(plan(A, B, generation=5), holding.stage)})]
    assert holding.plan.generation == 5
    with pytest.raises(EngineError):
        await holding.replan(engine, plan(A, B, generation=6))
    assert holding.plan.generation == 5


async def test_experts_part_from_their_trunks_even_if_the_engine_is_gone():
    engine, holding = OnceTold(), ExpertHolding(ASSIGNMENT, WORKER, A)
    for _ in range(2):
        await holding.drain(engine)
    ((verb, fields),) = engine.told
    assert verb == "drain"
    assert 0.0 < fields["timeout_s"] <= 2.0
