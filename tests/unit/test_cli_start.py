"""The command line as a person meets it: real processes, their exit codes, and what they load."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvasir_console import __version__, cli
from kvasir_console.config import Config, NetworkConfig
from kvasir_console.errors import ExitCode, LedgerError, WalletError
from kvasir_console.node import overrides, phase
from kvasir_console.node.admin import AdminServer, Handler
from kvasir_console.node.gateway.identity import Secrets
from kvasir_console.node.snapshot import EarningsView, NodeSnapshot, SliceView, WorkView
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.control import Message
from kvasir_console.wallet import vault

DATA = Path(__file__).parents[1] / "data" / "conformance"
CASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]
PHRASE, PASSPHRASE = CASE["mnemonic"], "correct horse battery"
KVASIR_PATH = "m/44'/501'/0'/0'"
ADDRESSES = {key["path"] or "none": key["address"] for key in CASE["keys"]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "passphrase"
    file.write_text(PASSPHRASE + "\n")
    file.chmod(0o600)
    return file


def console(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "kvasir_console", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        env={**os.environ, **environment},
        check=False,
    )


def failed(result: subprocess.CompletedProcess[str], code: ExitCode, *words: str) -> None:
    """One message and one next step on stderr, nothing on stdout, and the documented code."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith("kvasir-console: ")
    for word in words:
        assert word in result.stderr


