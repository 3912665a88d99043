"""The day's allowance: counted before anything is signed, across processes, restarts and clocks that go back."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.wallet import limits
from kvasir_console.wallet.limits import FREE_SIGNINGS, MAX_PAYMENTS, DailyLimit

DAY = date(2026, 11, 29)


class Calendar:
    def __init__(self) -> None:
        self.day = DAY

    def __call__(self) -> date:
        return self.day


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "spending.json"


def refusal(limit: DailyLimit, token: str, amount: int) -> WalletError:
    with pytest.raises(WalletError) as caught:
        limit.spend(token, amount)
    return caught.value


def test_a_day_has_its_allowance_whoever_asks(file):
    calendar = Calendar()
    DailyLimit(file, {"KVR": 10}, calendar).spend("KVR", 6)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = DailyLimit(file, {"KVR": 10}, calendar)
    error = refusal(again, "KVR", 5)
    assert error.code == "daily_limit"
    assert "0.000004 KVR of 0.000010 KVR" in error.message
    again.spend("KVR", 4)
    assert refusal(again, "KVR", 1).code == "daily_limit"
    calendar.day += timedelta(days=1)
    again.spend("KVR", 10)


def test_tokens_are_counted_apart_and_only_those_with_a_limit(file):
    limit = DailyLimit(file, {"KVR": 5, "SOL": 7}, Calendar())
    limit.spend("KVR", 5)
    limit.spend("SOL", 7)
    assert refusal(limit, "SOL", 1).code == "daily_limit"
    DailyLimit(file.with_name("other.json"), {"KVR": 5}, Calendar()).spend("SOL", 10**18)
    assert not file.with_name("other.json").exists()


def test_a_limit_of_nothing_lets_nothing_out(file):
    assert refusal(DailyLimit(file, {"KVR": 0}, Calendar()), "KVR", 1).code == "daily_limit"


def test_a_lower_limit_counts_what_was_sent_before(file):
    calendar = Calendar()
    DailyLimit(file, {"KVR": 100}, calendar).spend("KVR", 60)
    assert refusal(DailyLimit(file, {"KVR": 50}, calendar), "KVR", 1).code == "daily_limit"


def test_a_clock_that_goes_back_begins_no_new_day(file):
    calendar = Calendar()
    limit = DailyLimit(file, {"KVR": 10}, calendar)
    limit.spend("KVR", 10)
    calendar.day -= timedelta(days=1)
    assert refusal(limit, "KVR", 1).code == "daily_limit"
    calendar.day += timedelta(days=2)
    limit.spend("KVR", 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 4000,
        b'{"version": 1, "day": "noon", "spent": {}}',
        b'{"version": 2, "day": "2026-11-29", "spent": {}}',
        b'{"version": 3, "day": "2026-11-29", "spent": {}, "payments": {}}',
        b'{"version": 2, "day": "2026-11-29", "spent": {}, "payments": {"x": 1}}',
        b'{"version": 2, "day": "2026-11-29", "spent": {}, "payments": []}',
        b'{"version": 2, "day": "2026-11-29", "spent": {}, "payments": {"' + b"0" * 64 + b'": -1}}',
        b'{"version": true, "day": "2026-11-29", "spent": {}}',
        b'{"version": 1, "day": "2026-11-29", "spent": {"KVR": -5}}',
        b'{"version": 1, "day": "2026-11-29", "spent": {"KVR": true}}',
        b'{"version": 1, "day": "2026-11-29", "spent": []}',
    ],
)
def test_a_damaged_file_lets_nothing_out(file, content):
    file.write_bytes(content)
    file.chmod(0o600)
    assert refusal(DailyLimit(file, {"KVR": 10}, Calendar()), "KVR", 1).code == "spending_state"
    assert file.read_bytes() == content


def test_what_cannot_be_written_down_is_not_let_out(file, monkeypatch):
    limit = DailyLimit(file, {"KVR": 10}, Calendar())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SystemResourceError):
            limit.spend("KVR", 4)
    limit.spend("KVR", 10)


def test_several_processes_share_one_allowance(file):
    script = (
        "import pathlib, sys\nfrom kvasir_console.errors import WalletError\n"
        "from kvasir_console.wallet.limits import DailyLimit\n"
        "limit, passed = DailyLimit(pathlib.Path(sys.argv[1]), {'KVR': 10}), 0\n"
        "for _ in range(8):\n    try:\n        limit.spend('KVR', 1)\n        passed += 1\n"
        "    except WalletError:\n        pass\nprint(passed)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert sum(int(child.communicate(timeout=120)[0]) for child in children) == 10


RENT, BREAD = "0" * 64, "1" * 64


def test_a_payment_that_is_signed_again_counts_once_for_two_more_signatures(file):
    calendar = Calendar()
    limit = DailyLimit(file, {"KVR": 10}, calendar)
    for _ in range(1 + FREE_SIGNINGS):
        DailyLimit(file, {"KVR": 10}, calendar).spend("KVR", 6, RENT)
    assert refusal(limit, "KVR", 5).code == "daily_limit"
    limit.spend("KVR", 4)
    with pytest.raises(WalletError, match="more than the day's limit"):
        limit.spend("KVR", 6, RENT)  # the fourth counts again
    calendar.day += timedelta(days=1)
    limit.spend("KVR", 6, RENT)  # and so does the first of another day
    assert refusal(limit, "KVR", 5).code == "daily_limit"


def test_another_payment_is_not_the_same_one(file):
    limit = DailyLimit(file, {"KVR": 10}, Calendar())
    limit.spend("KVR", 6, RENT)
    with pytest.raises(WalletError, match="more than the day's limit"):
        limit.spend("KVR", 6, BREAD)
    limit.spend("KVR", 4, BREAD)


def test_a_payment_without_an_id_is_counted_each_time(file):
    limit = DailyLimit(file, {"KVR": 10}, Calendar())
    limit.spend("KVR", 6)
    assert refusal(limit, "KVR", 6).code == "daily_limit"


def test_a_refused_payment_is_not_remembered_as_counted(file):
    limit = DailyLimit(file, {"KVR": 5}, Calendar())
    for _ in range(2):
        with pytest.raises(WalletError, match="more than the day's limit"):
            limit.spend("KVR", 6, RENT)


def test_the_oldest_payments_are_forgotten_and_count_anew(file):
    limit = DailyLimit(file, {"KVR": MAX_PAYMENTS + 2}, Calendar())
    digests = [f"{number:064x}" for number in range(MAX_PAYMENTS + 1)]
    for digest in digests:
        limit.spend("KVR", 1, digest)
    limit.spend("KVR", 1, digests[1])  # remembered
    limit.spend("KVR", 1, digests[0])
    assert refusal(limit, "KVR", 1).code == "daily_limit"
    assert len(limits.parse_spending(file.read_bytes()).payments) == MAX_PAYMENTS


def test_a_day_that_an_older_program_wrote_goes_on(file):
    file.write_bytes(b'{"version": 1, "day": "2026-11-29", "spent": {"KVR": 7}}')
    file.chmod(0o600)
    limit = DailyLimit(file, {"KVR": 10}, Calendar())
    assert refusal(limit, "KVR", 4).code == "daily_limit"
    limit.spend("KVR", 3, RENT)
    limit.spend("KVR", 3, RENT)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 30)), max_size=15))
def test_no_day_lets_out_more_than_its_limit(file, steps):
    file.unlink(missing_ok=True)
    calendar, let_out = Calendar(), {}
    limit = DailyLimit(file, {"KVR": 40}, calendar)
    latest = DAY
    for days, amount in steps:
        calendar.day += timedelta(days=days)
        latest = max(latest, calendar.day) if let_out else calendar.day
        if allowed(limit, amount):
            let_out[latest] = let_out.get(latest, 0) + amount
    assert all(total <= 40 for total in let_out.values())


def allowed(limit: DailyLimit, amount: int) -> bool:
    try:
        limit.spend("KVR", amount)
    except WalletError:
        return False
    return True
