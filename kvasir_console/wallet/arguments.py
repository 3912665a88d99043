"""The options of ``kvasir-console wallet ...``. Nothing but ``argparse`` is imported here."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PassphraseOptions = Callable[[argparse.ArgumentParser], None]


def add_commands(
    parser: argparse.ArgumentParser,
    passphrase_options: PassphraseOptions,
    setting_option: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Fill the parser of ``wallet``.

    Args:
        passphrase_options: adds the options that every command with a passphrase has.
        setting_option: adds the one that every command has, ``--set``.
    """
    commands = parser.add_subparsers(dest="wallet_command", metavar="COMMAND", required=True)

    def command(name: str, text: str, *, passphrase: bool = True, json: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        _common(made, passphrase_options, passphrase=passphrase, json=json)
        setting_option(made)
        return made

    _create(command("create", "a new wallet; its words are shown once, on a terminal"))
    _import(command("import", "bring in words, a key or a key file, or an address to watch"))
    _accounts(command("accounts", "list the wallet's accounts, or change them", json=True), passphrase_options)
    command("address", "this wallet's address", passphrase=False, json=True)
    balance = command("balance", "KVR and SOL on the chain", passphrase=False, json=True)
    balance.add_argument("--all", action="store_true", help="of every account, not only the first")
    _send(command("send", "send KVR or SOL", json=True))
    history = command("history", "what came in and went out, newest first", passphrase=False, json=True)
    history.add_argument("--limit", type=int, default=20, metavar="N", help="lines to show (default 20)")
    claim = command("claim", "claim what this wallet earned", passphrase=False, json=True)
    passphrase_options(claim)
    _export(command("export", "show the words, or a key, or write them to a private file"))
    _sign_in(command("sign-in", "prove to the gateway who you are, with Sign-In-With-Solana", json=True))
    command("lock", "lock the wallet of the running node", passphrase=False)
    unlock = command("unlock", "unlock the wallet of the running node", passphrase=False)
    passphrase_options(unlock)
    unlock.add_argument("--remember", action="store_true", help="keep the passphrase in the desktop's key ring")
    _second_factor(command("2fa", "one-time codes for money and secrets", json=True), passphrase_options)
    limit = command("limit", "show or set what may be sent in one day", json=True)
    limit.add_argument("--kvr", metavar="AMOUNT", help="most KVR a day, or 'none'")
    limit.add_argument("--sol", metavar="AMOUNT", help="most SOL a day, or 'none'")
    _contacts(command("contacts", "the address book", json=True), passphrase_options)
    change = command("passphrase", "change the vault's passphrase")
    change.add_argument("--new-passphrase-file", metavar="FILE", help="file with the new one (mode 0600)")
    keyring = command("keyring", "keep the passphrase in the desktop's key ring, or drop it there")
    keyring.add_argument("keyring_command", choices=("keep", "forget"))
    cluster = command("cluster", "which Solana cluster this wallet lives on", passphrase=False, json=True)
    cluster.add_argument("--accept", action="store_true", help="take the configured one from now on")
    airdrop = command("airdrop", "ask a test cluster for SOL", passphrase=False, json=True)
    airdrop.add_argument("amount", help="SOL, like 0.5")


def _common(
    parser: argparse.ArgumentParser,
    passphrase_options: PassphraseOptions,
    *,
    passphrase: bool,
    json: bool,
    nested: bool = False,
) -> None:
    """``nested``: an option given before the nested command must not be reset by that command's default."""
    if passphrase:
        passphrase_options(parser)
        default = argparse.SUPPRESS if nested else None
        text = "one-time or back-up code, where a second factor is enrolled"
        parser.add_argument("--code", metavar="CODE", default=default, help=text)
    if json:
        default = argparse.SUPPRESS if nested else None
        parser.add_argument("--json", action="store_true", default=default, help="print JSON")


def _force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace the wallet here; the old file is kept")


def _create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--words", type=int, choices=(12, 24), default=24)
    parser.add_argument("--phrase-file", metavar="FILE", help="write the words to this new file instead of a terminal")
    _force(parser)


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a key file of solana-keygen, the Kvasir desktop or the web wallet (default: asked, or stdin)",
    )
    parser.add_argument("--file-passphrase-file", metavar="FILE", help="file with the passphrase of that key file")
    parser.add_argument("--path", metavar="PATH", help="derivation path, or 'none' for solana-keygen's default")
    parser.add_argument("--watch", metavar="ADDRESS", help="an address to look at, without its key")
    parser.add_argument("--add", action="store_true", help="into the wallet that is here, as one more account")
    parser.add_argument("--offline", action="store_true", help="do not ask the chain for balances")
    _force(parser)


