"""Phases: what a person reads about the node at any moment."""

from __future__ import annotations

import pytest

from kvasir_console.errors import ConfigError, EngineError, NetworkError, WalletError
from kvasir_console.node import phase
from kvasir_console.node.phase import Phase


def test_a_node_begins_stopped_and_says_what_to_do():
    state = phase.initial(100.0)
    assert (state.phase, state.since_s) == (Phase.STOPPED, 100.0)
    assert state.next_action


def test_a_change_starts_the_clock_anew():
    state = phase.initial(100.0).to(Phase.AUTHENTICATING, 105.0, "Asking.")
    assert (state.phase, state.since_s, state.why) == (Phase.AUTHENTICATING, 105.0, "Asking.")


def test_staying_keeps_since_and_takes_the_newer_reason():
    state = phase.initial(1.0).to(Phase.FAILED, 10.0, "No route.", "Wait.").to(Phase.FAILED, 20.0, "Timeout.")
    assert (state.since_s, state.why) == (10.0, "Timeout.")
    assert state.next_action != "Wait."


def test_coming_back_to_a_phase_starts_the_clock_anew():
    state = phase.initial(1.0)
    for moment, each in ((2.0, Phase.SERVING), (3.0, Phase.DIALLING), (4.0, Phase.SERVING)):
        state = state.to(each, moment)
    assert state.since_s == 4.0


@pytest.mark.parametrize("each", Phase)
def test_every_phase_has_a_next_action_of_its_own(each):
    assert phase.initial(0.0).to(each, 1.0).next_action.endswith(".")
    assert phase.initial(0.0).to(each, 1.0, next_action="Do this.").next_action == "Do this."


def test_a_state_is_a_value():
    state = phase.initial(1.0)
    state.to(Phase.SERVING, 2.0)
    assert state == phase.initial(1.0)


@pytest.mark.parametrize(
    ("error", "led_to"),
    [
        (WalletError("wallet_locked", "Locked.", "Unlock it."), (Phase.LOCKED, "Locked.", "Unlock it.")),
        (WalletError("signer_locked", "Locked.", "Unlock it."), (Phase.LOCKED, "Locked.", "Unlock it.")),
        (NetworkError("gone", "Gone."), (Phase.FAILED, "Gone.", "It is tried again within 15 s.")),
        (NetworkError("gone", "Gone.", "Wait."), (Phase.FAILED, "Gone.", "Wait. It is tried again within 15 s.")),
        (EngineError("engine_restarted", "It ended.", "It loads."), (Phase.FAILED, "It ended.", "It loads.")),
        (ConfigError("bad", "No URL.", "Set it."), (Phase.FAILED, "No URL.", "Set it.")),
    ],
)
def test_a_failure_says_what_happened_and_what_is_next(error, led_to):
    assert phase.after(error, 15.0) == led_to
