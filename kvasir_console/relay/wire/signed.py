"""Texts a wallet signs and the participation token given in exchange, exact to the byte.

The first three texts and the token are the public contract's (gateway contract, section 2); the action and plan texts
are ours. Lines end in one LF, none after the last; texts are UTF-8. A signer builds the text from the fields it means
and compares; it never signs what a server wrote. Signatures themselves are checked in ``wallet.keys``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from kvasir_console.errors import WalletError

ACTION_PREFIX = "kvasir-action-v1"
PLAN_PREFIX = "kvasir-plan-v1"
MAX_ACTION_LIFETIME = timedelta(minutes=5)
MAX_TEXT_BYTES = 64 * 2**10
MAX_TOKEN_BYTES = 512
NODE_TOKEN_TTL_S = 30 * 86_400

_MAX_DEPTH = 32
_WALLET = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,44}")
_BRIDGE_NONCE = re.compile(r"[0-9a-fA-F]{32}")
_ACTION_NONCE = re.compile(r"[0-9A-Za-z_-]{16,64}")
_DOMAIN = re.compile(r"[0-9A-Za-z.\[\]:-]{1,255}")
_NODE_ID = re.compile(r"[!-~]{1,128}")
_INSTANT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_EXPIRY = re.compile(r"[1-9][0-9]{0,15}")
_INSTANT_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class ActionKind(StrEnum):
    """What a signed action may do."""

    CLAIM = "claim"
    REMOVE_NODE = "remove-node"
    MOVE_NODE = "move-node"
    DELEGATE = "delegate"
    APPLY_PLAN = "apply-plan"
    SET_PRICE = "set-price"
    GRANT = "grant"


def gateway_sign_in_text(wallet: str, nonce: str) -> str:
    """Contract section 2, text 1: administration, credits and API keys."""
    return "\n".join(("Kvasir gateway admin sign-in", f"wallet: {_wallet(wallet)}", f"nonce: {_nonce(nonce)}"))


def bridge_challenge_text(wallet: str, nonce: str) -> str:
    """Contract section 2, text 2: a wallet asks for its node token. The dash is U+2014."""
    return "\n".join(
        (
            "Kvasir bridge \N{EM DASH} prove you operate this node.",
            f"wallet: {_wallet(wallet)}",
            f"nonce: {_nonce(nonce)}",
        )
    )


def p4_relay_text(host: str, node: str, wallet: str, nonce: str) -> str:
    """Contract section 2, text 3: the TCP relay's challenge."""
    return "\n".join(
        (
            "kvasir p4 relay",
            f"relay: {_field('relay host', host, _DOMAIN)}",
            f"node: {_field('node id', node, _NODE_ID)}",
            f"wallet: {_wallet(wallet)}",
            f"nonce: {_nonce(nonce)}",
        )
    )


def check_bridge_challenge(message: str, wallet: str, nonce: str) -> None:
    """Raises ``WalletError`` unless ``message`` is, to the byte, the bridge's challenge for this wallet and nonce.

    The public contract lets a server word its challenge as it likes. We do not sign foreign words: they could be a
    sign-in somewhere else.
    """
    if message != bridge_challenge_text(wallet, nonce):
        raise WalletError(
            "challenge_refused",
            "The server asked for a signature on a text that is not the bridge's challenge for this wallet.",
            "Nothing was signed. Check the gateway's address.",
        )


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces, ASCII (others as \\u escapes) and 64-bit integers; one value, one text.

    Raises ``WalletError("not_canonical")`` for floats, other key types than text, deep nesting and anything not JSON.
    """
    _check_canonical(value, 0)
    return json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))


def plan_text(plan: Mapping[str, Any]) -> str:
    """What the hub's key signs to put a placement plan in force."""
    return f"{PLAN_PREFIX}\n{canonical_json(dict(plan))}"


def rfc3339(instant: datetime | int) -> str:
    """An aware datetime, or Unix seconds, as RFC 3339 in UTC with whole seconds and a ``Z``."""
    if isinstance(instant, int):
        instant = datetime.fromtimestamp(instant, UTC)
    if instant.tzinfo is None:
        raise ValueError("an instant needs a time zone")
    return instant.astimezone(UTC).strftime(_INSTANT_FORMAT)


