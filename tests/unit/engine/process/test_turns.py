"""Prompts and decoding streams share time."""

from __future__ import annotations

from kvasir_console.engine.process.turns import Turns


def test_prompts_go_at_once_when_nobody_decodes():
    turns = Turns()
    for _ in range(5):
        assert turns.prompts_may(False)
        turns.spent(1.0, prompts=True, decoding=False)
    assert turns.prompts_may(True)


def test_after_a_step_with_prompts_decoding_has_as_much_time():
    turns = Turns()
    assert turns.prompts_may(True)
    turns.spent(1.0, prompts=True, decoding=True)
    steps = 0
    while not turns.prompts_may(True):
        turns.spent(0.1, prompts=False, decoding=True)
        steps += 1
    assert steps in (10, 11)
    assert turns.prompts_may(False)


def test_time_that_nobody_used_is_not_saved_up():
    turns = Turns()
    for _ in range(100):
        turns.spent(1.0, prompts=False, decoding=True)
    turns.spent(1.0, prompts=True, decoding=True)
    assert not turns.prompts_may(True)
