"""``kvasir-console wallet ...``: which function carries out which command. The work is in the ``command_`` modules."""

from __future__ import annotations

import argparse

from kvasir_console.config import Config
from kvasir_console.errors import UsageError
from kvasir_console.paths import Paths
from kvasir_console.wallet import command_create, command_guard, command_keys, command_signin
from kvasir_console.wallet.command_base import Command
from kvasir_console.wallet.terminal import controlling_terminal

_GUARDS = {
    "status": command_guard.factor_status,
    "enrol": command_guard.enrol_factor,
    "codes": command_guard.renew_codes,
    "disable": command_guard.disable_factor,
}


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Run one command. Raises ``KvasirError``."""
    paths = Paths.from_environment()
    if arguments.wallet_command not in ("address", "accounts"):  # which only read
        paths.ensure()
    with controlling_terminal() as person:
        return carry_out(Command(arguments, config, paths, person))


def carry_out(command: Command) -> int:
    match command.arguments.wallet_command:
        case "create":
            return command_create.create(command)
        case "import":
            return _import(command)
        case "accounts" if command.arguments.accounts_command is None:
            return command_keys.list_accounts(command)
        case "accounts":
            return command_keys.change_accounts(command)
        case "address":
            return command_keys.address(command)
        case "export":
            return command_keys.export(command)
        case "passphrase":
            return command_keys.change_passphrase(command)
        case "2fa":
            return _GUARDS[command.arguments.factor_command](command)
        case "limit":
            return command_guard.limit(command)
        case "contacts":
            return command_guard.contacts(command)
        case "keyring":
            return command_guard.keyring(command)
        case "sign-in":
            return command_signin.sign_in(command)
        case "balance" | "send" | "history" | "cluster" | "airdrop" as name:
            from kvasir_console.wallet import command_money  # brings the Solana client along: a quarter of a second

            functions = {
                "balance": command_money.balance,
                "send": command_money.send,
                "history": command_money.history,
                "cluster": command_money.cluster,
                "airdrop": command_money.airdrop,
            }
            return functions[name](command)
    raise UsageError("unknown_command", f"There is no wallet command {command.arguments.wallet_command!r}.")


def _import(command: Command) -> int:
    if command.arguments.offline:
        return command_create.import_(command)
    from kvasir_console.wallet.command_money import balances_of

    return command_create.import_(command, lambda addresses: balances_of(command, addresses))
