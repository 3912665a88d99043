"""The hub's key as this node knows it: pinned on first sight, followed through rotations, never exchanged silently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvasir_console.errors import NetworkError, SystemResourceError
from kvasir_console.relay.wire.statement import Rotation, follow_rotations
from kvasir_console.wallet.keys import verify

__all__ = ["HubPin"]


class HubPin:
    """One file with one key. Errors: ``SystemResourceError`` ``pin_unavailable``."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def key(self) -> str:
        """The pinned key; empty before the first."""
        try:
            return self._file.read_text(errors="replace").strip() if self._file.exists() else ""
        except OSError as error:
            raise self._unavailable(error) from error

    def follow(self, announced: str, rotations: Sequence[Rotation]) -> tuple[str, ...]:
        """All keys that lead to the announced one; a pinned key that signed for it gives way to it.

        Raises:
            NetworkError: ``hub_key_changed``.
        """
        pinned = self.key
        try:
            keys = follow_rotations(pinned, announced, rotations, verify)
        except NetworkError as error:
            hint = f"If the operator says that it changed, remove {self._file} and start again."
            raise NetworkError(error.code, error.message, hint) from None
        if pinned and pinned != announced:
            self._write(announced)
        return keys

    def keep(self, key: str) -> None:
        """Pin ``key``, which has signed something, unless one is pinned."""
        if not self.key:
            self._write(key)

    def _write(self, key: str) -> None:
        try:
            self._file.write_text(key + "\n")
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> SystemResourceError:
        return SystemResourceError(
            "pin_unavailable",
            f"The hub key in {self._file} cannot be used: {error.strerror}.",
            "Check its permissions.",
        )
