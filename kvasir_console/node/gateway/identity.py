"""Who calls: the operator's secrets, participation tokens, challenges and signed actions.

Three secrets with three purposes, each in a private file of its own: the service token (machines of the operator),
the key that node tokens are authenticated with, and the hub's signing key.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nacl.signing import SigningKey

from kvasir_console.errors import KvasirError, SystemResourceError, UsageError, WalletError
from kvasir_console.node.gateway import hubkey
from kvasir_console.node.gateway.store import NONCE_TTL_S, Store
from kvasir_console.paths import private_directory
from kvasir_console.relay.wire import signed
from kvasir_console.relay.wire.statement import Rotation
from kvasir_console.wallet.delegation import Delegation, parse_details
from kvasir_console.wallet.keys import decode_signature, encode_address, verify

SERVICE_HEADER = "x-kvasir-service-token"
MIN_SERVICE_TOKEN_CHARACTERS = 16
_NODE_TOKEN_PURPOSE = "node-token"  # noqa: S105 - the name of a purpose
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secrets:
    service_token: str = field(repr=False)
    node_token_key: bytes = field(repr=False)
    hub_seed: bytes = field(repr=False)
    rotations: tuple[Rotation, ...] = ()
    """How the hub's key came to be the one it is, oldest first."""

    @classmethod
    def load(cls, directory: Path, service_token_file: Path | None = None) -> Secrets:
        """Read the secrets from ``directory``, making those that are not there.

        Raises:
            SystemResourceError: a file cannot be read or made, or others may read it.
        """
        private_directory(directory)
        hubkey.finish_rotation(directory)
        file = service_token_file or directory / "service-token"
        token = _secret(file, lambda: secrets.token_urlsafe(_SECRET_BYTES).encode()).decode("ascii", "replace").strip()
        if len(token) < MIN_SERVICE_TOKEN_CHARACTERS or not token.isprintable() or not token.isascii():
            raise SystemResourceError(
                "service_token_weak",
                f"{file} does not hold a service token of {MIN_SERVICE_TOKEN_CHARACTERS} or more characters.",
                "Remove the file to have one made, or write a random one into it.",
            )
        keys = []
        for name in ("node-token-key", "hub-key"):
            key = _secret(directory / name, lambda: secrets.token_bytes(_SECRET_BYTES))
            if len(key) != _SECRET_BYTES:
                raise SystemResourceError(
                    "secret_malformed",
                    f"{directory / name} does not hold {_SECRET_BYTES} bytes.",
                    "Restore it from a backup; removing it voids every node token or pinned hub key.",
                )
            keys.append(key)
        return cls(token, keys[0], keys[1], hubkey.read_rotations(directory))


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request: a node with its wallet, or a machine of the operator (``wallet`` is ``None``)."""

    wallet: str | None

    @property
    def service(self) -> bool:
        return self.wallet is None

    def require_wallet(self) -> str:
        if self.wallet is None:
            raise WalletError("node_token_needed", "This needs a node token: it is done for a wallet.")
        return self.wallet


class Identity:
    """Mints and checks what callers show."""

    def __init__(self, secrets_: Secrets, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._secrets = secrets_
        self._store = store
        self.domains: tuple[str, ...] = ()
        """The names this gateway is reached by, ``host`` or ``host:port`` in lower case, the preferred one first.

        Set once the port is known; without them no signed action is accepted.
        """
        self._clock = clock
        self._hub_key = SigningKey(secrets_.hub_seed)

    @property
    def hub_key(self) -> str:
        """The hub's public key in base58."""
        return encode_address(bytes(self._hub_key.verify_key))

    @property
    def hub_keys(self) -> frozenset[str]:
        """The key, and those that it was exchanged for."""
        return frozenset({self.hub_key, *(each.old for each in self._secrets.rotations)})

    @property
    def hub_key_rotations(self) -> list[dict[str, str]]:
        """As ``/api/config`` announces them."""
        return [
            {"text": each.text(), "signature": base64.b64encode(each.signature).decode()}
            for each in self._secrets.rotations
        ]

    async def check_statement_key(self, wallet: str, key: str) -> None:
        """Raises ``WalletError`` unless ``key`` may acknowledge statements for ``wallet`` now."""
        if (
            key != wallet
            and await asyncio.to_thread(self._store.delegated_until, wallet, key, int(self._clock())) is None
        ):
            raise WalletError(
                "delegation_unknown", "That key may not acknowledge for this wallet.", "Unlock the wallet again."
            )

    def sign_as_hub(self, message: bytes) -> bytes:
        signature: bytes = self._hub_key.sign(message).signature
        return signature

    def is_service(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries the service token, in its own header or as a bearer token."""
        shown = (headers.get(SERVICE_HEADER, ""), _bearer(headers))
        return any(hmac.compare_digest(text.encode(), self._secrets.service_token.encode()) for text in shown)

    def edge_ticket(self, ring: str, generation: int, edge: int) -> str:
        """What the two ends of a ring's edge show each other, in hexadecimal digits; another with each plan."""
        text = f"kvasir-edge-v1\n{ring}\n{generation}\n{edge}"
        return hmac.new(self._secrets.node_token_key, text.encode(), "sha256").hexdigest()

    def require_service(self, headers: Mapping[str, str]) -> None:
        """Raises ``WalletError``: 401 with nothing shown, 403 with something else."""
        if not self.is_service(headers):
            shown = headers.get(SERVICE_HEADER) or _bearer(headers)
            code = "service_token_needed" if shown else "token_missing"
            raise WalletError(code, "This route is for the operator's own machines.", "Send the service token.")

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The node or machine behind a request. Raises ``WalletError``."""
        if self.is_service(headers):
            return Caller(None)
        token = _bearer(headers) or headers.get(SERVICE_HEADER, "")
        if not token:
            raise WalletError("token_missing", "This needs a node token.", "Sign in with the wallet first.")
        return Caller(self.wallet_of(token))

    def wallet_of(self, token: str) -> str:
        """The wallet of a node token. Raises ``WalletError``."""
        return signed.check_node_token(self._secrets.node_token_key, token, self._clock())

    async def challenge(self, wallet: str, address: str) -> tuple[str, str]:
        """(nonce, message) for a wallet that asks for a node token from a network address."""
        nonce = await asyncio.to_thread(
            self._store.issue_nonce, wallet, _NODE_TOKEN_PURPOSE, int(self._clock()), address=address
        )
        return nonce, signed.bridge_challenge_text(wallet, nonce)

    async def node_token(self, wallet: str, nonce: str, signature: str, key: str | None = None) -> tuple[str, int]:
        """(token, seconds it is valid) against the signed challenge. The nonce is spent even when this fails.

        Args:
            key: the session key that signed, if it was not the wallet; its token ends with its delegation.

        Raises:
            WalletError: ``challenge_refused``, ``signature_refused`` or ``delegation_unknown``.
        """
        now = int(self._clock())
        if not await asyncio.to_thread(self._store.consume_nonce, nonce, wallet, _NODE_TOKEN_PURPOSE, now):
            raise _challenge_refused()
        lifetime_s = signed.NODE_TOKEN_TTL_S
        if key is not None:
            until = await asyncio.to_thread(self._store.delegated_until, wallet, key, now)
            if until is None:
                raise WalletError(
                    "delegation_unknown", "That key may not take part for this wallet.", "Unlock the wallet again."
                )
            lifetime_s = min(lifetime_s, until - now)
        _check_signature(key or wallet, signed.bridge_challenge_text(wallet, nonce), signature)
        return signed.mint_node_token(self._secrets.node_token_key, wallet, now + lifetime_s), lifetime_s

    async def delegate(self, wallet: str, message: str, signature: str) -> Delegation:
        """Let a session key take part for ``wallet``, as its signed ``delegate`` action says.

        Raises:
            WalletError: as ``check_action``, and ``delegation_malformed``.
        """
        action = await self.check_action(wallet, signed.ActionKind.DELEGATE, message, signature)
        granted, now = parse_details(action.details), self._clock()
        granted.check(wallet, now)
        await asyncio.to_thread(self._store.delegate, wallet, granted.key, granted.until_s, int(now))
        return granted

    async def action_challenge(self, wallet: str, action: str, host: str, address: str) -> dict[str, str]:
        """What a wallet needs to write the text of a signed action.

        ``host`` is the name the caller reached us by; it is answered if it is one of ours.
        """
        try:
            kind = signed.ActionKind(action)
        except ValueError:
            raise UsageError("action_unknown", f"There is no action {action[:40]!r}.") from None
        domain = self._domain(host)
        now = int(self._clock())
        nonce = await asyncio.to_thread(self._store.issue_nonce, wallet, f"action:{kind}", now, address=address)
        return {
            "nonce": nonce,
            "issued_at": signed.rfc3339(now),
            "expires_at": signed.rfc3339(now + NONCE_TTL_S),
            "domain": domain,
        }

    async def check_action(self, wallet: str, kind: signed.ActionKind, message: str, signature: str) -> signed.Action:
        """The action, if ``wallet`` signed it for this gateway, now, and for the first time.

        The nonce is spent even when the rest fails.

        Raises:
            WalletError: naming what is wrong.
        """
        action = signed.parse_action(message)
        now = self._clock()
        fresh = await asyncio.to_thread(self._store.consume_nonce, action.nonce, wallet, f"action:{kind}", int(now))
        if not fresh:
            raise _challenge_refused()
        action.check(domain=self._domain(action.domain), kind=kind, wallet=wallet, nonce=action.nonce, now=now)
        _check_signature(wallet, message, signature)
        return action

    def _domain(self, name: str) -> str:
        """``name`` if it is one of ours, else our preferred one."""
        if not self.domains:
            raise WalletError("domain_unknown", "The gateway does not know its own name yet.", "Try again in a moment.")
        return name if name.lower() in self.domains else self.domains[0]


def _check_signature(wallet: str, text: str, signature: str) -> None:
    try:
        raw = decode_signature(signature)
    except KvasirError:
        raw = b""
    if not verify(wallet, text.encode(), raw):
        raise WalletError(
            "signature_refused", f"That is not {wallet}'s signature over the challenge.", "Ask for a new challenge."
        )


def _challenge_refused() -> WalletError:
    return WalletError(
        "challenge_refused",
        "The challenge is unknown, has expired, was used, or belongs to another wallet.",
        "Ask for a new challenge.",
    )


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _secret(file: Path, make: Callable[[], bytes]) -> bytes:
    """The bytes of a private file, made if it is not there."""
    try:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with open(descriptor, "wb") as stream:
                stream.write(make())
                stream.flush()
                os.fsync(descriptor)
        with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            data = stream.read(4096)
    except OSError as error:
        raise SystemResourceError(
            "secret_unavailable", f"{file} cannot be used: {error.strerror or error}.", "Check its permissions."
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SystemResourceError(
            "secret_exposed",
            f"{file} is not a file that only its owner can read.",
            f"Close it with: chmod 600 '{file}'",
        )
    return data
