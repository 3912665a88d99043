"""What an engine says it did: read off it, added to the statements' counts, and gone on with by the next one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_parts import A, Told

from kvasir_console.errors import EngineError
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.statements import StatementBook
from kvasir_console.node.work import EngineWork


def stats(rows: int, **fields: Any) -> dict[str, Any]:
    served = {"requests": 1, "rows": rows, "pairs": 2 * rows}
    return {"served": served, "ring": None, "tokens_total": 0, "rss_bytes": 1000 + rows, **fields}


class Client:
    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)

    async def stats(self) -> dict[str, Any]:
        if not self.answers:
            raise EngineError("engine_gone", "It ended.")
        return self.answers.pop(0)


class Looked:
    """A node's work, with an engine that says what it is told and a clock of the test's."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.plans = 0
        self.engine = SimpleNamespace(client=None)
        self.statements = StatementBook(Told().market, A, directory / "book.json", HubPin(directory / "hub-key"))
        self.statements.count("box", "expert-box")
        self.work = EngineWork(self.engine, self.statements, self._newer_plan, lambda: self.now)

    def _newer_plan(self) -> None:
        self.plans += 1

    async def at(self, now: float, *answers: dict[str, Any]) -> None:
        self.now = now
        self.engine.client = Client(*answers)
        for _ in answers:
            await self.work.sample()


@pytest.fixture
def looked(tmp_path: Path) -> Looked:
    tmp_path.chmod(0o700)
    return Looked(tmp_path)


async def test_an_engine_that_is_not_up_is_not_asked(looked: Looked) -> None:
    await looked.work.sample()
    assert (looked.work.rss_bytes, looked.work.view(layers=False).rows) == (None, 0)


async def test_counters_are_shown_and_are_the_nodes_own_side_of_its_statements(looked: Looked) -> None:
    await looked.at(1.0, stats(10, experts=[{"pairs": [3, 0, 17]}]))
    await looked.at(3.0, stats(30, experts=[{"pairs": [9, 1, 50]}]))
    view = looked.work.view(layers=False)
    assert (view.requests, view.rows, view.pairs, view.history) == (1, 30, 60, (10.0,))
    assert (view.expert_pairs, looked.work.rss_bytes) == ((9, 1, 50), 1030)
    mine = looked.statements.view()
    assert (mine.mine_rows, mine.mine_pairs) == (30, 60)


async def test_a_window_counts_what_its_ring_did_and_draws_tokens(looked: Looked) -> None:
    ring = {"rows": 5, "sampled": 2, "behind": False}
    await looked.at(1.0, stats(0, served=None, ring=ring))
    await looked.at(2.0, stats(0, served=None, ring={**ring, "rows": 9, "sampled": 6}))
    view = looked.work.view(layers=True)
    assert (view.rows, view.tokens, view.history) == (9, 6, (4.0,))
    assert looked.plans == 0


async def test_neighbours_with_a_newer_plan_are_told_of(looked: Looked) -> None:
    await looked.at(1.0, stats(0, ring={"rows": 5, "behind": True}))
    assert looked.plans == 1


async def test_the_next_engine_goes_on_where_the_last_ended(looked: Looked) -> None:
    await looked.at(1.0, stats(10, experts=[{"pairs": [3]}]))
    looked.engine.client = None
    looked.work.lost()
    view = looked.work.view(layers=False)
    assert (view.rows, view.expert_pairs, looked.work.rss_bytes) == (10, (), None)
    await looked.at(2.0, stats(4))
    assert looked.work.view(layers=False).rows == 14
    assert looked.statements.view().mine_rows == 14


async def test_an_engine_that_ends_meanwhile_is_the_callers(looked: Looked) -> None:
    looked.engine.client = Client()
    with pytest.raises(EngineError):
        await looked.work.sample()


async def test_what_an_engine_did_unseen_before_it_ended_may_be_stated(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(looked.statements, "unsure", lambda: told.append("unsure"))
    await looked.at(1.0, stats(10))
    assert told == []
    looked.work.lost()
    assert told == ["unsure"]
