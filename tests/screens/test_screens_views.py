"""Builders of panels: any snapshot fits any size, the unknown is N/A, and the words are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from console_fakes import EMPTY, HOSTILE_SNAPSHOT, NOW_S, SERVING, in_phase

from kvasir_console.node.phase import Phase, PhaseState
from kvasir_console.node.snapshot import DownloadView, EarningsView, NodeSnapshot, RelayView, SliceView, WorkView
from kvasir_console.screens.frame import Builder, Frame
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.line import Role, width
from kvasir_console.screens.reader import NodeView
from kvasir_console.screens.verdict import verdict
from kvasir_console.screens.views import earnings, header, holding, machine, nodes, phase, relay, throughput

BUILDERS: dict[str, Builder] = {
    "header": header.header,
    "answer": header.answer,
    "phase": phase.phase,
    "slice": holding.holding,
    "throughput": throughput.throughput,
    "relay": relay.relay,
    "earnings": earnings.earnings,
    "machine": machine.machine,
    "nodes": nodes.nodes,
}
VIEWS = {
    "serving": NodeView("x", SERVING),
    "empty": NodeView("x", EMPTY),
    "hostile": NodeView("x", HOSTILE_SNAPSHOT),
    "before the first answer": NodeView("x"),
    "lost": NodeView("x", SERVING, NOW_S - 9, "No node answers there."),
    "never seen": NodeView("x", None, NOW_S - 9, "No node answers there."),
    "downloading": NodeView("x", in_phase(Phase.DOWNLOADING, download=DownloadView("x", 5, 10))),
}


def frame(view: NodeView | NodeSnapshot, symbols: Symbols = Symbols.BRAILLE) -> Frame:
    view = NodeView("x", view) if isinstance(view, NodeSnapshot) else view
    return Frame((view,), 0, NOW_S, symbols)


def text(builder: str, shown: Frame | NodeView | NodeSnapshot, cells: int = 60, height: int = 12) -> str:
    shown = shown if isinstance(shown, Frame) else frame(shown)
    return "\n".join("".join(span.text for span in line).rstrip() for line in BUILDERS[builder](shown, cells, height))


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("symbols", [Symbols.BRAILLE, Symbols.ASCII])
def test_every_panel_fits_every_size(builder: str, view: str, symbols: Symbols) -> None:
    """The widget crops to be safe; a builder must not need it at the sizes the layout gives."""
    for cells in (26, 34, 36, 47, 60, 66, 100, 138, 200):
        for height in (1, 2, 4, 5, 6, 9, 20):
            lines = BUILDERS[builder](frame(VIEWS[view], symbols), cells, height)
            if builder in ("header", "nodes") and height > 1:
                continue
            assert len(lines) <= height, (cells, height)
            assert all(width(line) <= cells for line in lines), (cells, height)


def test_the_unknown_is_never_a_zero() -> None:
    for builder in ("earnings", "machine", "throughput", "nodes"):
        shown = text(builder, EMPTY, 138)
        assert "N/A" in shown
        assert "0.000000" not in shown
        assert "0.00" not in shown
    assert "N/A" in text("slice", replace(SERVING, held=replace(SERVING.held, tensor_bytes=None, model_digest="")))
    assert "rtt N/A" in text("relay", replace(SERVING, relays=(RelayView("s", "open", NOW_S),)))


def test_a_measured_zero_is_a_zero() -> None:
    idle = replace(SERVING, work=WorkView(history=(0.0,)))
    assert "requests     0" in text("throughput", frame(idle, Symbols.ASCII))
    assert "0.00  rows/s" in text("throughput", frame(idle, Symbols.ASCII))
    assert "pending             0.000000 KVR" in text(
        "earnings", replace(SERVING, earnings=EarningsView(pending_micro_kvr=0))
    )


def test_header_names_node_wallet_lock_gateway_and_version() -> None:
    shown = text("header", SERVING, 100)
    for part in ("alpha", "7EcD…LtV2", "● unlocked", "gate.example:8443", "v1.2.3"):
        assert part in shown
    assert "○ locked" in text("header", EMPTY, 100)
    assert "read-only" in text("header", replace(frame(SERVING), read_only=True), 100)


def test_a_short_header_keeps_what_matters() -> None:
    shown = text("header", SERVING, 34)
    assert "alpha" in shown
    assert "unlocked" in shown
    assert "gate" not in shown


def test_the_answer_is_yes_no_or_unknown_with_a_reason() -> None:
    assert text("answer", SERVING, 120).startswith(" Earning  YES  because it serves work")
    assert "NO  because the wallet is locked" in text("answer", EMPTY, 120)
    assert "UNKNOWN  because this node has not answered for 9 s" in text("answer", VIEWS["lost"], 120)
    assert "UNKNOWN  because this node has not answered yet" in text("answer", VIEWS["before the first answer"], 120)


def test_phase_says_what_since_why_and_next() -> None:
    shown = text("phase", SERVING)
    assert "SERVING" in shown
    assert "for 1 h 02 min" in shown
    assert "why    Every relay session is open." in shown
    assert "next   Nothing to do." in shown


def test_phase_of_a_lost_node_is_disconnected_since() -> None:
    shown = text("phase", VIEWS["lost"])
    assert "DISCONNECTED" in shown
    assert "for 9 s" in shown
    assert "No node answers there." in shown
    assert "SERVING" not in shown


def test_long_reasons_leave_room_for_the_next_action() -> None:
    state = PhaseState(Phase.FAILED, NOW_S - 1, "why " * 60, "act now")
    lines = phase.phase(frame(replace(SERVING, state=state)), 36, 4)
    shown = ["".join(span.text for span in line) for line in lines]
    assert len(lines) == 4
    assert shown[-2].rstrip().endswith("…")
    assert shown[-1].startswith("next   act now")


def test_a_download_has_a_bar_only_when_its_size_is_known() -> None:
    known = text("phase", in_phase(Phase.DOWNLOADING, download=DownloadView("x", 5 * 2**20, 10 * 2**20)), 40)
    assert "█" in known
    assert "5.00 of 10.0 MiB" in known
    unknown = text("phase", in_phase(Phase.DOWNLOADING, download=DownloadView("x", 5 * 2**20, None)), 40)
    assert "█" not in unknown
    assert "5.00 MiB" in unknown


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (SliceView("experts", "m", 3, 0, 2, 8), "experts 0–1 of layer 3"),
        (SliceView("experts", "m", 0, 7, 8, 8), "expert 7 of layer 0"),
        (SliceView("layers", "m", None, 15, 30, 30), "layers 15–29"),
        (SliceView("layers", "m", None, 4, 5, 30), "layer 4"),
    ],
)
def test_slices_in_words(held: SliceView, words: str) -> None:
    assert words in text("slice", replace(SERVING, held=held))


def test_the_share_is_a_bar_at_its_place() -> None:
    held = SliceView("layers", "m", None, 15, 30, 30, 1)
    shown = text("slice", replace(SERVING, held=held), 60)
    assert "░" * 16 + "█" * 16 in shown
    assert "15 of 30, 50%" in shown


def test_a_narrow_slice_panel_carries_the_machine() -> None:
    assert "cpu 42%" in text("slice", SERVING, 36)
    assert "cpu" not in text("slice", SERVING, 62)


def test_experts_count_rows_and_layers_count_tokens() -> None:
    assert "rows/s" in text("throughput", SERVING)
    layers = replace(
        SERVING, held=SliceView("layers", "m", None, 0, 9, 9), work=WorkView(3, 900, 0, 77, 50.0, 12.5, (1.0,))
    )
    shown = text("throughput", frame(layers, Symbols.ASCII))
    assert "12.5  tokens/s" in shown
    assert "tokens    77" in shown
    assert "requests" not in shown  # a stage of a ring does not see them
    assert "pairs" not in shown
    no_sampler = replace(layers, work=replace(layers.work, tokens=0, tokens_per_s=0.0))
    assert "50.0  rows/s" in text("throughput", frame(no_sampler, Symbols.ASCII))


def test_the_headline_is_drawn_in_large_digits() -> None:
    assert throughput.big("7") == ["╺━┓", "  ┃", "  ╹"]
    assert throughput.big("1.5")[2] == "╺┻╸.╺━┛"
    assert all(len(row) == 3 * 5 + 3 for row in throughput.big("23.5", gap=2))


def test_the_graph_has_its_scale_and_span() -> None:
    shown = text("throughput", SERVING, 60, 12).split("\n")
    assert any(row.lstrip().startswith("50┤") for row in shown)
    assert shown[-1].split() == ["1", "min", "46", "s", "ago", "now"]
    assert "no samples yet" in text("throughput", EMPTY, 60, 12)


def test_relays_show_state_distance_and_traffic() -> None:
    shown = text("relay", SERVING, 66)
    assert "expert-alpha-7f3a" in shown
    assert "open for 1 min 00 s  rtt 12.3 ms  ↑ 2.00 MiB  ↓ 4.00 MiB" in shown


def test_a_waiting_relay_shows_countdown_and_reason() -> None:
    waiting = RelayView("s", "waiting", NOW_S - 3, None, 0, 0, 4.2, "4404: the relay does not know this session")
    shown = text("relay", replace(SERVING, relays=(waiting,)))
    assert "waiting for 3 s, again in 4 s" in shown
    assert "4404: the relay does not know this session" in shown


def test_an_edge_past_the_relay_is_as_good_as_open() -> None:
    direct = RelayView("ring/0/P", "direct", NOW_S - 65, None, 2048, 1024)
    shown = text("relay", replace(SERVING, relays=(direct,)))
    assert "● ring/0/P" in shown
    assert "direct for 1 min" in shown
    assert "rtt" not in shown
    assert "2.00 KiB" in shown
    assert verdict(replace(SERVING, relays=(direct,))) == verdict(SERVING)
    aside = replace(direct, state="aside")
    assert "no relay session is open" in verdict(replace(SERVING, relays=(aside,))).because


def test_many_relays_are_shortened_then_counted() -> None:
    many = replace(SERVING, relays=tuple(RelayView(f"ring/{i}/P", "open", NOW_S, 1.0) for i in range(9)))
    shown = text("relay", many, 36, 5).split("\n")
    assert [row.split()[1] for row in shown[:4]] == ["ring/0/P", "ring/1/P", "ring/2/P", "ring/3/P"]
    assert shown[4] == "and 5 more sessions"
    assert "more" not in text("relay", many, 36, 9)


def test_earnings_stand_in_one_column_and_are_exact() -> None:
    rows = text("earnings", SERVING).split("\n")
    points = {row.index(".") for row in rows if row.startswith(("pending", "credited", "paid", "on chain", "units"))}
    assert len(points) == 1
    shown = "\n".join(rows)
    for part in ("2.141592 KVR", "3.141592 KVR", "1.000000 KVR", "1.000001 KVR", "123.456789", "1/3 µKVR", "confirmed"):
        assert part in shown
    assert "5h6x…sUYv" in shown
    assert SERVING.earnings.last_signature not in shown


def test_the_way_to_the_minimum_claim_is_a_bar() -> None:
    below = replace(SERVING, earnings=replace(SERVING.earnings, pending_micro_kvr=250_000))
    assert "██░░░░░░ 25% of 1 KVR" in text("earnings", below)
    assert "can be claimed now" in text("earnings", SERVING)
    assert "minimum claim N/A" in text("earnings", EMPTY)


@pytest.mark.parametrize(
    ("pending", "minimum", "possible"),
    [
        (None, 1, False),
        (0, 0, False),
        (0, None, False),
        (1, None, True),
        (1, 1, True),
        (999, 1000, False),
        (1000, 1000, True),
    ],
)
def test_what_can_be_claimed(pending: int | None, minimum: int | None, possible: bool) -> None:
    assert earnings.can_claim(EarningsView(pending_micro_kvr=pending, minimum_claim_micro_kvr=minimum)) is possible


def test_the_table_of_nodes_has_aligned_columns() -> None:
    views = (NodeView("a", SERVING), NodeView("b", EMPTY), VIEWS["lost"], NodeView("d"))
    lines = nodes.nodes(Frame(views, 1, NOW_S, Symbols.BRAILLE), 136, 5)
    rows = ["".join(span.text for span in line) for line in lines]
    heading = rows[0]
    assert [row[heading.index("name") :].split()[0] for row in rows[1:]] == ["alpha", "empty", "alpha", "d"]
    assert [row[heading.index("phase") :].split()[0] for row in rows[1:]] == [
        "serving",
        "locked",
        "disconnected",
        "connecting",
    ]
    end = heading.index("pending KVR") + len("pending KVR")
    assert [row[:end].split()[-1] for row in rows[1:]] == ["2.141592", "N/A", "2.141592", "N/A"]
    assert [row[heading.index("earning") :].strip() for row in rows[1:]] == ["yes", "no", "unknown", "unknown"]
    assert rows[2].startswith("▸ 2")
    assert {span.role for span in lines[3][3:]} <= {Role.FAINT, Role.BAD}


def test_many_nodes_scroll_with_the_selection() -> None:
    views = tuple(NodeView(f"node-{i}") for i in range(20))
    for selected in (0, 7, 19):
        shown = Frame(views, selected, NOW_S, Symbols.BRAILLE)
        rows = text("nodes", shown, 136, 6).split("\n")
        assert len(rows) == 6
        assert any(f"node-{selected} " in row and "▸" in row for row in rows)
        assert nodes.first_row(shown, 6) <= selected < nodes.first_row(shown, 6) + 5
        assert f"{selected + 1} ◌ node-{selected}" in text("nodes", shown, 80, 1)


def test_the_strip_shows_rates_for_all_or_for_none() -> None:
    four = tuple(NodeView("x", replace(SERVING, name=f"expert-{i}")) for i in range(4))
    assert text("nodes", Frame(four, 0, NOW_S, Symbols.BRAILLE), 80, 1).split(" ● ")[1] == "expert-0 23.5/s 2"
    longer = (*four[:3], NodeView("x", replace(SERVING, name="expert-three")))
    assert "/s" not in text("nodes", Frame(longer, 0, NOW_S, Symbols.BRAILLE), 80, 1)


def test_the_strip_finds_the_node_under_the_pointer() -> None:
    shown = Frame(tuple(NodeView(f"n{i}") for i in range(4)), 0, NOW_S, Symbols.BRAILLE)
    strip = text("nodes", shown, 80, 1)
    for index in range(4):
        assert nodes.strip_index(shown, 80, strip.index(f"n{index}")) == index
