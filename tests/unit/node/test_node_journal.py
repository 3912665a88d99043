"""What a node tells: every change of phase once, its latest lines, and a download's progress."""

from __future__ import annotations

from kvasir_console.node.journal import LOG_LINES, Journal
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import DownloadView


def test_a_change_of_phase_is_told_after_it_and_a_new_reason_is_not() -> None:
    told: list[tuple[Phase, str]] = []
    journal = Journal(lambda: told.append((journal.state.phase, journal.lines[-1].split(" ", 1)[1])))
    journal.enter(Phase.DIALLING, "A session is dialled.")
    journal.enter(Phase.DIALLING, "It is dialled again.", "Wait.")
    assert (journal.state.why, journal.state.next_action) == ("It is dialled again.", "Wait.")
    journal.enter(Phase.SERVING)
    assert told == [(Phase.DIALLING, "dialling: A session is dialled."), (Phase.SERVING, "serving")]
    assert len(journal.lines) == 2


def test_the_latest_lines_are_kept() -> None:
    journal = Journal(lambda: None)
    for number in range(LOG_LINES + 5):
        journal.note(f"line {number}")
    assert [each.split(" ", 1)[1] for each in journal.lines] == [f"line {n}" for n in range(5, LOG_LINES + 5)]


def test_progress_is_shown_once_there_is_any() -> None:
    journal = Journal(lambda: None)
    progress = journal.progress("layers 0 to 14")
    assert journal.download is None
    progress(5, None)
    progress(7, 10)
    assert journal.download == DownloadView("layers 0 to 14", 7, 10)
