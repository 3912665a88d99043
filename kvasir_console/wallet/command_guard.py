"""``wallet 2fa``, ``limit``, ``contacts`` and ``keyring``: what stands between an unlocked wallet and its money."""

from __future__ import annotations

from dataclasses import replace

from kvasir_console.errors import ExitCode, UsageError, WalletError
from kvasir_console.wallet import passphrase_cache, twofactor, vault
from kvasir_console.wallet.command_base import Command, say
from kvasir_console.wallet.export import check_second_factor, open_with_second_factor
from kvasir_console.wallet.keys import decode_address
from kvasir_console.wallet.money import KVR, SOL, amount_text, parse_amount
from kvasir_console.wallet.qr import columns, qr_lines
from kvasir_console.wallet.terminal import Person, require
from kvasir_console.wallet.twofactor import SecondFactor, state_file
from kvasir_console.wallet.vault_format import Contents

ISSUER = "kvasir-console"
MAX_CONTACTS = 256
MAX_NAME_CHARACTERS = 31
"""One less than the shortest address: a name is never taken for one."""
LOW_CODES = 3


def factor_status(command: Command) -> int:
    enrolled = vault.second_factor_enrolled(command.vault)
    left = SecondFactor(state_file(command.vault), b"").backup_codes_left() if enrolled else 0
    lines = [f"A second factor is enrolled; {left} back-up codes are left." if enrolled else "No second factor."]
    if enrolled and left <= LOW_CODES:
        lines.append("Make new ones with: kvasir-console wallet 2fa codes")
    return command.emit({"enrolled": enrolled, "backup_codes_left": left}, lines)


def enrol_factor(command: Command) -> int:
    """Show a new secret, want a code of it, and only then ask for codes from now on. Replacing one takes its code."""
    person = require(command.person, "Enrolling a second factor", "Do it on the machine's own terminal.")
    passphrase = command.passphrase()
    open_with_second_factor(command.vault, passphrase, command.code).wipe()
    secret, codes = twofactor.new_secret(), twofactor.new_backup_codes()
    _show_secret(person, command.accounts()[0].address[:8], secret)
    SecondFactor(state_file(command.vault), secret).enrol(person.ask("The code it shows: "), codes)
    vault.update(command.vault, passphrase, lambda contents: replace(contents, second_factor=secret))
    _show_codes(person, codes)
    say("From now on this wallet sends money and shows secrets against a code only. A node needs none to earn.")
    return ExitCode.OK


def renew_codes(command: Command) -> int:
    """Ten new back-up codes in place of all old ones."""
    person = require(command.person, "Showing back-up codes", "Do it on the machine's own terminal.")
    with open_with_second_factor(command.vault, command.passphrase(), command.code) as opened:
        secret = opened.second_factor
    if secret is None:
        raise WalletError(
            "second_factor_none", "No second factor is enrolled.", "Enrol one with kvasir-console wallet 2fa enrol."
        )
    codes = twofactor.new_backup_codes()
    SecondFactor(state_file(command.vault), secret).renew_backup_codes(codes)
    _show_codes(person, codes)
    return ExitCode.OK


def disable_factor(command: Command) -> int:
    _guarded(command, lambda contents: replace(contents, second_factor=None))
    state_file(command.vault).unlink(missing_ok=True)
    say("No code is asked for any more.")
    return ExitCode.OK


def limit(command: Command) -> int:
    """Show or change what may be sent in one day."""
    changes: dict[str, int | None] = {}
    for name, text in ((KVR, command.arguments.kvr), (SOL, command.arguments.sol)):
        if text is not None:
            changes[name] = None if text == "none" else parse_amount(text, name)
    if changes:

        def change(contents: Contents) -> Contents:
            merged = {**contents.limits, **changes}
            return replace(contents, limits={name: most for name, most in merged.items() if most is not None})

        limits = dict(_guarded(command, change).limits)
    else:
        with vault.open_vault(command.vault, command.passphrase()) as opened:
            limits = dict(opened.contents().limits)
    lines = [
        f"{name}: at most {amount_text(name, limits[name])} a day" if name in limits else f"{name}: no limit"
        for name in (KVR, SOL)
    ]
    return command.emit({"micro_kvr": limits.get(KVR), "lamports": limits.get(SOL)}, lines)