@dataclass(frozen=True, slots=True)
class Action:
    """A signed action, read. Equal texts and equal actions are the same thing."""

    domain: str
    kind: ActionKind
    wallet: str
    details: Mapping[str, Any]
    nonce: str
    issued_at: datetime
    expires_at: datetime

    def text(self) -> str:
        return action_text(
            self.domain, self.kind, self.wallet, self.details, self.nonce, self.issued_at, self.expires_at
        )

    def check(self, *, domain: str, kind: ActionKind | str, wallet: str, nonce: str, now: datetime | float) -> None:
        """Raises ``WalletError`` naming the first field that is not the verifier's, or the time if it has run out.

        The nonce's single use is the caller's to enforce.
        """
        if isinstance(now, int | float):
            now = datetime.fromtimestamp(now, UTC)
        for name, given, due in (
            ("domain", self.domain, domain),
            ("action", str(self.kind), str(kind)),
            ("wallet", self.wallet, wallet),
            ("nonce", self.nonce, nonce),
        ):
            if given != due:
                raise WalletError(
                    f"action_{name}", f"The signed action names another {name} than asked.", "Ask for a new challenge."
                )
        if not self.issued_at <= now <= self.expires_at:
            raise WalletError(
                "action_expired", "The signed action is not valid now.", "Check the clock and sign again."
            )


def action_text(
    domain: str,
    action: ActionKind | str,
    wallet: str,
    details: Mapping[str, Any],
    nonce: str,
    issued_at: str | datetime,
    expires_at: str | datetime,
) -> str:
    """The text that authorises ``action`` at ``domain``. Raises ``WalletError`` for a field that cannot stand in it.

    Instants are aware datetimes or RFC 3339 in UTC with whole seconds; they lie at most five minutes apart.
    """
    begin, end = _instant("issued-at", issued_at), _instant("expires-at", expires_at)
    if not timedelta(0) < end - begin <= MAX_ACTION_LIFETIME:
        raise WalletError("action_lifetime", "A signed action is valid for more than no time and at most five minutes.")
    text = "\n".join(
        (
            ACTION_PREFIX,
            f"domain: {_field('domain', domain, _DOMAIN)}",
            f"action: {_kind(action)}",
            f"wallet: {_wallet(wallet)}",
            f"details: {canonical_json(dict(details))}",
            f"nonce: {_field('nonce', nonce, _ACTION_NONCE)}",
            f"issued-at: {rfc3339(begin)}",
            f"expires-at: {rfc3339(end)}",
        )
    )
    if len(text) > MAX_TEXT_BYTES:
        raise WalletError("action_too_long", f"A signed action takes at most {MAX_TEXT_BYTES} bytes.")
    return text


_ACTION_NAMES = ("domain", "action", "wallet", "details", "nonce", "issued-at", "expires-at")


def parse_action(text: str) -> Action:
    """The action that ``text`` is, if ``action_text`` writes exactly this text for it. Raises ``WalletError``."""
    lines = text.split("\n") if len(text) <= MAX_TEXT_BYTES else []
    if len(lines) != 1 + len(_ACTION_NAMES) or lines[0] != ACTION_PREFIX:
        raise _malformed()
    values = []
    for name, line in zip(_ACTION_NAMES, lines[1:], strict=True):
        prefix = f"{name}: "
        if not line.startswith(prefix):
            raise _malformed()
        values.append(line.removeprefix(prefix))
    domain, kind, wallet, details_text, nonce, issued_at, expires_at = values
    try:
        details = json.loads(details_text)
    except (ValueError, RecursionError) as error:
        raise _malformed() from error
    if not isinstance(details, dict):
        raise _malformed()
    action = Action(
        domain,
        _kind(kind),
        wallet,
        details,
        nonce,
        _instant("issued-at", issued_at),
        _instant("expires-at", expires_at),
    )
    if action.text() != text:
        raise _malformed()
    return action


@dataclass(frozen=True, slots=True)
class NodeToken:
    """What a participation token says; true only if ``check_node_token`` says so too."""

    wallet: str
    expiry: int
    """Unix seconds; the token is still valid in this second."""


