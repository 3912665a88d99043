"""JSON-RPC 2.0: envelopes in, envelopes out; parameters checked before anything is done with them.

Source: JSON-RPC 2.0 specification; Agave ``rpc-client-api`` for Solana's own error codes.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from solders.pubkey import Pubkey
from solders.signature import Signature

from kvasir_console.errors import KvasirError
from kvasir_console.wallet.localnet import base58
from kvasir_console.wallet.localnet.ledger import Commitment, Ledger, is_panic

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
PREFLIGHT_FAILURE = -32002
BLOCK_NOT_AVAILABLE = -32004
SIGNATURE_FAILURE = -32003
UNSUPPORTED_VERSION = -32015
MIN_CONTEXT_SLOT = -32016

MAX_BATCH = 50
MAX_TRANSACTION_BYTES = 1232
"""Solana's packet size; a longer transaction never reaches a leader."""

_log = logging.getLogger(__name__)


class RpcFault(Exception):  # noqa: N818 - the specification calls it an error object, this is what makes one
    """An answer that is a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


@dataclass(frozen=True, slots=True)
class Params:
    """Positional parameters of one call. Each reader raises ``RpcFault`` -32602 and names what it wanted."""

    values: tuple[Any, ...]

    def text(self, index: int, what: str, limit: int = 128) -> str:
        value = self.values[index] if index < len(self.values) else None
        if not isinstance(value, str) or len(value) > limit:
            raise RpcFault(INVALID_PARAMS, f"Invalid param: {what} must be a string of at most {limit} characters")
        return value

    def pubkey(self, index: int) -> Pubkey:
        return pubkey(self.text(index, "address"))

    def signature(self, index: int) -> Signature:
        return signature(self.text(index, "signature"))

    def integer(self, index: int, what: str, highest: int = 2**64 - 1) -> int:
        return bounded_integer(self.values[index] if index < len(self.values) else None, what, 0, highest)

    def strings(self, index: int, what: str, most: int) -> list[str]:
        value = self.values[index] if index < len(self.values) else None
        return bounded_strings(value, what, most)

    def config(self, index: int) -> Config:
        """The trailing object of options; absent or null counts as empty."""
        value = self.values[index] if index < len(self.values) else None
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise RpcFault(INVALID_PARAMS, "Invalid param: the configuration must be an object")
        return Config(value)


@dataclass(frozen=True, slots=True)
class Config:
    """Named options of one call; null counts as absent."""

    values: Mapping[str, Any]

    def text(self, key: str, default: str, limit: int = 128) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > limit:
            raise RpcFault(INVALID_PARAMS, f"Invalid param: {key} must be a string")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise RpcFault(INVALID_PARAMS, f"Invalid param: {key} must be a boolean")
        return bool(value)

    def integer(self, key: str, default: int, lowest: int, highest: int) -> int:
        value = self.values.get(key)
        return default if value is None else bounded_integer(value, key, lowest, highest)

    def optional_signature(self, key: str) -> Signature | None:
        return None if self.values.get(key) is None else signature(self.text(key, ""))

    def commitment(self, key: str = "commitment") -> Commitment:
        """The level asked for, by default finalized, with the old names older clients still send."""
        name = self.text(key, "finalized")
        level = _COMMITMENTS.get(name)
        if level is None:
            raise RpcFault(INVALID_PARAMS, f"Invalid param: {key} must be processed, confirmed or finalized")
        return level

    def data_slice(self) -> tuple[int, int] | None:
        value = self.values.get("dataSlice")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise RpcFault(INVALID_PARAMS, "Invalid param: dataSlice must be an object")
        return (
            bounded_integer(value.get("offset"), "dataSlice.offset", 0, 2**32),
            bounded_integer(value.get("length"), "dataSlice.length", 0, 2**32),
        )

    def checked_slot(self, ledger: Ledger) -> int:
        """The slot at the commitment asked for. Raises ``RpcFault`` -32016 below ``minContextSlot``."""
        slot = ledger.slot(self.commitment())
        if slot < self.integer("minContextSlot", 0, 0, 2**64 - 1):
            raise RpcFault(MIN_CONTEXT_SLOT, "Minimum context slot has not been reached", {"contextSlot": slot})
        return slot


_COMMITMENTS = {
    "processed": Commitment.PROCESSED,
    "confirmed": Commitment.CONFIRMED,
    "finalized": Commitment.FINALIZED,
    "recent": Commitment.PROCESSED,
    "singleGossip": Commitment.CONFIRMED,
    "single": Commitment.CONFIRMED,
    "max": Commitment.FINALIZED,
    "root": Commitment.FINALIZED,
}

Method = Callable[[Ledger, Params], Any]


def with_context(slot: int, value: Any) -> dict[str, Any]:
    """A result with the slot it is true for."""
    return {"context": {"slot": slot}, "value": value}


def pubkey(text: str) -> Pubkey:
    try:
        return Pubkey.from_string(text)
    except ValueError as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: an address is 32 bytes in base58") from error


def signature(text: str) -> Signature:
    try:
        return Signature.from_string(text)
    except ValueError as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: a signature is 64 bytes in base58") from error


def bounded_integer(value: Any, what: str, lowest: int, highest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {what} must be an integer from {lowest} to {highest}")
    return value


def bounded_strings(value: Any, what: str, most: int) -> list[str]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(each, str) for each in value):
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {what} must be a list of at most {most} strings")
    return value


def transaction_bytes(text: str, encoding: str) -> bytes:
    """A transaction or message in base58 or base64. Raises ``RpcFault`` -32602, also above 1232 bytes."""
    try:
        if encoding == "base64":
            raw = base64.b64decode(text, validate=True)
        elif encoding == "base58":
            raw = base58.decode(text)
        else:
            raise RpcFault(INVALID_PARAMS, f"Invalid param: encoding must be base58 or base64, not {encoding!r}")
    except (binascii.Error, ValueError) as error:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: the transaction is not {encoding}") from error
    if len(raw) > MAX_TRANSACTION_BYTES:
        raise RpcFault(
            INVALID_PARAMS,
            f"Invalid param: decoded {len(raw)} bytes, a transaction has at most {MAX_TRANSACTION_BYTES}",
        )
    return raw


def answer(ledger: Ledger, methods: Mapping[str, Method], body: bytes) -> bytes | None:
    """The reply to one HTTP body: one call or a batch; ``None`` when nothing in it wants an answer. Never raises."""
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _dump(_failure(None, RpcFault(PARSE_ERROR, "Parse error")))
    if not isinstance(document, list):
        reply = _answer_one(ledger, methods, document)
        return None if reply is None else _dump(reply)
    if not 0 < len(document) <= MAX_BATCH:
        return _dump(_failure(None, RpcFault(INVALID_REQUEST, f"A batch holds 1 to {MAX_BATCH} calls")))
    replies = [reply for each in document if (reply := _answer_one(ledger, methods, each)) is not None]
    return _dump(replies) if replies else None


def _answer_one(ledger: Ledger, methods: Mapping[str, Method], call: Any) -> dict[str, Any] | None:
    try:
        name, params, call_id = _request(call)
    except RpcFault as fault:
        return _failure(None, fault)
    wants_reply = "id" in call
    try:
        method = methods.get(name)
        if method is None:
            raise RpcFault(METHOD_NOT_FOUND, "Method not found")
        result = method(ledger, params)
    except RpcFault as fault:
        return _failure(call_id, fault) if wants_reply else None
    except KvasirError as error:
        return _failure(call_id, RpcFault(INTERNAL_ERROR, str(error))) if wants_reply else None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _log.exception("%s failed", name)
        return _failure(call_id, RpcFault(INTERNAL_ERROR, "Internal error")) if wants_reply else None
    return {"jsonrpc": "2.0", "result": result, "id": call_id} if wants_reply else None


def _request(call: Any) -> tuple[str, Params, str | int | None]:
    if not isinstance(call, dict) or call.get("jsonrpc") != "2.0" or not isinstance(call.get("method"), str):
        raise RpcFault(INVALID_REQUEST, "Invalid request")
    call_id, params = call.get("id"), call.get("params")
    if isinstance(call_id, bool) or not isinstance(call_id, str | int | None):
        raise RpcFault(INVALID_REQUEST, "Invalid request")
    if params is not None and not isinstance(params, list):
        raise RpcFault(INVALID_REQUEST, "Invalid request: parameters are a list")
    return call["method"], Params(tuple(params or ())), call_id


def _failure(call_id: str | int | None, fault: RpcFault) -> dict[str, Any]:
    error: dict[str, Any] = {"code": fault.code, "message": fault.message}
    if fault.data is not None:
        error["data"] = fault.data
    return {"jsonrpc": "2.0", "error": error, "id": call_id}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _dump(reply: Any) -> bytes:
    return json.dumps(reply, separators=(",", ":"), allow_nan=False).encode()
