"""The embedded ledger as a real child process, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


class LedgerProcess:
    """One data directory and the process serving it; ``start`` again after ``kill`` or ``stop``."""

    def __init__(self, directory: Path, slot_ms: int = 60) -> None:
        self.data = directory / "ledger"
        self.auth_file = directory / "rpc-auth"
        self.slot_ms = slot_ms
        self.genesis = ""
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    @property
    def auth(self) -> str:
        return self.auth_file.read_text().strip()

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "kvasir_console.wallet.localnet"),
            *("--data", str(self.data), "--port", "0", "--auth-file", str(self.auth_file)),
            *("--slot-ms", str(self.slot_ms)),
        ]

    def start(self) -> LedgerProcess:
        self.process = subprocess.Popen(
            self.command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.genesis = ready["genesis"]
        self.url = f"http://127.0.0.1:{ready['port']}"
        return self

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more, nothing is tidied up."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        status = self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        return status