def loaded_by(code: str) -> set[str]:
    """The top-level modules a fresh interpreter has after ``code``."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_version_is_said_without_loading_anything_heavy():
    start = (
        "from kvasir_console.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit as end:\n    assert end.code == 0"
    )
    modules = loaded_by(start)
    assert not modules & {
        "torch",
        "textual",
        "rich",
        "httpx",
        "numpy",
        "gguf",
        "nacl",
        "solders",
        "starlette",
        "psutil",
    }
    result = console("--version")
    assert (result.returncode, result.stdout) == (0, f"kvasir-console {__version__}\n")


def test_a_node_without_screens_never_loads_them_nor_torch():
    node = (
        "import kvasir_console.headless, kvasir_console.node.node, kvasir_console.node.admin\n"
        "import kvasir_console.node.gateway.service"
    )
    modules = loaded_by(node)
    assert not modules & {"textual", "torch"}
    assert {"httpx", "starlette"} <= modules  # what was asked for did load
    # httpx loads rich for its own command line where it finds it; nothing here needs it.
    assert "httpx" in loaded_by(f"import sys\nsys.modules.update(rich=None, textual=None, torch=None)\n{node}")


def test_without_a_terminal_the_way_on_is_named():
    failed(console(), ExitCode.USAGE, "terminal", "--headless")


def test_an_unknown_command_is_a_usage_error():
    result = console("lokal")
    assert (result.returncode, result.stdout) == (ExitCode.USAGE, "")
    assert "local" in result.stderr


def test_a_misspelt_key_is_answered_with_the_right_one(home):
    failed(console("--headless", "--set", "node.max_expert=3"), ExitCode.USAGE, "max_expert", "'max_experts'")
    failed(console("--headless", KVASIR_NODE_SERV="all"), ExitCode.USAGE, "KVASIR_NODE_SERV", "'serve'")
    (home / "config").mkdir(parents=True)
    (home / "config" / "config.toml").write_text("[node]\npol_s = 1\n")
    failed(console("wallet", "address"), ExitCode.USAGE, "config.toml", "'poll_s'")


def test_a_setting_before_or_behind_the_command_counts(home):
    for arguments in (("--set", "gateway.prt=1", "gateway"), ("gateway", "--set", "gateway.prt=1")):
        failed(console(*arguments), ExitCode.USAGE, "'port'")
    both = console("--set", "gateway.prt=1", "gateway", "--set", "gateway.host=x")
    failed(both, ExitCode.USAGE, "'port'")
    failed(console("wallet", "claim", "--set", "network.gatway=x"), ExitCode.USAGE, "'gateway'")


def test_a_setting_nobody_reads_is_refused():
    failed(console("--set", "node.name=x", "status"), ExitCode.USAGE, "--set", "status")
    failed(console("--headless", "--set", "node.name"), ExitCode.USAGE, "section.key=value")


WALLET_COMMANDS = (
    *(
        "create",
        "import",
        "accounts",
        "address",
        "balance",
        "send",
        "history",
        "claim",
        "export",
        "lock",
        "unlock",
        "sign-in",
    ),
    *("2fa", "limit", "contacts", "passphrase", "keyring", "cluster", "airdrop"),
)


def test_every_wallet_command_explains_itself(capsys):
    for name in WALLET_COMMANDS:
        with pytest.raises(SystemExit) as caught:
            cli.main(["wallet", name, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert f"kvasir-console wallet {name}" in text
        assert "--passphrase " not in text  # no passphrase on the command line


def test_options_before_a_nested_command_are_kept():
    parse = cli._parser().parse_args
    assert parse(["wallet", "2fa", "--code", "123456", "disable"]).code == "123456"
    assert parse(["wallet", "2fa", "disable"]).code is None
    assert parse(["wallet", "contacts", "--json", "list"]).json
    assert parse(["wallet", "accounts", "--passphrase-file", "f", "add"]).passphrase_file == "f"
    assert parse(["wallet", "accounts"]).accounts_command is None


def test_options_before_a_command_are_kept():
    parse = cli._parser().parse_args
    assert parse(["--headless", "local"]).headless
    assert not parse(["local"]).headless
    assert parse(["--passphrase-file", "f", "wallet", "create"]).passphrase_file == "f"
    assert parse(["wallet", "unlock", "--passphrase-fd", "3"]).passphrase_fd == 3
    assert parse(["wallet", "create"]).passphrase_file is None


def test_without_a_wallet_the_command_that_makes_one_is_named(home):
    for arguments in (("--headless",), ("wallet", "address")):
        failed(console(*arguments), ExitCode.WALLET, str(home), "kvasir-console wallet create")


def test_without_a_node_its_commands_say_so(home, secret):
    for arguments in (
        ("status",),
        ("wallet", "lock"),
        ("wallet", "unlock", "--passphrase-file", str(secret)),
    ):
        failed(console(*arguments), ExitCode.NETWORK, "No node", "kvasir-console --headless")


def test_without_a_node_a_claim_is_made_from_here(home, secret):
    """It says so, wants the passphrase, and then it is the gateway that does not answer."""
    failed(console("wallet", "claim"), ExitCode.WALLET, str(home), "kvasir-console wallet create")
    vault.create_vault(home / "data" / "vault.json", PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    failed(console("wallet", "claim"), ExitCode.USAGE, "No node runs here", "--passphrase-file")
    gateway = {"KVASIR_NETWORK_GATEWAY": "http://127.0.0.1:1"}
    asked = console("wallet", "claim", "--passphrase-file", str(secret), **gateway)
    failed(asked, ExitCode.NETWORK, "gateway")


def test_a_wrong_passphrase_ends_the_start(home, tmp_path):
    vault.create_vault(home / "data" / "vault.json", PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    wrong = tmp_path / "wrong"
    wrong.write_text("not the passphrase")
    wrong.chmod(0o600)
    result = console("--headless", "--passphrase-file", str(wrong), KVASIR_NETWORK_GATEWAY="http://127.0.0.1:1")
    failed(result, ExitCode.WALLET, "passphrase", "vault.json", "Try again")
    assert "not the passphrase" not in "".join(log.read_text() for log in (home / "state").glob("*.log"))
    wrong.chmod(0o644)
    failed(console("--headless", "--passphrase-file", str(wrong)), ExitCode.WALLET, "chmod 600")


def test_a_wallet_is_made_once_and_replaced_only_by_force(home, secret):
    arguments = ("--set", "wallet.kdf=interactive", "wallet", "create", "--passphrase-file", str(secret))
    words = home.parent / "words"
    made = console(*arguments, "--words", "12", "--phrase-file", str(words))
    assert made.returncode == 0, made.stderr
    address = made.stdout.strip()
    shown = words.read_text().split()
    assert len(shown) == 12
    assert stat.S_IMODE(words.stat().st_mode) == 0o600
    assert not set(shown) & set(made.stderr.split())
    words.unlink()
    file = home / "data" / "vault.json"
    assert json.loads(file.read_text())["kdf"]["mem_kib"] == 64 * 1024
    assert console("wallet", "address").stdout == f"{address}\n"
    assert json.loads(console("wallet", "address", "--json").stdout) == {"address": address}

    failed(console(*arguments, "--phrase-file", str(words)), ExitCode.WALLET, str(file), "--force")
    assert not words.exists()
    assert console("wallet", "address").stdout == f"{address}\n"
    replaced = console(*arguments, "--force", "--phrase-file", str(words))
    assert replaced.returncode == 0
    assert replaced.stdout.strip() != address
    (kept,) = file.parent.glob("vault.json.*.bak")
    assert json.loads(kept.read_text())["accounts"][0]["address"] == address

    # The words that were shown are the way back to the first wallet.
    restored = console(
        *("wallet", "import", "--offline", "--force", "--passphrase-file", str(secret)),
        stdin=" ".join(shown),
        KVASIR_WALLET_KDF="interactive",
    )
    assert restored.stdout.strip() == address


def test_a_wallet_without_a_passphrase_or_a_place_for_its_words_is_not_made(home, secret):
    words = home.parent / "words"
    failed(console("wallet", "create", "--phrase-file", str(words)), ExitCode.USAGE, "--passphrase-file")
    assert not words.exists()
    failed(console("wallet", "create", "--passphrase-file", str(secret)), ExitCode.USAGE, "--phrase-file")
    assert not (home / "data" / "vault.json").exists()


def test_an_import_shows_every_address_before_it_keeps_one(home, secret):
    settings = ("--set", "wallet.kdf=interactive")
    arguments = (*settings, "wallet", "import", "--offline", "--passphrase-file", str(secret))

    refused = console(*arguments, "--path", "m/44/501", stdin=PHRASE)
    failed(refused, ExitCode.WALLET, "m/44/501")
    assert not (home / "data" / "vault.json").exists()

    for path, address in ADDRESSES.items():
        extra = () if path == KVASIR_PATH else ("--path", path)
        result = console(*arguments, *extra, "--force", stdin=f"  {PHRASE.upper()} \n")
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{address}\n"
        (chosen,) = [line for line in result.stderr.splitlines() if line.startswith("*")]
        assert address in chosen
        assert all(other in result.stderr for other in ADDRESSES.values())


def test_bad_words_are_refused_before_a_passphrase_is_asked_for(home):
    bad = " ".join([*PHRASE.split()[:-1], "zoo"])
    failed(console("wallet", "import", stdin=bad), ExitCode.WALLET)
    failed(console("wallet", "import"), ExitCode.WALLET, "No words")
    assert not (home / "data" / "vault.json").exists()


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m kvasir_console models list --json | head -c 0; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_defect_is_one_line_for_a_person_and_a_traceback_in_the_log(home):
    script = (
        "import sys\nfrom kvasir_console import cli\n"
        "def broken(*_):\n    raise ZeroDivisionError('node_token=abcdefgh')\n"
        "cli._run = broken\nsys.exit(cli.main(['status']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    log = home / "state" / "console.log"
    failed(result, ExitCode.FAILURE, "ZeroDivisionError", str(log))
    assert "Traceback" in log.read_text()
    assert "abcdefgh" not in log.read_text()


def test_a_refusal_of_the_system_names_the_file(monkeypatch, capsys):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr(cli, "_run", full)
    assert cli.main(["status"]) == ExitCode.RESOURCE
    assert capsys.readouterr().err == "kvasir-console: The system refused: No space left on device (/data/x).\n"


def test_an_interrupt_has_its_own_code(monkeypatch):
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["status"]) == ExitCode.INTERRUPTED


# Commands of a running node


SNAPSHOT = NodeSnapshot(
    at_s=160.0,
    version=__version__,
    pid=1,
    engine_pid=2,
    name="box",
    worker_id="server-x-box",
    wallet=ADDRESSES[KVASIR_PATH],
    wallet_locked=True,
    gateway="https://gate.example.net",
    state=phase.initial(1.0).to(phase.Phase.SERVING, 100.0, "Every relay session is open."),
    held=SliceView("experts", "moe", 3, 2, 6, 8),
    work=WorkView(requests=7, rows=90, pairs=180, expert_pairs=(0, 60, 100, 20)),
    earnings=EarningsView(pending_micro_kvr=12_779),
)


class RunningNode:
    """A node's socket as the commands find it; the passphrases it was sent."""

    def __init__(self) -> None:
        self.passphrases: list[str] = []
        self.pending = 0
        self.locked = 0

    def handlers(self) -> dict[str, Handler]:
        async def status(_: Message) -> Message:
            return {"snapshot": SNAPSHOT.to_json()}

        async def unlock(message: Message) -> Message:
            self.passphrases.append(message["passphrase"])
            if message["passphrase"] != PASSPHRASE:
                raise WalletError("wrong_passphrase", "The passphrase does not open the vault.", "Try again.")
            return {}

        async def lock(_: Message) -> Message:
            self.locked += 1
            return {}

        async def claim(_: Message) -> Message:
            if not self.pending:
                raise LedgerError("nothing_to_claim", "0 micro-KVR are pending.", "It accrues with work.")
            return {"claim": {"claim_id": "c", "micro_kvr": self.pending, "state": "reserved"}}

        runs_with = Config(network=NetworkConfig(gateway=SNAPSHOT.gateway))
        return {"status": status, "unlock": unlock, "lock": lock, "claim": claim, **overrides.verbs(runs_with)}


