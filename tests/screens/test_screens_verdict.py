"""Whether a node earns and why not, for every phase and every way of serving without earning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from console_fakes import NOW_S, SERVING, in_phase

from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import DownloadView, EarningsView, RelayView, WorkView
from kvasir_console.screens.verdict import Answer, quiet_s, verdict


def test_work_and_credit_is_a_yes_with_the_amount() -> None:
    found = verdict(SERVING)
    assert found.answer is Answer.YES
    assert "3.141592 KVR" in found.text


@pytest.mark.parametrize(
    ("phase", "answer", "word"),
    [
        (Phase.STOPPED, Answer.NO, "stopped"),
        (Phase.LOCKED, Answer.NO, "locked"),
        (Phase.AUTHENTICATING, Answer.NOT_YET, "admitted"),
        (Phase.VOLUNTEERING, Answer.NO, "no slice"),
        (Phase.DOWNLOADING, Answer.NOT_YET, "downloaded"),
        (Phase.VERIFYING, Answer.NOT_YET, "verified"),
        (Phase.STARTING, Answer.NOT_YET, "engine"),
        (Phase.REPORTING, Answer.NO, "wired no relay session"),
        (Phase.DIALLING, Answer.NOT_YET, "dialled"),
        (Phase.DRAINING, Answer.NO, "stops"),
        (Phase.FAILED, Answer.NO, "failed"),
    ],
)
def test_every_phase_but_serving_says_what_is_missing(phase: Phase, answer: Answer, word: str) -> None:
    found = verdict(in_phase(phase))
    assert found.answer is answer
    assert word in found.because


def test_every_phase_has_a_verdict() -> None:
    assert all(verdict(in_phase(phase)).because for phase in Phase)


def test_the_nodes_own_reason_is_part_of_the_sentence() -> None:
    found = verdict(in_phase(Phase.VOLUNTEERING, why="The market needs no more experts now."))
    assert found.text == "no, because the market has no slice for this node: the market needs no more experts now"
    assert verdict(in_phase(Phase.FAILED, why="TLS is refused.")).because == "TLS is refused"


def test_a_download_says_how_far_it_is_and_never_a_false_hundred() -> None:
    almost = in_phase(Phase.DOWNLOADING, download=DownloadView("x", 999, 1000))
    assert "99% done" in verdict(almost).because
    unknown = in_phase(Phase.DOWNLOADING, download=DownloadView("x", 999, None))
    assert "%" not in verdict(unknown).because


def test_a_waiting_relay_gives_its_close_and_the_countdown() -> None:
    relay = RelayView("s", "waiting", NOW_S, retry_in_s=7.9, last_close="4403: not admitted")
    found = verdict(in_phase(Phase.DIALLING, relays=(relay,)))
    assert found.answer is Answer.NO
    assert "4403: not admitted" in found.because
    assert "next try in 7 s" in found.because


def test_serving_without_any_open_session_is_a_no() -> None:
    closed = RelayView("s", "waiting", NOW_S, last_close="1006: the connection was lost")
    found = verdict(replace(SERVING, relays=(closed,)))
    assert found.answer is Answer.NO
    assert found.because == "no relay session is open: 1006: the connection was lost"
    assert "none was dialled" in verdict(replace(SERVING, relays=())).because


def test_one_lost_session_of_several_is_named() -> None:
    lost = RelayView("s", "closed", NOW_S, last_close="4404: unknown")
    found = verdict(replace(SERVING, relays=(*SERVING.relays, lost)))
    assert found.answer is Answer.NO
    assert found.because == "a relay session is not open: 4404: unknown"


def test_serving_without_a_request_counts_the_time() -> None:
    found = verdict(replace(SERVING, work=WorkView(history=(0.0,) * 5)))
    assert found.answer is Answer.NOT_YET
    assert "1 h 02 min" in found.because


def test_quiet_for_a_minute_is_a_no_and_a_busy_second_ends_it() -> None:
    quiet = replace(SERVING.work, history=(5.0,) + (0.0,) * 60)
    assert quiet_s(replace(SERVING, work=quiet)) == 60
    found = verdict(replace(SERVING, work=quiet))
    assert found.answer is Answer.NO
    assert found.because == "no work has come for 1 min 00 s"
    assert verdict(replace(SERVING, work=replace(quiet, history=quiet.history[:-1]))).answer is Answer.YES
    assert verdict(replace(SERVING, work=replace(quiet, history=(*quiet.history, 1.0)))).answer is Answer.YES


def test_quiet_longer_than_the_history_says_more_than() -> None:
    found = verdict(replace(SERVING, work=replace(SERVING.work, history=(0.0,) * 240)))
    assert "more than 4 min 00 s" in found.because


def test_work_without_credit_is_not_called_earning() -> None:
    assert verdict(replace(SERVING, earnings=replace(SERVING.earnings, credited_micro_kvr=0))).answer is Answer.NOT_YET
    unknown = verdict(replace(SERVING, earnings=EarningsView()))
    assert unknown.answer is Answer.YES
    assert "not stated" in unknown.because
