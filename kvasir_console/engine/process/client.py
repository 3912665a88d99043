"""The other end of an engine's control stream. Torch-free: this is all that a node imports of the engine process.

The stream is a Unix socket of an engine on this machine, or a ring's entry session that the hub spliced; the messages
are the same (``relay.wire.control``), the second only accepts generation verbs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import control

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of ``prompt``, ``messages`` and ``prompt_tokens`` is set.

    ``ignore_eos`` generates past an end-of-text token, so that ``max_tokens`` is exact.
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
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    experts: str = "network"
    trace: bool = False


@dataclass(frozen=True, slots=True)
class TokenEvent:
    index: int
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of a generation.

    ``text`` is all of it; ``tail`` is the part of it that no token event carried (characters held back because they
    could have begun a stop string). ``rows`` counts token rows computed through the whole model.
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


class EngineClient:
    """Calls verbs of an engine and streams its events; one reader task serves any number of concurrent calls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Message | None]] = {}
        self._closed = False
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

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | DoneEvent, None]:
        """Token events, then one ``DoneEvent``. Closing the iterator before its end cancels the request."""
        fields = {key: value for key, value in asdict(request).items() if value is not None}
        finished = False
        async with self._exchange("generate", fields) as messages:
            try:
                async for message in messages:
                    match message.get("event"):
                        case "token":
                            yield TokenEvent(message["index"], message["token"], message["text"])
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

    async def stats(self) -> Message:
        return await self.call("stats")

    async def coverage(self) -> list[Message]:
        sessions: list[Message] = (await self.call("coverage"))["sessions"]
        return sessions

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
                queue = self._waiting.get(message.get("id", 0))
                if queue is not None:
                    queue.put_nowait(message)
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
    )


def _gone() -> EngineError:
    return EngineError(
        "engine_gone",
        "The engine closed its control stream before it answered.",
        "It is being restarted if it crashed; try again in a moment.",
    )
