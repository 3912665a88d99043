"""The signer as a process: its socket, its end, and what reaches it there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from signer_parts import BRIDGE, HOST, LOCKED, PARTICIPATION, PASSPHRASE, UNLOCKED, WALLET, claim, refusal

from kvasir_console.errors import ExitCode
from kvasir_console.relay.wire import control
from kvasir_console.relay.wire import signed as texts
from kvasir_console.wallet import (
    keys,
    signer,
)
from kvasir_console.wallet.signer_client import SignerClient


def arguments(vault_file: Path, path: Path) -> list[str]:
    return [
        sys.executable, "-m", "kvasir_console.wallet.signer",
        "--vault", str(vault_file), "--socket", str(path), "--host", HOST,
    ]  # fmt: skip


def spawn(argv: list[str], **pipes: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, **pipes)


@contextlib.contextmanager
def running_in(directory: Path, vault_file: Path) -> Iterator[SimpleNamespace]:
    """A signer of its own in ``directory``, locked; its log holds no secret, whatever is done to it."""
    path, log = directory / "signer.sock", directory / "log"
    with log.open("wb") as stderr:
        process = spawn(arguments(vault_file, path), stdout=stderr, stderr=stderr)
    client = SignerClient(path)
    try:
        assert asyncio.run(client.wait_ready(120)) == LOCKED
        yield SimpleNamespace(process=process, client=client, path=path, log=log)
    finally:
        process.kill()
        process.wait(120)
    assert not [secret for secret in (PASSPHRASE, "wrong one", "abandon", "Traceback") if secret in log.read_text()]


@pytest.fixture
def running(vault_file: Path, runtime: Path) -> Iterator[SimpleNamespace]:
    with running_in(runtime, vault_file) as process:
        yield process


@pytest.fixture(scope="module")
def standing(vault_file: Path) -> Iterator[SimpleNamespace]:
    """One for all tests that leave it as it was: locked, with no wrong passphrase tried."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory, running_in(Path(directory), vault_file) as process:
        yield process


async def test_from_unlock_to_lock(running):
    client = running.client
    assert (await refusal(client.sign(PARTICIPATION))).code == "wallet_locked"
    assert await client.unlock(PASSPHRASE) == UNLOCKED
    assert await client.sign(PARTICIPATION) == base64.b64decode(BRIDGE["signature_base64"])
    assert await client.lock() == LOCKED
    assert (await refusal(client.sign(PARTICIPATION))).code == "wallet_locked"
    assert "signed: Take part in the network at gate.example.net" in running.log.read_text()


async def test_a_wrong_passphrase_is_refused_and_the_next_try_has_to_wait(running):
    errors = [await refusal(running.client.unlock("wrong one")) for _ in range(2)]
    assert [error.code for error in errors] == ["wrong_passphrase", "unlock_throttled"]
    assert await running.client.status() == LOCKED


async def test_connections_are_bounded(standing):
    held = [await asyncio.open_unix_connection(standing.path) for _ in range(signer.MAX_CONNECTIONS)]
    for reader, writer in held:  # answered, so all of them are counted
        await control.write_message(writer, {"id": 1, "verb": "status"})
        await control.read_message(reader)
    assert (await refusal(standing.client.status())).code == "signer_gone"
    for _, writer in held:
        writer.close()
    assert await standing.client.wait_ready(120) == LOCKED


async def test_actions_are_signed_for_our_host_only(running):
    await running.client.unlock(PASSPHRASE)
    intent = claim(datetime.now(UTC))
    signature = await running.client.sign(intent)
    text = texts.action_text(HOST, "claim", WALLET, intent.details, intent.nonce, intent.issued_at, intent.expires_at)
    assert keys.verify(WALLET, text.encode(), signature)
    assert (await refusal(running.client.sign(claim(datetime.now(UTC), "evil.example.net")))).code == "other_host"
    assert (await refusal(running.client.sign(claim(datetime.now(UTC) - timedelta(hours=1))))).code == "action_expired"


async def test_several_clients_are_answered_while_one_unlocks(running):
    results = await asyncio.gather(
        running.client.unlock(PASSPHRASE), *(running.client.status() for _ in range(20)), running.client.status()
    )
    assert results[0] == UNLOCKED
    assert await running.client.status() == UNLOCKED


