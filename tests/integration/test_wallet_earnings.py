"""A wallet earns, claims and is paid: real ledger, gateway, payout and node. And no secret is left anywhere by it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mnemonic import Mnemonic

import kvasir_console
from kvasir_console.errors import ExitCode
from kvasir_console.node.gateway.ledger import Ledger, Reading
from kvasir_console.node.gateway.store import Store
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, vault
from kvasir_console.wallet.chain import Chain
from kvasir_console.wallet.keys import Key, derive
from kvasir_console.wallet.localnet.bootstrap import bootstrap

from canaries import found_in, found_in_files, found_in_processes, spellings
from ledger_process import LedgerProcess

PASSPHRASE = "the canary sings: Zürich 1291"
OTHER_PASSPHRASE = "not what opens it, but a secret too"
EARNED_MICRO_UNITS = 150_000_000
PATIENCE_S = 240.0


@dataclass
class Network:
    """A ledger, a gateway and a payout process, and the home of one wallet that earns there."""

    directory: Path
    ledger: LedgerProcess
    environment: dict[str, str]
    database: str
    outputs: bytearray = field(default_factory=bytearray)
    """All that any command said."""

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def paths(self) -> Paths:
        return Paths.from_environment({"KVASIR_HOME": str(self.home)})

    def command(self, *words: str, code: int = 0) -> str:
        """Run it without a terminal; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "kvasir_console", *words],
            capture_output=True,
            timeout=PATIENCE_S,
            start_new_session=True,
            env=self.environment,
        )
        self.outputs += done.stdout + done.stderr
        assert done.returncode == code, done.stderr.decode()
        return done.stdout.decode()

    def data(self, *words: str) -> Any:
        return json.loads(self.command(*words, "--json"))

    def given(self, name: str = "passphrase") -> tuple[str, str]:
        return "--passphrase-file", str(self.directory / name)

    def earn(self, wallet: str, run_id: str) -> None:
        """Work that was metered, as the settlement credits it."""
        store = Store.open(self.database)
        Ledger(store).credit(Reading(wallet, "w", "expert", run_id, EARNED_MICRO_UNITS), int(time.time()))
        store.close()


def secret_file(file: Path, text: str) -> Path:
    file.touch(0o600)
    file.write_text(text + "\n")
    return file


def started(directory: Path, name: str, environment: dict[str, str], *argv: str) -> subprocess.Popen[bytes]:
    """A server in a directory of its own, which would leave core files there."""
    where = directory / "cwd"
    where.mkdir(exist_ok=True)
    with (directory / f"{name}.out").open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**environment, "KVASIR_HOME": str(directory / name)},
            cwd=where,
            preexec_fn=cores_allowed,
        )


def cores_allowed() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    ledger = LedgerProcess(tmp_path, slot_ms=20).start()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        treasury = Paths.from_environment({"KVASIR_HOME": str(tmp_path / "payout")}).ensure()
        treasury_passphrase = secret_file(tmp_path / "treasury-passphrase", "a passphrase of the treasury")
        commands.create_wallet(treasury, "a passphrase of the treasury", words=12, kdf="interactive")
        with vault.open_vault(treasury.vault_file, "a passphrase of the treasury") as opened, opened.key() as key:
            keypair = key.keypair()
        async with Chain(ledger.url, ledger.auth) as chain:
            mint = await bootstrap(chain, keypair)
        port, database = free_port(), f"sqlite:///{tmp_path / 'gateway.sqlite'}"
        environment = {
            **os.environ,
            "KVASIR_HOME": str(tmp_path / "home"),
            "KVASIR_NETWORK_GATEWAY": f"http://127.0.0.1:{port}",
            "KVASIR_NODE_POLL_S": "0.5",
            "KVASIR_NODE_RETRY_S": "0.5",
            "KVASIR_WALLET_RPC_URL": ledger.url,
            "KVASIR_WALLET_RPC_AUTH_FILE": str(ledger.auth_file),
            "KVASIR_WALLET_MINT": mint,
            "KVASIR_WALLET_KDF": "interactive",
        }
        settings = {"port": port, "database": database, "minimum_claim_micro_kvr": 1, "settlement_poll_s": 0.5}
        flags = [word for name, value in settings.items() for word in ("--set", f"gateway.{name}={value}")]
        processes.append(started(tmp_path, "gateway", environment, "kvasir_console", *flags, "gateway"))
        until(lambda: listens(port))
        payout = ("--database", database, "--rpc", ledger.url, "--rpc-auth-file", str(ledger.auth_file))
        payout += ("--mint", mint, "--treasury", str(treasury.vault_file), "--poll-s", "0.1")
        payout += ("--passphrase-file", str(treasury_passphrase))
        processes.append(started(tmp_path, "payout", environment, "kvasir_console.node.gateway.payout", *payout))
        secret_file(tmp_path / "passphrase", PASSPHRASE)
        secret_file(tmp_path / "wrong", OTHER_PASSPHRASE)
        yield Network(tmp_path, ledger, environment, database)
    finally:
        for process in processes:
            process.kill()
            process.wait(120)
        ledger.stop()


