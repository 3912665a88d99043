"""A signer for one command: bound as it was told, locked at first, gone at the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvasir_console.errors import KvasirError, SystemResourceError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import vault
from kvasir_console.wallet.intents import GatewaySignIn, TransferIntent
from kvasir_console.wallet.signer_session import signer_session

PHRASE = "abandon " * 11 + "about"
PASSPHRASE = "correct horse battery"
GENESIS, MINT = "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG", "6cuJAmqtMuGzJ7s7eWQSqfJvEFRUdTiYR3cuMmiNoCPQ"
RECIPIENT = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


@pytest.fixture
def paths() -> Paths:
    made = Paths.from_environment().ensure()
    vault.create_vault(made.vault_file, PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    return made


def session(paths: Paths, log: Path | None = None):
    return signer_session(
        paths.vault_file,
        paths.runtime,
        log or paths.state / "signer.log",
        host="gate.example.net",
        kinds=("transfer",),
        cluster=GENESIS,
        mint=MINT,
    )


async def test_a_session_signs_what_it_is_bound_to_and_leaves_nothing(paths):
    async with session(paths) as signer:
        assert (await signer.status()).locked
        assert not (await signer.unlock(PASSPHRASE)).locked
        intent = TransferIntent(GENESIS, "KVR", RECIPIENT, 5, "", GENESIS)
        assert len(await signer.sign(intent)) == 64
        with pytest.raises(WalletError, match="does not sign for"):
            await signer.sign(TransferIntent(MINT, "KVR", RECIPIENT, 5, "", GENESIS))
        with pytest.raises(WalletError) as caught:
            await signer.sign(GatewaySignIn("gate.example.net", "", "", ""))
        assert caught.value.code == "intent_not_allowed"
        (socket,) = paths.runtime.glob("sign-*.sock")
        assert str(os.getpid()) in socket.name
    assert list(paths.runtime.glob("sign-*.sock")) == []
    assert PASSPHRASE not in (paths.state / "signer.log").read_text()


async def test_an_error_in_between_ends_the_signer_too(paths):
    clients = []

    async def command() -> None:
        async with session(paths) as signer:
            clients.append(signer)
            await signer.unlock(PASSPHRASE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await command()
    with pytest.raises(KvasirError):
        await clients[0].status()


async def test_a_cancelled_command_ends_it(paths):
    inside = asyncio.Event()

    async def command() -> None:
        async with session(paths):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(command())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(paths.runtime.glob("sign-*.sock")) == []


async def test_a_signer_that_does_not_start_is_said_with_its_log(paths, monkeypatch):
    from kvasir_console.wallet import signer_session as module

    async def never(*_: object) -> None:
        raise WalletError("signer_gone", "The signer does not answer.")

    monkeypatch.setattr(module.SignerClient, "wait_ready", never)
    with pytest.raises(WalletError) as caught:
        async with session(paths):
            pass
    assert "signer.log" in caught.value.hint


async def test_a_log_that_cannot_be_written_is_named(paths, tmp_path):
    with pytest.raises(SystemResourceError) as caught:
        async with session(paths, tmp_path / "nowhere" / "log"):
            pass
    assert caught.value.code == "log_unavailable"
