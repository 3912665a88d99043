"""Real engine processes for tests, and a splice that stands in for hub and uplink on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from kvasir_console.engine.checkpoint.digest import model_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import write_expert_shard
from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest
from kvasir_console.relay.wire.preamble import Preamble

Tamper = Callable[[bytes], bytes]
PATIENCE_S = 120.0
"""How long a busy machine may take for what is waited for."""


class EngineProcess:
    """One engine child with its control client."""

    def __init__(self, process: asyncio.subprocess.Process, client: EngineClient, data_socket: Path) -> None:
        self.process = process
        self.client = client
        self.data_socket = data_socket

    @property
    def pid(self) -> int:
        return self.process.pid


@contextlib.asynccontextmanager
async def engine(runtime: Path, name: str) -> AsyncIterator[EngineProcess]:
    """Start an engine process; stop it hard at the end."""
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = os.open(runtime / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.engine.process"),
        *("--runtime", str(runtime), "--name", name, "--threads", "1"),
        stdout=log,
        stderr=log,
    )
    os.close(log)
    client = await EngineClient.connect(runtime / f"{name}.ctl", timeout_s=PATIENCE_S)
    try:
        yield EngineProcess(process, client, runtime / f"{name}.data")
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


def expert_slice(
    process: EngineProcess, model: Path, layer: int, begin: int = 0, end: int | None = None
) -> dict[str, Any]:
    """A shard of ``model`` for ``process``, written beside its sockets, as its ``load`` takes it; ``end`` is all."""
    with Checkpoint.open(model) as checkpoint:
        end = ModelShape.of(checkpoint).n_expert if end is None else end
        path = process.data_socket.parent / f"L{layer}_{begin}-{end}.gguf"
        write_expert_shard(checkpoint, path, model="tiny", layer=layer, begin=begin, end=end)
    return {"path": str(path), "layer": layer, "experts": [begin, end]}


async def hold(process: EngineProcess, model: Path, layer: int, begin: int = 0, end: int | None = None) -> None:
    """Make ``process`` a worker of these experts, or of all."""
    await process.client.load(model="tiny", role="experts", **expert_slice(process, model, layer, begin, end))


def digest_of(model: Path) -> bytes:
    with Checkpoint.open(model) as checkpoint:
        return model_digest(checkpoint)


async def connected(trunk: EngineProcess, count: int) -> None:
    """Wait until ``trunk`` has so many slices at hand."""

    async def live() -> bool:
        return sum(each["connected"] for each in await trunk.client.coverage()) == count

    await until(live)


async def complete(client: EngineClient, request: GenerateRequest) -> DoneEvent:
    """The final event of a request."""
    async for event in client.generate(request):
        if isinstance(event, DoneEvent):
            return event
    raise AssertionError("the stream ended without a done event")


async def idle(trunk: EngineProcess) -> None:
    """Wait until no worker of ``trunk`` owes an answer: a late one is still counted when it comes."""

    async def nothing_in_flight() -> bool:
        return not any(each["in_flight"] for each in await trunk.client.coverage())

    await until(nothing_in_flight)


async def unhurried(trunk: EngineProcess, request: GenerateRequest) -> DoneEvent:
    """A request of which every pair that could leave was computed elsewhere: no answer was late. A busy machine makes
    some late, which are computed here, and then it is asked again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await idle(trunk)
            done = await complete(trunk.client, request)
            if done.pairs_remote and not done.failovers:
                return done


@contextlib.asynccontextmanager
async def at_once(process: EngineProcess) -> AsyncIterator[None]:
    """What tasks ask of an engine meanwhile reaches it in one moment: it is stopped until all of it is written."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
        for _ in range(10):  # tasks begin, and write
            await asyncio.sleep(0)
    finally:
        os.kill(process.pid, signal.SIGCONT)


class Splice:
    """Joins two engines' data sockets, as relay and hub do, and may tamper with what flows from left to right."""

    def __init__(self, left: Path, left_preamble: Preamble, right: Path, right_preamble: Preamble) -> None:
        self._ends = ((left, left_preamble), (right, right_preamble))
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.bytes_right = 0
        self.bytes_left = 0
        self.tamper: Tamper | None = None
        self.tamper_left: Tamper | None = None
        self.delay_left_s = 0.0

    async def __aenter__(self) -> Splice:
        streams = []
        for path, preamble in self._ends:
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(preamble.encode())
            await writer.drain()
            streams.append((reader, writer))
            self._writers.append(writer)
        (left_reader, left_writer), (right_reader, right_writer) = streams
        self._tasks = [
            asyncio.create_task(self._pump(left_reader, right_writer, to_right=True)),
            asyncio.create_task(self._pump(right_reader, left_writer, to_right=False)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def ended(self) -> None:
        """Wait until either end has closed."""
        await asyncio.wait(self._tasks)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_right: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if to_right:
                    self.bytes_right += len(data)
                    data = self.tamper(data) if self.tamper else data
                else:
                    self.bytes_left += len(data)
                    await asyncio.sleep(self.delay_left_s)
                    data = self.tamper_left(data) if self.tamper_left else data
                writer.write(data)
                await writer.drain()
        for each in self._writers:
            each.close()


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until ``condition`` holds (it may be async)."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.01)
