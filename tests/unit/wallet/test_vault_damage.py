"""A vault that was damaged, asks for too much memory, or was being written when its writer was killed."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vault_parts import CHEAP, PASSPHRASE, PHRASE, edit, left_beside, refusal

from kvasir_console.errors import WalletError
from kvasir_console.wallet import vault


def unopened(file: Path, damaged: bytes) -> None:
    """``damaged`` is refused by name and left as it is."""
    whole = file.read_bytes()
    file.write_bytes(damaged)
    try:
        assert refusal(file).code.startswith(("vault_", "wrong_", "memory_"))
        assert file.read_bytes() == damaged
        assert left_beside(file) == set()
    finally:
        file.write_bytes(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(file, data):
    whole = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    unopened(file, whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_exchanged_byte_goes_unnoticed(file, data):
    whole = file.read_bytes()
    place = data.draw(st.sampled_from([place for place, byte in enumerate(whole) if not chr(byte).isspace()]))
    byte = data.draw(st.integers(0x21, 0x7E).filter(lambda byte: byte != whole[place]))
    unopened(file, whole[:place] + bytes([byte]) + whole[place + 1 :])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_truncation_goes_unnoticed(file, data):
    whole = file.read_bytes()
    unopened(file, whole[: data.draw(st.integers(0, len(whole.rstrip()) - 1))])


def test_no_byte_of_the_whole_file_can_have_a_flipped_bit(tmp_path, monkeypatch):
    """Every byte. The derivation, which takes a second, is exchanged for one that takes none."""
    monkeypatch.setattr(vault, "_derive_key", lambda text, header: hashlib.sha256(header.salt + text.encode()).digest())
    file = tmp_path / "v" / "vault.json"
    vault.create_vault(file, PHRASE, PASSPHRASE, cost=CHEAP)
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
    whole = file.read_bytes()
    for place in range(len(whole) - 1):  # the last one is the line's end
        unopened(file, whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])


def test_memory_that_is_not_there_is_named(file):
    edit(file, kdf__mem_kib=2**20)
    script = f"""
        import resource
        from pathlib import Path
        from kvasir_console.errors import SystemResourceError
        from kvasir_console.wallet import vault
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))  # the program needs some of it
        try:
            vault.open_vault(Path({str(file)!r}), {PASSPHRASE!r})
        except SystemResourceError as error:
            print(error.code, error.message)
    """
    output = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert output.stdout.startswith("memory_short")
    assert "1024 MiB" in output.stdout


def test_a_cost_that_does_not_fit_is_refused_before_the_kernel_would(file, monkeypatch):
    monkeypatch.setattr(vault, "available_bytes", lambda: 18 * 2**20)
    monkeypatch.setattr(vault.argon2id, "kdf", lambda *_: pytest.fail("derived"))
    assert refusal(file).code == "memory_short"


def test_the_dearest_legal_header_is_refused_in_time_and_memory(file):
    """The most a hostile file can make us spend: two passes over 1 GiB. How long that takes stands in the decisions."""
    edit(file, kdf__ops=2, kdf__mem_kib=2**20)
    script = (
        "import pathlib, sys\nfrom kvasir_console.errors import KvasirError\n"
        "from kvasir_console.wallet import vault\n"
        "try:\n    vault.open_vault(pathlib.Path(sys.argv[1]), 'x' * 9)\n"
        "except KvasirError as error:\n    print(error.code)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"  # getrusage remembers the parent's peak
        "print(status.split('VmHWM:')[1].split()[0])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    code, rss_kib = result.stdout.split()
    assert code in ("wrong_passphrase", "memory_short")
    assert int(rss_kib) < 1.2 * 2**20


def test_random_kills_while_saving_leave_the_old_vault_or_the_new_one(file, monkeypatch):
    """A hundred times: SIGKILL at a random moment of a process that does nothing but save."""
    # Deriving takes long and writes nothing; without it the kills hit the saving.
    monkeypatch.setattr(vault, "_derive_key", lambda text, header: hashlib.sha256(header.salt + text.encode()).digest())
    vault.create_vault(file, PHRASE, "passphrase 0", cost=CHEAP, force=True)
    (file.parent / next(iter(left_beside(file)))).unlink()
    random, before = Random(4), "passphrase 0"
    for _ in range(100):
        before = current = opens_with(file, before)
        saved, saves = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                while True:
                    following = f"passphrase {(int(current.split()[1]) + 1) % 1000}"
                    vault.change_passphrase(file, current, following, cost=CHEAP)
                    current = following
                    os.write(saves, b".")
            finally:
                os._exit(1)
        assert select.select([saved], [], [], 120)[0]  # it has begun to save
        select.select([], [], [], random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(saved)
        os.close(saves)
        assert opens_with(file, before) != before
    vault.change_passphrase(file, opens_with(file, before), "the last one", cost=CHEAP)
    assert left_beside(file) == set()


def opens_with(file: Path, before: str) -> str:
    """The passphrase that opens the vault, whole, with its phrase in it: ``before``, or that of a save since."""
    first = int(before.split()[1])
    for number in range(first, first + 1000):
        passphrase = f"passphrase {number % 1000}"
        try:
            with vault.open_vault(file, passphrase) as opened:
                assert opened.phrase == PHRASE
                return passphrase
        except WalletError as error:
            if error.code != "wrong_passphrase":
                raise
    pytest.fail("neither the old vault nor the new one")
