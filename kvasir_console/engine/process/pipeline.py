"""How token rows pass through the model: the seam between the scheduler and where layers live.

A ``Pipeline`` admits sequences, and computes a step: rows of several sequences at once, each with the tokens that the
sampler chose after them. ``local.LocalPipeline`` computes all layers here (the trunk); ``ring_pipeline.RingPipeline``
computes the first rank's window and hands the rest to its successors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvasir_console.engine.process.prefix import PREFILL_CHUNK
from kvasir_console.engine.process.tally import Tally
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import EngineError, KvasirError

log = logging.getLogger(__name__)

__all__ = [
    "LOGIT_BYTES",
    "MAX_RING_SEQUENCES",
    "MAX_SEQUENCES",
    "PREFILL_CHUNK",
    "Admitted",
    "Choice",
    "Feed",
    "More",
    "Outcome",
    "Pipeline",
    "SequenceParams",
    "as_engine_error",
]

MAX_SEQUENCES = 64
"""Most sequences that run at once in one process; further ones wait."""
MAX_RING_SEQUENCES = 256
"""Most sequences of a ring: some are on the network while others are computed."""
LOGIT_BYTES = 64 * 2**20
"""Logits are computed for at most so many bytes of rows at a time."""


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """What a pipeline has to know of a request before its first row."""

    sampling: SamplingParams
    capacity: int
    """Most positions this sequence can take: prompt plus ``max_tokens``."""
    prompt_tokens: tuple[int, ...]
    experts: str = "network"
    trace: Path | None = None
    logprobs: int | None = None
    """Number of alternatives to report with each token's log probability; ``None`` for none of it."""
    session: str = ""
    key: int = 0
    """The request's name wherever it is kept, 0 for none: it outlives this process."""
    resumed: tuple[int, ...] = ()
    """Tokens that were chosen after the prompt before this process had the request."""


class Admitted(Protocol):
    """One sequence inside the model. ``reused`` of its prompt's tokens need not be fed: their rows were kept."""

    tally: Tally
    reused: int


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows of one sequence in a step."""

    sequence: Any
    """As ``Pipeline.open`` returned it."""
    tokens: list[int]
    position: int
    """Of the first of ``tokens``; the sequence holds exactly the rows before it."""
    choices: int
    """How many tokens to choose: after each of the last ``choices`` rows. 0 inside a prompt; 1 after a prompt or a
    token; more after a token and a draft, whose tokens all but the first of these rows are."""
    refill: bool = False
    """Rows of a resumed sequence whose choices are known."""
    again: bool = False
    """The first row after those: somebody may have computed it before."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that the sampler chose, and log probabilities if they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Outcome = list[Choice] | KvasirError
"""What a feed yields. Of a draft, the choices up to and including the first that differs from it: the sequence then
holds the rows before the last choice and no others. An error ends its sequence, and no other."""


More = Callable[[list[Outcome]], list[Feed]]
"""Takes a step's outcomes, one for each feed, and gives the next step's feeds."""


class Pipeline(Protocol):
    """Where a scheduler's sequences are computed."""

    @property
    def depth(self) -> int:
        """How many steps, of different sequences, may be under way at once; it may change between steps."""
        ...

    interruptible: bool
    """Whether ``close`` may be called while a step holds the sequence."""

    def check(self, params: SequenceParams) -> None:
        """Raises ``RequestError`` for a sequence that can never be admitted here."""

    def fits(self, params: SequenceParams) -> bool:
        """Whether ``open`` would succeed now, as far as memory goes."""

    def draft_limit(self, params: SequenceParams) -> int:
        """Longest draft that can be verified for this sequence; 0 if none can."""

    def network_bound(self, params: SequenceParams) -> bool:
        """Whether rows of this sequence are now computed by others, who are paid for each."""

    async def open(self, params: SequenceParams) -> Admitted:
        """Admit a sequence. Raises ``EngineError``."""

    async def run(self, feeds: list[Feed], more: More) -> None:
        """Compute a step, then those that ``more`` asks for, until it asks for none.

        A step has at most one feed a sequence. ``more`` may be called on another thread, but only while this call is
        awaited: a step then follows the one before without a detour over the event loop.
        """

    async def close(self, sequence: Any) -> str | None:
        """Free everything the sequence held; returns the trace file's path if a trace was asked for."""

    def stats(self) -> dict[str, Any]:
        """Counters for the ``stats`` verb."""


def as_engine_error(error: Exception) -> KvasirError:
    """What a request is told of a pass that failed; what is not one of our own errors goes to the log in full."""
    if isinstance(error, KvasirError):
        return error
    log.error("a pass failed", exc_info=error)
    return EngineError("step_failed", f"A step failed: {type(error).__name__}: {error}"[:500], "Read the engine's log.")
