"""What the chain answers about transactions, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from solana.rpc.commitment import Commitment


class OutcomeState(StrEnum):
    CONFIRMED = "confirmed"
    """It landed and did what it says."""
    FAILED = "failed"
    """It landed, paid its fee and changed nothing else."""
    EXPIRED = "expired"
    """It did not land and never will."""


@dataclass(frozen=True, slots=True)
class Outcome:
    state: OutcomeState
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SignatureStatus:
    slot: int
    commitment: Commitment
    error: str | None
    """What failed, in words; ``None`` for success."""


@dataclass(frozen=True, slots=True)
class Simulation:
    error: str | None
    logs: tuple[str, ...]
    units: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What a message would cost and do if it were signed and sent now."""

    fee_lamports: int
    """Priority fee included; paid whether or not it succeeds."""
    spent_lamports: int | None
    """All SOL that leaves the payer: fee, amount and rent of accounts it opens; ``None`` when it would fail."""
    units: int
    error: str | None
