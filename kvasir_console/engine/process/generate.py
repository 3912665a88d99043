"""The generation loop: prompt in fixed chunks, then one token a step, until a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir_console.engine.chat import ChatTemplate
from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.engine.process.pipeline import PREFILL_CHUNK, Pipeline, SequenceParams
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256


def parse_request(message: dict[str, Any]) -> GenerateRequest:
    """Read ``generate`` fields from a control message. Raises ``RequestError`` naming the field."""
    known = set(GenerateRequest.__dataclass_fields__)
    fields = {key: value for key, value in message.items() if key in known}
    if unknown := set(message) - known - {"id", "verb"}:
        raise RequestError("unknown_field", f"generate has no field {sorted(unknown)[0]!r}.")
    for key, kinds in _FIELD_TYPES.items():
        if key in fields and (not isinstance(fields[key], kinds) or (bool not in kinds and fields[key] is True)):
            raise RequestError("wrong_type", f"generate: {key} has the wrong type ({type(fields[key]).__name__}).")
    for key in ("messages", "prompt_tokens", "stop"):
        if key in fields:
            fields[key] = tuple(fields[key])
    request = GenerateRequest(**fields)
    given = [request.prompt is not None, request.messages is not None, request.prompt_tokens is not None]
    if sum(given) != 1:
        raise RequestError("no_prompt", "A request needs exactly one of prompt, messages and prompt_tokens.")
    if request.prompt_tokens is not None and not all(type(token) is int for token in request.prompt_tokens):
        raise RequestError("wrong_type", "generate: prompt_tokens must be integers.")
    if request.max_tokens < 1:
        raise RequestError("max_tokens_out_of_range", "max_tokens must be at least 1.")
    if request.experts not in ("network", "local"):
        raise RequestError("unknown_experts_mode", "experts must be 'network' or 'local'.")
    if len(request.stop) > MAX_STOP_STRINGS or not all(
        isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in request.stop
    ):
        raise RequestError(
            "bad_stop",
            f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters.",
        )
    return request


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "messages": (list,),
    "prompt_tokens": (list,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "stop": (list,),
    "ignore_eos": (bool,),
    "experts": (str,),
    "trace": (bool,),
}


class Generator:
    """Runs requests over one pipeline. Owns the tokenizer and the chat template of the loaded model."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        context_length: int,
        trace_directory: Path,
    ) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = context_length
        self._trace_directory = trace_directory
        self._traces = 0

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Prompt tokens of a request. A long text or a slow template keeps nobody else waiting.

        Raises:
            RequestError: the template refuses the messages, a token is out of range, or there is no token at all.
        """
        return await asyncio.to_thread(self._tokenize, request)

    def close(self) -> None:
        self._template.close()

    def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.prompt_tokens is not None:
            tokens = list(request.prompt_tokens)
            if any(not 0 <= token < self._tokenizer.n_vocab for token in tokens):
                raise RequestError("token_out_of_range", f"prompt_tokens must be in [0, {self._tokenizer.n_vocab}).")
        elif request.messages is not None:
            tokens = self._tokenizer.encode(self._template.render(list(request.messages)))
        else:
            tokens = self._tokenizer.encode(request.prompt or "")
        if not tokens:
            raise RequestError("empty_prompt", "The prompt has no tokens.", "Send at least one character.")
        return tokens

    def check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self._context_length:
            raise RequestError(
                "context_length_exceeded",
                f"The prompt has {prompt_tokens} tokens and {max_tokens} more are asked for; "
                f"this model's context holds {self._context_length}.",
                "Shorten the prompt or lower max_tokens.",
            )

    async def run(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[TokenEvent | DoneEvent, None]:
        """Token events and the final event of one request. Closing the iterator frees the sequence."""
        trace = None
        if request.trace:
            self._traces += 1
            trace = self._trace_directory / f"trace-{self._traces}.npy"
        sampling = SamplingParams(
            temperature=float(request.temperature),
            top_k=request.top_k,
            top_p=float(request.top_p),
            min_p=float(request.min_p),
            seed=request.seed,
        )
        sequence = await self._pipeline.open(
            SequenceParams(
                sampling=sampling,
                capacity=len(prompt) + request.max_tokens,
                experts=request.experts,
                trace=trace,
                prompt_tokens=tuple(prompt),
            )
        )
        started = time.monotonic()
        first: float | None = None
        tokens: list[int] = []
        emitted = StopScanner(request.stop)
        decoder = self._tokenizer.stream(skip_special=True)
        finish = "length"
        trace_path: str | None = None
        try:
            token: int | None = None
            for begin in range(0, len(prompt), PREFILL_CHUNK):
                chunk = prompt[begin : begin + PREFILL_CHUNK]
                token = await sequence.step(chunk, begin, want_token=begin + len(chunk) == len(prompt))
            while token is not None:
                first = first or time.monotonic()
                if token in self._tokenizer.eos_ids and not request.ignore_eos:
                    finish = "stop"
                    break
                tokens.append(token)
                yield TokenEvent(len(tokens) - 1, token, emitted.push(decoder.push(token)))
                if emitted.stopped:
                    finish = "stop"
                if emitted.stopped or len(tokens) == request.max_tokens:
                    break
                token = await sequence.step([token], len(prompt) + len(tokens) - 1, want_token=True)
        finally:
            trace_path = await sequence.close()
        ended = time.monotonic()
        tail = emitted.push(decoder.flush()) + emitted.flush()
        tally = sequence.tally
        yield DoneEvent(
            finish_reason=finish,
            prompt_tokens=len(prompt),
            completion_tokens=len(tokens),
            tokens=tuple(tokens),
            text=emitted.text,
            tail=tail,
            rows=tally.rows,
            pairs_local=tally.pairs_local,
            pairs_remote=tally.pairs_remote,
            failovers=tally.failovers,
            ttft_ms=((first or ended) - started) * 1e3,
            decode_ms=(ended - (first or ended)) * 1e3,
            trace_path=trace_path,
        )


def event_message(event: TokenEvent | DoneEvent) -> dict[str, Any]:
    """An event as it crosses the control stream."""
    return {"event": "token" if isinstance(event, TokenEvent) else "done", **asdict(event)}


class StopScanner:
    """Releases text as it comes, but holds back what may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, text: str) -> str:
        """Take new text, return what may be shown now."""
        if self.stopped:
            return ""
        self._held += text
        cut = min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._release(cut)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - keep)

    def flush(self) -> str:
        """The end: what was held back is no stop string after all."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        ready, self._held = self._held[:count], self._held[count:]
        self._released.append(ready)
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
