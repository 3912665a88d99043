"""The one error tree.

    KvasirError
    ├── UsageError        a command or option that cannot be carried out as written
    ├── ConfigError       the configuration file, an environment variable or a flag is wrong
    ├── NetworkError      a peer, gateway or package index cannot be reached or misbehaves
    ├── WalletError       a vault, key file, passphrase or signature is refused
    ├── ModelError        a model file, shard or catalogue entry is refused
    ├── EngineError       the engine process failed or refused a request
    │   └── RequestError  a request that this engine can never serve (prompt too long, bad sampling)
    ├── LedgerError       the chain or the settlement store refused
    └── SystemResourceError   a port, file, disk or memory of this machine is not available

Each error carries a stable ``code`` (lower_snake), a message that says what happened to what, and a hint that
says what to do next. An error is mapped once, at the edge: ``exit_code`` for the command line, ``http_status`` for a
server, both for a toast.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of ``kvasir-console``; they are documented in the README and do not change."""

    OK = 0
    FAILURE = 1
    """Something failed that has no code of its own; the message says what."""
    USAGE = 2
    """A flag, a command or the configuration is wrong."""
    NETWORK = 3
    """A gateway, relay, ledger or package index could not be reached."""
    WALLET = 4
    """A wallet, passphrase or signature was refused."""
    MODEL = 5
    """A model file or shard was refused."""
    ENGINE = 6
    """The engine failed, or refused the request (a prompt longer than the context)."""
    LEDGER = 7
    """The ledger or the settlement store refused."""
    RESOURCE = 8
    """A port, file, disk or memory of this machine is not available."""
    INTERRUPTED = 130


class KvasirError(Exception):
    """Root of every error this program raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE
    http_status: ClassVar[int] = 500

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def as_dict(self) -> dict[str, str]:
        """The error as it crosses a process boundary."""
        return {"kind": type(self).__name__, "code": self.code, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_dict(data: object) -> KvasirError:
        """Rebuild an error sent by ``as_dict``; an unknown kind, or anything else, becomes a plain ``KvasirError``."""
        if not isinstance(data, Mapping):
            data = {}
        kind = _KINDS.get(str(data.get("kind", "")), KvasirError)
        return kind(
            str(data.get("code", "unknown")),
            str(data.get("message", "the other process gave no message")),
            str(data.get("hint", "")),
        )


class UsageError(KvasirError):
    exit_code = ExitCode.USAGE
    http_status = 400


class ConfigError(KvasirError):
    exit_code = ExitCode.USAGE


class NetworkError(KvasirError):
    exit_code = ExitCode.NETWORK
    http_status = 502


class WalletError(KvasirError):
    exit_code = ExitCode.WALLET
    http_status = 401


class ModelError(KvasirError):
    exit_code = ExitCode.MODEL
    http_status = 422


class EngineError(KvasirError):
    exit_code = ExitCode.ENGINE
    http_status = 503


class RequestError(EngineError):
    http_status = 400


class LedgerError(KvasirError):
    exit_code = ExitCode.LEDGER
    http_status = 409


class SystemResourceError(KvasirError):
    exit_code = ExitCode.RESOURCE


_KINDS: dict[str, type[KvasirError]] = {
    kind.__name__: kind
    for kind in (
        KvasirError,
        UsageError,
        ConfigError,
        NetworkError,
        WalletError,
        ModelError,
        EngineError,
        RequestError,
        LedgerError,
        SystemResourceError,
    )
}
