"""The node and the gateway without screens: the same ``Node``, one line for each change, no UI code loaded."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_console import logs
from kvasir_console.config import Config
from kvasir_console.errors import ExitCode, NetworkError, SystemResourceError, UsageError
from kvasir_console.paths import Paths

if TYPE_CHECKING:
    from kvasir_console.node.admin import AdminClient


def run_node(config: Config, arguments: argparse.Namespace) -> int:
    """Run a node until SIGTERM or SIGINT."""
    from kvasir_console.wallet.vault import public_accounts

    paths = Paths.from_environment().ensure()
    logs.configure(paths.log_file)
    public_accounts(paths.vault_file)  # a missing wallet is said before a passphrase is asked for
    prompt = "Passphrase of the wallet (empty: run locked): " if sys.stdin.isatty() else None
    return asyncio.run(_node(config, paths, _passphrase(arguments, prompt)))


def _passphrase(
    arguments: argparse.Namespace, prompt: str | None, cache: Callable[[], str | None] | None = None
) -> str | None:
    from kvasir_console.wallet.passphrase import read_passphrase

    file = Path(arguments.passphrase_file) if arguments.passphrase_file else None
    return read_passphrase(file=file, fd=arguments.passphrase_fd, cache=cache, prompt=prompt)


async def _node(config: Config, paths: Paths, passphrase: str | None) -> int:
    from kvasir_console.node import overrides
    from kvasir_console.node.admin import AdminServer
    from kvasir_console.node.node import Node
    from kvasir_console.node.snapshot import NodeSnapshot

    node = Node(config, paths)

    def line(snapshot: NodeSnapshot) -> None:
        state = snapshot.state
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(state.since_s))
        print(f"{moment} {state.phase.value}: {state.why} {state.next_action}".rstrip(), file=sys.stderr, flush=True)

    node.listen(line)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop)
    async with AdminServer(paths.runtime / "node.sock", {**node.verbs(), **overrides.verbs(config)}):
        await node.run(passphrase)
    return ExitCode.OK


def run_gateway(config: Config) -> int:
    """Run the gateway, its hub and its front port until SIGTERM or SIGINT.

    Raises:
        KvasirError: as its parts do; ``gateway_already_runs``: with another port a second one could take its place.
    """
    paths = Paths.from_environment().ensure()
    if not config.gateway.upstream and _listens(paths.runtime / "gateway.http"):
        raise SystemResourceError(
            "gateway_already_runs",
            "Another gateway already runs with this home.",
            "Stop it, or set KVASIR_HOME to another folder.",
        )
    logs.configure(paths.state / "gateway.log")
    return asyncio.run(_gateway(config, paths))


def rotate_hub_key() -> int:
    """Give the hub of this home a new signing key.

    Raises:
        SystemResourceError: the gateway runs, there is no key yet, or its files cannot be written.
    """
    from kvasir_console.node.gateway import hubkey

    paths = Paths.from_environment().ensure()
    if _listens(paths.runtime / "gateway.http"):
        raise SystemResourceError(
            "gateway_runs", "The gateway of this home runs, and would go on with the old key.", "Stop it first."
        )
    rotation = hubkey.rotate(paths.data / "gateway", int(time.time()))
    print(f"The hub signs with {rotation.new} from its next start on; {rotation.old} has signed for it.")
    return ExitCode.OK


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


async def _gateway(config: Config, paths: Paths) -> int:
    from kvasir_console.node.gateway.publicfront import PublicFront
    from kvasir_console.node.gateway.service import GatewayService

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    made: PublicFront | GatewayService = (
        PublicFront(config) if config.gateway.upstream else GatewayService(config, paths)
    )
    async with made as service:
        print(f"The gateway answers on {service.public_url}", file=sys.stderr, flush=True)
        if isinstance(service, GatewayService) and service.warning:
            print(service.warning, file=sys.stderr, flush=True)
        ended = {asyncio.create_task(stopping.wait()), asyncio.create_task(service.wait())}
        done, running = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        for task in done:
            task.result()
    return ExitCode.OK


def ask_node(verb: str, arguments: argparse.Namespace, config: Config) -> int:
    """``unlock``, ``lock`` or ``claim`` at the node that runs with this home; without one, a claim is made from here.

    Raises:
        UsageError: a setting that the running node would ignore, or nothing to unlock with.
        NetworkError: no node runs, or for a claim: no gateway answers.
        WalletError: the passphrase is wrong, or the wallet is locked.
        LedgerError: there is nothing to claim yet.
    """
    from kvasir_console.node.overrides import flag_names

    # The key ring is asked by the command itself.
    flags = [name for name in flag_names(settings_of(arguments)) if name != "wallet.keyring"]
    return asyncio.run({"unlock": _unlock, "lock": _lock, "claim": _claim}[verb](arguments, config, flags))


def settings_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Every ``--set``, given before or behind the command."""
    return (*(arguments.set or ()), *getattr(arguments, "command_set", ()))


async def _lock(_arguments: argparse.Namespace, config: Config, flags: list[str]) -> int:
    from kvasir_console.node.overrides import refuse_ignored

    async with _running_node() as client:
        await refuse_ignored(client, config, flags, "lock it as it runs")
        await client.call("lock")
    print("The node's wallet is locked.", file=sys.stderr)
    return ExitCode.OK


