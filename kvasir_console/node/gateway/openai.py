"""The OpenAI surface: models, health and chat completions, whole or streamed (gateway contract, section 6.1)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvasir_console.errors import EngineError, KvasirError, RequestError, UsageError, WalletError
from kvasir_console.node.gateway.backends import Backend
from kvasir_console.node.gateway.chatanswer import Answer
from kvasir_console.node.gateway.chatrequest import DEFAULT_MAX_TOKENS, ChatRequest, ParameterError, parse_chat
from kvasir_console.node.gateway.generation import Generation, Generations
from kvasir_console.node.gateway.idempotency import name_request
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.slots import RETRY_AFTER_WAITED_S, BusyError, Slots
from kvasir_console.node.gateway.web import MAX_DETAIL_CHARACTERS, error_type, read_json, status_of

log = logging.getLogger(__name__)

BUSY_CODES = frozenset({"queue_full", "queue_timeout", "kv_budget_full", "ring_busy"})
"""An engine's refusals that say: not now."""
NO_MODEL = "This gateway serves no model: its configuration names none (gateway.models is empty)."
NO_MODEL_HINT = "Its operator adds a [[gateway.models]] table with id, path and placement, and starts it again."


class OpenAI:
    """Routes under ``/v1``.

    Args:
        public_url: base URL of this gateway; its hash qualifies model ids as the contract's do.
        open_access: whether callers without the service token are served (a gateway on loopback).
        make_slots: a model's admission queue.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        generations: Generations,
        identity: Identity,
        *,
        public_url: str,
        open_access: bool,
        make_slots: Callable[[], Slots] = Slots,
    ) -> None:
        self._backends = {backend.info.model_id: backend for backend in backends}
        self._slots = {backend.info.model_id: make_slots() for backend in backends}
        self._generations = generations
        self._identity = identity
        self._open_access = open_access
        self._prefix = hashlib.sha1(public_url.encode(), usedforsecurity=False).hexdigest()[:8]
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/health", self.health, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    def qualified(self, model_id: str) -> str:
        """``<8 hex>:<id>``, as ``/api/pay/models`` names a model."""
        return f"{self._prefix}:{model_id}"

    @property
    def backends(self) -> Mapping[str, Backend]:
        return self._backends

    async def models(self, _request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": model_id,
                        "object": "model",
                        "created": self._created,
                        "owned_by": "kvasir",
                        "name": backend.info.name,
                    }
                    for model_id, backend in self._backends.items()
                ],
            }
        )

    async def health(self, _request: Request) -> Response:
        """Healthy if any model can answer; the contract's looks at the first one only."""
        for model_id, backend in self._backends.items():
            if backend.ready:
                return JSONResponse({"status": "ok", "model": model_id, "name": backend.info.name})
        if not self._backends:
            return JSONResponse({"status": "no_model", "detail": f"{NO_MODEL} {NO_MODEL_HINT}"}, 503)
        return JSONResponse({"status": "unhealthy", "recovering": True}, 503)

    async def chat(self, request: Request) -> Response:
        try:
            return await self._chat(request)
        except KvasirError as error:
            return _failure(error)

    async def _chat(self, request: Request) -> Response:
        service = self._identity.is_service(request.headers)
        if not service and not self._open_access:
            raise WalletError("token_missing", "This gateway serves callers with its service token.")
        body = await read_json(request)
        name, chat = name_request(request.headers, body), parse_chat(body)
        if chat.extended and not service:
            raise WalletError("service_token_needed", "The kvasir extension is for the operator's own machines.")
        backend = self._backend(chat.model)
        prompt_tokens, max_tokens = await _fit(backend, chat)
        caller = request.headers.get("authorization", "")
        asked = replace(chat.to_engine(max_tokens, caller=caller), key=name.key)
        slots = self._slots[backend.info.model_id]
        request_id = await self._generations.id_of(name)
        generation = self._generations.start(backend, slots, asked, request_id, prompt_tokens)
        answer = Answer(generation, request_id, backend.info.model_id, show_paths=service)
        left = asyncio.create_task(_left(request))
        try:
            # Nothing is answered before the first event: a dead backend is then a plain 503, also for a stream.
            first = await _unless_left(generation.next(), left)
            if chat.stream:
                return _EventStream(generation, answer.stream(first))
            return JSONResponse(await _unless_left(answer.whole(first), left))
        except BaseException:
            generation.cancel()
            raise
        finally:
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left

    def _backend(self, name: str) -> Backend:
        """By id, by qualified id, or by a display name that only one model has."""
        plain = name.removeprefix(f"{self._prefix}:")
        if backend := self._backends.get(plain):
            return backend
        named = [backend for backend in self._backends.values() if backend.info.name == name]
        if len(named) == 1:
            return named[0]
        if not self._backends:
            raise EngineError("no_model", NO_MODEL, NO_MODEL_HINT)
        served = ", ".join(self._backends)
        raise UsageError("model_not_served", f"The model {name[:80]!r} is not served here.", f"Served: {served}.")


class _EventStream(StreamingResponse):
    """A streamed answer. However it ends, a client that left included, its generation ends with it."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _fit(backend: Backend, chat: ChatRequest) -> tuple[int, int]:
    """(prompt tokens, most tokens to generate). Raises ``RequestError`` for what can never be held here."""
    limits = await backend.limits()
    prompt = await backend.count_tokens(chat.prompt, chat.messages)
    room = min(limits.context_length, limits.kv_tokens) - prompt
    wanted = chat.max_tokens if chat.max_tokens is not None else max(1, min(DEFAULT_MAX_TOKENS, room))
    if wanted <= room:
        return prompt, wanted
    asked = f"the prompt has {prompt} and {wanted} more are asked for."
    hint = "Shorten the prompt or lower max_tokens."
    if prompt + wanted > limits.context_length:
        holds = f"This model's context holds {limits.context_length} tokens"
        raise RequestError("context_length_exceeded", f"{holds}; {asked}", hint)
    holds = f"The memory for this model's keys and values holds {limits.kv_tokens} tokens"
    raise RequestError("kv_budget_exceeded", f"{holds}; {asked}", hint)


async def _left(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_left(work: Any, left: asyncio.Task[None]) -> Any:
    """The result of ``work``, given up when the client leaves before."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("client_left", "The client left before the answer was complete.")
        return await task
    finally:
        task.cancel()


def _failure(error: KvasirError) -> Response:
    """What the caller can change keeps its status; everything behind the gateway is one 503 (contract 6.3)."""
    headers: dict[str, str] = {}
    status, code, kind = status_of(error), error.code, ""
    if isinstance(error, BusyError) or code in BUSY_CODES:
        headers["retry-after"] = str(error.retry_after_s if isinstance(error, BusyError) else RETRY_AFTER_WAITED_S)
        status, code, kind = 503, "ring_busy", "ring_busy"
    elif status >= 500:
        log.warning("a chat request failed: %s", error)
        status, code, kind = 503, "ring_recovering", "hub_unavailable"
    body: dict[str, Any] = {"message": str(error), "type": kind or error_type(status), "code": code}
    if isinstance(error, ParameterError):
        body["param"] = error.param
    if code == "ring_recovering":
        body["detail"] = f"{error.code}: {error.message}"[:MAX_DETAIL_CHARACTERS]
    return JSONResponse({"error": body}, status, headers=headers)
