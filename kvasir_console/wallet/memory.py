"""How much memory this process may take: what the machine has free, and what its control groups leave.

In a container the machine's free memory says little; going over the group's limit ends the process without a word.
"""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can be taken without swapping or being killed, as far as the system tells."""
    available: int = psutil.virtual_memory().available
    return min([available, *_group_limits(root, membership)])


def _group_limits(root: Path, membership: Path) -> list[int]:
    """What each control group on the way up leaves (cgroup v2, or the memory controller of v1)."""
    try:
        lines = membership.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    left = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory != base and base not in directory.parents:
                break
            found = _left(directory, *names)
            if found is not None:
                left.append(found)
    return left


def _left(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    limit, usage = _number(directory / limit_file), _number(directory / usage_file)
    if limit is None or usage is None:  # no such file, or "max"
        return None
    cache = 0
    try:
        for line in (directory / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable and value.isdecimal():
                cache = int(value)
    except (OSError, UnicodeDecodeError):
        pass
    return max(limit - max(usage - cache, 0), 0)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None
