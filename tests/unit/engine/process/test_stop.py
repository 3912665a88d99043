"""Stop strings: wherever pieces end, what is shown is the text before the first of them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvasir_console.engine.process.stop import StopScanner

letters = st.text("ab", max_size=8)
stops = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@given(st.lists(letters, max_size=12), stops)
@example(["a", "a", "b"], ["ab"])
@example(["ab", "a", "b"], ["aab", "bab"])
def test_the_text_is_cut_before_the_first_stop_string(pieces, stop):
    scanner = StopScanner(tuple(stop))
    shown = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        so_far = "".join(shown)
        assert not any(text in so_far for text in stop)
    shown.append(scanner.flush())
    whole = "".join(pieces)
    # The first to be complete is the one that ends first; of those that end together, the longest.
    complete = [(end, begin) for end in range(len(whole) + 1) for begin in range(end) if whole[begin:end] in stop]
    cuts = {begin for end, begin in complete}
    assert scanner.stopped == bool(complete)
    assert scanner.text == "".join(shown)
    if complete:
        assert len(scanner.text) in cuts
        assert not any(text in scanner.text for text in stop)
        assert whole.startswith(scanner.text)
    else:
        assert scanner.text == whole


def test_only_what_may_begin_a_stop_string_is_held_back():
    scanner = StopScanner(("</end>",))
    assert scanner.push("text <") == "text "
    assert scanner.push("/e") == ""
    assert scanner.push("x") == "</ex"
    assert scanner.push("</end> more") == ""
    assert scanner.stopped
    assert scanner.push("more") == scanner.flush() == ""