def contacts(command: Command) -> int:
    """The address book. It is sealed in the vault, so that no other program exchanges an address in it."""
    arguments = command.arguments
    if arguments.contacts_command == "list":
        with vault.open_vault(command.vault, command.passphrase()) as opened:
            book = dict(opened.contents().contacts)
    elif arguments.contacts_command == "add":
        _check_contact(arguments.name, arguments.address)
        book = dict(_guarded(command, lambda contents: _with_contact(contents, arguments)).contacts)
    else:
        book = dict(_guarded(command, lambda contents: _without_contact(contents, arguments.name)).contacts)
    lines = [f"{name:20}  {address}" for name, address in sorted(book.items())]
    return command.emit({"contacts": book}, lines)


def _with_contact(contents: Contents, arguments: object) -> Contents:
    name, address = str(getattr(arguments, "name", "")), str(getattr(arguments, "address", ""))
    if len(contents.contacts) >= MAX_CONTACTS:
        raise UsageError("too_many_contacts", f"The address book holds at most {MAX_CONTACTS} names.")
    return replace(contents, contacts={**contents.contacts, name: address})


def _without_contact(contents: Contents, name: str) -> Contents:
    if name not in contents.contacts:
        raise UsageError("no_such_contact", f"{name[:40]!r} is not in the address book.")
    return replace(contents, contacts={each: at for each, at in contents.contacts.items() if each != name})


def _check_contact(name: str, address: str) -> None:
    decode_address(address)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise UsageError("contact_name", f"A name has 1 to {MAX_NAME_CHARACTERS} printable characters.")


def keyring(command: Command) -> int:
    """Keep the passphrase in the desktop's key ring, or drop it there."""
    address = command.accounts()[0].address
    if command.arguments.keyring_command == "forget":
        passphrase_cache.forget(address)
        return ExitCode.OK
    passphrase = command.passphrase()
    with vault.open_vault(command.vault, passphrase):
        pass  # a wrong one is not kept
    passphrase_cache.remember(address, passphrase)
    say("Kept. It is used once wallet.keyring is set to true; any program of yours may read it there.")
    return ExitCode.OK


def _guarded(command: Command, change: vault.Change) -> Contents:
    """Change what guards the wallet: with the passphrase, and a code where one is asked for."""
    made: list[Contents] = []

    def checked(contents: Contents) -> Contents:
        check_second_factor(command.vault, contents.second_factor, command.code)
        made.append(change(contents))
        return made[0]

    vault.update(command.vault, command.passphrase(), checked)
    return made[0]


def _show_secret(person: Person, account: str, secret: bytes) -> None:
    """To be scanned where the terminal has room for it, and to be typed in."""
    uri = twofactor.otpauth_uri(ISSUER, account, secret)
    text = f"\nGive this to an authenticator:\n\n  {uri}\n\nor type in its secret:\n\n  {_grouped(secret)}\n"
    code, (width, height) = qr_lines(twofactor.short_uri(uri)), person.size()
    if width >= columns(code) and height > len(code) + text.count("\n") + 1:
        text = "\n".join([*code, text])
    elif width >= columns(code) and height > len(code):
        person.show_secret("\n".join(code), "Scan this, and press Enter to see it as text. ")
    person.show_secret(text, "Press Enter when it shows codes. ")


def _show_codes(person: Person, codes: tuple[str, ...]) -> None:
    text = "\n".join(["", "Back-up codes, each for one use, in place of the authenticator:", "", *codes, ""])
    person.show_secret(text, "Press Enter when you have written them down. ")


def _grouped(secret: bytes) -> str:
    text = twofactor.encode_secret(secret)
    return " ".join(text[place : place + 4] for place in range(0, len(text), 4))
