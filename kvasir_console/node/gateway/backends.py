"""What answers a chat request: the trunk engine of this machine, or rank 0 of a ring through the hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.gateway.memory import Memory
from kvasir_console.node.gateway.plans import PlannedRing

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = TokenEvent | DoneEvent
Messages = tuple[dict[str, Any], ...]
CALL_TIMEOUT_S = 30.0
ENTRY_TIMEOUT_S = 5.0
"""How long a request waits for a rank 0 to dial in that was not seen lately."""
RETRY_S = 0.2
MAX_MISSING = 200
MAX_PROMPT_TOKENS = 2**31
LOST = frozenset(
    {
        "engine_gone",
        "engine_silent",
        "engine_closed",
        "engine_draining",
        "entry_not_connected",
        "entry_in_use",
        "nothing_loaded",
        "no_generation_here",
        "no_tokenizer_here",
        "request_exists",
    }
)
"""Errors of an engine or a stream that is gone, or not back yet."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    model_id: str
    name: str
    ring: PlannedRing | None = None
    """The ring whose stages are paid for the rows of a request."""
    context_limit: int = 2**31
    """Context of the checkpoint itself: whatever an engine says, it has no more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request's prompt and answer may take together, in tokens."""

    context_length: int
    kv_tokens: int
    """As far as the memory for keys and values goes, if the request has all of it."""


class Backend(Protocol):
    """One served model."""

    @property
    def info(self) -> BackendInfo: ...

    @property
    def ready(self) -> bool:
        """Whether a request has a chance now."""
        ...

    async def limits(self) -> Limits:
        """What a request may take. Raises ``KvasirError`` if the engine cannot be reached."""
        ...

    async def count_tokens(self, prompt: str | None, messages: Messages | None) -> int:
        """Tokens of a prompt as ``generate`` will see it. Raises ``RequestError`` for one that cannot be served."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Tokens, then the end; closing the iterator early cancels the request."""
        ...


