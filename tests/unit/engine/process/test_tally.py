"""Pairs are counted for the rows they belong to, however a pass is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.tally import StepTally, Tally


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_every_pair_goes_to_its_request(requests, data):
    total = sum(requests)
    step = StepTally([True] * total)
    expected = np.zeros((3, total), dtype=int)
    for layer in range(2):
        at = 0
        while at < total:  # a layer may be computed in several calls
            count = data.draw(st.integers(1, total - at))
            rows = step.take(layer, count)
            assert rows == slice(at, at + count)
            kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
            for row, kind in enumerate(kinds):
                (step.count_local, step.count_remote, step.count_failovers)[kind](np.array([row + rows.start]))
                expected[kind, at + row] += 1
            at += count
    begin = 0
    for count in requests:
        tally = Tally()
        step.credit(tally, slice(begin, begin + count))
        mine = expected[:, begin : begin + count].sum(axis=1)
        assert (tally.rows, tally.pairs_local, tally.pairs_remote, tally.failovers) == (count, *mine)
        begin += count


def test_a_row_may_have_several_pairs_at_once():
    step, tally = StepTally([False, False]), Tally()
    step.count_local(np.array([0, 0, 1, 0]))
    step.credit(tally, slice(0, 1))
    assert tally.pairs_local == 3
    step.local_everywhere(4)
    step.credit(tally, slice(1, 2))
    assert (tally.pairs_local, tally.rows) == (3 + 1 + 4, 2)


def test_layers_that_no_call_came_to_were_computed_here():
    step, tally = StepTally([True]), Tally()
    step.take(3, 1)
    step.count_remote(np.array([0, 0]))
    step.rest_local(layers=5, pairs_per_row=2)
    step.credit(tally, slice(0, 1))
    assert (tally.pairs_local, tally.pairs_remote) == (8, 2)