async def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(console, *arguments)


@pytest.fixture
async def node() -> AsyncIterator[RunningNode]:
    running = RunningNode()
    async with AdminServer(Paths.from_environment().ensure().runtime / "node.sock", running.handlers()):
        yield running


async def test_the_state_of_a_node_is_for_people_and_for_programs(node):
    result = await ask("status")
    assert (result.returncode, result.stderr) == (0, "")
    for words in (
        "box",
        "(locked)",
        "serving for 60 s",
        "moe, layer 3, experts [2, 6) of 8",
        "90 rows",
        "most asked for: expert 4 (100), expert 3 (60), expert 5 (20)\n",
        "0.012779 KVR",
    ):
        assert words in result.stdout
    assert "N/A paid" in result.stdout  # not known is not zero
    as_json = await ask("status", "--json")
    assert NodeSnapshot.from_json(json.loads(as_json.stdout)) == SNAPSHOT


async def test_a_running_node_is_unlocked_from_outside(node, secret, tmp_path):
    result = await ask("wallet", "unlock", "--passphrase-file", str(secret))
    assert (result.returncode, result.stdout) == (0, "")
    assert node.passphrases == [PASSPHRASE]
    wrong = tmp_path / "wrong"
    wrong.write_text("not the passphrase")
    wrong.chmod(0o600)
    failed(await ask("wallet", "unlock", "--passphrase-file", str(wrong)), ExitCode.WALLET, "Try again")
    failed(await ask("wallet", "unlock"), ExitCode.USAGE, "--passphrase-file")


