"""Numbers on the screen: exact money, N/A for the unknown, nothing rounded up to a round number."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.screens import format as fmt


@given(st.integers(-(10**20), 10**20))
def test_money_is_exact(value: int) -> None:
    text = fmt.micro(value)
    assert Decimal(text) * 1_000_000 == value
    assert len(text.partition(".")[2]) == 6


def test_money_has_its_unit_and_the_unknown_has_none() -> None:
    assert fmt.kvr(8945) == "0.008945 KVR"
    assert fmt.kvr(0) == "0.000000 KVR"
    assert fmt.kvr(None) == "N/A"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "N/A"),
        ("0/1", "0"),
        ("1/3", "1/3"),
        ("2000000000/3000000000", "≈ 0.666"),
        ("999999999999/1000000000000", "≈ 0.999"),
        ("1/0", "N/A"),
        ("-1/3", "N/A"),
        ("1/3/5", "N/A"),
        ("\x1b[31m1/3", "N/A"),
    ],
)
def test_carried_fractions(value: str | None, text: str) -> None:
    assert fmt.carried(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "N/A"), (0, "0"), (999, "999"), (1000, "1.00k"), (1239, "1.23k"), (45_678, "45.6k"), (999_999, "999k"),
     (1_000_000, "1.00M"), (10**15, "1.00P"), (123 * 10**18, "123E")],
)  # fmt: skip
def test_compact_counts_cut_and_stay_short(value: int | None, text: str) -> None:
    assert fmt.compact(value) == text
    assert len(text) <= 5


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "N/A"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10_240, "10.0 KiB"), (1_048_575, "1.00 MiB"),
     (98_362_432, "93.8 MiB"), (16 * 2**30, "16.0 GiB")],
)  # fmt: skip
def test_sizes(value: int | None, text: str) -> None:
    assert fmt.size(value) == text


@given(st.integers(0, 2**62))
def test_sizes_fit_their_column(value: int) -> None:
    assert len(fmt.size(value)) <= 8


def test_a_unit_that_both_share_is_said_once() -> None:
    assert fmt.sizes(9 * 2**30, 16 * 2**30) == "9.00 of 16.0 GiB"
    assert fmt.sizes(5, 2**30) == "5 B of 1.00 GiB"
    assert fmt.sizes(None, 2**30) == "N/A of 1.00 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "N/A"), (-3, "0 s"), (0.9, "0 s"), (59.9, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"),
     (3600, "1 h 00 min"), (86_399, "23 h 59 min"), (86_400, "1 d 0 h"), (450_000, "5 d 5 h")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "N/A"), (0.0, "0.00"), (9.876, "9.88"), (37.42, "37.4"), (512.6, "513"), (12345.0, "12,345")],
)
def test_rates(value: float | None, text: str) -> None:
    assert fmt.rate(value) == text


def test_percent_is_rounded_down_and_unknown_without_a_whole() -> None:
    assert fmt.percent(999, 1000) == 99
    assert fmt.percent(1000, 1000) == 100
    assert fmt.percent(1, 0) is None
    assert fmt.percent(None, 10) is None


def test_names() -> None:
    assert fmt.short("7EcDhSYGxXyscszYEp35KHN8vvw3svAuLKTzXwCFLtV2") == "7EcD…LtV2"
    assert fmt.short("") == "N/A"
    assert fmt.host("https://user:secret@gate.example:8443/x?token=t") == "gate.example:8443"
    assert fmt.host("not a url") == "not a url"
    assert fmt.host("http://[broken") == "http://[broken"
    assert fmt.milliseconds(None) == "N/A"
    assert fmt.milliseconds(1.24) == "1.2 ms"
    assert fmt.milliseconds(2345.0) == "2,345 ms"
