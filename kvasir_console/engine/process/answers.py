"""Tokens that rank 0 of a ring waits for, and errors that come instead.

A request waits for one step at a time. Tokens may come twice, late, or for a step that was given up: only those of the
step that waits are taken, each once. Answers come about in the order in which they were asked for: one that many later
ones have overtaken will not come.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvasir_console.errors import EngineError, KvasirError


@dataclass(frozen=True, slots=True)
class _Expected:
    step: int
    position: int
    """Of the first token."""
    count: int
    tokens: list[int]
    done: asyncio.Future[list[int]]
    asked_at: float


class Answers:
    """By request: at most one answer of a known number of tokens is expected at a time."""

    def __init__(self, n_vocab: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_vocab = n_vocab
        self._clock = clock
        self._answered = -math.inf
        """When the latest question was asked of those that were answered."""
        self._expected: dict[int, _Expected] = {}
        self._failed: dict[int, KvasirError] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._expected)

    def expect(self, request_id: int, step: int, position: int, count: int) -> asyncio.Future[list[int]]:
        """What the future holds: tokens for ``count`` positions, or the error that came instead or had come before."""
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        if (error := self._failed.pop(request_id, None)) is not None:
            done.set_exception(error)
        elif count == 0:
            done.set_result([])
        else:
            self._expected[request_id] = _Expected(step, position, count, [], done, self._clock())
        return done

    def waits(self, request_id: int) -> tuple[int, int] | None:
        """The step that the request waits for, and the position of the next token of its answer."""
        expected = self._expected.get(request_id)
        return None if expected is None else (expected.step, expected.position + len(expected.tokens))

    def receive(self, request_id: int, step: int, position: int, token: int) -> bool:
        """A token came from the last rank; whether it was waited for: it may come twice, or its request be gone."""
        expected = self._expected.get(request_id)
        if expected is None or (step, position) != (expected.step, expected.position + len(expected.tokens)):
            return False
        if token >= self._n_vocab:
            trouble = EngineError("bad_token", f"The ring's last rank chose {token}, which is no token.", "Ask again.")
            self.fail(request_id, trouble)
            return False
        expected.tokens.append(token)
        if len(expected.tokens) == expected.count:
            self._answered = max(self._answered, expected.asked_at)
            del self._expected[request_id]
            if not expected.done.done():
                expected.done.set_result(expected.tokens)
        return True

    def overtaken(self, lag_s: float) -> list[int]:
        """Requests whose answer is waited for, though one that was asked for ``lag_s`` later has come."""
        return [key for key, each in self._expected.items() if self._answered - each.asked_at > lag_s]

    def fail(self, request_id: int, error: KvasirError) -> None:
        """A request is lost: who waits for it hears of it now, else who expects its next answer."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            self._failed[request_id] = error
        elif not expected.done.done():
            expected.done.set_exception(error)

    def fail_all(self, error: KvasirError) -> None:
        """Every answer that is expected now is lost."""
        for request_id in list(self._expected):
            self.fail(request_id, error)

    def forget(self, request_id: int) -> None:
        """The request is over; who still waits for it is told so."""
        self.fail(request_id, EngineError("released", "The request was cancelled."))
        self._failed.pop(request_id, None)
