"""What a chat completion answers: the reply's documents, made from a generation's events (contract, section 6.1)."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvasir_console.engine.process.client import DoneEvent, TokenEvent, TokenLogprob
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.backends import Event
from kvasir_console.node.gateway.generation import Generation

ENGINE_NAME = "kvasir-console"
LEAST_LOGPROB = -9999.0
"""Stands for a token that cannot come, as in OpenAI's API: JSON has no infinity."""


class Answer:
    """One reply. ``show_paths`` names files of this machine in it."""

    def __init__(self, generation: Generation, request_id: str, model_id: str, *, show_paths: bool) -> None:
        self._generation = generation
        self._id = request_id
        self._model_id = model_id
        self._show_paths = show_paths
        self._created = int(time.time())

    async def whole(self, event: Event) -> dict[str, Any]:
        logprobs: list[dict[str, Any]] = []
        while not isinstance(event, DoneEvent):
            logprobs += _logprobs(event)
            event = await self._generation.next()
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model_id,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": event.text},
                    "finish_reason": event.finish_reason,
                    "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                }
            ],
            "usage": _usage(event),
            "kvasir": self._extension(event),
        }

    async def stream(self, event: Event) -> AsyncIterator[bytes]:
        """Server-sent events. An error in the middle is the last one, without ``[DONE]``."""
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            while isinstance(event, TokenEvent):
                logprobs = _logprobs(event)
                if event.text or logprobs:
                    yield self._chunk({"content": event.text}, logprobs=logprobs)
                event = await self._generation.next()
            if event.tail:
                yield self._chunk({"content": event.tail})
            yield self._chunk({}, event.finish_reason)
            yield _sse(self._document([]) | {"usage": _usage(event), "kvasir": self._extension(event)})
            yield b"data: [DONE]\n\n"
        except KvasirError as error:
            yield _sse({"error": {"message": str(error), "type": "engine_error", "code": error.code}})

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if logprobs:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        return _sse(self._document([choice]))

    def _document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model_id,
            "choices": choices,
        }

    def _extension(self, done: DoneEvent) -> dict[str, Any]:
        first = self._generation.first_token_ms
        return {
            "engine": ENGINE_NAME,
            "request_id": self._id,
            "first_token_ms": None if first is None else round(first, 3),
            "stage_rows": done.rows,
            "tokens": list(done.tokens),
            "queued_ms": round(done.queued_ms, 3),
            "decode_steps": done.decode_steps,
            "drafted_tokens": done.drafted_tokens,
            "accepted_tokens": done.accepted_tokens,
            "pairs_local": done.pairs_local,
            "pairs_remote": done.pairs_remote,
            "failovers": done.failovers,
            "trace_path": done.trace_path if self._show_paths else None,
        }


def _logprobs(event: TokenEvent) -> list[dict[str, Any]]:
    """The token's entry among ``logprobs.content``, if any was asked for."""
    if event.logprob is None:
        return []
    return [_entry(event.logprob) | {"top_logprobs": [_entry(each) for each in event.top or ()]}]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = bytes(token.piece).decode("utf-8", "replace")
    return {"token": text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.piece)}


def _usage(done: DoneEvent) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def _sse(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
