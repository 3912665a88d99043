"""Reports of a ring's stage: one value has one text, counters only grow, and no more is paid than passed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire.stage_report import (
    MAX_SLICES,
    MAX_TEXT_BYTES,
    SliceWork,
    StageReport,
    Work,
    check_growth,
    check_passed,
)

KEY = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
ZEROS = "0" * 64
counts = st.integers(0, 2**40)


def piece(layer: int = 0, rows: int = 3, pairs: int = 6, begin: int = 0, end: int = 4) -> SliceWork:
    return SliceWork(layer, begin, end, rows, pairs, "ab" * 32, live=True)


def report(*slices: SliceWork, **changes: object) -> StageReport:
    made = StageReport(
        hub=KEY,
        stage=KEY,
        key=KEY,
        ring="ring-a",
        epoch=1,
        run="0f" * 16,
        sequence=1,
        model_digest="cd" * 32,
        wallet=KEY,
        session="expert-a",
        requests=2,
        slices=slices or (piece(),),
        quarantined=False,
        convictions=0,
        fault="",
        evidence=ZEROS,
    )
    return dataclasses.replace(made, **changes)


def code(call) -> str:
    with pytest.raises(NetworkError) as caught:
        call()
    return caught.value.code


places = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), min_size=1, max_size=MAX_SLICES, unique=True).map(
    sorted
)


@given(places, st.lists(st.tuples(counts, counts), min_size=MAX_SLICES, max_size=MAX_SLICES), st.booleans())
def test_what_is_written_is_read(where: list[tuple[int, int]], work: list[tuple[int, int]], caught: bool) -> None:
    slices = [
        SliceWork(layer, begin, begin + 4, rows, pairs, "1e" * 32, live=caught)
        for (layer, begin), (rows, pairs) in zip(where, work, strict=False)
    ]
    made = report(*slices, quarantined=caught, convictions=int(caught), fault="off by 5" if caught else "")
    assert StageReport.parse(made.text()) == made
    assert len(made.text()) <= MAX_TEXT_BYTES
    assert made.work == Work(sum(each.rows for each in slices), sum(each.pairs for each in slices))


def test_a_text_in_another_form_is_refused() -> None:
    text = report().text()
    head, _, body = text.partition("\n")
    fields = json.loads(body)
    for other in (
        body,
        f"{head}\n{json.dumps(fields)}",
        f"{head}\n{body} ",
        text.replace("stage-report-v1", "stage-report-v2"),
        f"{head}\n[]",
        f"{head}\n" + "[" * 5000,
        text + " " * MAX_TEXT_BYTES,
        text.replace('"requests":2', '"requests":2.0'),
        text.replace('"requests":2', '"requests":true'),
        text.replace('"requests":2', '"requests":-1'),
        text.replace('"requests":2', '"requests":2,"more":1'),
        text.replace('"slices":[[', '"slices":[[1,'),
        text.replace('"slices":[[', '"slices":[7,['),
        text.replace('"fault":""', '"fault":"caught"'),
        text.replace("expert-a", "expert\\u00e9"),
    ):
        assert code(lambda text=other: StageReport.parse(text)) == "report_malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"slices": ()},
        {"slices": (piece(1), piece(0))},
        {"slices": (piece(), piece())},
        {"slices": tuple(piece(layer) for layer in range(MAX_SLICES + 1))},
        {"sequence": 0},
        {"epoch": 2**32},
        {"run": "short"},
        {"quarantined": True},
        {"fault": "line\nbreak", "convictions": 1},
        {"evidence": "none"},
        {"stage": "nobody"},
        {"requests": 2**53},
    ],
)
def test_bounds(changes: dict[str, object]) -> None:
    assert code(lambda: report(**changes)) == "report_malformed"


@pytest.mark.parametrize("wrong", [{"begin": 4}, {"layer": -1}, {"rows": 2**53}, {"pairs": -1}, {"layer": 2**31}])
def test_bounds_of_a_slice(wrong: dict[str, int]) -> None:
    assert code(lambda: piece(**wrong)) == "report_malformed"


def test_a_report_goes_on_where_the_last_one_stood() -> None:
    first = report(piece(0), piece(2), sequence=5)
    check_growth(None, first)
    check_growth(first, dataclasses.replace(first, sequence=6))
    check_growth(first, report(piece(0, rows=4), piece(1, rows=0, pairs=0), piece(2), sequence=9))
    for sequence in (1, 4, 5):
        again = report(piece(0, rows=900), piece(2), sequence=sequence)
        assert code(lambda again=again: check_growth(first, again)) == "report_replayed"
    for slices in ((piece(0),), (piece(0, rows=2), piece(2)), (piece(0), piece(2, pairs=5)), (piece(0), piece(3))):
        shrunk = report(*slices, sequence=6)
        assert code(lambda shrunk=shrunk: check_growth(first, shrunk)) == "report_shrunk"
    fewer = report(piece(0), piece(2), sequence=6, requests=1)
    assert code(lambda: check_growth(first, fewer)) == "report_shrunk"


@given(st.integers(1, 8192), st.lists(st.builds(Work, counts, counts), max_size=5), counts, counts)
def test_no_more_is_paid_than_passed(n_embd: int, work: list[Work], down: int, up: int) -> None:
    rows, pairs = sum(each.rows for each in work), sum(each.pairs for each in work)
    due = 2 * n_embd * rows + 10 * pairs
    if due <= down and 2 * n_embd * rows <= up:
        assert check_passed(n_embd, work, down, up) == due
    else:
        assert code(lambda: check_passed(n_embd, work, down, up)) == "report_over_counted"
    assert check_passed(n_embd, work, due, due) == due
    if due:
        assert code(lambda: check_passed(n_embd, work, due - 1, due)) == "report_over_counted"
