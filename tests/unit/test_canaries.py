"""The search for secrets finds them, in every spelling, wherever they stand."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.wallet.localnet import base58

import canaries

SEED = bytes(range(100, 132))
WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"


@pytest.mark.parametrize(
    "written",
    [
        SEED,
        SEED.hex(),
        SEED.hex().upper(),
        base58.encode(SEED),
        base64.b64encode(SEED),
        base64.urlsafe_b64encode(SEED),
        base64.b32encode(SEED),
        json.dumps(list(SEED)),
        json.dumps([7, *SEED, 9], separators=(",", ":")),
        repr(SEED),
        SEED[::-1],
        SEED[::-1].hex(),
        SEED.hex().encode("utf-16"),
        str(int.from_bytes(SEED, "little")),
    ],
    ids=str,
)
def test_a_key_is_found_however_it_is_written(written):
    content = b"before" + (written.encode() if isinstance(written, str) else written) + b"after"
    assert canaries.found_in(content, canaries.spellings(SEED))


@pytest.mark.parametrize(
    "written",
    [WORDS, WORDS.replace(" ", "\n"), json.dumps(WORDS.split()), WORDS[::-1], WORDS.upper(), WORDS.encode().hex()],
)
def test_words_are_found_however_they_are_written(written):
    assert canaries.found_in(written.encode(), canaries.spellings(WORDS))
    assert canaries.found_in(written.encode("utf-16"), canaries.spellings(WORDS))


@given(st.binary(max_size=9), st.binary(max_size=9), st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
def test_a_key_is_found_in_the_middle_of_something_encoded(before, after, encode):
    assert canaries.found_in(encode(before + SEED + after), canaries.spellings(SEED))


@given(st.binary(max_size=4096))
def test_nothing_is_found_where_nothing_is(content):
    assert not canaries.found_in(content, canaries.spellings(SEED))


def test_files_and_processes_are_looked_at(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "log").write_bytes(b"key: " + base64.b64encode(SEED))
    read, found = canaries.found_in_files(tmp_path, canaries.spellings(SEED))
    assert (read, {file.name for file, _ in found}) == (1, {"log"})
    seed = secrets.token_bytes(32)  # no other process has it: the same test may run beside this one
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", seed.hex()],
        stdin=subprocess.PIPE,
        env={**os.environ, "SECRET": base58.encode(seed)},
    )
    try:
        read, found = canaries.found_in_processes(canaries.spellings(seed))
        assert read > 1
        assert {where for where, _ in found} == {f"{process.pid}/cmdline", f"{process.pid}/environ"}
    finally:
        process.kill()
        process.wait(120)
