"""A stage keeps one session waiting for the next worker, and no more."""

from __future__ import annotations

from kvasir_console.node.star import Star
from kvasir_console.relay.uplink import UplinkPhase, UplinkState


class Session:
    def __init__(self) -> None:
        self.phase, self.bytes_down = UplinkPhase.DIALLING, 0

    def snapshot(self) -> UplinkState:
        return UplinkState("s", "wss://h", self.phase, 0.0, 0.0, None, None, 0, self.bytes_down, 1, None)


class Dialler:
    def __init__(self, most: int = 8) -> None:
        self.sessions: list[Session] = []
        self.star = Star(self._dial, most)

    def _dial(self, slot: int) -> Session:
        assert slot == len(self.sessions)
        self.sessions.append(Session())
        return self.sessions[-1]

    def enter(self, slot: int, phase: UplinkPhase) -> None:
        self.sessions[slot].phase = phase
        self.star.changed(slot, self.sessions[slot].snapshot())

    def take(self, slot: int) -> None:
        """The hub joins a worker: its preamble comes."""
        self.sessions[slot].bytes_down += 256

    def tended(self) -> int:
        for _ in range(3):
            self.star.tend()
        return len(self.sessions)


def test_one_session_waits_and_the_next_is_dialled_when_it_is_taken() -> None:
    dialler = Dialler()
    assert dialler.tended() == 1
    dialler.enter(0, UplinkPhase.OPEN)
    assert dialler.tended() == 1
    dialler.take(0)
    assert dialler.tended() == 2
    dialler.enter(1, UplinkPhase.OPEN)
    dialler.take(1)
    assert dialler.tended() == 3


def test_a_session_whose_worker_left_waits_again() -> None:
    dialler = Dialler()
    dialler.tended()
    dialler.enter(0, UplinkPhase.OPEN)
    dialler.take(0)
    assert dialler.tended() == 2
    dialler.enter(1, UplinkPhase.OPEN)
    dialler.enter(0, UplinkPhase.WAITING)
    dialler.enter(0, UplinkPhase.OPEN)
    dialler.take(1)
    assert dialler.tended() == 2
    dialler.take(0)
    assert dialler.tended() == 3


def test_there_is_a_most() -> None:
    dialler = Dialler(most=2)
    for slot in range(2):
        dialler.tended()
        dialler.enter(slot, UplinkPhase.OPEN)
        dialler.take(slot)
    assert dialler.tended() == 2
