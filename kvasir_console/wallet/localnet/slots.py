"""Time in slots, and the blockhash of each slot. Pure but for the injected clock.

A slot here is a length of time (400 ms, as on a public cluster), every slot has a block, so height and slot agree.
Blockhashes come from a random seed kept with the ledger: no two ledgers share one, and a ledger that restarts goes
on where it stopped, so a transaction signed for one ledger is worth nothing on another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from solders.hash import Hash

SLOT_MS = 400
BLOCKHASH_MAX_AGE = 150
"""Slots a blockhash stays usable (Agave's ``MAX_PROCESSING_AGE``)."""


class SlotClock:
    """A slot counter that follows the wall clock but never goes back.

    Args:
        now_s: wall clock, Unix seconds.
        genesis_ms: Unix milliseconds at which slot 1 began.
        slot_ms: length of a slot.
        floor: slot that an earlier run may have reached; this run starts at or after it.
    """

    def __init__(self, now_s: Callable[[], float], genesis_ms: int, slot_ms: int, floor: int = 1) -> None:
        self._now_s = now_s
        self._slot_ms = slot_ms
        self._seen_ms = self.now_ms()
        self._elapsed_ms = max(self._seen_ms - genesis_ms, (floor - 1) * slot_ms)

    def now_ms(self) -> int:
        return int(self._now_s() * 1000)

    def slot(self) -> int:
        """The slot of this moment, from 1. A wall clock set back stops nothing: slots go on from the new time."""
        now_ms = self.now_ms()
        self._elapsed_ms += max(0, now_ms - self._seen_ms)
        self._seen_ms = now_ms
        return 1 + self._elapsed_ms // self._slot_ms


class Blockhashes:
    """``sha256(seed || slot as u64 little-endian)``, and the reverse look-up within the usable window."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._slots: dict[bytes, int] = {}
        self._newest = -1

    def at(self, slot: int) -> Hash:
        return Hash.from_bytes(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest())

    def slot_of(self, blockhash: Hash, newest: int) -> int | None:
        """The slot whose hash this is, if it is at most ``BLOCKHASH_MAX_AGE`` slots before ``newest``."""
        oldest = max(0, newest - BLOCKHASH_MAX_AGE)
        for slot in range(max(self._newest + 1, oldest), newest + 1):
            self._slots[bytes(self.at(slot))] = slot
        self._newest = max(self._newest, newest)
        if len(self._slots) > 2 * BLOCKHASH_MAX_AGE:
            self._slots = {digest: slot for digest, slot in self._slots.items() if slot >= oldest}
        slot_found = self._slots.get(bytes(blockhash))
        return slot_found if slot_found is not None and oldest <= slot_found <= newest else None
