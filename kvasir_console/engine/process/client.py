"""The other end of an engine's control stream. Torch-free: this is all that a node imports of the engine process.

The stream is a Unix socket of an engine on this machine, or a ring's entry session that the hub spliced; the messages
are the same (``relay.wire.control``), the second only accepts generation verbs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import control

Message = dict[str, Any]
MAX_LOGPROBS = 20
"""Most alternatives whose log probabilities a request may ask for."""
STUCK_S = 300.0
"""An engine that has computed one piece of work for so long is taken for stuck: in a driver, say."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of ``prompt``, ``messages`` and ``prompt_tokens`` is set.

    ``ignore_eos`` generates past an end-of-text token, so that ``max_tokens`` is exact.
    Penalties and their order are those of ``engine.sampling``. ``logprobs`` asks for each token's log probability and
    so many alternatives (0 to ``MAX_LOGPROBS``); ``None`` for neither.
    ``session`` names a conversation: keys and values of its prompts are kept for it, and reused by it alone. Without a
    name they are shared by all requests without one.
    ``speculation`` (``auto``, ``on``, ``off``) changes how many tokens come out of a step, never which.
    ``key`` names the request wherever it is kept: the engine keeps one with a key while nobody follows it, and whoever
    asks again with the same key goes on after ``resumed``, the tokens that were seen. An engine that does not have it
    begins with those tokens; the prompt should then be the ``prompt_tokens`` that the first one told.
    ``experts`` is ``network`` (dispatch what remote sessions hold) or ``local`` (compute all here); ``trace`` keeps
    the logits of every sampled position and names the ``.npy`` file that holds them, (tokens, vocabulary) f32.
    """

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_tokens: tuple[int, ...] | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    session: str = ""
    speculation: str = "auto"
    experts: str = "network"
    trace: bool = False
    key: int = 0
    resumed: tuple[int, ...] = ()

    def to_fields(self) -> Message:
        """The request as it crosses the control stream: fields that say something, so that an older engine that knows
        fewer serves what it can."""
        defaults = {name: each.default for name, each in self.__dataclass_fields__.items()}
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and the bytes it stands for (part of a character, perhaps)."""

    token: int
    logprob: float
    piece: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token. ``logprob`` is its own and ``top`` the most likely ones', if ``logprobs`` was asked for: of the model's
    distribution before penalties and temperature."""

    index: int
    token: int
    text: str
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of a generation.

    ``text`` is all of it; ``tail`` is the part of it that no token event carried (characters held back because they
    could have begun a stop string). ``rows`` counts token rows through the whole model whose result was used: neither
    the ``cached_tokens`` of the prompt, kept from an earlier request, nor drafted tokens that were wrong.
    After the first token, ``decode_steps`` gave the others; ``accepted_tokens`` of ``drafted_tokens`` were right, and
    each saved a step. ``ttft_ms`` includes ``queued_ms``.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[int, ...]
    text: str
    tail: str
    rows: int
    pairs_local: int
    pairs_remote: int
    failovers: int
    ttft_ms: float
    decode_ms: float
    trace_path: str | None
    queued_ms: float = 0.0
    cached_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a decode step gave on average; ``None`` if there was no such step."""
        return 1 + self.accepted_tokens / self.decode_steps if self.decode_steps else None


