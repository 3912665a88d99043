"""``wallet sign-in``: prove to the configured gateway who one is, with Sign-In-With-Solana."""

from __future__ import annotations

import asyncio
import base64
import secrets
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from kvasir_console.errors import UsageError
from kvasir_console.wallet.command_base import Command, say
from kvasir_console.wallet.intents import SignInIntent
from kvasir_console.wallet.signer_session import signer_session
from kvasir_console.wallet.signin import SignIn
from kvasir_console.wallet.terminal import confirm, require

LIFETIME = timedelta(minutes=5)


def sign_in(command: Command) -> int:
    """Show what is signed, ask, and print text and signature for whoever wants to be convinced."""
    arguments = command.arguments
    if not arguments.yes:
        require(command.person, "Signing in", "To sign without a question, add --yes.")
    message = _message(command)
    say(SignInIntent(message).describe())
    if not arguments.yes and not confirm(require(command.person, "Signing in", "Add --yes."), "Sign it?"):
        raise UsageError("not_signed", "Nothing was signed.")
    signature = base64.b64encode(asyncio.run(_sign(command, message))).decode()
    data = {"address": message.address, "message": message.text(), "signature": signature}
    return command.emit(data, [message.text(), "", signature])


async def _sign(command: Command, message: SignIn) -> bytes:
    passphrase = command.passphrase()
    session = signer_session(
        command.vault,
        command.paths.runtime,
        command.paths.state / "signer.log",
        host=message.domain,
        kinds=(SignInIntent.kind,),
    )
    async with session as signer:
        await signer.unlock(passphrase)
        return await signer.sign(SignInIntent(message))


def _message(command: Command) -> SignIn:
    arguments, gateway = command.arguments, command.config.network.gateway.rstrip("/")
    now = datetime.now(UTC)
    return SignIn(
        domain=urlsplit(gateway).netloc.lower(),
        address=command.accounts()[0].address,
        statement=arguments.statement,
        uri=arguments.uri or f"{gateway}/",
        version="1",
        chain_id=arguments.chain,
        nonce=arguments.nonce or secrets.token_hex(8),
        issued_at=_instant(now),
        expiration_time=_instant(now + LIFETIME),
    )


def _instant(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
