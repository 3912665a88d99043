"""The delay proxy's other end: links of a network that a benchmark or a fault test shapes while it runs.

async with Links(seed=7) as links:
    port = await links.open("node-0", to=8443, rtt_ms=20.0)
    await links.cut("node-0", direction="up", after_bytes=100_000)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, Self

__all__ = ["Links"]


class Links:
    """A delay proxy as a child process; it ends with the block. ``delay.py`` says what each call does.

    Every call raises ``RuntimeError`` if the proxy refuses it or is gone.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.bench.delay"),
            *("--seed", str(self._seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        process, stdin, _stdout = self._child()
        stdin.close()
        await process.wait()

    @property
    def pid(self) -> int:
        return self._child()[0].pid

    async def open(self, link: str, to: int, *, host: str = "127.0.0.1", port: int = 0, **shape: float | None) -> int:
        """Forward a loopback port (0: a free one) to port ``to``, shaped by the fields of ``delay.Shape``; the port."""
        return int((await self._ask("open", link=link, to=to, host=host, port=port, **shape))["port"])

    async def set(self, link: str, **shape: float | None) -> None:
        await self._ask("set", link=link, **shape)

    async def stall(self, link: str, for_s: float | None = None) -> None:
        await self._ask("stall", link=link, for_s=for_s)

    async def resume(self, link: str) -> None:
        await self._ask("resume", link=link)

    async def cut(self, link: str, *, direction: str | None = None, after_bytes: int = 0) -> None:
        await self._ask("cut", link=link, direction=direction, after_bytes=after_bytes)

    async def down(self, link: str, on: bool = True) -> None:
        await self._ask("down", link=link, on=on)

    async def stats(self) -> dict[str, dict[str, int]]:
        """By link: ``up_bytes``, ``down_bytes``, ``connections``, ``accepted``, ``cuts``, ``stalls``."""
        links: dict[str, dict[str, int]] = (await self._ask("stats"))["links"]
        return links

    async def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        _process, stdin, stdout = self._child()
        async with self._lock:
            self._asked += 1
            stdin.write(json.dumps({"id": self._asked, "do": verb, **fields}).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        if not line:
            raise RuntimeError("the delay proxy is gone")
        answer: dict[str, Any] = json.loads(line)
        if not answer.get("ok"):
            raise RuntimeError(f"the delay proxy refused {verb}: {answer.get('error')}")
        return answer

    def _child(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamWriter, asyncio.StreamReader]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the delay proxy runs within its block only")
        return process, process.stdin, process.stdout
