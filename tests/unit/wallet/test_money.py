"""Amounts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import UsageError
from kvasir_console.wallet.money import DECIMALS, KVR, MAX_AMOUNT, SOL, amount_text, parse_amount


@pytest.mark.parametrize(
    ("text", "token", "amount"),
    [
        ("12.5", KVR, 12_500_000),
        ("0.000001", KVR, 1),
        ("0.000000001", SOL, 1),
        (" 7 ", SOL, 7_000_000_000),
        ("18446744073709.551615", KVR, MAX_AMOUNT),
        ("18446744073.709551615", SOL, MAX_AMOUNT),
    ],
)
def test_amounts_are_read_exactly(text, token, amount):
    assert parse_amount(text, token) == amount


@pytest.mark.parametrize(
    "text", ["", ".5", "5.", "1.0000001", "-1", "+1", "1e3", "1_000", "1,5", "\u0661", "NaN", "1 2"]
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_amount(text, KVR)
    assert caught.value.code == "amount_malformed"


def test_what_no_account_can_hold_is_refused():
    for text, token in (("18446744073709.551616", KVR), ("18446744073.709551616", SOL), ("9" * 20, KVR)):
        with pytest.raises(UsageError) as caught:
            parse_amount(text, token)
        assert caught.value.code == "amount_too_large"


@given(st.integers(0, MAX_AMOUNT), st.sampled_from(sorted(DECIMALS)))
def test_every_amount_is_read_back(amount, token):
    text = amount_text(token, amount)
    number, name = text.split(" ")
    assert name == token
    assert len(number.partition(".")[2]) == DECIMALS[token]
    assert parse_amount(number, token) == amount


def test_what_went_out_has_a_sign():
    assert amount_text(KVR, -1_500_000) == "-1.500000 KVR"
