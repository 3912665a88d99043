"""Signing in, as intents: with Solana's text, which the signer builds itself, and with the public gateway's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar
from urllib.parse import urlsplit

from kvasir_console.errors import WalletError
from kvasir_console.relay.wire import signed
from kvasir_console.wallet import signin
from kvasir_console.wallet.chain_cluster import cluster_name
from kvasir_console.wallet.intent_base import Challenge, Context, check_host, check_wallet, shown, take, take_optional

_CHAINS = {"mainnet-beta": "mainnet", "testnet": "testnet", "devnet": "devnet"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OPTIONAL = tuple(each.name for each in fields(signin.SignIn) if each.name not in ("domain", "address", "resources"))


@dataclass(frozen=True, slots=True)
class GatewaySignIn(Challenge):
    """Sign in to a gateway's administration, credits and API keys: the public contract has one text for all three."""

    kind: ClassVar[str] = "gateway_sign_in"

    def text(self, context: Context) -> str:
        """Raises ``WalletError`` unless this is our host, our wallet and the gateway's sign-in, to the byte."""
        check_host(self.host, context)
        check_wallet(self.wallet, context)
        if self.message != signed.gateway_sign_in_text(self.wallet, self.nonce):
            raise WalletError(
                "challenge_refused",
                "The server asked for a signature on a text that is not the gateway's sign-in for this wallet.",
                "Nothing was signed. Check the gateway's address.",
            )
        return self.message

    def describe(self) -> str:
        what = "the administration, the credits and the API keys"
        return f"Sign in to {what} of {shown(self.host)} as {shown(self.wallet)}"


@dataclass(frozen=True, slots=True)
class SignInIntent:
    """Sign in with Solana at the configured host (``signin``). The text is built here, from the fields."""

    kind: ClassVar[str] = "sign_in"

    message: signin.SignIn

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> SignInIntent:
        resources = given.get("resources")
        if resources is not None:
            if not isinstance(resources, list) or not all(isinstance(each, str) for each in resources):
                raise WalletError("intent_malformed", "The resources of a sign-in are not a list of texts.")
            resources = tuple(resources)
        texts: dict[str, Any] = {name: take_optional(given, name) for name in _OPTIONAL}
        domain, address = take(given, "domain", str), take(given, "address", str)
        return cls(signin.SignIn(domain, address, resources=resources, **texts))

    def text(self, context: Context) -> str:
        """Raises ``WalletError`` for another domain, address, chain or time, and for a field that is missing."""
        check_host(self.message.domain, context)
        chain = _CHAINS.get(cluster_name(context.cluster), "localnet") if context.cluster else None
        origin = f"{_scheme(self.message.uri, context.host)}://{context.host}"
        signin.check(self.message, signin.Expected(context.host, context.wallet, context.now, origin, chain))
        return self.message.text()

    def describe(self) -> str:
        message = self.message
        lines = [f"Sign in with Solana at {shown(message.domain)} as {shown(message.address)}"]
        lines += [f"  {name}: {shown(value)}" for name in _OPTIONAL if (value := getattr(message, name)) is not None]
        return "\n".join([*lines, *(f"  resource: {shown(each)}" for each in message.resources or ())])

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self.message, each.name) for each in fields(signin.SignIn)}
        resources = None if self.message.resources is None else list(self.message.resources)
        return {"kind": self.kind, **values, "resources": resources}


def _scheme(uri: str | None, host: str) -> str:
    """What the URI has to begin with: https, or http on this machine."""
    plain = uri is not None and uri.lower().startswith("http://") and urlsplit(f"//{host}").hostname in _LOOPBACK
    return "http" if plain else "https"
