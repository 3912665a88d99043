"""A slice's files: fetched once, fetched again when they were touched, and known when the node stood by for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from node_parts import PLAN, A, B, Told

from kvasir_console.errors import NetworkError
from kvasir_console.node import holding
from kvasir_console.node.fetching import Fetching
from kvasir_console.node.holding import RingHolding
from kvasir_console.node.journal import Journal
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import DownloadView

MIB = 2**20


class Fetches:
    """Makes sure of windows, whose bytes come from nowhere; ``made`` are the windows that were fetched."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phases: list[Phase] = []
        self.made: list[tuple[int, int]] = []
        self.seen: list[DownloadView | None] = []
        self.refusal: NetworkError | None = None
        self.budgets: list[int] = []
        self.tokens: list[str] = []
        self.gateway = Told()
        self.journal = Journal(lambda: self.phases.append(self.journal.state.phase))
        credentials = self.gateway.credentials(directory)
        self.fetching = Fetching(self.gateway.market, credentials, self.journal, directory / "shards", "cpu", 7)
        monkeypatch.setattr(holding, "fetch_stage", self._fetch_stage)

    async def _fetch_stage(
        self, _: Any, token: str, directory: Path, *, begin: int, end: int, budget_bytes: int, progress: Any, **__: Any
    ) -> Path:
        self.tokens.append(token)
        self.budgets.append(budget_bytes)
        progress(1, 2)
        self.seen.append(self.journal.download)
        if self.refusal is not None:
            raise self.refusal
        self.made.append((begin, end))
        directory.mkdir(exist_ok=True)
        file = directory / f"{begin}-{end}.gguf"
        file.write_bytes(bytes(len(self.made)))
        return file


@pytest.fixture
def fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetches:
    return Fetches(tmp_path, monkeypatch)


def window(wallet: str = A) -> RingHolding:
    return RingHolding(PLAN.moved(0, wallet, 5) if wallet != A else PLAN, wallet, 64)


async def test_a_slice_is_fetched_once_and_shown_while_it_is(fetches: Fetches) -> None:
    held = window()
    await fetches.fetching.fetch(held)
    assert (fetches.phases, fetches.journal.state.why) == ([Phase.DOWNLOADING], "Fetching layers 0 to 14 of m.")
    assert fetches.seen == [DownloadView("layers 0 to 14 of m", 1, 2)]
    assert fetches.journal.download is None
    assert (fetches.budgets, fetches.tokens) == ([7 * MIB], fetches.gateway.minted)
    await fetches.fetching.fetch(held)
    assert fetches.made == [(0, 15)]


async def test_a_file_that_was_touched_is_fetched_and_verified_again(fetches: Fetches) -> None:
    held = window()
    await fetches.fetching.fetch(held)
    assert held.file is not None
    held.file.write_bytes(b"others")
    await fetches.fetching.fetch(held)
    held.file.unlink()
    await fetches.fetching.fetch(held)
    assert fetches.made == [(0, 15)] * 3


async def test_a_window_that_the_node_stood_by_for_is_there_already(fetches: Fetches) -> None:
    for _ in range(2):
        await fetches.fetching.fetch_ahead(PLAN, B)
    assert fetches.made == [(0, 15)]
    held = window(B)
    await fetches.fetching.fetch(held)
    assert (fetches.made, held.fetched) == ([(0, 15)], (held.file,))
    await fetches.fetching.fetch(held)
    assert fetches.made == [(0, 15)]
    assert held.file is not None
    held.file.write_bytes(b"others")
    await fetches.fetching.fetch(held)
    assert fetches.made == [(0, 15)] * 2


async def test_who_stands_by_for_nothing_fetches_nothing(fetches: Fetches) -> None:
    await fetches.fetching.fetch_ahead(PLAN, A)
    assert (fetches.made, fetches.phases) == ([], [])


async def test_a_failure_is_the_callers_and_the_next_try_begins_anew(fetches: Fetches) -> None:
    fetches.refusal = NetworkError("digest", "Another file than was promised.")
    held = window()
    for act in (fetches.fetching.fetch(held), fetches.fetching.fetch_ahead(PLAN, B)):
        with pytest.raises(NetworkError):
            await act
    assert fetches.journal.download is None
    fetches.refusal = None
    await fetches.fetching.fetch(held)
    await fetches.fetching.fetch_ahead(PLAN, B)
    assert fetches.made == [(0, 15)] * 2
