"""Sign-In-With-Solana, both sides: the text a wallet builds from fields, and what a server reads from a text.

The grammar is the ABNF of Phantom's specification, to the byte: optional fields leave no line, one blank line stands
before the statement and one before the fields (EIP-4361 leaves two without a statement), and nothing follows the last
line. ``parse`` reads exactly the texts ``SignIn.text`` writes. Where the specification makes a field optional, the
rules here do not: a verifier wants chain, nonce, issue and expiry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from kvasir_console.errors import WalletError
from kvasir_console.wallet.keys import is_address, verify

MAX_TEXT_BYTES = 16 * 2**10
TOLERANCE = timedelta(minutes=10)
"""How far the time of issue may be from the verifier's clock, either way."""
CHAINS = ("mainnet", "testnet", "devnet", "localnet", "solana:mainnet", "solana:testnet", "solana:devnet")

_TITLE = " wants you to sign in with your Solana account:"
_UNRESERVED = r"A-Za-z0-9\-._~"
_SUB_DELIMS = r"!$&'()*+,;="
_PCHAR = rf"(?:[{_UNRESERVED}{_SUB_DELIMS}:@]|%[0-9A-Fa-f]{{2}})"
_DOMAIN = re.compile(rf"(?:[{_UNRESERVED}{_SUB_DELIMS}:@\[\]]|%[0-9A-Fa-f]{{2}})+")
_STATEMENT = re.compile(rf"[{_UNRESERVED}{_SUB_DELIMS}:/?#\[\]@ ]+")
_URI = re.compile(rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{_PCHAR}|[/?#\[\]])*")
_NONCE = re.compile(r"[A-Za-z0-9]{8,}")
_REQUEST_ID = re.compile(rf"{_PCHAR}*")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SignIn:
    """The fields of one text. Instants are RFC 3339 text, kept as they were written."""

    domain: str
    address: str
    statement: str | None = None
    uri: str | None = None
    version: str | None = None
    chain_id: str | None = None
    nonce: str | None = None
    issued_at: str | None = None
    expiration_time: str | None = None
    not_before: str | None = None
    request_id: str | None = None
    resources: tuple[str, ...] | None = None

    def text(self) -> str:
        """The text that is signed.

        Raises:
            WalletError: ``sign_in_malformed`` naming a field that cannot stand in it.
        """
        self._check()
        lines = [self.domain + _TITLE, self.address]
        if self.statement is not None:
            lines += ["", self.statement]
        fields = [f"{label}: {value}" for label, name in _LABELS if (value := getattr(self, name)) is not None]
        if self.resources is not None:
            fields += ["Resources:", *(f"- {each}" for each in self.resources)]
        text = "\n".join([*lines, *(["", *fields] if fields else [])])
        if len(text) > MAX_TEXT_BYTES:
            raise _malformed(f"it has more than {MAX_TEXT_BYTES} bytes")
        return text

    def _check(self) -> None:
        for name, pattern in _PATTERNS.items():
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise _malformed(f"its {name} has a form that is not allowed")
        for name in _INSTANTS:
            value = getattr(self, name)
            if value is not None:
                _instant(name, value)
        if not is_address(self.address):
            raise _malformed("its address is no Solana address")
        if self.version not in (None, "1"):
            raise _malformed("its version is unknown")
        if self.chain_id not in (None, *CHAINS):
            raise _malformed("its chain is unknown")
        if self.statement is not None and _is_field(self.statement):
            raise _malformed("its statement reads like a field")
        if any(not _URI.fullmatch(each) for each in self.resources or ()):
            raise _malformed("a resource in it is no URI")


_LABELS = (
    ("URI", "uri"),
    ("Version", "version"),
    ("Chain ID", "chain_id"),
    ("Nonce", "nonce"),
    ("Issued At", "issued_at"),
    ("Expiration Time", "expiration_time"),
    ("Not Before", "not_before"),
    ("Request ID", "request_id"),
)
_PATTERNS = {
    "domain": _DOMAIN,
    "statement": _STATEMENT,
    "uri": _URI,
    "nonce": _NONCE,
    "request_id": _REQUEST_ID,
    "issued_at": _INSTANT,
    "expiration_time": _INSTANT,
    "not_before": _INSTANT,
}
_INSTANTS = ("issued_at", "expiration_time", "not_before")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a verifier, or a wallet before it signs, knows by itself."""

    domain: str
    address: str
    now: datetime
    uri_origin: str | None = None
    """``https://host[:port]``; checked where the text has a URI."""
    chain_id: str | None = None
    """With or without ``solana:``; ``None`` takes any."""
    nonce: str | None = None
    """The one that was handed out; ``None`` takes any."""
    tolerance: timedelta = TOLERANCE


def parse(text: str) -> SignIn:
    """The fields of a text in its exact form.

    Raises:
        WalletError: ``sign_in_malformed``.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise _malformed(f"it has more than {MAX_TEXT_BYTES} bytes")
    lines = text.split("\n")
    domain = lines[0].removesuffix(_TITLE)
    if len(lines) < 2 or domain == lines[0]:
        raise _malformed("it does not begin like one")
    values: dict[str, str] = {}
    resources: tuple[str, ...] | None = None
    rest = lines[2:]
    if len(rest) > 1 and rest[0] == "" and not _is_field(rest[1]):
        values["statement"] = rest[1]
        rest = rest[2:]
    if rest:
        if rest[0] != "" or len(rest) == 1:
            raise _malformed("a blank line is missing, or too many are there")
        rest = rest[1:]
        for label, name in _LABELS:
            if rest and rest[0].startswith(f"{label}: "):
                values[name] = rest.pop(0).removeprefix(f"{label}: ")
        if rest and rest[0] == "Resources:":
            if not all(line.startswith("- ") for line in rest[1:]):
                raise _malformed("its resources are not a list")
            resources, rest = tuple(line.removeprefix("- ") for line in rest[1:]), []
        if rest:
            raise _malformed("a field is unknown, stands twice or in another order")
    message = SignIn(domain, lines[1], resources=resources, **values)
    if message.text() != text:
        raise _malformed("it has another form than its fields give")
    return message


def errors(message: SignIn, expected: Expected) -> tuple[str, ...]:
    """The fields that are not what they have to be, by name; none means that the message may be signed or believed."""
    found: list[str] = []
    if message.domain.lower() != expected.domain.lower():
        found.append("domain")
    if message.address != expected.address:
        found.append("address")
    if (
        message.uri is not None
        and expected.uri_origin is not None
        and _origin(message.uri) != _origin(expected.uri_origin)
    ):
        found.append("uri")
    if message.chain_id is None or (
        expected.chain_id is not None and _chain(message.chain_id) != _chain(expected.chain_id)
    ):
        found.append("chain_id")
    if message.nonce is None or expected.nonce not in (None, message.nonce):
        found.append("nonce")
    now = expected.now
    issued, expires, begins = (
        None if value is None else _instant(name, value)
        for name, value in zip(_INSTANTS, (message.issued_at, message.expiration_time, message.not_before), strict=True)
    )
    if issued is None or abs(now - issued) > expected.tolerance:
        found.append("issued_at")
    if expires is None or expires <= now or (issued is not None and expires <= issued):
        found.append("expiration_time")
    if begins is not None and (begins > now or (expires is not None and begins >= expires)):
        found.append("not_before")
    return tuple(found)


def check(message: SignIn, expected: Expected) -> None:
    """Raises ``WalletError`` ``sign_in_refused`` naming every field that is wrong."""
    wrong = errors(message, expected)
    if wrong:
        raise WalletError(
            "sign_in_refused",
            f"The sign-in does not fit: {', '.join(wrong)}.",
            "Ask for a new one; if the times are wrong, check this machine's clock.",
        )


def verify_sign_in(text: str, signature: bytes, expected: Expected) -> SignIn:
    """The message, if its form, its rules and its signature are right. The nonce's single use is the caller's.

    Raises:
        WalletError: ``sign_in_malformed``, ``sign_in_refused`` or ``signature_refused``.
    """
    message = parse(text)
    check(message, expected)
    if not verify(message.address, text.encode(), signature):
        raise WalletError("signature_refused", "The signature is not the address's over this sign-in.")
    return message


def _is_field(line: str) -> bool:
    return line == "Resources:" or any(line.startswith(f"{label}: ") for label, _ in _LABELS)


def _instant(name: str, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise _malformed(f"its {name} is no date") from None
    return instant.astimezone(UTC)


def _chain(name: str) -> str:
    return name.removeprefix("solana:")


def _origin(uri: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port as a browser compares them (RFC 6454)."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        return uri, None, None
    return parts.scheme, parts.hostname, port or {"https": 443, "http": 80}.get(parts.scheme)


def _malformed(what: str) -> WalletError:
    return WalletError("sign_in_malformed", f"A text is no sign-in with Solana: {what}.", "Nothing was signed.")
