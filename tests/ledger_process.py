"""The embedded ledger as a real child process, and a proxy that makes it misbehave, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class LedgerProcess:
    """One data directory and the process serving it; ``start`` again after ``kill`` or ``stop``."""

    def __init__(self, directory: Path, slot_ms: int = 60, port: int = 0) -> None:
        self.port = port
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
            *("--data", str(self.data), "--port", str(self.port), "--auth-file", str(self.auth_file)),
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
        status = self.process.wait(timeout=120)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        return status


@dataclass(frozen=True)
class Refusal:
    """An answer that is no JSON-RPC."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


HANG_UP = Refusal(0)
"""No answer at all: the connection is closed."""


def pass_on(_method: str, reply: Any) -> Any:
    """The ledger's own answer."""
    return reply


def let_in(_method: str) -> Refusal | None:
    """Every request reaches the ledger."""
    return None


class RpcProxy:
    """An RPC in front of a ledger.

    ``gate(method)`` may refuse a request before the ledger sees it. ``rewrite(method, reply)`` gives the answer to a
    request that the ledger has carried out: another reply, or a ``Refusal``. With ``auth`` it signs in by itself, as a
    public RPC that asks for no header.
    """

    def __init__(
        self,
        target: str,
        rewrite: Callable[[str, Any], Any] = pass_on,
        gate: Callable[[str], Refusal | None] = let_in,
        auth: str = "",
    ) -> None:
        self.target, self.rewrite, self.gate, self.auth = target, rewrite, gate, auth
        self.calls: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def __aenter__(self) -> RpcProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head, body = await self._message(reader)
            method = json.loads(body)["method"]
            self.calls.append(method)
            lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line]
            self.headers.append({name.lower(): value for name, value in lines})
            answer = self.gate(method)
            if answer is None:
                host, port = self.target.removeprefix("http://").split(":")
                there, back = await asyncio.open_connection(host, int(port))
                own = f"Authorization: {self.auth}\r\n\r\n".encode() if self.auth else b"\r\n"
                back.write(head.removesuffix(b"\r\n") + own + body)
                status, reply = await self._message(there)
                back.close()
                assert status.startswith(b"HTTP/1.1 200")
                answer = self.rewrite(method, json.loads(reply))
            if answer is not HANG_UP:
                await self._answer(writer, answer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client, or the ledger, is gone
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()

    @staticmethod
    async def _answer(writer: asyncio.StreamWriter, answer: Any) -> None:
        refusal = answer if isinstance(answer, Refusal) else Refusal(200)
        content = b"" if isinstance(answer, Refusal) else json.dumps(answer).encode()
        headers = {"Connection": "close", "Content-Length": str(len(content)), **refusal.headers}
        lines = [f"HTTP/1.1 {refusal.status} -", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + content)
        await writer.drain()

    @staticmethod
    async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = (line.split(b":", 1) for line in head.lower().split(b"\r\n") if b":" in line)
        length = next(int(value) for name, value in fields if name == b"content-length")
        return head, await reader.readexactly(length)
