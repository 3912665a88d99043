"""Both ends' counts: they agree to the byte after any history of sends, losses, broken dials and restarts."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.relay.counting import (
    CONNECTION_HEADER,
    COUNTED_HEADER,
    RECEIVED_HEADER,
    OwnCount,
    Tally,
    parse_counted,
    parse_received,
)

NAME = "0123456789abcdef"


def dial(tally: Tally, own: OwnCount, *, answered: bool = True) -> None:
    counted = tally.settle(own.header().get(RECEIVED_HEADER, ""))
    headers = {CONNECTION_HEADER: tally.enter(0.0)}
    if counted:
        headers[COUNTED_HEADER] = counted
    if answered:
        own.opened(headers)


class Both:
    """One session as seen from both ends, with a network that delivers a prefix of what was sent."""

    def __init__(self) -> None:
        self.tally, self.own = Tally("s", "w"), OwnCount()

    def act(self, step: tuple[str, int, int]) -> None:
        what, sent, arrived = step
        arrived = min(sent, arrived)
        if what == "up":
            self.own.sent += sent
            self.tally.add_ws2tcp(arrived)
        elif what == "down":
            self.tally.add_tcp2ws(sent)
            self.own.received += arrived
        elif what == "ping":
            if self.own.received == self.tally._connection_sent:  # the pong can only follow what was sent before it
                self.tally.confirm(self.tally.mark())
        elif what == "dial":
            dial(self.tally, self.own)
        elif what == "lost answer":
            dial(self.tally, self.own, answered=False)
            dial(self.tally, self.own)
        elif what == "hub restarts":
            restored = Tally("s", "w")
            restored.restore(json.loads(json.dumps(self.tally.state())))
            self.tally = restored
            dial(self.tally, self.own)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["up", "down", "ping", "dial", "lost answer", "hub restarts"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    ),
    max_size=30,
)


@given(STEPS)
def test_after_the_next_dial_both_ends_count_the_same_bytes(steps: list[tuple[str, int, int]]) -> None:
    both = Both()
    dial(both.tally, both.own)
    before = (0, 0)
    for step in steps:
        both.act(step)
        count = both.tally.count()
        assert (count.ws2tcp, count.confirmed) >= before  # a statement never has to take anything back
        assert count.confirmed <= count.tcp2ws
        before = (count.ws2tcp, count.confirmed)
    dial(both.tally, both.own)
    count = both.tally.count()
    assert (count.ws2tcp, count.confirmed) == (both.own.total_up, both.own.total_down)
    assert both.own.disputed == 0


def test_totals_that_were_not_written_before_a_crash_are_missing_at_both_ends() -> None:
    tally, own = Tally("s", "w"), OwnCount()
    dial(tally, own)
    tally.add_ws2tcp(100)
    own.sent, own.received = 100, 0
    written = tally.state()
    tally.add_ws2tcp(50)
    own.sent = 150
    crashed = Tally("s", "w")
    crashed.restore(written)
    dial(crashed, own)
    assert crashed.count().ws2tcp == own.total_up == 100
    assert own.lost_up == 50


def test_a_node_that_claims_too_much_is_believed_what_was_sent() -> None:
    tally, own = Tally("s", "w"), OwnCount()
    dial(tally, own)
    tally.add_tcp2ws(1000)
    own.received = 10**12
    dial(tally, own)
    assert tally.count().confirmed == 1000


def test_a_node_that_claims_less_than_it_confirmed_is_held_to_it() -> None:
    tally = Tally("s", "w")
    name = tally.enter(0.0)
    tally.add_tcp2ws(1000)
    tally.confirm(f"{name} 1000".encode())
    assert tally.settle(f"{name} 3") == f"{name} 0 1000"
    assert tally.settle(f"{name} 3") == f"{name} 0 1000"  # and asking again changes nothing


def test_a_hub_that_claims_too_much_is_not_believed() -> None:
    own = OwnCount()
    own.opened({CONNECTION_HEADER: NAME})
    own.sent, own.received = 10, 20
    own.opened({CONNECTION_HEADER: NAME[::-1], COUNTED_HEADER: f"{NAME} 15 27"})
    assert (own.total_up, own.total_down, own.disputed) == (10, 20, 12)


def test_a_node_that_crashed_takes_the_hubs_word_for_that_one_connection() -> None:
    own = OwnCount()
    own.opened({CONNECTION_HEADER: NAME})
    own.sent, own.received = 10, 20
    again = OwnCount.from_json(json.loads(json.dumps(own.to_json())))
    assert again.header() == {RECEIVED_HEADER: f"{NAME} 20"}
    again.opened({CONNECTION_HEADER: NAME[::-1], COUNTED_HEADER: f"{NAME} 900 800"})
    assert (again.total_up, again.total_down, again.disputed) == (900, 800, 0)


def test_a_relay_without_these_headers_is_settled_by_the_nodes_own_count() -> None:
    own = OwnCount()
    own.opened({})
    own.sent, own.received = 10, 20
    own.opened({})
    assert (own.total_up, own.total_down) == (10, 20)
    assert own.header() == {}


@given(st.text(max_size=64))
def test_hostile_headers_are_read_or_ignored(text: str) -> None:
    tally = Tally("s", "w")
    tally.enter(0.0)
    tally.confirm(text.encode())
    assert tally.settle(text) == "" or parse_received(text) is not None
    OwnCount(connection=NAME).opened({CONNECTION_HEADER: text, COUNTED_HEADER: text})
    assert parse_counted(f"{NAME} 1 2") == (NAME, 1, 2)
    assert parse_counted(f"{NAME} 1 -2") is None
