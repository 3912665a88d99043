"""How many bytes keys and values may take, and who has them.

A request reserves what its whole sequence can ever need before its first row is computed, so none fails half-way for
want of memory. What running requests leave may hold blocks kept for reuse; those give way whenever it is needed.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from kvasir_console.errors import EngineError, RequestError

FREE_SHARE = 0.5
"""Part of the memory that is free at load which keys and values may take by default."""
KEPT_SHARE = 0.25
"""Most of the budget that blocks kept for reuse may take."""


class KvBudget:
    """Bytes of keys and values: ``reserved`` for running requests, ``kept`` for blocks that may be used again."""

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < 1:
            raise EngineError(
                "bad_kv_budget",
                f"A budget of {total_bytes} bytes holds no keys and values.",
                "Set engine.kv_budget_mib.",
            )
        self.total_bytes = total_bytes
        self.reserved_bytes = 0
        self.kept_bytes = 0

    def check(self, n_bytes: int) -> None:
        """Raises ``RequestError`` (``kv_budget_exceeded``) for a request that even an idle engine cannot hold."""
        if n_bytes > self.total_bytes:
            raise RequestError(
                "kv_budget_exceeded",
                f"The request's keys and values would take {n_bytes} bytes; this engine has {self.total_bytes} for "
                "them, of all requests together.",
                "Shorten the prompt or lower max_tokens.",
            )

    def fits(self, n_bytes: int) -> bool:
        """Whether a request can be admitted now; kept blocks are no obstacle."""
        return self.reserved_bytes + n_bytes <= self.total_bytes

    def reserve(self, n_bytes: int) -> None:
        """Take bytes for a request that ``fits``. The caller then drops kept blocks while ``excess_bytes``."""
        if not self.fits(n_bytes):
            raise EngineError("kv_budget_full", "The budget for keys and values is taken.", "Try again shortly.")
        self.reserved_bytes += n_bytes

    def release(self, n_bytes: int) -> None:
        self.reserved_bytes -= n_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much kept blocks exceed what they may take now; at most 0 is good."""
        allowed = min(int(self.total_bytes * KEPT_SHARE), self.total_bytes - self.reserved_bytes)
        return self.kept_bytes - allowed


def budget_of(wanted_bytes: int, device: torch.device | str, sharers: int = 1) -> KvBudget:
    """What the owner wants, or (0) this engine's part of ``FREE_SHARE`` of what is free on ``device`` now.

    Args:
        sharers: how many engines of this machine have to share that.

    Raises:
        EngineError: ``kv_budget_too_large``; more is wanted than is free, which would end in the middle of a request.
    """
    free = free_bytes(device)
    if wanted_bytes > free:
        raise EngineError(
            "kv_budget_too_large",
            f"engine.kv_budget_mib asks for {wanted_bytes} bytes of keys and values; {free} are free on {device}.",
            "Lower it, set it to 0, or set engine.kv_type to a smaller kind.",
        )
    return KvBudget(wanted_bytes or max(1, int(free * FREE_SHARE) // max(1, sharers)))


def free_bytes(device: torch.device | str) -> int:
    """Bytes that are free on ``device`` now, a container's limit included."""
    device = torch.device(device)
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(int(psutil.virtual_memory().available), cgroup_free_bytes(Path("/sys/fs/cgroup")))


def cgroup_free_bytes(root: Path) -> int:
    """Bytes below the memory limit of this process's control group (v2, then v1); a huge number without one."""
    unlimited = 1 << 62
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_name).read_text().strip()
            used = int((root / used_name).read_text())
        except (OSError, ValueError):
            continue
        return unlimited if limit == "max" else min(unlimited, max(0, int(limit) - used))
    return unlimited
