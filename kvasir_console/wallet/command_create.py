"""``wallet create`` and ``wallet import``: how a wallet comes into the vault."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvasir_console.errors import ExitCode, KvasirError, UsageError, WalletError
from kvasir_console.wallet import accounts, formats, private_file, vault
from kvasir_console.wallet import phrase as bip39
from kvasir_console.wallet.command_base import Command, say
from kvasir_console.wallet.export import write_secret
from kvasir_console.wallet.formats import Phrase, RawKey, Sealed, Secret
from kvasir_console.wallet.keys import KVASIR_PATH
from kvasir_console.wallet.money import KVR, SOL, amount_text
from kvasir_console.wallet.passphrase import read_passphrase
from kvasir_console.wallet.terminal import Person
from kvasir_console.wallet.vault_format import Account

NO_PATH = "none"
RETYPED_WORDS = 3
TRIES = 3
BALANCES_TIMEOUT_S = 6.0

Balances = Callable[[Sequence[str]], Awaitable[Sequence[tuple[int, int] | None]]]
"""Micro-KVR and lamports of each address, or ``None`` for one that could not be asked."""


def create(command: Command) -> int:
    """A fresh phrase: shown once at a terminal and typed back in part, or written to a private file."""
    arguments, person = command.arguments, command.person
    _check_free(command)
    if arguments.phrase_file is None and person is None:
        raise UsageError(
            "no_terminal",
            "The words of a new wallet are shown on a terminal, and there is none.",
            "To have them written to a new file of mode 0600, give --phrase-file FILE.",
        )
    passphrase = command.new_passphrase()
    cost = vault.choose_cost(command.config.wallet.kdf)
    phrase = bip39.generate(arguments.words)
    if arguments.phrase_file is not None:
        write_secret(Path(arguments.phrase_file), phrase)
        say(f"The words are in {arguments.phrase_file}. Copy them to paper and remove the file.")
    elif person is not None:
        show_words(person, phrase)
    (account,) = vault.create_vault(command.vault, phrase, passphrase, cost=cost, force=arguments.force)
    print(account.address)
    return ExitCode.OK


def show_words(person: Person, phrase: str) -> None:
    """Show a new phrase and ask for some of its words, so that nobody keeps a wallet whose words were not written down.

    Raises:
        WalletError: ``phrase_not_kept``.
    """
    words = phrase.split()
    shown = [f"{number:2}. {word:10}" for number, word in enumerate(words, 1)]
    rows = ["  " + "  ".join(shown[row : row + 4]).rstrip() for row in range(0, len(shown), 4)]
    head = "Write these words down, in order, on paper. They are shown once and are the only way back:"
    for _ in range(TRIES):
        person.show_secret("\n".join(["", head, "", *rows, ""]), "Press Enter when you have them. ")
        places = sorted(secrets.SystemRandom().sample(range(len(words)), RETYPED_WORDS))
        if all(bip39.normalise(person.ask_secret(f"Word {place + 1}: ")) == words[place] for place in places):
            return
        person.show("That is another word. Look again.")
    raise WalletError("phrase_not_kept", "The words were not typed back right.", "No wallet was made; begin again.")


def import_(command: Command, balances: Balances | None = None) -> int:
    """An existing phrase, key or key file, or an address to watch; every address is shown before anything is kept."""
    arguments = command.arguments
    if not arguments.add:
        _check_free(command)
    if arguments.watch is not None:
        address = arguments.watch
        return _keep(command, accounts.watching(address), lambda contents: accounts.add_watched(contents, address))
    secret = _secret(command)
    if isinstance(secret, RawKey):
        if arguments.path is not None:
            raise UsageError("path_without_phrase", "A raw key has no derivation path.", "Leave --path out.")
        _list([Account(secret.address, None)], 0, balances)
        return _keep(command, accounts.of_secret(secret), lambda contents: accounts.add_key(contents, secret))
    path = _choose_path(command, secret, balances)
    new = accounts.of_secret(secret, path)
    return _keep(command, new, lambda contents: accounts.add_phrase(contents, secret, path))


def _keep(command: Command, new: vault.Contents, add: vault.Change) -> int:
    """Into a vault of its own, or with ``--add`` into the one that is there."""
    if command.arguments.add:
        vault.update(command.vault, command.passphrase(), add)
    else:
        passphrase = command.new_passphrase()
        cost = vault.choose_cost(command.config.wallet.kdf)
        vault.create(command.vault, new, passphrase, cost=cost, force=command.arguments.force)
    print(new.accounts[0].address)
    return ExitCode.OK


def _secret(command: Command) -> Secret:
    arguments, person = command.arguments, command.person
    if arguments.file is not None:
        content = formats.read(Path(arguments.file))
        if not isinstance(content, Sealed):
            return content
        return content.open(_file_passphrase(command))
    if person is not None and sys.stdin.isatty():
        text = person.ask_secret("Words of the wallet, or its key: ")
    else:
        text = sys.stdin.readline()
    if not text.strip():
        raise WalletError("no_phrase", "No words were given.", "Type or pipe in the 12 or 24 words.")
    return formats.parse_text(text)


def _file_passphrase(command: Command) -> str:
    """The passphrase of the file that is imported, which is not the vault's."""
    named = command.arguments.file_passphrase_file
    passphrase = read_passphrase(file=Path(named), env={}, prompt=None) if named else None
    if passphrase is None and command.person is not None:
        passphrase = command.person.ask_secret(f"Passphrase of {command.arguments.file}: ")
    if not passphrase:
        raise UsageError(
            "no_passphrase",
            f"{command.arguments.file} is encrypted, and nobody gave its passphrase.",
            "Give --file-passphrase-file FILE (mode 0600).",
        )
    return passphrase