async def _unlock(arguments: argparse.Namespace, config: Config, flags: list[str]) -> int:
    from kvasir_console.node.overrides import refuse_ignored
    from kvasir_console.wallet import passphrase_cache

    async with _running_node() as client:
        wallet = (await client.snapshot()).wallet  # no node: said before a passphrase is asked for
        await refuse_ignored(client, config, flags, "unlock it as it runs")
        cache = (lambda: passphrase_cache.recall(wallet)) if config.wallet.keyring else None
        passphrase = _needed(_passphrase(arguments, "Passphrase of the wallet: ", cache), "Unlocking")
        await client.call("unlock", passphrase=passphrase)
        if arguments.remember:
            passphrase_cache.remember(wallet, passphrase)
    print("The node's wallet is unlocked.", file=sys.stderr)
    return ExitCode.OK


def _needed(passphrase: str | None, what: str) -> str:
    if passphrase is None:
        raise UsageError(
            "no_passphrase",
            f"{what} needs the passphrase, and there is no terminal to ask on.",
            "Give --passphrase-file FILE (mode 0600) or --passphrase-fd FD.",
        )
    return passphrase


async def _claim(arguments: argparse.Namespace, config: Config, flags: list[str]) -> int:
    from kvasir_console.node.overrides import refuse_ignored
    from kvasir_console.wallet.money import KVR, amount_text

    try:
        async with _running_node() as client:
            await refuse_ignored(client, config, flags, "claim as it runs")
            claim = (await client.call("claim"))["claim"]
    except NetworkError as error:
        if error.code != "no_node_there":
            raise
        claim = await _claim_from_here(arguments, config)
    if arguments.json:
        print(json.dumps(claim, indent=2))
    else:
        print(f"{amount_text(KVR, int(claim['micro_kvr']))} claimed, {claim['state']}")
    return ExitCode.OK


async def _claim_from_here(arguments: argparse.Namespace, config: Config) -> dict[str, Any]:
    from kvasir_console.node import claiming
    from kvasir_console.wallet import passphrase_cache
    from kvasir_console.wallet.vault import public_accounts

    paths = Paths.from_environment().ensure()
    wallet = public_accounts(paths.vault_file)[0].address
    cache = (lambda: passphrase_cache.recall(wallet)) if config.wallet.keyring else None
    passphrase = _passphrase(arguments, "Passphrase of the wallet: ", cache)
    made = await claiming.claim(config, paths, _needed(passphrase, "No node runs here, so claiming"))
    print("No node runs here: the claim was signed and sent by this command.", file=sys.stderr)
    return made


@contextlib.asynccontextmanager
async def _running_node() -> AsyncIterator[AdminClient]:
    from kvasir_console.node.admin import AdminClient

    client = AdminClient(Paths.from_environment().runtime / "node.sock")
    try:
        yield client
    finally:
        await client.close()


def _most_asked(pairs: tuple[int, ...], begin: int, count: int = 5) -> str:
    """The experts that were chosen most often, and how often."""
    order = sorted(range(len(pairs)), key=lambda at: (-pairs[at], at))[:count]
    return ", ".join(f"expert {begin + at} ({pairs[at]})" for at in order if pairs[at])


def print_status(*, as_json: bool) -> int:
    """Print the state of the node that runs with this home."""
    return asyncio.run(_status(as_json))


async def _status(as_json: bool) -> int:
    from kvasir_console.wallet.token import format_kvr

    async with _running_node() as client:
        snapshot = await client.snapshot()
    if as_json:
        print(json.dumps(snapshot.to_json(), indent=2))
        return ExitCode.OK
    state, earnings = snapshot.state, snapshot.earnings
    pending = "N/A" if earnings.pending_micro_kvr is None else f"{format_kvr(earnings.pending_micro_kvr)} KVR"
    paid = "N/A" if earnings.paid_micro_kvr is None else f"{format_kvr(earnings.paid_micro_kvr)} KVR"
    print(f"{snapshot.name}  {snapshot.wallet}{'  (locked)' if snapshot.wallet_locked else ''}")
    print(f"{state.phase.value} for {snapshot.at_s - state.since_s:.0f} s: {state.why}")
    print(f"next: {state.next_action}")
    if snapshot.held is not None:
        held = snapshot.held
        where = f"layer {held.layer}, experts" if held.kind == "experts" else "layers"
        print(f"holds {held.model}, {where} [{held.begin}, {held.end}) of {held.total}")
    print(f"work: {snapshot.work.requests} requests, {snapshot.work.rows} rows, {snapshot.work.pairs} pairs")
    if snapshot.held is not None and any(snapshot.work.expert_pairs):
        print(f"most asked for: {_most_asked(snapshot.work.expert_pairs, snapshot.held.begin)}")
    print(f"earned: {pending} pending, {paid} paid")
    seen = snapshot.statements
    if seen.worker:
        stated = "nothing yet" if seen.sequence is None else f"{seen.stated_rows} rows, {seen.stated_pairs} pairs"
        print(f"counted here: {seen.mine_rows} rows, {seen.mine_pairs} pairs; stated by the hub: {stated}")
    if seen.refused:
        print(f"statements: {seen.refused}")
    return ExitCode.OK
