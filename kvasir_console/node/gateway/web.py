"""What every route shares: bounded JSON bodies, and one error envelope for each API surface."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvasir_console.errors import KvasirError, UsageError
from kvasir_console.relay.wire.texts import loads
from kvasir_console.wallet.keys import is_address

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2_000_000
MAX_DETAIL_CHARACTERS = 200

STATUS_BY_CODE: Mapping[str, int] = {
    "action_unknown": 400,
    "action_time": 400,
    "below_minimum": 400,
    "body_too_large": 413,
    "census_full": 503,
    "context_length_exceeded": 400,
    "delegation_malformed": 400,
    "field_refused": 400,
    "hub_unavailable": 503,
    "model_not_served": 400,
    "node_token_needed": 403,
    "not_in_plan": 403,
    "nothing_pending": 400,
    "relay_session_taken": 409,
    "ring_busy": 503,
    "ring_recovering": 503,
    "service_token_needed": 403,
    "shard_unavailable": 502,
    "signature_malformed": 400,
    "statement_malformed": 400,
    "statement_unknown": 404,
    "store_busy": 503,
    "too_many_experts": 413,
    "too_many_nonces": 429,
    "unknown_model": 404,
}
"""Where the contract names a status for a refusal; the rest follow from the kind of error."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        UsageError: ``body_too_large`` past 2 MB, whatever its headers promised; ``malformed_json``.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise UsageError("body_too_large", f"A request body has at most {MAX_BODY_BYTES} bytes.")
    try:
        value = loads(body, _no_constant) if body else {}
    except ValueError as error:
        raise UsageError("malformed_json", "The request body is not JSON.") from error
    if not isinstance(value, dict):
        raise UsageError("malformed_json", "The request body is not a JSON object.")
    return value


def wallet_field(body: Mapping[str, Any], key: str = "wallet") -> str:
    """A Solana address in the body. Raises ``UsageError``."""
    value = body.get(key)
    if not isinstance(value, str) or not is_address(value):
        raise UsageError("missing_field", f"{key} is needed: a Solana address in base58.")
    return value


def text_field(body: Mapping[str, Any], key: str, limit: int = 1024) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise UsageError("missing_field", f"{key} is needed: text of 1 to {limit} characters.")
    return value


def query_integer(request: Request, key: str) -> int:
    """A decimal number in the query. Raises ``UsageError``."""
    text = request.query_params.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError("missing_field", f"{key} is needed in the query: a whole number.")
    return int(text)


def address_of(request: Request) -> str:
    """The caller's network address. Only the front reaches this server, and it writes this header itself."""
    return request.headers.get("x-forwarded-for", "")[:64]


def status_of(error: KvasirError) -> int:
    return STATUS_BY_CODE.get(error.code, error.http_status)


async def on_kvasir_error(request: Request, error: Exception) -> Response:
    """A refusal in the envelope of its surface."""
    assert isinstance(error, KvasirError)  # noqa: S101 - registered for this class only
    status = status_of(error)
    if status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    headers = {"x-kvasir-error": error.code} if status == 403 else {}
    return envelope(request.url.path, status, str(error), error.code, headers=headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, wrong method (with ``Allow``)."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
    path = request.url.path
    if error.status_code == 404:
        return envelope(path, 404, f"There is no {request.method} {path[:200]} here.", "unknown_endpoint", nested=True)
    headers = dict(error.headers or {})
    return envelope(path, error.status_code, f"{error.detail}.", "method_not_allowed", headers=headers)


async def on_exception(_request: Request, error: Exception) -> Response:
    """What should not happen; the traceback goes to the log, never to the caller."""
    message = "The gateway failed on this request."
    body = {
        "type": "gateway_error",
        "code": "internal",
        "message": message,
        "detail": type(error).__name__[:MAX_DETAIL_CHARACTERS],
    }
    return JSONResponse({"error": body}, 500)


def envelope(
    path: str,
    status: int,
    message: str,
    code: str,
    *,
    headers: Mapping[str, str] | None = None,
    nested: bool = False,
) -> JSONResponse:
    """An error body: flat for ``/api``, nested for ``/v1`` and unknown paths, Anthropic's under ``/anthropic``."""
    kind = error_type(status)
    content: dict[str, Any]
    if path.startswith("/anthropic"):
        content = {"type": "error", "error": {"type": kind, "message": message}}
    elif nested or path.startswith("/v1"):
        content = {"error": {"message": message, "type": kind, "code": code}}
    else:
        content = {"error": message, "code": code}
    return JSONResponse(content, status, headers=headers)


def error_type(status: int) -> str:
    """The ``type`` of an OpenAI-style error for a status."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "hub_unavailable" if status == 503 else "gateway_error"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