async def test_only_this_user_can_reach_the_socket(standing):
    status = standing.path.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        struct.pack("<I", 2**31),
        struct.pack("<I", 3) + b"not",
        struct.pack("<I", 2) + b"[]",
        b"GET / HTTP",
    ],
)
async def test_garbage_closes_its_own_connection_only(standing, garbage):
    reader, writer = await asyncio.open_unix_connection(standing.path)
    writer.write(garbage)
    writer.write_eof()
    async with asyncio.timeout(120):
        assert await reader.read() == b""
    writer.close()
    assert await standing.client.status() == LOCKED


async def test_one_connection_may_ask_several_times(standing):
    reader, writer = await asyncio.open_unix_connection(standing.path)
    for number in (1, 2):
        await control.write_message(writer, {"id": number, "verb": "status"})
        assert (await control.read_message(reader))["id"] == number
    writer.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, "exit"])
async def test_asked_to_stop_it_goes_at_once_and_leaves_nothing(running, how):
    await running.client.unlock(PASSPHRASE)
    _, idle = await asyncio.open_unix_connection(running.path)  # an open connection holds nothing up
    if how == "exit":
        await running.client.exit()
    else:
        running.process.send_signal(how)
    assert await asyncio.to_thread(running.process.wait, 120) == 0
    idle.close()
    assert not running.path.exists()
    assert (await refusal(running.client.status())).code == "signer_gone"


async def test_ctrl_c_on_the_console_does_not_take_the_signer_away(standing):
    standing.process.send_signal(signal.SIGINT)
    assert await standing.client.status() == LOCKED


async def test_a_second_signer_does_not_take_the_first_ones_place(standing, vault_file):
    second = await asyncio.to_thread(
        subprocess.run, arguments(vault_file, standing.path), capture_output=True, text=True, timeout=120
    )
    assert second.returncode == ExitCode.RESOURCE
    assert "Another signer answers" in second.stderr
    assert await standing.client.status() == LOCKED


async def test_a_killed_signers_socket_is_taken_over_locked(running, vault_file):
    await running.client.unlock(PASSPHRASE)
    running.process.kill()
    running.process.wait(120)
    assert running.path.exists()
    with running.log.open("ab") as stderr:
        successor = spawn(arguments(vault_file, running.path), stderr=stderr)
    try:
        assert await running.client.wait_ready(120) == LOCKED
    finally:
        successor.kill()
        successor.wait(120)


async def test_without_a_vault_it_ends_with_the_wallets_exit_code(runtime):
    ended = await asyncio.to_thread(
        subprocess.run,
        arguments(runtime / "vault.json", runtime / "signer.sock"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == ExitCode.WALLET
    assert "There is no wallet at" in ended.stderr


async def test_a_directory_others_may_enter_is_refused(vault_file, runtime):
    runtime.chmod(0o755)
    ended = await asyncio.to_thread(
        subprocess.run, arguments(vault_file, runtime / "signer.sock"), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == ExitCode.WALLET
    assert "folder of its own" in ended.stderr
    assert "chmod 700" in ended.stderr


async def test_an_orphaned_signer_ends(vault_file, runtime):
    path = runtime / "signer.sock"
    script = f"""
        import os, subprocess, sys
        run = [sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.wallet.signer"]
        print(subprocess.Popen(run + {arguments(vault_file, path)[3:]!r}).pid, flush=True)
        sys.stdin.read()
    """
    parent = spawn([sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    descriptor = os.pidfd_open(int(parent.stdout.readline()))
    client = SignerClient(path)
    await client.wait_ready(120)
    await client.unlock(PASSPHRASE)
    parent.communicate(timeout=120)
    async with asyncio.timeout(120):
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)
    assert not path.exists()


async def test_the_process_leaves_no_core(standing):
    limits = Path(f"/proc/{standing.process.pid}/limits").read_text()
    (line,) = [each.split() for each in limits.splitlines() if each.startswith("Max core file size")]
    assert line[4:6] == ["0", "0"]


async def test_nobody_at_the_socket_is_told(runtime):
    error = await refusal(SignerClient(runtime / "signer.sock").status())
    assert error.code == "signer_gone"
    assert (await refusal(SignerClient(runtime / "signer.sock").wait_ready(0.1))).code == "signer_gone"


async def test_a_passphrase_that_is_no_text_is_not_repeated(runtime):
    error = await refusal(SignerClient(runtime / "signer.sock").unlock("12345678\udcff"))
    assert error.code == "passphrase_text"
    assert "12345678" not in str(error)
