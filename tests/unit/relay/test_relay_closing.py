from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.relay.closing import clean, explain


@pytest.mark.parametrize(
    ("code", "meaning", "action"),
    [
        (4401, "token", "new token"),
        (4403, "another wallet", "admitted"),
        (4404, "does not know", "coverage"),
        (1011, "nothing listens", "dialling"),
        (1000, "normally", "dialling"),
        (1006, "lost", "dialling"),
    ],
)
def test_each_code_of_the_contract_says_what_it_means_and_what_comes_next(code, meaning, action):
    closing = explain(code, "why")
    assert meaning in closing.meaning
    assert action in closing.action
    assert closing.text.startswith(f"{code}: ")
    assert "(why)" in closing.text


def test_an_unknown_code_is_shown_with_its_number():
    assert explain(4999).text == "4999: the relay closed the session; dialling again"


def test_a_reason_cannot_move_the_cursor():
    assert clean("gone\x1b[2J\r\n") == "gone [2J"


@given(st.text(max_size=300))
def test_a_cleaned_reason_fits_a_close_frame_and_stays_itself(reason):
    cleaned = clean(reason)
    assert len(cleaned.encode()) <= 123  # RFC 6455 section 5.5: 125 bytes, two of them the code
    assert cleaned.isprintable()
    assert clean(cleaned) == cleaned
