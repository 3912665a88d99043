"""What a gateway keeps of a running request: enough to ask whoever takes over for the rest of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError


class Memory:
    """One request: its prompt's token ids once an engine told them, and every token that was seen."""

    def __init__(self, request: GenerateRequest, key: int) -> None:
        self._request = replace(request, key=key)
        self._tokens: list[int] = []
        self._prompt: tuple[int, ...] | None = None

    @property
    def key(self) -> int:
        return self._request.key

    @property
    def begun(self) -> bool:
        """Whether an engine accepted the request."""
        return self._prompt is not None

    @property
    def request(self) -> GenerateRequest:
        """What to ask an engine now. The prompt goes as token ids: a template may depend on the date."""
        resumed = tuple(self._tokens)
        if self._prompt is None:
            return self._request
        return replace(self._request, prompt=None, messages=None, prompt_tokens=self._prompt, resumed=resumed)

    def prompt(self, tokens: Sequence[int]) -> None:
        """An engine accepted the request; the first one's word for the prompt stays."""
        if self._prompt is None:
            self._prompt = tuple(tokens)

    def take(self, event: TokenEvent | DoneEvent) -> TokenEvent | DoneEvent | None:
        """An event as it is to be shown, ``None`` for a token that was seen before.

        Raises:
            EngineError: ``engine_misbehaved``; tokens were left out, or it ended before the last one that was seen.
        """
        if isinstance(event, DoneEvent):
            if len(event.tokens) < len(self._tokens):
                raise EngineError("engine_misbehaved", "The answer ended before tokens that were seen.", "Try again.")
            return event
        if event.index > len(self._tokens):
            raise EngineError("engine_misbehaved", f"Token {event.index} came after {len(self._tokens)}.", "Try again.")
        if event.index < len(self._tokens):
            return None
        self._tokens.append(event.token)
        return event
