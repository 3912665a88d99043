"""What a wallet can be asked to sign. Nobody hands the signer bytes: they name an intent and its fields.

Each intent is checked against the host and cluster the user configured, the wallet and the clock, and only then
becomes the one text (``intent_transfer``: the one message) that is signed. ``describe`` is what a person is shown; it
holds every field that matters, escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Self

from kvasir_console.errors import WalletError
from kvasir_console.relay.wire import signed
from kvasir_console.wallet import delegation
from kvasir_console.wallet.intent_base import (
    Challenge,
    Context,
    Shape,
    check_host,
    check_is_no_transaction,
    check_wallet,
    shown,
    take,
)
from kvasir_console.wallet.intent_signin import GatewaySignIn, SignInIntent
from kvasir_console.wallet.intent_transfer import TransferIntent

__all__ = [
    "ActionIntent",
    "Context",
    "DelegationIntent",
    "GatewaySignIn",
    "Intent",
    "Participation",
    "SignInIntent",
    "TextIntent",
    "TransferIntent",
    "parse",
    "text_of",
]

MAX_LIFETIME = signed.MAX_ACTION_LIFETIME
CLOCK_SKEW = timedelta(seconds=30)
"""How far a gateway's clock may be from ours."""


@dataclass(frozen=True, slots=True)
class Participation(Challenge):
    """Ask the gateway for a node token: it lets a machine take part for this wallet and do nothing else."""

    kind: ClassVar[str] = "participation"

    def text(self, context: Context) -> str:
        """The text to sign. Raises ``WalletError`` if this is not our host, our wallet and the bridge's challenge."""
        check_host(self.host, context)
        check_wallet(self.wallet, context)
        signed.check_bridge_challenge(self.message, self.wallet, self.nonce)
        return self.message

    def describe(self) -> str:
        return f"Take part in the network at {shown(self.host)} as {shown(self.wallet)}"


@dataclass(frozen=True, slots=True)
class ActionIntent(Shape):
    """Authorise one action at the gateway, once and within minutes (``signed.action_text``)."""

    kind: ClassVar[str] = "action"

    host: str
    action: signed.ActionKind
    details: Mapping[str, Any]
    nonce: str
    issued_at: str
    """RFC 3339, UTC, whole seconds, as the challenge said; ``expires_at`` too."""
    expires_at: str

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        name = take(given, "action", str)
        try:
            action = signed.ActionKind(name)
        except ValueError:
            raise WalletError("action_unknown", f"There is no action named {shown(name)}.") from None
        return super(ActionIntent, cls).parse({**given, "action": action})

    def text(self, context: Context) -> str:
        """The text to sign. Raises ``WalletError`` for another host, malformed fields or an expiry out of bounds."""
        if self.action is signed.ActionKind.DELEGATE:
            raise WalletError("action_unknown", "A delegation is an intent of its own.", "Ask for a delegation.")
        return self.write(context)

    def write(self, context: Context) -> str:
        check_host(self.host, context)
        text = signed.action_text(
            self.host, self.action, context.wallet, self.details, self.nonce, self.issued_at, self.expires_at
        )
        expiry = datetime.fromisoformat(self.expires_at).astimezone(UTC)
        if expiry <= context.now:
            raise WalletError(
                "action_expired",
                "The challenge for this action has expired.",
                "Ask for a new one; if that one has expired too, check this machine's clock.",
            )
        if expiry > context.now + MAX_LIFETIME + CLOCK_SKEW:
            raise WalletError(
                "action_lifetime",
                "The challenge for this action would be valid for more than five minutes.",
                "Check this machine's clock; if it is right, do not trust the gateway.",
            )
        return text

    def describe(self) -> str:
        details = "".join(f"\n  {shown(name)}: {signed.canonical_json(self.details[name])}" for name in self.details)
        return f"{_SENTENCES[self.action]} at {shown(self.host)}{details}"


@dataclass(frozen=True, slots=True)
class DelegationIntent(Shape):
    """Let a session key prove participation for this wallet, for at most thirty days (``delegation``)."""

    kind: ClassVar[str] = "delegation"

    host: str
    key: str
    until_s: int
    nonce: str
    issued_at: str
    expires_at: str

    def text(self, context: Context) -> str:
        """Raises ``WalletError`` for another host, a key that is none, or a lifetime beyond what is allowed."""
        granted = delegation.Delegation(self.key, self.until_s)
        granted.check(context.wallet, context.now.timestamp())
        action = ActionIntent(
            self.host, signed.ActionKind.DELEGATE, granted.details(), self.nonce, self.issued_at, self.expires_at
        )
        return action.write(context)

    def describe(self) -> str:
        if not self.until_s:
            return f"Take back what the key {shown(self.key)} may do at {shown(self.host)}"
        until = signed.rfc3339(self.until_s)
        return f"Let the key {shown(self.key)} take part in the network at {shown(self.host)} until {until}"


TextIntent = Participation | ActionIntent | GatewaySignIn | SignInIntent | DelegationIntent
Intent = TextIntent | TransferIntent

_KINDS: dict[str, type[Intent]] = {
    each.kind: each
    for each in (Participation, ActionIntent, GatewaySignIn, SignInIntent, DelegationIntent, TransferIntent)
}
_SENTENCES = {
    signed.ActionKind.CLAIM: "Claim the earned KVR",
    signed.ActionKind.REMOVE_NODE: "Remove a node",
    signed.ActionKind.MOVE_NODE: "Move a node",
    signed.ActionKind.DELEGATE: "Let another key act for this wallet",
    signed.ActionKind.APPLY_PLAN: "Put a placement plan in force",
    signed.ActionKind.SET_PRICE: "Set a price",
    signed.ActionKind.GRANT: "Grant a right",
}


def parse(fields: object) -> Intent:
    """The intent a control message carries.

    Raises:
        WalletError: ``intent_unknown`` naming a kind nobody can ask for, ``intent_malformed`` for missing, extra or
            mistyped fields, ``action_unknown``.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise WalletError("intent_malformed", "A request to sign has no kind.")
    intent_type = _KINDS.get(fields["kind"])
    if intent_type is None:
        raise WalletError(
            "intent_unknown",
            f"A wallet does not sign {shown(fields['kind'])}.",
            f"It signs: {', '.join(sorted(_KINDS))}.",
        )
    intent = intent_type.parse(fields)
    extra = sorted(set(fields) - set(intent.to_json()))
    if extra:
        raise WalletError("intent_malformed", f"A request to sign has an unknown field {shown(extra[0])}.")
    return intent


def text_of(intent: TextIntent, context: Context) -> str:
    """The text that is signed for an intent.

    Raises:
        WalletError: the intent does not fit the context, or its text could be read as a transaction.
    """
    text = intent.text(context)
    check_is_no_transaction(text)
    return text
