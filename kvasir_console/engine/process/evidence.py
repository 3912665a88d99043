"""What is kept when a worker is caught: everything that is needed to see again that its answer was wrong."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

MAX_CASES = 64
"""The oldest go first."""
MAX_ROWS = 64
"""Most judged rows of one case: the guilty one and those after it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One wrong answer. Arrays as they were judged: rows as the worker received them, its answers, the reference."""

    session: str
    wallet: str
    layer: int
    wire: str
    model_digest: str
    fault: str
    at_unix_s: float
    rows: NDArray[np.float32]
    row_idx: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    answered: NDArray[np.float32]
    terms: NDArray[np.float32]

    def facts(self) -> dict[str, Any]:
        names = ("session", "wallet", "layer", "wire", "model_digest", "fault", "at_unix_s")
        return {name: getattr(self, name) for name in names}


def keep(directory: Path, case: Case) -> tuple[Path, str] | None:
    """Write ``case`` as two files, arrays and facts; ``None`` if the disk refuses.

    Returns:
        The facts' path, and the SHA-256 of the arrays' file in hexadecimal digits.
    """
    label = hashlib.sha256(f"{case.wallet}\0{case.session}".encode()).hexdigest()[:12]
    stem = f"{int(case.at_unix_s * 1e3):013d}-{case.layer}-{label}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        arrays = ("rows", "row_idx", "ids", "weights", "answered", "terms")
        with (directory / f"{stem}.npz").open("w+b") as file:
            np.savez(file, **{name: getattr(case, name) for name in arrays})
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = directory / f"{stem}.json"
        path.write_text(json.dumps(case.facts(), sort_keys=True, indent=2) + "\n")
        for old in sorted(directory.glob("*.json"))[:-MAX_CASES]:
            old.with_suffix(".npz").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("the evidence against %s cannot be kept: %s", case.session, error)
        return None
    return path, digest