def test_a_wallet_is_made_claims_without_a_node_and_is_paid(network):
    words = network.directory / "words"
    address = network.command("wallet", "create", "--phrase-file", str(words), *network.given()).strip()
    network.command("wallet", "claim", *network.given(), code=ExitCode.LEDGER)  # nothing was earned
    network.earn(address, "one")
    network.command("wallet", "claim", *network.given("wrong"), code=ExitCode.WALLET)
    claim = network.data("wallet", "claim", *network.given())
    assert (claim["micro_kvr"], claim["state"]) == (1_500_000, "reserved")
    until(lambda: network.data("wallet", "balance")["accounts"][0]["micro_kvr"] == 1_500_000)
    (line,) = network.data("wallet", "history")["movements"]
    assert line["micro_kvr"] == 1_500_000
    assert line["memos"] == [f"kvasir:claim:{claim['claim_id']}"]
    network.command("wallet", "claim", *network.given(), code=ExitCode.LEDGER)  # and nothing is left
    assert network.data("wallet", "balance")["accounts"][0]["micro_kvr"] == 1_500_000


def planted(words: str, address: str) -> dict[str, frozenset[bytes]]:
    """Everything of a wallet that must be nowhere, in every spelling."""
    seed = Mnemonic.to_seed(words)
    [account] = [each for each in vault.derive_accounts(words, ("m/44'/501'/0'/0'",)) if each.address == address]
    with Key(derive(seed, account.path)) as key:
        both = bytes(key.keypair())
    return {
        "words": spellings(words),
        "entropy": spellings(bytes(Mnemonic("english").to_entropy(words))),
        "seed": spellings(seed),
        "key": spellings(both[:32]),
        "key pair": spellings(both),
        "passphrase": spellings(PASSPHRASE),
        "wrong passphrase": spellings(OTHER_PASSPHRASE),
    }


def signers(home: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvasir_console.wallet.signer" in line and any(each.startswith(os.fsencode(home)) for each in line):
            found.append(int(name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_no_secret_is_left_by_making_unlocking_serving_claiming_and_a_crash(network):
    words_file = network.directory / "words"
    address = network.command(
        *("wallet", "create", "--words", "24", "--phrase-file", str(words_file)), *network.given()
    ).strip()
    words = words_file.read_text().strip()
    words_file.unlink()
    canaries = planted(words, address)
    every = frozenset().union(*canaries.values())
    network.earn(address, "one")

    node = started(network.directory, "home", network.environment, "kvasir_console", "--headless", *network.given())
    try:
        until(lambda: signers(network.home))
        until(lambda: node_status(network).get("wallet_locked") is False)
        assert network.data("wallet", "claim")["micro_kvr"] == 1_500_000
        until(lambda: network.data("wallet", "balance")["accounts"][0]["micro_kvr"] == 1_500_000)
        # Commands that go well, and commands that fail with a secret in hand.
        network.command("wallet", "sign-in", "--chain", "localnet", "--yes", *network.given())
        network.command("wallet", "send", address, "1", "--yes", *network.given(), code=ExitCode.USAGE)
        network.command("wallet", "limit", *network.given("wrong"), code=ExitCode.WALLET)
        network.command("wallet", "unlock", *network.given("wrong"), code=ExitCode.WALLET)
        network.command("wallet", "export", "key", code=ExitCode.USAGE)
        looked_at, found = found_in_processes(every)
        assert looked_at > 4
        assert found == []
        read_alive, found = found_in_files(network.home, every)  # with the databases' journals
        assert found == []

        (signer,) = signers(network.home)
        os.kill(signer, signal.SIGABRT)
        until(lambda: signers(network.home) not in ([], [signer]))
        until(lambda: node_status(network).get("wallet_locked") is True)
        network.command("wallet", "unlock", *network.given())
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(PATIENCE_S)
    for secret in ("passphrase", "wrong"):
        (network.directory / secret).unlink()
    read, found = found_in_files(network.directory, every)  # all homes, outputs, databases, and where cores would be
    assert found == []
    assert read > read_alive >= 5
    assert b"killed by SIGABRT" in network.paths.log_file.read_bytes()
    assert list((network.directory / "cwd").iterdir()) == []
    assert found_in(bytes(network.outputs), every) == []
    # "account", "address" and "balance" are words of the list, too: what commands say anyway betrays nothing.
    said = str(network.directory) + "".join(
        file.read_text() for file in Path(kvasir_console.__file__).parent.rglob("*.py")
    )
    secret_words = [word for word in words.split() if len(word) > 5 and word not in said]
    assert not [word for word in secret_words if word.encode() in network.outputs]


def node_status(network: Network) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kvasir_console", "status", "--json"], capture_output=True, env=network.environment
    )
    network.outputs += done.stdout + done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells whether a core was dumped")
@pytest.mark.parametrize("hardened", [False, True])
def test_a_process_that_holds_a_key_dumps_no_core_though_it_could(tmp_path, hardened):
    """And the same process without our precaution does, or this would prove nothing."""
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("cores go to a program here")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no core can be dumped here")
    script = "from kvasir_console import child\n" + ("child.forbid_core_dumps()\n" if hardened else "")
    process = subprocess.Popen(
        [sys.executable, "-c", script + "import os, signal\nos.kill(os.getpid(), signal.SIGABRT)"],
        cwd=tmp_path,
        preexec_fn=cores_allowed,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    _, status = os.waitpid(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == -signal.SIGABRT
    assert os.WCOREDUMP(status) is not hardened