class EngineClient:
    """Calls verbs of an engine and streams its events; one reader task serves any number of concurrent calls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Message | None]] = {}
        self._closed = False
        self.on_event: Callable[[Message], None] | None = None
        """Told of events that answer no request (``quarantined``)."""
        self._task = asyncio.create_task(self._read(), name="engine-client")

    @classmethod
    async def connect(cls, path: Path, timeout_s: float = 30.0) -> EngineClient:
        """Open the control socket of an engine, waiting for a process that is still starting.

        Raises:
            EngineError: nothing listens there within ``timeout_s``.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return cls(*await asyncio.open_unix_connection(str(path)))
            except OSError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise EngineError(
                        "engine_not_listening",
                        f"No engine answers on {path} after {timeout_s:g} s.",
                        "Read the engine's log; it says why the process did not start.",
                    ) from error
            await asyncio.sleep(0.05)

    @property
    def closed(self) -> bool:
        return self._closed

    async def call(self, verb: str, **fields: Any) -> Message:
        """Send one request and return its reply's fields. Raises the error the engine sent."""
        async with self._exchange(verb, fields) as messages:
            async for message in messages:
                if "event" not in message:
                    return message
        raise _gone()

    async def load(self, progress: Callable[[int, int], None] | None = None, **fields: Any) -> Message:
        """``load`` with progress in bytes (done, total); returns the engine's ``info``."""
        async with self._exchange("load", fields) as messages:
            async for message in messages:
                if "event" not in message:
                    info: Message = message["info"]
                    return info
                if progress is not None:
                    progress(int(message["done_bytes"]), int(message["total_bytes"]))
        raise _gone()

    async def generate(
        self, request: GenerateRequest, on_prompt: Callable[[tuple[int, ...]], None] | None = None
    ) -> AsyncGenerator[TokenEvent | DoneEvent, None]:
        """Token events, then one ``DoneEvent``. Closing the iterator before its end cancels the request.

        Args:
            on_prompt: told the prompt's token ids once the request is accepted, if it has a ``key``.
        """
        finished = False
        async with self._exchange("generate", request.to_fields()) as messages:
            try:
                async for message in messages:
                    match message.get("event"):
                        case None if on_prompt is not None and request.key:
                            on_prompt(tuple(int(token) for token in message["prompt_token_ids"]))
                        case "token":
                            yield _token(message)
                        case "done":
                            finished = True
                            yield _done(message)
                            return
                        case "error":
                            finished = True
                            raise KvasirError.from_dict(message["error"])
                finished = True
                raise _gone()
            finally:
                if not finished and not self._closed:
                    with contextlib.suppress(OSError, KvasirError):
                        await self.call("cancel", request=messages.request_id)

    async def count_tokens(
        self, *, prompt: str | None = None, messages: tuple[dict[str, Any], ...] | None = None
    ) -> int:
        fields = {"prompt": prompt} if messages is None else {"messages": list(messages)}
        return int((await self.call("count_tokens", **fields))["tokens"])

    async def info(self) -> Message:
        info: Message = (await self.call("info"))["info"]
        return info

    async def stats(self, *, experts: bool = False) -> Message:
        """The process's counters; with ``experts`` also how often each expert was chosen, layer by layer."""
        return await self.call("stats", **({"experts": True} if experts else {}))

    async def coverage(self) -> list[Message]:
        sessions: list[Message] = (await self.call("coverage"))["sessions"]
        return sessions

    async def pardon(self, session: str, wallet: str) -> bool:
        """Lift the quarantine of a session; whether there was one."""
        return bool((await self.call("pardon", session=session, wallet=wallet))["pardoned"])

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._task
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    @contextlib.asynccontextmanager
    async def _exchange(self, verb: str, fields: Message) -> AsyncIterator[_Exchange]:
        if self._closed:
            raise _gone()
        request_id = next(self._ids)
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._waiting[request_id] = queue
        try:
            try:
                await control.write_message(self._writer, {**fields, "id": request_id, "verb": verb})
            except OSError as error:
                raise _gone() from error
            yield _Exchange(request_id, queue)
        finally:
            del self._waiting[request_id]

    async def _read(self) -> None:
        try:
            while True:
                message = await control.read_message(self._reader)
                number = message.get("id", 0)
                queue = self._waiting.get(number) if isinstance(number, int) else None
                if queue is not None:
                    queue.put_nowait(message)
                elif self.on_event is not None and "event" in message and not message.get("id"):
                    self.on_event(message)
        except (OSError, EOFError, KvasirError):
            pass  # the stream ended; whoever still waits is told by the None below
        finally:
            self._closed = True
            for queue in self._waiting.values():
                queue.put_nowait(None)


class _Exchange:
    """Messages that answer one request, errors raised, ending when the stream ends."""

    def __init__(self, request_id: int, queue: asyncio.Queue[Message | None]) -> None:
        self.request_id = request_id
        self._queue = queue

    def __aiter__(self) -> _Exchange:
        return self

    async def __anext__(self) -> Message:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        if "error" in message and "event" not in message:
            raise KvasirError.from_dict(message["error"])
        return message


def _token(message: Message) -> TokenEvent:
    logprob, top = message.get("logprob"), message.get("top")
    return TokenEvent(
        message["index"],
        message["token"],
        message["text"],
        None if logprob is None else _logprob(logprob),
        None if top is None else tuple(_logprob(each) for each in top),
    )


def _logprob(message: Message) -> TokenLogprob:
    """Raises ``ValueError`` or ``TypeError`` for what is none."""
    logprob, piece = float(message["logprob"]), message["piece"]
    if math.isnan(logprob) or not isinstance(piece, list):
        raise ValueError("this is no log probability")
    return TokenLogprob(message["token"], logprob, tuple(bytes(piece)))


def _done(message: Message) -> DoneEvent:
    return DoneEvent(
        finish_reason=message["finish_reason"],
        prompt_tokens=message["prompt_tokens"],
        completion_tokens=message["completion_tokens"],
        tokens=tuple(message["tokens"]),
        text=message["text"],
        tail=message["tail"],
        rows=message["rows"],
        pairs_local=message["pairs_local"],
        pairs_remote=message["pairs_remote"],
        failovers=message["failovers"],
        ttft_ms=message["ttft_ms"],
        decode_ms=message["decode_ms"],
        trace_path=message["trace_path"],
        queued_ms=float(message.get("queued_ms", 0.0)),
        cached_tokens=int(message.get("cached_tokens", 0)),
        decode_steps=int(message.get("decode_steps", 0)),
        drafted_tokens=int(message.get("drafted_tokens", 0)),
        accepted_tokens=int(message.get("accepted_tokens", 0)),
    )


def _gone() -> EngineError:
    return EngineError(
        "engine_gone",
        "The engine closed its control stream before it answered.",
        "It is being restarted if it crashed; try again in a moment.",
    )
