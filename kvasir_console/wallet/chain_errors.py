"""What a Solana RPC can answer or fail to answer, as this program's errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from solana.exceptions import SolanaRpcException
from solana.rpc.core import RPCException
from solders.errors import SerdeJSONError
from solders.rpc.errors import InternalErrorMessage, RpcCustomErrorFieldless, SendTransactionPreflightFailureMessage
from solders.transaction_status import (
    InstructionErrorCustom,
    TransactionErrorFieldless,
    TransactionErrorInstructionError,
    TransactionErrorInsufficientFundsForRent,
)

from kvasir_console.errors import KvasirError, LedgerError, NetworkError

_T = TypeVar("_T")


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
    """Await one RPC request.

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
    except SerdeJSONError as error:
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
    message = str(getattr(answer, "message", answer))
    if isinstance(answer, InternalErrorMessage):
        return LedgerError("rpc_internal", f"The Solana RPC could not answer {what}: {message}")
    return LedgerError("rpc_refused", f"The Solana RPC refused {what}: {message}.")


def _unreachable(what: str, cause: BaseException | None) -> NetworkError:
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403):
        return NetworkError(
            "rpc_unauthorised",
            f"The Solana RPC refused access (HTTP {status}, {what}).",
            "Check that wallet.rpc_auth_file is the file of this ledger.",
        )
    if status == 429:
        return NetworkError(
            "rpc_rate_limited", f"The Solana RPC asks for a pause (HTTP 429, {what}).", "Try again in a minute."
        )
    reason = f"HTTP {status}" if status else type(cause).__name__
    return NetworkError(
        "rpc_unreachable",
        f"The Solana RPC did not answer ({what}: {reason}).",
        "Check wallet.rpc_url and the network; nothing needs to be sent twice by hand.",
    )


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