class _ClientBackend:
    """A backend behind an engine's control stream."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info
        self._known: tuple[EngineClient, Limits] | None = None

    @property
    def info(self) -> BackendInfo:
        return self._info

    async def client(self) -> EngineClient:
        raise _not_ready(self._info.name)

    async def limits(self) -> Limits:
        client = await self.client()
        if self._known is None or self._known[0] is not client:
            with _answering(self._info.name):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    info = await client.info()
                context_length = min(int(info["context_length"]), self._info.context_limit)
                self._known = client, Limits(context_length, int(info.get("kv_tokens", context_length)))
        return self._known[1]

    async def count_tokens(self, prompt: str | None, messages: Messages | None) -> int:
        client = await self.client()
        with _answering(self._info.name):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                tokens = await client.count_tokens(prompt=prompt, messages=messages)
            if not 0 <= tokens < MAX_PROMPT_TOKENS:  # the ring is paid for them
                raise ValueError(f"a prompt of {tokens} tokens")
            return tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        client = await self.client()
        with _answering(self._info.name):
            # Without its key: nobody comes back to an engine that lives and dies with this process.
            async with contextlib.aclosing(client.generate(replace(request, key=0))) as events:
                async for event in events:
                    yield event


class TrunkBackend(_ClientBackend):
    """The engine on this machine that holds every layer. ``attach`` gives it a client whenever the engine is loaded."""

    def __init__(self, info: BackendInfo) -> None:
        super().__init__(info)
        self._client: EngineClient | None = None

    def attach(self, client: EngineClient | None) -> None:
        self._client = client

    @property
    def ready(self) -> bool:
        return self._client is not None and not self._client.closed

    async def client(self) -> EngineClient:
        if self._client is None or self._client.closed:
            raise _not_ready(self._info.name)
        return self._client


class Entries(Protocol):
    """Where a ring's rank 0 dials in (``relay.hub.Hub``)."""

    def entry_connected(self, ring_id: str) -> bool: ...

    async def open_entry(self, ring_id: str, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


class RingBackend(_ClientBackend):
    """Rank 0 of a ring, over the entry session it dialled; the stream is opened once and serves every request.

    A request survives the stream and rank 0 itself: it is asked for again, with the tokens that were seen, as soon as
    rank 0 or its successor dials in (docs/reliability.md). A rank 0 that answers nothing for ``silence_s`` is lost.
    With each answer it tells which of the other ranks are missed.
    """

    def __init__(
        self,
        info: BackendInfo,
        ring: PlannedRing,
        hub: Entries,
        *,
        recover_s: float = 120.0,
        beat_s: float = 5.0,
        silence_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(info)
        self._ring_id = ring.plan.ring
        self._hub = hub
        self._recover_s = recover_s
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._clock = clock
        self._seen_at: float | None = None
        self._client: EngineClient | None = None
        self._opening = asyncio.Lock()
        self._beats: asyncio.Task[None] | None = None
        self._missing = ""
        self.planned: Callable[[], PlannedRing] | None = None
        """The ring's plan as it is now; its owner sets it if windows may move."""

    @property
    def info(self) -> BackendInfo:
        """With the plan in force: a window may have moved."""
        return self._info if self.planned is None else replace(self._info, ring=self.planned())

    @property
    def ready(self) -> bool:
        return self._hub.entry_connected(self._ring_id)

    @property
    def missing(self) -> str:
        """Which ranks are missed, as rank 0 last said; empty while it says that the ring is whole."""
        return self._missing

    @property
    def recovering(self) -> bool:
        """Whether rank 0 answered not long ago, and may be expected back."""
        return self._seen_at is not None and self._clock() - self._seen_at <= self._recover_s

    async def client(self) -> EngineClient:
        async with self._opening:
            if self._client is None or self._client.closed:
                await self.close()
                patience_s = self._recover_s if self.recovering else ENTRY_TIMEOUT_S
                self._client = EngineClient(*await self._hub.open_entry(self._ring_id, patience_s))
                self._beats = asyncio.create_task(self._beat(self._client), name=f"ring-{self._ring_id}-beat")
            return self._client

    async def limits(self) -> Limits:
        return await self._persist(super().limits)

    async def count_tokens(self, prompt: str | None, messages: Messages | None) -> int:
        count = super().count_tokens
        return await self._persist(lambda: count(prompt, messages))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        memory = Memory(request, request.key or secrets.randbits(63) or 1)
        lost_at: float | None = None
        while True:
            try:
                client = await self.client()
                with _answering(self._info.name):
                    async with contextlib.aclosing(client.generate(memory.request, memory.prompt)) as events:
                        async for each in events:
                            lost_at, self._seen_at = None, self._clock()
                            if (event := memory.take(each)) is not None:
                                yield event
                return
            except KvasirError as error:
                now = self._clock()
                lost_at = now if lost_at is None else lost_at
                if error.code not in LOST or now - lost_at > self._recover_s or not (memory.begun or self.recovering):
                    raise
                log.warning("%s lost a request, which goes on: %s", self._info.name, error.code)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
        if self._client is not None:
            await self._client.close()
            self._client = None
        self._missing = ""

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that changes nothing, asked again while rank 0 is expected back."""
        begun = self._clock()
        while True:
            try:
                return await call()
            except KvasirError as error:
                if error.code not in LOST or not self.recovering or self._clock() - begun > self._recover_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _beat(self, client: EngineClient) -> None:
        """End the stream of a rank 0 that answers nothing: whoever waits on it asks again."""
        while not client.closed:
            try:
                async with asyncio.timeout(self._silence_s):
                    with _answering(self._info.name):
                        self._heard(await client.info())
                self._seen_at = self._clock()
            except TimeoutError:
                log.warning("%s: rank 0 answered nothing for %g s", self._info.name, self._silence_s)
                await client.close()
                return
            except KvasirError as error:
                log.debug("%s: %s", self._info.name, error)
            await asyncio.sleep(self._beat_s)

    def _heard(self, info: dict[str, Any]) -> None:
        """What rank 0 says of its ring; another's machine may say anything, and older ones nothing."""
        whole = info.get("whole")
        said = str(whole.get("missing", ""))[:MAX_MISSING] if isinstance(whole, dict) else ""
        missing = "".join(character for character in said if character.isprintable())
        if missing != self._missing:
            self._missing = missing
            log.warning("%s: %s", self._info.name, missing or "the ring is whole again")


@contextlib.contextmanager
def _answering(name: str) -> Iterator[None]:
    """Turns what is no answer into an error: a ring's rank 0 is another's machine and may send anything."""
    try:
        yield
    except TimeoutError as error:
        raise EngineError("engine_silent", f"{name} does not answer.", "Try again soon.") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError("engine_misbehaved", f"{name} answered with something else.", "Try again.") from error


def _not_ready(name: str) -> KvasirError:
    return EngineError(
        "model_not_ready", f"{name} is not loaded at the moment.", "It is being started; try again soon."
    )
