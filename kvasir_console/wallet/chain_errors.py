"""What a Solana RPC can answer or fail to answer, as this program's errors."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from solana.exceptions import SolanaRpcException
from solana.rpc.core import RPCException
from solders.errors import SerdeJSONError
from solders.rpc.errors import (
    InternalErrorMessage,
    MinContextSlotNotReachedMessage,
    NodeUnhealthyMessage,
    RpcCustomErrorFieldless,
    SendTransactionPreflightFailureMessage,
)
from solders.transaction_status import (
    InstructionErrorCustom,
    TransactionErrorFieldless,
    TransactionErrorInstructionError,
    TransactionErrorInsufficientFundsForRent,
)

from kvasir_console.errors import KvasirError, LedgerError, NetworkError

_T = TypeVar("_T")

MAX_RETRY_AFTER_S = 300.0


class RateLimitedError(NetworkError):
    """The RPC wants a pause. ``retry_after_s`` is how long it said, or ``None``."""

    def __init__(self, what: str, retry_after_s: float | None) -> None:
        pause = "in a minute" if retry_after_s is None else f"in {retry_after_s:.0f} seconds"
        super().__init__("rpc_rate_limited", f"The Solana RPC asks for a pause ({what}).", f"Try again {pause}.")
        self.retry_after_s = retry_after_s


class PreflightError(LedgerError):
    """The RPC tried a transaction before passing it on, and it would fail. ``err`` is Solana's error."""

    def __init__(self, message: str, hint: str, err: Any) -> None:
        super().__init__("transaction_refused", message, hint)
        self.err = err

    @property
    def already_processed(self) -> bool:
        return bool(self.err == TransactionErrorFieldless.AlreadyProcessed)

    @property
    def blockhash_not_found(self) -> bool:
        """The blockhash is too old, or so new that this RPC has not seen it yet: they cannot be told apart here."""
        return bool(self.err == TransactionErrorFieldless.BlockhashNotFound)


async def ask(what: str, request: Awaitable[_T]) -> _T:
    """Await one RPC request, and whatever is read out of its answer.

    Args:
        what: the request in a few words, for messages ("the balance of …").

    Raises:
        NetworkError: no answer, or none that can be understood; whether the request took effect is not known.
        LedgerError: the RPC answered with an error.
        PreflightError: it refused a transaction.
    """
    try:
        return await request
    except RPCException as error:
        raise _refused(what, error.args[0] if error.args else None) from error
    except SolanaRpcException as error:
        raise _unreachable(what, error.__cause__) from error
    except (SerdeJSONError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # The bindings' own refusal of an answer, or what comes of reading one that lacks a part.
        raise NetworkError(
            "rpc_malformed",
            f"The Solana RPC answered something else than asked for ({what}).",
            "Check wallet.rpc_url: it may not be a Solana RPC.",
        ) from error


def _refused(what: str, answer: Any) -> KvasirError:
    if isinstance(answer, SendTransactionPreflightFailureMessage):
        err = answer.data.err
        return PreflightError(
            f"The ledger refused {what}: {describe_error(err)}.", _HINTS.get(_key(err), "Check it."), err
        )
    if answer == RpcCustomErrorFieldless.TransactionSignatureVerificationFailure:
        return LedgerError("signature_refused", f"The ledger refused {what}: a signature does not match.")
    if isinstance(answer, NodeUnhealthyMessage | MinContextSlotNotReachedMessage):
        return stale(what, "it says so itself")
    message = str(getattr(answer, "message", answer))
    if isinstance(answer, InternalErrorMessage):
        return LedgerError("rpc_internal", f"The Solana RPC could not answer {what}: {message}")
    return LedgerError("rpc_refused", f"The Solana RPC refused {what}: {message}.")


def stale(what: str, why: str) -> NetworkError:
    """A node that lags behind its cluster: what it does not know may have happened all the same."""
    return NetworkError(
        "rpc_stale",
        f"The Solana RPC is behind its cluster ({why}; {what}).",
        "Wait until it has caught up, or name another in wallet.rpc_url or wallet.rpc_fallbacks.",
    )


def _unreachable(what: str, cause: BaseException | None) -> NetworkError:
    response = cause.response if isinstance(cause, httpx2.HTTPStatusError) else None
    if response is not None and response.status_code in (401, 403):
        return NetworkError(
            "rpc_unauthorised",
            f"The Solana RPC refused access (HTTP {response.status_code}, {what}).",
            "Check that wallet.rpc_auth_file is the file of this ledger.",
        )
    if response is not None:
        retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
        if response.status_code == 429 or (response.status_code == 503 and retry_after_s is not None):
            return RateLimitedError(what, retry_after_s)
    reason = type(cause).__name__ if response is None else f"HTTP {response.status_code}"
    return NetworkError(
        "rpc_timeout" if isinstance(cause, httpx2.TimeoutException) else "rpc_unreachable",
        f"The Solana RPC did not answer ({what}: {reason}).",
        "Check wallet.rpc_url and the network; nothing needs to be sent twice by hand.",
    )


def _retry_after_s(text: str) -> float | None:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), at most ``MAX_RETRY_AFTER_S``; ``None`` without one."""
    try:
        if text.isascii() and text.isdigit():
            seconds = float(text[:12])
        else:
            at = parsedate_to_datetime(text)
            seconds = (at.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    except (ValueError, OverflowError, OSError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def describe_error(err: Any) -> str:
    """A transaction error in words."""
    if isinstance(err, TransactionErrorInstructionError):
        reason = err.err
        if isinstance(reason, InstructionErrorCustom):
            words = _TOKEN_ERRORS.get(reason.code, "") or _SYSTEM_ERRORS.get(reason.code, "")
            return f"instruction {err.index} failed with code {reason.code}" + (f" ({words})" if words else "")
        return f"instruction {err.index} failed ({str(reason).rsplit('.', 1)[-1]})"
    if isinstance(err, TransactionErrorInsufficientFundsForRent):
        return f"account {err.account_index} would hold less SOL than rent asks for"
    return str(err).rsplit(".", 1)[-1]


def _key(err: Any) -> str:
    if isinstance(err, TransactionErrorInstructionError) and isinstance(err.err, InstructionErrorCustom):
        return str(err.err.code)
    return str(err).rsplit(".", 1)[-1]


# spl-token's and the system program's own codes; they share the number 1 and its meaning.
_TOKEN_ERRORS = {
    1: "insufficient funds",
    3: "another mint",
    4: "not the owner",
    17: "the account is frozen",
    18: "wrong decimals",
}
_SYSTEM_ERRORS = {0: "the account is in use already"}
_HINTS = {
    "1": "Check the balance.",
    "AccountNotFound": "The paying wallet has no SOL for the fee.",
    "InsufficientFundsForFee": "Send the paying wallet some SOL for the fee.",
    "BlockhashNotFound": "Sign it again only when its outcome says it expired.",
    "AlreadyProcessed": "Ask for its outcome.",
}
