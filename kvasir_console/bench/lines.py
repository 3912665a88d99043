"""A part of a benchmark as a child process that is asked in JSON, one object a line, and answers each in turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, Self

__all__ = ["LineChild"]


class LineChild:
    """``python -m module arguments``, for the length of a block; its input's end tells it to end.

    ``ask`` raises ``RuntimeError`` if the child refuses or is gone.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._name = module.rpartition(".")[2]
        self._argv = (sys.executable, "-m", "kvasir_console.child", str(os.getpid()), module, *arguments)
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
            env={**os.environ, **self._environment},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        process, stdin, _stdout = self._child()
        stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        return self._child()[0].pid

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        _process, stdin, stdout = self._child()
        async with self._lock:
            self._asked += 1
            stdin.write(json.dumps({"id": self._asked, "do": verb, **fields}).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._name} process is gone")
        answer: dict[str, Any] = json.loads(line)
        if not answer.get("ok"):
            raise RuntimeError(f"the {self._name} process refused {verb}: {answer.get('error')}")
        return answer

    def _child(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamWriter, asyncio.StreamReader]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError(f"the {self._name} process runs within its block only")
        return process, process.stdin, process.stdout