async def test_a_wallet_is_locked_from_outside(node):
    result = await ask("wallet", "lock")
    assert (result.returncode, result.stdout, node.locked) == (0, "", 1)
    assert "locked" in result.stderr


async def test_a_claim_is_made_from_outside(node):
    failed(await ask("wallet", "claim"), ExitCode.LEDGER, "0 micro-KVR", "accrues")
    node.pending = 1_500_000
    assert (await ask("wallet", "claim")).stdout == "1.500000 KVR claimed, reserved\n"
    as_json = await ask("wallet", "claim", "--json")
    assert json.loads(as_json.stdout) == {"claim_id": "c", "micro_kvr": 1_500_000, "state": "reserved"}


async def test_settings_that_a_running_node_would_ignore_are_refused_by_name(node, secret):
    node.pending = 1_500_000
    other = ("--set", "network.gateway=https://other.example.net")
    for words in (("claim",), ("lock",), ("unlock", "--passphrase-file", str(secret))):
        result = await ask("wallet", *words, *other)
        failed(result, ExitCode.USAGE, "A node runs here already", "--set network.gateway would have no effect")
        failed(await ask(*other, "wallet", *words), ExitCode.USAGE, "network.gateway")
    assert (node.locked, node.passphrases) == (0, [])
    assert (await ask("wallet", "claim", "--set", f"network.gateway={SNAPSHOT.gateway}")).returncode == ExitCode.OK
    unlocked = await ask("wallet", "unlock", "--passphrase-file", str(secret), "--set", "wallet.keyring=true")
    assert unlocked.returncode == ExitCode.OK


async def test_a_second_node_with_the_same_home_does_not_start(node, home):
    vault.create_vault(home / "data" / "vault.json", PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    result = await asyncio.to_thread(console, "--headless", KVASIR_NETWORK_GATEWAY="http://127.0.0.1:1")
    failed(result, ExitCode.RESOURCE, "already runs", "KVASIR_HOME")


# Commands of an operator


def test_nothing_is_done_to_the_home_of_a_running_gateway(capsys):
    paths = Paths.from_environment().ensure()
    Secrets.load(paths.data / "gateway")
    before = (paths.data / "gateway" / "hub-key").read_bytes()
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(paths.runtime / "gateway.http"))
        gateway.listen()
        assert cli.main(["gateway", "--rotate-hub-key"]) == ExitCode.RESOURCE
        assert "Stop it" in capsys.readouterr().err
        assert cli.main(["gateway", "--set", "gateway.port=0"]) == ExitCode.RESOURCE  # nor is there a second one
        assert "already runs" in capsys.readouterr().err
    assert (paths.data / "gateway" / "hub-key").read_bytes() == before
    assert cli.main(["gateway", "--rotate-hub-key"]) == ExitCode.OK  # a socket that nobody listens on does not matter
    assert (paths.data / "gateway" / "hub-key").read_bytes() != before


def test_the_port_of_a_local_network_is_one():
    failed(console("local", "--port", "70000"), ExitCode.USAGE, "--port", "65535")
