"""Worker ids as the public network forms them (contract section 2)."""

from __future__ import annotations

import re


def worker_id(wallet: str, name: str, slot: int = 0) -> str:
    """``server-`` + first 8 characters of the wallet + ``-`` + the name as a slug of at most 24; ``-2`` and on for
    further slots."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-") or "node"
    return f"server-{wallet[:8]}-{slug}" + (f"-{slot + 1}" if slot else "")