def mint_node_token(secret: str | bytes, wallet: str, expiry: int) -> str:
    """A participation token: base64url, unpadded, of ``node|wallet|expiry|hex HMAC-SHA256`` (contract section 2)."""
    key = secret.encode() if isinstance(secret, str) else secret
    if not key:
        raise WalletError("token_secret_unset", "A node token cannot be minted or checked without a secret.")
    claim = f"node|{_wallet(wallet)}|{expiry}"
    mac = hmac.new(key, claim.encode(), hashlib.sha256).hexdigest()
    return base64.urlsafe_b64encode(f"{claim}|{mac}".encode()).decode().rstrip("=")


def check_node_token(secret: str | bytes, token: str, now: float) -> str:
    """The wallet of a token that ``mint_node_token`` wrote with ``secret`` and that has not expired.

    Raises ``WalletError``. The whole token is rebuilt and compared, so each claim has one valid spelling.
    """
    read = read_node_token(token)
    rebuilt = mint_node_token(secret, read.wallet, read.expiry)
    if not hmac.compare_digest(rebuilt.encode(), token.encode()):
        raise WalletError("token_refused", "A node token was not written by this gateway.", "Sign in again.")
    if int(now) > read.expiry:
        raise WalletError("token_expired", "The node token has expired.", "Sign in again.")
    return read.wallet


def read_node_token(token: str) -> NodeToken:
    """What ``token`` claims, unverified: how a node learns when to sign in again. Raises ``WalletError``."""
    try:
        if len(token) > MAX_TOKEN_BYTES:
            raise ValueError("too long")
        raw = base64.b64decode(token.encode("ascii") + b"=" * (-len(token) % 4), altchars=b"-_", validate=True)
        scope, wallet, expiry, _mac = raw.decode("ascii").split("|")
    except ValueError as error:
        raise WalletError("token_malformed", "A node token is not well formed.", "Sign in again.") from error
    if scope != "node" or not _WALLET.fullmatch(wallet) or not _EXPIRY.fullmatch(expiry):
        raise WalletError("token_malformed", "A node token is not well formed.", "Sign in again.")
    return NodeToken(wallet, int(expiry))


def _malformed() -> WalletError:
    return WalletError("action_malformed", "A text is not a signed action in its exact form.")


def _kind(action: ActionKind | str) -> ActionKind:
    try:
        return ActionKind(action)
    except ValueError:
        raise WalletError("action_unknown", "A signed action names something that no action does.") from None


def _instant(name: str, value: str | datetime) -> datetime:
    if isinstance(value, datetime):
        value = rfc3339(value)
    if not _INSTANT.fullmatch(value):
        raise WalletError("action_time", f"The {name} of a signed action is not RFC 3339 in UTC with whole seconds.")
    try:
        return datetime.strptime(value, _INSTANT_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise WalletError("action_time", f"The {name} of a signed action is no date.") from None


def _field(name: str, value: str, pattern: re.Pattern[str]) -> str:
    """``value`` if it can stand on a line of its own; a line break in it would write another line."""
    if not pattern.fullmatch(value):
        raise WalletError("field_refused", f"The {name} of a text to sign has a form that is not allowed.")
    return value


def _wallet(wallet: str) -> str:
    return _field("wallet", wallet, _WALLET)


def _nonce(nonce: str) -> str:
    return _field("nonce", nonce, _BRIDGE_NONCE)


def _check_canonical(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise WalletError("not_canonical", "A value to sign is nested too deeply.")
    match value:
        case None | bool() | str():
            return
        case int():
            if not -(2**63) <= value < 2**64:
                raise WalletError("not_canonical", "A number to sign does not fit 64 bits.")
        case dict():
            for key, entry in value.items():
                if not isinstance(key, str):
                    raise WalletError("not_canonical", "A value to sign has a key that is not text.")
                _check_canonical(entry, depth + 1)
        case list() | tuple():
            for entry in value:
                _check_canonical(entry, depth + 1)
        case _:
            raise WalletError("not_canonical", f"A value to sign holds a {type(value).__name__}.")