def _accounts(parser: argparse.ArgumentParser, passphrase_options: PassphraseOptions) -> None:
    commands = parser.add_subparsers(dest="accounts_command", metavar="CHANGE")
    for name, text, which, optional in (
        ("add", "derive one more from the words", "PATH", True),
        ("watch", "look at an address", "ADDRESS", False),
        ("use", "make one the first: it signs and earns", "ACCOUNT", False),
        ("remove", "take one out", "ACCOUNT", False),
    ):
        made = commands.add_parser(name, help=text)
        made.add_argument("which", metavar=which, nargs="?" if optional else None)
        _common(made, passphrase_options, passphrase=True, json=False, nested=True)
        if name == "remove":
            made.add_argument("--force", action="store_true", help="do not ask before a raw key is gone")


def _send(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipient", help="an address, or a name of the address book")
    parser.add_argument("amount", help="like 12.5")
    parser.add_argument("token", nargs="?", choices=("KVR", "SOL"), default="KVR")
    parser.add_argument("--memo", default="", help="a note on the chain, for everybody to read")
    parser.add_argument("--yes", action="store_true", help="do not ask before sending")
    parser.add_argument("--id", metavar="ID", help="id of the payment: with the same one, it happens once")
    parser.add_argument("--twin", action="store_true", help="although an equal payment is still under way")


def _sign_in(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nonce", metavar="TEXT", help="the gateway's nonce, 8 letters and digits or more")
    parser.add_argument("--statement", metavar="TEXT", help="a sentence to sign along")
    parser.add_argument("--uri", metavar="URI", help="what is signed in to (default: the gateway's root)")
    parser.add_argument("--chain", choices=("mainnet", "testnet", "devnet", "localnet"), default="mainnet")
    parser.add_argument("--yes", action="store_true", help="do not ask before signing")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("phrase", "key"))
    parser.add_argument(
        "--form",
        choices=("words", "cli", "base58", "desktop", "browser"),
        help="words or browser for a phrase; cli, base58 or desktop for a key",
    )
    parser.add_argument("--account", metavar="ACCOUNT", help="address or number (default: the first)")
    parser.add_argument("--out", metavar="FILE", help="a new file of mode 0600 (default: shown on the terminal)")
    parser.add_argument("--file-passphrase-file", metavar="FILE", help="file with the passphrase of the new file")


def _second_factor(parser: argparse.ArgumentParser, passphrase_options: PassphraseOptions) -> None:
    commands = parser.add_subparsers(dest="factor_command", metavar="COMMAND", required=True)
    status = commands.add_parser("status", help="whether one is enrolled, and how many back-up codes are left")
    _common(status, passphrase_options, passphrase=False, json=True, nested=True)
    for name, text in (
        ("enrol", "begin, or replace the secret"),
        ("codes", "new back-up codes; the old ones are void"),
        ("disable", "ask for codes no more"),
    ):
        _common(commands.add_parser(name, help=text), passphrase_options, passphrase=True, json=False, nested=True)


def _contacts(parser: argparse.ArgumentParser, passphrase_options: PassphraseOptions) -> None:
    commands = parser.add_subparsers(dest="contacts_command", metavar="COMMAND", required=True)
    for name in ("list", "add", "remove"):
        made = commands.add_parser(name)
        if name != "list":
            made.add_argument("name")
        if name == "add":
            made.add_argument("address")
        _common(made, passphrase_options, passphrase=True, json=True, nested=True)
