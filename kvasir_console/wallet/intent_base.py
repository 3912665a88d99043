"""What every intent shares: the signer's own knowledge, and fields read from a control message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, Self, TypeVar, get_origin, get_type_hints

from solders.message import Message, MessageV0
from solders.transaction import Transaction, VersionedTransaction

from kvasir_console.errors import WalletError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Context:
    """What the signer knows by itself and an intent has to agree with."""

    host: str
    """The configured gateway, as ``host`` or ``host:port``."""
    wallet: str
    now: datetime
    cluster: str = ""
    """The wallet's cluster, by its genesis hash; empty where nothing is signed for a chain."""
    mint: str = ""
    """The KVR token's mint there."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an intent travels: its kind and each of its fields, by name; of exactly the declared types."""

    kind: ClassVar[str]

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """Raises ``WalletError`` ``intent_malformed``."""
        types = get_type_hints(cls)
        return cls(**{each.name: take(given, each.name, _plain_type(types[each.name])) for each in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **{each.name: _plain(getattr(self, each.name)) for each in fields(self)}}


@dataclass(frozen=True, slots=True)
class Challenge(Shape):
    """A text that the gateway handed out, with what has to stand in it."""

    host: str
    message: str
    """The challenge's text as the gateway sent it."""
    wallet: str
    nonce: str


def _plain_type(declared: Any) -> Any:
    origin = get_origin(declared) or declared
    return dict if origin is Mapping else origin


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return dict(value) if isinstance(value, Mapping) else value


def take(given: Mapping[str, object], name: str, wanted: type[_T]) -> _T:
    """A field of exactly this type (a bool is no int). Raises ``WalletError`` ``intent_malformed``."""
    value = given.get(name)
    if type(value) is not wanted:
        raise WalletError("intent_malformed", f"A request to sign lacks its {name}, or it is of the wrong type.")
    return value


def take_optional(given: Mapping[str, object], name: str) -> str | None:
    return None if given.get(name) is None else take(given, name, str)


def check_host(host: str, context: Context) -> None:
    if host.lower() != context.host.lower():
        raise WalletError(
            "other_host",
            f"The wallet is bound to {context.host} and does not sign for {shown(host)}.",
            "If that gateway is the one you mean, set network.gateway to it.",
        )


def check_wallet(wallet: str, context: Context) -> None:
    if wallet != context.wallet:
        raise WalletError(
            "other_wallet",
            "The challenge is for another wallet than the one in this vault.",
            "Ask the gateway for a challenge for this wallet.",
        )


def check_is_no_transaction(text: str) -> None:
    """Refuse a text whose bytes are a transaction or its message: signed, it could be sent.

    A signature over a text says nothing of what it was meant for. None of the texts we build can be one; this is the
    second lock on that door.

    Raises:
        WalletError: ``text_is_transaction``.
    """
    data = text.encode()
    for reader in (Message, MessageV0, Transaction, VersionedTransaction):
        try:
            reader.from_bytes(data)
        except ValueError:
            continue
        raise WalletError("text_is_transaction", "A text to sign can be read as a transaction.", "Nothing was signed.")


def shown(text: str, limit: int = 80) -> str:
    """``text`` without anything a terminal would act on, and not too long."""
    return ascii(text[:limit])[1:-1]
