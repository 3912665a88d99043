"""From a request to its events: the prompt's tokens, text as it grows, stop strings, the final account.

A ``Generation`` is what the scheduler runs: it takes chosen tokens as they come, says when the answer is complete, and
holds events until its reader takes them. Tokens never wait for a reader; there are at most ``max_tokens`` of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kvasir_console.engine.chat import ChatTemplate
from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent, TokenLogprob
from kvasir_console.engine.process.kept import Kept
from kvasir_console.engine.process.pipeline import Choice, SequenceParams
from kvasir_console.engine.process.request import sampling_of
from kvasir_console.engine.process.scheduler import Progress, Scheduler
from kvasir_console.engine.process.stop import StopScanner
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import EngineError, KvasirError, RequestError

Event = TokenEvent | DoneEvent


class Generation:
    """One request on its way. ``async with`` it, and iterate; leaving the block early cancels the request."""

    def __init__(
        self, request: GenerateRequest, params: SequenceParams, tokenizer: Tokenizer, scheduler: Scheduler
    ) -> None:
        self.params = params
        self.max_tokens = request.max_tokens
        self.speculation = request.speculation
        self.progress = Progress()
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._ends = frozenset() if request.ignore_eos else tokenizer.eos_ids
        self._decoder = tokenizer.stream(skip_special=True)
        self._text = StopScanner(request.stop)
        self._tokens: list[int] = []
        self._finish = "length"
        self._fresh: deque[TokenEvent] = deque()
        """Pushed from the compute thread, not shown yet."""
        self._shown: list[Event | KvasirError] = []
        self._changed = asyncio.Event()
        self._resumed = len(request.resumed)
        self._retold = request.logprobs is None
        """Whether the resumed tokens can be told again: their log probabilities are not known here."""
        self._submitted = time.monotonic()
        self._admitted: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self.complete = False
        """Whether the resumed tokens are already the whole answer."""
        for token in request.resumed:
            text = self._take(token)
            self.complete = text is None or self._over
            if text is None:
                self._resumed = len(self._tokens)  # what came after the end is no part of the answer
                break
            self._shown.append(TokenEvent(len(self._tokens) - 1, token, text))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scheduler.cancel(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.follow(self._resumed)

    async def follow(self, index: int) -> AsyncIterator[Event]:
        """Token events from the token ``index`` of the answer on, then one ``DoneEvent``; any number may follow.

        The tokens that it was resumed with are told like those that were chosen here: a gateway that was restarted
        knows none of them, whoever chose them.

        Raises:
            KvasirError: what ended the request; ``EngineError`` (``request_exists``) if tokens before the resumed
                ones are asked for with log probabilities.
        """
        at = index
        if at < self._resumed and not self._retold:
            raise EngineError("request_exists", "This request runs from a later token on.", "Ask anew.")
        while True:
            self._changed.clear()
            for event in self._shown[at:]:
                at += 1
                if isinstance(event, KvasirError):
                    raise event
                yield event
                if isinstance(event, DoneEvent):
                    return
            if at >= len(self._shown):
                await self._changed.wait()

    def admitted(self) -> None:
        self._admitted = time.monotonic()

    def push(self, choice: Choice) -> bool:
        self._last = time.monotonic()
        self._first = self._first or self._last
        text = self._take(choice.token)
        if text is None:
            return True
        top = None if choice.logprob is None else tuple(self._logprob(*each) for each in choice.top)
        logprob = None if choice.logprob is None else self._logprob(choice.token, choice.logprob)
        self._fresh.append(TokenEvent(len(self._tokens) - 1, choice.token, text, logprob, top))
        return self._over

    def _take(self, token: int) -> str | None:
        """The next token of the answer: its text, or ``None`` if it is the end and no part of it."""
        if token in self._ends:
            self._finish = "stop"
            return None
        self._tokens.append(token)
        text = self._text.push(self._decoder.push(token))
        if self._text.stopped:
            self._finish = "stop"
        return text

    @property
    def _over(self) -> bool:
        return self._text.stopped or len(self._tokens) >= self.max_tokens

    def flush(self) -> None:
        while self._fresh:
            self._shown.append(self._fresh.popleft())
        self._changed.set()

    def finish(self, error: KvasirError | None) -> None:
        self.flush()
        self._shown.append(self._done() if error is None else error)
        self._changed.set()

    def _logprob(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, logprob, tuple(self._tokenizer.piece(token)))

    def _done(self) -> DoneEvent:
        now = time.monotonic()
        tail = self._text.push(self._decoder.flush()) + self._text.flush()
        progress, tally = self.progress, self.progress.tally
        first = self._first or now
        return DoneEvent(
            finish_reason=self._finish,
            prompt_tokens=len(self.params.prompt_tokens),
            completion_tokens=len(self._tokens),
            tokens=tuple(self._tokens),
            text=self._text.text,
            tail=tail,
            rows=tally.rows,
            pairs_local=tally.pairs_local,
            pairs_remote=tally.pairs_remote,
            failovers=tally.failovers,
            ttft_ms=(first - self._submitted) * 1e3,
            decode_ms=((self._last or now) - first) * 1e3,
            trace_path=progress.trace_path,
            queued_ms=((self._admitted or now) - self._submitted) * 1e3,
            cached_tokens=progress.cached_tokens,
            decode_steps=progress.decode_steps,
            drafted_tokens=progress.drafted_tokens,
            accepted_tokens=progress.accepted_tokens,
        )


class Generator:
    """Starts requests on one scheduler. Owns the tokenizer and the chat template of the loaded model."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        context_length: int,
        trace_directory: Path,
    ) -> None:
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = context_length
        self._trace_directory = trace_directory
        self._traces = 0
        self.kept = Kept()

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Prompt tokens of a request. A long text or a slow template keeps nobody else waiting.

        Raises:
            RequestError: the template refuses the messages, a token is out of range, or there is no token at all.
        """
        return await asyncio.to_thread(self._tokenize, request)

    async def close(self) -> None:
        self.kept.close()
        await self.scheduler.close()
        self._template.close()

    def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.prompt_tokens is not None:
            tokens = list(request.prompt_tokens)
            if any(not 0 <= token < self._tokenizer.n_vocab for token in (*tokens, *request.resumed)):
                raise RequestError("token_out_of_range", f"prompt_tokens must be in [0, {self._tokenizer.n_vocab}).")
        elif request.messages is not None:
            tokens = self._tokenizer.encode(self._template.render(list(request.messages)))
        else:
            tokens = self._tokenizer.encode(request.prompt or "")
        if not tokens:
            raise RequestError("empty_prompt", "The prompt has no tokens.", "Send at least one character.")
        return tokens

    def start(self, request: GenerateRequest, prompt: list[int]) -> Generation:
        """Queue a request whose prompt is ``tokenize``'s.

        Raises:
            RequestError: ``context_length_exceeded``, ``kv_budget_exceeded``, ``bad_sampling``: never to be served.
            EngineError: ``queue_full``.
        """
        if len(prompt) + request.max_tokens > self._context_length:
            raise RequestError(
                "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens and {request.max_tokens} more are asked for; "
                f"this model's context holds {self._context_length}.",
                "Shorten the prompt or lower max_tokens.",
            )
        trace = None
        if request.trace:
            self._traces += 1
            trace = self._trace_directory / f"trace-{self._traces}.npy"
        params = SequenceParams(
            sampling=sampling_of(request),
            capacity=len(prompt) + request.max_tokens,
            prompt_tokens=tuple(prompt),
            experts=request.experts,
            trace=trace,
            logprobs=request.logprobs,
            session=request.session,
            key=request.key,
            resumed=request.resumed,
        )
        generation = Generation(request, params, self._tokenizer, self.scheduler)
        if generation.complete:
            generation.finish(None)
        else:
            self.scheduler.submit(generation)
        return generation


def event_message(event: Event) -> dict[str, Any]:
    """An event as it crosses the control stream; what was not asked for is left out."""
    fields = {key: value for key, value in asdict(event).items() if key in _ALWAYS or value is not None}
    return {"event": "token" if isinstance(event, TokenEvent) else "done", **fields}


_ALWAYS = frozenset({"trace_path"})
