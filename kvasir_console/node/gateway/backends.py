"""What answers a chat request: the trunk engine of this machine, or rank 0 of a ring through the hub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.gateway.plans import PlannedRing
from kvasir_console.relay.hub import Hub

Event = TokenEvent | DoneEvent
Messages = tuple[dict[str, Any], ...]
CALL_TIMEOUT_S = 30.0
ENTRY_TIMEOUT_S = 5.0
"""How long a request waits for rank 0 to dial in, which it does again at once after a lost session."""


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
                return await client.count_tokens(prompt=prompt, messages=messages)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        client = await self.client()
        with _answering(self._info.name):
            async with contextlib.aclosing(client.generate(request)) as events:
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


class RingBackend(_ClientBackend):
    """Rank 0 of a ring, over the entry session it dialled; the stream is opened once and serves every request."""

    def __init__(self, info: BackendInfo, ring: PlannedRing, hub: Hub) -> None:
        super().__init__(info)
        self._ring_id = ring.plan.ring
        self._hub = hub
        self._client: EngineClient | None = None
        self._opening = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return self._hub.entry_connected(self._ring_id)

    async def client(self) -> EngineClient:
        async with self._opening:
            if self._client is None or self._client.closed:
                await self.close()
                self._client = EngineClient(*await self._hub.open_entry(self._ring_id, ENTRY_TIMEOUT_S))
            return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


@contextlib.contextmanager
def _answering(name: str) -> Iterator[None]:
    """Turns what is no answer into an error: a ring's rank 0 is another's machine and may send anything."""
    try:
        yield
    except TimeoutError as error:
        raise EngineError("engine_silent", f"{name} does not answer.", "Try again soon.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError("engine_misbehaved", f"{name} answered with something else.", "Try again.") from error


def _not_ready(name: str) -> KvasirError:
    return EngineError(
        "model_not_ready", f"{name} is not loaded at the moment.", "It is being started; try again soon."
    )
