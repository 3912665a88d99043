"""``wallet accounts``, ``address``, ``export`` and ``passphrase``: what is done with the keys in the vault."""

from __future__ import annotations

from pathlib import Path

from kvasir_console.errors import ExitCode, UsageError
from kvasir_console.wallet import accounts, vault
from kvasir_console.wallet.command_base import Command, say
from kvasir_console.wallet.command_create import NO_PATH
from kvasir_console.wallet.export import (
    ENCRYPTED,
    Form,
    check_second_factor,
    exported,
    open_with_second_factor,
    write_secret,
)
from kvasir_console.wallet.passphrase import read_passphrase
from kvasir_console.wallet.terminal import confirm, require
from kvasir_console.wallet.vault_format import AccountKind, Contents


def address(command: Command) -> int:
    """The first account: the one that signs and earns."""
    own = command.accounts()[0].address
    return command.emit({"address": own}, [own])


def list_accounts(command: Command) -> int:
    listed = command.accounts()
    data = [{"address": each.address, "kind": str(each.kind), "path": each.path} for each in listed]
    lines = []
    for place, account in enumerate(listed, 1):
        origin = (account.path or NO_PATH) if account.kind is AccountKind.PHRASE else str(account.kind)
        lines.append(f"{'*' if place == 1 else ' '} {place}. {account.address:44}  {origin}")
    return command.emit({"accounts": data}, lines)


def change_accounts(command: Command) -> int:
    """``add``, ``watch``, ``use`` and ``remove``."""
    arguments, which = command.arguments, command.arguments.which
    match arguments.accounts_command:
        case "add":
            after = _update(command, lambda contents: accounts.add_derived(contents, _path(contents, which)))
            print(after[-1].address)
        case "watch":
            after = _update(command, lambda contents: accounts.add_watched(contents, which))
            print(after[-1].address)
        case "use":
            after = _update(command, lambda contents: accounts.use(contents, which))
            print(after[0].address)
            say("A node that runs earns to it when it is started again.")
        case "remove":
            return _remove(command, which)
    return ExitCode.OK


def _remove(command: Command, which: str) -> int:
    gone = accounts.find(command.accounts(), which)
    if gone.kind is AccountKind.KEY and not command.arguments.force:
        person = require(command.person, "Removing a key", "To remove it unasked, add --force.")
        if not confirm(person, f"The key of {gone.address} will be gone, and no words bring it back. Remove it?"):
            raise UsageError("not_removed", "Nothing was removed.")
    passphrase = command.passphrase()

    def change(contents: Contents) -> Contents:
        check_second_factor(command.vault, contents.second_factor, command.code)
        return accounts.remove(contents, gone.address)

    vault.update(command.vault, passphrase, change)
    return ExitCode.OK


def _update(command: Command, change: vault.Change) -> tuple[vault.Account, ...]:
    return vault.update(command.vault, command.passphrase(), change)


def _path(contents: Contents, which: str | None) -> str | None:
    if which is None:
        return accounts.next_path(contents.accounts)
    return None if which == NO_PATH else which


def export(command: Command) -> int:
    """The phrase or one key, to the terminal or a new private file; never to standard output."""
    arguments = command.arguments
    form = _form(arguments.what, arguments.form)
    index = 0
    if arguments.account is not None:
        listed = command.accounts()
        index = listed.index(accounts.find(listed, arguments.account))
    if arguments.out is None:
        require(command.person, "Showing a secret", "To have it written to a new file of mode 0600, give --out FILE.")
    with open_with_second_factor(command.vault, command.passphrase(), command.code) as opened:
        text = exported(opened, index, form, _export_passphrase(command) if form in ENCRYPTED else None)
    if arguments.out is not None:
        write_secret(Path(arguments.out), text)
        say(f"Written to {arguments.out} (mode 0600). Whoever reads it has the money.")
    elif command.person is not None:
        command.person.show_secret(f"\n{text}\n", "Press Enter to hide it. ")
    return ExitCode.OK


def _form(what: str, form: str | None) -> Form:
    chosen = Form(form) if form else Form.WORDS if what == "phrase" else Form.CLI
    if (chosen in (Form.WORDS, Form.BROWSER)) != (what == "phrase"):
        raise UsageError(
            "form_unfit",
            f"A {what} is not written as {chosen}.",
            "A phrase is written as words or browser; a key as cli, base58 or desktop.",
        )
    return chosen


def _export_passphrase(command: Command) -> str:
    named = command.arguments.file_passphrase_file
    found = read_passphrase(file=Path(named), env={}, prompt=None) if named else None
    return found or command.ask_twice("Passphrase of the exported file (8 characters or more): ")


def change_passphrase(command: Command) -> int:
    """Encrypt the vault under a new passphrase, with costs that fit this machine now."""
    old = command.passphrase()
    named = command.arguments.new_passphrase_file
    with vault.open_vault(command.vault, old):
        pass  # said before a new one is thought up
    new = read_passphrase(file=Path(named), env={}, prompt=None) if named else None
    if new is None:
        new = command.ask_twice("New passphrase of the vault (8 characters or more): ")
    vault.change_passphrase(command.vault, old, new, cost=vault.choose_cost(command.config.wallet.kdf))
    say("The vault opens with the new passphrase. Copies of the old file still open with the old one.")
    return ExitCode.OK