def _choose_path(command: Command, secret: Phrase, balances: Balances | None) -> str | None:
    """Show the address at each path wallets use, and say (or ask) which is kept."""
    wanted, offered = command.arguments.path, accounts.CANDIDATE_PATHS
    path = KVASIR_PATH if wanted is None else None if wanted == NO_PATH else wanted
    if path not in offered:
        offered = (path, *offered)
    found = vault.derive_accounts(secret.words, offered)
    chosen = offered.index(path)
    say("These words lead to:")
    _list(found, chosen, balances)
    if command.person is not None and wanted is None:
        answer = command.person.ask(f"Which one is yours? [{chosen + 1}] ") or str(chosen + 1)
        if answer not in [str(place) for place in range(1, len(offered) + 1)]:
            raise UsageError("no_such_account", f"{answer[:20]!r} is none of the numbers.", "Nothing was kept.")
        chosen = int(answer) - 1
    return offered[chosen]


def _list(found: Sequence[Account], chosen: int, balances: Balances | None) -> None:
    amounts = _balances([each.address for each in found], balances)
    for place, (account, amount) in enumerate(zip(found, amounts, strict=True)):
        mark = "*" if place == chosen else " "
        money = "" if amount is None else f"  {amount_text(KVR, amount[0])}, {amount_text(SOL, amount[1])}"
        say(f"{mark} {place + 1}. {account.address:44}  {account.path or NO_PATH:18}{money}".rstrip())


def _balances(addresses: Sequence[str], balances: Balances | None) -> Sequence[tuple[int, int] | None]:
    """What lies at each address, where somebody can be asked. Offline, an import goes on without."""
    nothing: Sequence[tuple[int, int] | None] = [None] * len(addresses)
    if balances is None:
        return nothing

    async def ask() -> Sequence[tuple[int, int] | None]:
        async with asyncio.timeout(BALANCES_TIMEOUT_S):
            return await balances(addresses)

    try:
        return asyncio.run(ask())
    except (KvasirError, TimeoutError):
        say("  (balances are not known: the Solana RPC does not answer)")
        return nothing


def _check_free(command: Command) -> None:
    """Said before anything is typed in; the vault itself refuses again, in the same step as it writes."""
    if command.vault.exists() and not command.arguments.force:
        raise private_file.exists(command.vault)
