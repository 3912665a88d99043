"""What a wallet can be asked to sign. Nobody hands the signer bytes: they name an intent and its fields.

Each intent is checked against the host the user configured, the wallet and the clock, and only then becomes the one
text that is signed. ``describe`` is what a person is shown; it holds every field that matters, escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar

from kvasir_console.errors import WalletError
from kvasir_console.relay.wire import signed

MAX_LIFETIME = signed.MAX_ACTION_LIFETIME
CLOCK_SKEW = timedelta(seconds=30)
"""How far a gateway's clock may be from ours."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Context:
    """What the signer knows by itself and an intent has to agree with."""

    host: str
    """The configured gateway, as ``host`` or ``host:port``."""
    wallet: str
    now: datetime


@dataclass(frozen=True, slots=True)
class Participation:
    """Ask the gateway for a node token: it lets a machine take part for this wallet and do nothing else."""

    kind: ClassVar[str] = "participation"

    host: str
    message: str
    """The challenge's text as the gateway sent it."""
    wallet: str
    nonce: str

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> Participation:
        return cls(
            _field(fields, "host", str),
            _field(fields, "message", str),
            _field(fields, "wallet", str),
            _field(fields, "nonce", str),
        )

    def text(self, context: Context) -> str:
        """The text to sign. Raises ``WalletError`` if this is not our host, our wallet and the bridge's challenge."""
        _check_host(self.host, context)
        if self.wallet != context.wallet:
            raise WalletError(
                "other_wallet",
                "The challenge is for another wallet than the one in this vault.",
                "Ask the gateway for a challenge for this wallet.",
            )
        signed.check_bridge_challenge(self.message, self.wallet, self.nonce)
        return self.message

    def describe(self) -> str:
        return f"Take part in the network at {_shown(self.host)} as {_shown(self.wallet)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "host": self.host,
            "message": self.message,
            "wallet": self.wallet,
            "nonce": self.nonce,
        }


@dataclass(frozen=True, slots=True)
class ActionIntent:
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
    def parse(cls, fields: Mapping[str, object]) -> ActionIntent:
        name = _field(fields, "action", str)
        try:
            action = signed.ActionKind(name)
        except ValueError:
            raise WalletError("action_unknown", f"There is no action named {_shown(name)}.") from None
        return cls(
            _field(fields, "host", str),
            action,
            _field(fields, "details", dict),
            _field(fields, "nonce", str),
            _field(fields, "issued_at", str),
            _field(fields, "expires_at", str),
        )

    def text(self, context: Context) -> str:
        """The text to sign. Raises ``WalletError`` for another host, malformed fields or an expiry out of bounds."""
        _check_host(self.host, context)
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
        details = "".join(f"\n  {_shown(name)}: {signed.canonical_json(self.details[name])}" for name in self.details)
        return f"{_SENTENCES[self.action]} at {_shown(self.host)}{details}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "host": self.host,
            "action": str(self.action),
            "details": dict(self.details),
            "nonce": self.nonce,
            "issued_at": self.issued_at,
            "expires_at": self.expires_at,
        }


Intent = Participation | ActionIntent

_KINDS: dict[str, type[Participation] | type[ActionIntent]] = {
    each.kind: each for each in (Participation, ActionIntent)
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
            f"A wallet does not sign {_shown(fields['kind'])}.",
            f"It signs: {', '.join(sorted(_KINDS))}.",
        )
    intent = intent_type.parse(fields)
    extra = sorted(set(fields) - set(intent.to_json()))
    if extra:
        raise WalletError("intent_malformed", f"A request to sign has an unknown field {_shown(extra[0])}.")
    return intent


def _field(fields: Mapping[str, object], name: str, wanted: type[_T]) -> _T:
    value = fields.get(name)
    if not isinstance(value, wanted):
        raise WalletError("intent_malformed", f"A request to sign lacks its {name}, or it is of the wrong type.")
    return value


def _check_host(host: str, context: Context) -> None:
    if host.lower() != context.host.lower():
        raise WalletError(
            "other_host",
            f"The wallet is bound to {context.host} and does not sign for {_shown(host)}.",
            "If that gateway is the one you mean, set network.gateway to it.",
        )


def _shown(text: str) -> str:
    """``text`` without anything a terminal would act on, and not too long."""
    return ascii(text[:80])[1:-1]
