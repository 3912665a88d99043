"""What each slice of each session has done and earned over this engine's life.

Written by the compute thread and, for answers that come late, by the loop; so every change is one turn under the lock.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from kvasir_console.engine.process import checks
from kvasir_console.engine.process.worker import SessionStats, Slice
from kvasir_console.relay.wire import dispatch

MAX_ACCOUNTS = 8192
"""A reading of all of them fits a control message. A worker names its slices itself, any part of what it was admitted
with, so those that never did anything make room."""
MAX_OF_SESSION = 512
"""Or one worker that works a little with each dial would leave no room for anybody else."""


class Accounts:
    """Accounts by session, wallet and slice; they outlive connections."""

    def __init__(self, trial_pairs: int) -> None:
        self._trial_pairs = trial_pairs
        self._lock = threading.Lock()
        self._stats: dict[tuple[str, str, int, int, int], SessionStats] = {}

    def of(self, session: str, wallet: str, held: Slice) -> SessionStats:
        """Raises ``ValueError`` if there is no room for another."""
        key = (session, wallet, held.layer, held.begin, held.end)
        with self._lock:
            if key not in self._stats and len(self._stats) >= MAX_ACCOUNTS:
                self._stats = {each: stats for each, stats in self._stats.items() if _worth_keeping(stats)}
                if len(self._stats) >= MAX_ACCOUNTS:
                    raise ValueError(f"{len(self._stats)} slices have an account already")
            if key not in self._stats:
                mine = sum(each[:2] == key[:2] and _worth_keeping(stats) for each, stats in self._stats.items())
                if mine >= MAX_OF_SESSION:
                    raise ValueError(f"session {session} has accounts of {mine} slices already")
            return self._stats.setdefault(key, SessionStats(*key, proven=self._trial_pairs == 0))

    def pay(self, stats: SessionStats, request: dispatch.Request, checked_pairs: int = 0) -> None:
        """An answer was acknowledged; so many of its pairs were looked at and found right."""
        n_bytes = dispatch.paid_bytes(request.n_embd, request.n_rows, request.n_pairs)
        with self._lock:
            checks.acknowledge(stats, request.n_rows, request.n_pairs, n_bytes)
            if checked_pairs:
                checks.passed(stats, checked_pairs, self._trial_pairs)

    def convict(self, session: str, wallet: str | None = None) -> int | None:
        """Quarantine a session, of one wallet or of any; the bytes that were voided, ``None`` if nobody is called so.

        All its slices fall: they are one machine's.
        """
        with self._lock:
            found = [each for each in self._stats.values() if each.session == session and wallet in (None, each.wallet)]
            for stats in found:
                checks.convict(stats)
            return sum(stats.voided_bytes for stats in found) if found else None

    def pardon(self, session: str, wallet: str) -> bool:
        """Lift a session's quarantine; whether there was one."""
        with self._lock:
            found = [each for each in self._stats.values() if (each.session, each.wallet) == (session, wallet)]
            found = [each for each in found if each.quarantined]
            for stats in found:
                checks.pardon(stats, self._trial_pairs)
            return bool(found)

    def keep_case(self, session: str, wallet: str, fault: str, evidence: str, digest: str) -> None:
        """Remember what a session was caught at, and where the evidence lies."""
        with self._lock:
            for stats in self._stats.values():
                if (stats.session, stats.wallet) == (session, wallet):
                    stats.fault, stats.evidence, stats.evidence_digest = fault, evidence, digest

    def quarantined(self, session: str, wallet: str) -> bool:
        with self._lock:
            return any(
                stats.quarantined and (stats.session, stats.wallet) == (session, wallet)
                for stats in self._stats.values()
            )

    def coverage(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(stats) for stats in self._stats.values()]


def _worth_keeping(stats: SessionStats) -> bool:
    return bool(stats.requests or stats.failures or stats.mismatches or stats.connected or stats.quarantined)
