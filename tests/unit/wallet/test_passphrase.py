"""Sources of a passphrase: private files, descriptors, systemd credentials and a real terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.wallet.passphrase import read_passphrase


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "passphrase"
    file.write_bytes("correct hörse battery\n".encode())
    file.chmod(0o600)
    return file


def refused(**source: object) -> str:
    with pytest.raises(WalletError) as refusal:
        read_passphrase(env={}, prompt=None, **source)
    assert "hörse" not in str(refusal.value)
    assert refusal.value.code == "passphrase_file"
    return str(refusal.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read_without_its_line_end(secret_file, mode):
    secret_file.chmod(mode)
    assert read_passphrase(file=secret_file, env={}) == "correct hörse battery"


@pytest.mark.parametrize(
    ("content", "passphrase"),
    [(b"abc", "abc"), (b"abc\r\n", "abc"), (b"abc\n\n", "abc\n"), (b" abc \n", " abc "), (b"x" * 4096, "x" * 4096)],
)
def test_one_line_end_and_nothing_else_is_dropped(secret_file, content, passphrase):
    secret_file.write_bytes(content)
    assert read_passphrase(file=secret_file, env={}) == passphrase


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n", b"\xff\xfe", b"x" * 4097])
def test_contents_that_are_no_passphrase_are_refused(secret_file, content):
    secret_file.write_bytes(content)
    refused(file=secret_file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_files_others_may_read_are_refused_with_the_command_that_helps(secret_file, mode):
    secret_file.chmod(mode)
    assert f"chmod 600 '{secret_file}'" in refused(file=secret_file)


def test_a_file_of_another_user_is_refused(secret_file, monkeypatch):
    status = list(secret_file.stat())
    status[4] = os.getuid() + 1000
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda _: os.stat_result(status))
        assert "Other users" in refused(file=secret_file)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    assert "No such file" in refused(file=tmp_path / "nowhere")
    assert "directory" in refused(file=tmp_path)


def test_a_descriptor_is_read_to_its_end_and_closed():
    reading, writing = os.pipe()
    os.write(writing, b"from a pipe\n")
    os.close(writing)
    assert read_passphrase(fd=reading, env={}) == "from a pipe"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


@pytest.mark.parametrize("fd", [-1, 9999])
def test_a_descriptor_that_is_not_open_is_refused(fd):
    refused(fd=fd)


def test_two_sources_are_one_too_many(secret_file):
    with pytest.raises(UsageError):
        read_passphrase(file=secret_file, fd=0)


def test_the_systemd_credential_unlocks_and_a_flag_goes_before_it_for_a_new_passphrase(tmp_path, secret_file):
    credential = tmp_path / "kvasir-passphrase"
    credential.write_text("from systemd")
    credential.chmod(0o440)
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert read_passphrase(env=env, prompt=None) == "from systemd"
    assert read_passphrase(env=env, file=secret_file) == "from systemd"
    assert read_passphrase(env=env, file=secret_file, confirm=True) == "correct hörse battery"
    assert read_passphrase(env=env, prompt=None, confirm=True) == "from systemd"
    credential.chmod(0o444)
    with pytest.raises(WalletError):
        read_passphrase(env=env, prompt=None)


def test_the_key_ring_comes_after_what_was_given_and_never_makes_a_new_passphrase(secret_file):
    def cache() -> str:
        return "from the key ring"

    assert read_passphrase(env={}, cache=cache, prompt=None) == "from the key ring"
    assert read_passphrase(env={}, cache=cache, file=secret_file) == "correct hörse battery"
    assert read_passphrase(env={}, cache=cache, prompt=None, confirm=True) is None
    assert read_passphrase(env={}, cache=lambda: None, prompt=None) is None


def test_no_source_gives_nothing(tmp_path):
    assert read_passphrase(env={}, prompt=None) is None
    assert read_passphrase(env={"CREDENTIALS_DIRECTORY": str(tmp_path)}, prompt=None) is None


_ASK = """
from kvasir_console.errors import WalletError
from kvasir_console.wallet.passphrase import read_passphrase
try:
    print("got", repr(read_passphrase(env={}, confirm=%s)))
except WalletError as error:
    print("refused", error.code)
"""


def on_terminal(typed: list[bytes], *, confirm: bool) -> str:
    """Run the question on a terminal of its own, answer each prompt, and return what it shows."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", _ASK % confirm])  # noqa: S606
    shown = b""
    answers = list(typed)
    try:
        while select.select([terminal], [], [], 120)[0]:
            shown += os.read(terminal, 1024)
            if shown.endswith(b": ") and answers:
                os.write(terminal, answers.pop(0))
    except OSError:  # the terminal is gone with its last process
        pass
    os.waitpid(child, 0)
    os.close(terminal)
    return shown.decode()


def test_a_person_is_asked_on_the_terminal_without_an_echo():
    shown = on_terminal([b"typed secret\n"], confirm=False)
    assert "got 'typed secret'" in shown
    assert shown.count("typed secret") == 1  # by the script, not by the terminal


@pytest.mark.parametrize(
    ("second", "outcome"),
    [(b"typed secret\n", "got 'typed secret'"), (b"typed secrte\n", "refused passphrase_differs")],
)
def test_a_new_passphrase_is_asked_for_twice(second, outcome):
    assert outcome in on_terminal([b"typed secret\n", second], confirm=True)


@pytest.mark.parametrize("typed", [b"\n", b"\x04"])
def test_no_answer_is_no_passphrase(typed):
    assert "got None" in on_terminal([typed], confirm=False)


def test_without_a_terminal_nobody_is_asked_and_standard_input_is_left_alone():
    output = subprocess.run(
        [sys.executable, "-c", _ASK % False],
        input="from standard input\n",
        capture_output=True,
        text=True,
        start_new_session=True,
        check=True,
        timeout=120,
    )
    assert output.stdout == "got None\n"
    assert output.stderr == ""
