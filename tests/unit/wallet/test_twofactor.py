"""One-time codes against the RFCs and the vectors: never twice, not after a restart, not after the clock went back."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.wallet import private_file, twofactor
from kvasir_console.wallet.twofactor import FactorState, SecondFactor

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "totp.json").read_text())
SECRET = bytes.fromhex(VECTORS["secret_hex"])
NOW = 1111111110


class Clock:
    def __init__(self, now_s: float = NOW) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def code(self, steps: int = 0) -> str:
        """What an authenticator shows; the tables of the RFCs, above, tie ``hotp`` down."""
        return twofactor.hotp(SECRET, int(self.now_s) // 30 + steps)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "second-factor.json"


def write_state(file: Path, state: FactorState) -> None:
    private_file.write(file, json.dumps(state.to_json()).encode(), replace=True)


def stored(file: Path) -> FactorState:
    return twofactor.parse_state(file.read_bytes())


def verdict(factor: SecondFactor, code: str) -> str:
    try:
        factor.check(code)
    except WalletError as error:
        return "repeats the code" if code and code in str(error) else error.code
    return "accept"


@pytest.mark.parametrize("case", VECTORS["codes"], ids=lambda case: str(case["time"]))
def test_codes_are_those_of_rfc_6238(case):
    assert case["time"] // 30 == case["step"]
    assert twofactor.hotp(SECRET, case["step"]) == case["code"]
    assert twofactor.hotp(SECRET, case["step"], 8) == case["code_8_digits"]
    assert twofactor.matching_step(SECRET, case["code"], case["time"]) == case["step"]


@pytest.mark.parametrize("case", VECTORS["hotp_rfc4226"], ids=lambda case: str(case["counter"]))
def test_codes_are_those_of_rfc_4226(case):
    assert twofactor.hotp(SECRET, case["counter"]) == case["code"]


def test_the_rule_is_the_vectors_rule():
    rule = VECTORS["rule"]
    assert (rule["digits"], rule["step_s"], rule["window_steps"]) == (
        twofactor.DIGITS,
        twofactor.STEP_S,
        twofactor.WINDOW_STEPS,
    )


@pytest.mark.parametrize("case", VECTORS["sequences"], ids=lambda case: case["name"])
def test_sequences(case, file):
    clock = Clock()
    write_state(file, FactorState(last_step=case["last_step_before"]))
    factor = SecondFactor(file, SECRET, clock)
    for event in case["events"]:
        if event["op"] == "restart":
            factor = SecondFactor(file, SECRET, clock)
            continue
        clock.now_s = event["now"]
        answer = verdict(factor, event["code"])
        assert (answer == "accept") == (event["expect"] == "accept"), event["note"]
        assert stored(file).last_step == event["last_step_after"], event["note"]


@pytest.mark.parametrize("case", VECTORS["malformed_codes"]["cases"], ids=lambda case: case["name"])
def test_malformed_codes(case, file):
    write_state(file, FactorState())
    clock = Clock(VECTORS["malformed_codes"]["now"])
    factor = SecondFactor(file, SECRET, clock)
    assert verdict(factor, case["code"]) == "second_factor_refused"
    assert verdict(factor, VECTORS["malformed_codes"]["right_code"]) == "accept"


@pytest.mark.parametrize("case", VECTORS["otpauth"], ids=lambda case: case["account"])
def test_links_for_authenticators(case):
    secret = bytes.fromhex(case["secret_hex"])
    assert twofactor.encode_secret(secret) == case["secret_base32"]
    uri = twofactor.otpauth_uri(case["issuer"], case["account"], secret)
    assert uri == case["gateway_uri"]
    for link in (uri, case["short_uri"]):
        parts, wanted = urlsplit(link), case["components"]
        assert (parts.scheme, parts.netloc) == (wanted["scheme"], wanted["type"])
        assert unquote(parts.path.removeprefix("/")) == wanted["label"]
        query = {key: value for key, (value,) in parse_qs(parts.query).items()}
        assert {**wanted["query"], **query} == wanted["query"]


@pytest.mark.parametrize("case", VECTORS["base32"], ids=lambda case: case["text"][:12])
def test_spellings_of_a_secret(case):
    assert twofactor.decode_secret(case["text"]).hex() == case["hex"]


@pytest.mark.parametrize("text", ["0189", "A", "ABC!", "\u00c4BCD"])
def test_what_is_no_base32_is_refused(text):
    with pytest.raises(WalletError) as caught:
        twofactor.decode_secret(text)
    assert caught.value.code == "second_factor_secret"


@given(st.binary(min_size=1, max_size=64))
def test_a_secret_survives_its_spelling(secret):
    text = twofactor.encode_secret(secret)
    assert re.fullmatch("[A-Z2-7]+", text)
    assert twofactor.decode_secret(text.lower()) == secret


# Back-up codes


@pytest.mark.parametrize(
    "case", VECTORS["backup_codes"]["cases"], ids=lambda case: f"{case['kind']}-{case['typed'].strip()}"
)
def test_spellings_of_a_backup_code(case):
    assert twofactor.normalise_backup_code(case["typed"]) == case["normalised"]
    assert twofactor.backup_code_hash(case["typed"]) == case["sha256"]
    assert twofactor.without_backup_code([case["sha256"]], case["typed"]) == ()


def test_a_backup_code_works_once(file):
    sequence = VECTORS["backup_codes"]["single_use"]
    write_state(file, FactorState(backup_hashes=tuple(sequence["stored"])))
    for event in sequence["events"]:
        answer = verdict(SecondFactor(file, SECRET, Clock()), event["typed"])
        assert (answer == "accept") == (event["expect"] == "accept")
        assert list(stored(file).backup_hashes) == event["stored_after"]


def test_new_backup_codes_are_ten_of_eighty_bits():
    codes = twofactor.new_backup_codes()
    assert len(set(codes)) == 10
    for code in codes:
        assert re.fullmatch(r"(?:[A-Z2-7]{4}-){3}[A-Z2-7]{4}", code)
        assert len(twofactor.decode_secret(code)) == 10
        assert twofactor.backup_code_hash(code) == hashlib.sha256(code.replace("-", "").lower().encode()).hexdigest()


def test_a_gateways_backup_codes_have_the_contracts_form():
    codes = twofactor.new_gateway_backup_codes()
    assert len(set(codes)) == 10
    assert all(re.fullmatch(r"[0-9a-f]{5}-[0-9a-f]{5}", code) for code in codes)


def test_backup_codes_are_stored_hashed_and_a_new_set_voids_the_old_one(file):
    clock, codes = Clock(), twofactor.new_backup_codes()
    factor = SecondFactor(file, SECRET, clock)
    factor.enrol(clock.code(), codes)
    assert not any(code in file.read_text() or code.replace("-", "").lower() in file.read_text() for code in codes)
    factor.check(codes[3].lower().replace("-", ""))
    assert factor.backup_codes_left() == 9
    factor.renew_backup_codes(twofactor.new_backup_codes())
    assert factor.backup_codes_left() == 10
    assert verdict(factor, codes[4]) == "second_factor_refused"


# The file


def test_enrolling_needs_a_code_of_the_secret(file):
    clock = Clock()
    factor = SecondFactor(file, SECRET, clock)
    with pytest.raises(WalletError) as caught:
        factor.enrol("000000", ())
    assert caught.value.code == "second_factor_refused"
    assert not file.exists()
    factor.enrol(clock.code(), ())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert verdict(factor, clock.code()) == "second_factor_refused"  # the one that enrolled is used
    assert verdict(factor, clock.code(1)) == "accept"


def test_a_grant_is_on_the_disk_before_it_is_given(file, monkeypatch):
    clock = Clock()
    factor = SecondFactor(file, SECRET, clock)
    factor.enrol(clock.code(), ())
    clock.now_s += 30
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace(*names))[1])
    factor.check(clock.code())
    assert order[:2] == ["fsync", "replace"]
    assert stored(file).last_step == int(clock.now_s) // 30


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_cannot_be_written_is_not_granted(file, monkeypatch, step):
    clock = Clock()
    factor = SecondFactor(file, SECRET, clock)
    factor.enrol(clock.code(), ())
    clock.now_s += 30

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(SystemResourceError):
            factor.check(clock.code())
    assert verdict(factor, clock.code()) == "accept"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 16_000,
        b'{"version": 2}',
        b'{"version": 1, "last_step": true, "backup_hashes": [], "failures": 0, "failed_at_s": 0}',
        b'{"version": 1, "last_step": null, "backup_hashes": ["x"], "failures": 0, "failed_at_s": 0}',
        b'{"version": 1, "last_step": null, "backup_hashes": [], "failures": -1, "failed_at_s": 0}',
        b'{"version": 1, "last_step": 1e3, "backup_hashes": [], "failures": 0, "failed_at_s": 0}',
        None,
    ],
    ids=str,
)
def test_a_damaged_or_missing_state_grants_nothing(file, content):
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    clock = Clock()
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "second_factor_state"


def test_a_state_others_could_have_written_grants_nothing(file):
    clock = Clock()
    write_state(file, FactorState())
    file.chmod(0o660)
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "vault_mode"


def test_of_two_processes_with_one_code_one_is_granted(file):
    write_state(file, FactorState())
    script = (
        "import pathlib, sys\nfrom kvasir_console.errors import KvasirError\n"
        "from kvasir_console.wallet.twofactor import SecondFactor, hotp\n"
        f"factor = SecondFactor(pathlib.Path(sys.argv[1]), {SECRET!r}, lambda: {NOW})\n"
        f"sys.stdin.readline()\ntry:\n    factor.check(hotp({SECRET!r}, {NOW} // 30))\n    print('accept')\n"
        "except KvasirError as error:\n    print(error.code)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", script, str(file)], **pipes) for _ in range(4)]
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    answers = sorted(child.communicate(timeout=120)[0].strip() for child in children)
    assert answers == ["accept"] + ["second_factor_refused"] * 3


# The pause


def test_the_fifth_failure_pauses_across_restarts(file):
    clock = Clock()
    write_state(file, FactorState())
    for _ in range(5):
        assert verdict(SecondFactor(file, SECRET, clock), "000000") == "second_factor_refused"
    for pause_s in (30, 60, 120, 240, 480, 960, 1920, 3600, 3600):
        clock.now_s += pause_s - 1
        early = SecondFactor(file, SECRET, clock)
        assert verdict(early, clock.code()) == "second_factor_paused"  # the right code is no way round it
        clock.now_s += 1
        assert verdict(SecondFactor(file, SECRET, clock), "000000") == "second_factor_refused"
    clock.now_s += 3600
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "accept"
    assert stored(file).failures == 0


def test_backup_codes_share_the_pause(file):
    clock, codes = Clock(), twofactor.new_backup_codes()
    SecondFactor(file, SECRET, clock).enrol(clock.code(), codes)
    for guess in ("000000", "AAAA-AAAA-AAAA-AAAA", "", "111111", "BBBB"):
        assert verdict(SecondFactor(file, SECRET, clock), guess) == "second_factor_refused"
    assert verdict(SecondFactor(file, SECRET, clock), codes[0]) == "second_factor_paused"
    clock.now_s += 30
    assert verdict(SecondFactor(file, SECRET, clock), codes[0]) == "accept"


def test_a_paused_code_is_not_spent(file):
    clock = Clock()
    write_state(file, FactorState(failures=5, failed_at_s=NOW))
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "second_factor_paused"
    assert stored(file).last_step is None


def test_a_clock_that_goes_back_neither_ends_the_pause_nor_makes_it_endless(file):
    clock = Clock()
    write_state(file, FactorState(failures=7, failed_at_s=NOW + 10**6))
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "second_factor_paused"
    clock.now_s += 119
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "second_factor_paused"
    clock.now_s += 1
    assert verdict(SecondFactor(file, SECRET, clock), clock.code()) == "accept"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(-200, 200), st.integers(-3, 3), st.sampled_from(["right", "wrong", "again"])), max_size=30
    )
)
def test_no_step_is_ever_accepted_twice_whatever_the_clock_does(events):
    state, now, accepted, last = FactorState(), float(NOW), [], "000000"
    for shift, steps, kind in events:
        now += shift
        code = {"right": twofactor.hotp(SECRET, int(now) // 30 + steps), "wrong": "000000", "again": last}[kind]
        last = code
        state, granted = twofactor.judge(state, SECRET, code, now)
        if granted:
            assert abs(state.last_step - int(now) // 30) <= 1
            accepted.append(state.last_step)
    assert accepted == sorted(set(accepted))
