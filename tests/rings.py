"""A ring of real engine processes for tests: stages that are killed and started again, edges that are dialled for ever.

What relay, hub and supervisor do, without them: an edge is a pair of Unix sockets and a pump; it is cut, and made
again, and a stage that died is started and loaded again while ``supervise`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvasir_console.engine.checkpoint.digest import model_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import write_stage
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.preamble import Kind, Preamble

from engines import PATIENCE_S, until

REDIAL_S = 0.05


class Stage:
    """One rank's engine, and its supervisor."""

    def __init__(self, directory: Path, model: Path, window: tuple[int, int], ring: dict[str, Any]) -> None:
        directory.mkdir(mode=0o700, parents=True)
        self.directory = directory
        self.ring = ring
        self.window = window
        self.file = directory / "stage.gguf"
        self.supervise = asyncio.Event()
        self.supervise.set()
        self.client: EngineClient | None = None
        self.lives = 0
        self._process: asyncio.subprocess.Process | None = None
        with Checkpoint.open(model) as checkpoint:
            write_stage(checkpoint, self.file, model="tiny", begin=window[0], end=window[1])

    @property
    def data_socket(self) -> Path:
        return self.directory / "s.data"

    async def run(self) -> None:
        try:
            while True:
                await self._once()
                await self.supervise.wait()
        finally:
            await self._end()

    async def _once(self) -> None:
        for name in ("s.ctl", "s.data"):
            (self.directory / name).unlink(missing_ok=True)
        with (self.directory / "s.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.engine.process"),
                *("--runtime", str(self.directory), "--name", "s", "--threads", "1"),
                stdout=log,
                stderr=log,
            )
        try:
            client = await EngineClient.connect(self.directory / "s.ctl", timeout_s=PATIENCE_S)
            await client.load(path=str(self.file), model="tiny", role="stage", layers=list(self.window), ring=self.ring)
            self.client = client
            self.lives += 1
        except KvasirError:
            pass  # it was killed while it started
        await self._process.wait()
        if self.client is not None:
            await self.client.close()
            self.client = None

    async def _end(self) -> None:
        if self.client is not None:
            await self.client.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def stats(self) -> dict[str, Any]:
        assert self.client is not None
        return (await self.client.stats())["ring"]


class Joint:
    """An edge, dialled for ever: when one end's connection is over, so is the other's, and both dial again."""

    def __init__(self, left: Stage, right: Stage, digest: bytes) -> None:
        self.left, self.right = left, right
        self.digest = digest
        self._writers: list[asyncio.StreamWriter] = []
        self.made = 0
        self.held = False
        """While set, nobody dials."""
        self.swallows = False
        """An edge that is made while it is set carries everything but hidden states."""

    async def run(self) -> None:
        while True:
            if not self.held:
                with contextlib.suppress(OSError):
                    await self._once()
            await asyncio.sleep(REDIAL_S)

    async def _once(self) -> None:
        streams = []
        self._writers = []
        try:
            for stage, kind in ((self.left, Kind.RING_NEXT), (self.right, Kind.RING_PREV)):
                reader, writer = await asyncio.open_unix_connection(str(stage.data_socket))
                self._writers.append(writer)
                epoch = stage.ring["epoch"]
                writer.write(Preamble(kind, kind.name.lower(), model_digest=self.digest, epoch=epoch).encode())
                streams.append((reader, writer))
            self.made += 1
            (left_reader, left_writer), (right_reader, right_writer) = streams
            pumps = [
                asyncio.create_task((_sieve if self.swallows else _pump)(left_reader, right_writer)),
                asyncio.create_task(_pump(right_reader, left_writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self.cut()

    def cut(self) -> None:
        """Cut the connection off, in the middle of a frame if it comes to that."""
        for writer in self._writers:
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()


async def _sieve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, EOFError):
        writer.write(await reader.readexactly(1))  # the role
        while True:
            frame = await wire.read_frame(reader)
            if frame.kind is not wire.FrameKind.HIDDEN:
                writer.write(wire.encode(frame))
                await writer.drain()


class Ring:
    """Stages in their order, the closing edge included. Also the hub's side of the entry (``backends.Entries``)."""

    def __init__(self, stages: list[Stage], joints: list[Joint]) -> None:
        self.stages, self.joints = stages, joints
        self._entries: list[asyncio.StreamWriter] = []

    def entry_connected(self, ring_id: str) -> bool:
        return self.stages[0].client is not None

    async def open_entry(self, ring_id: str, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            await until(lambda: self.entry_connected(ring_id), timeout_s)
            reader, writer = await asyncio.open_unix_connection(str(self.stages[0].data_socket))
        except OSError as error:
            raise NetworkError("entry_not_connected", "Rank 0 is not there.") from error
        writer.write(Preamble(Kind.ENTRY, "entry").encode())
        self._entries.append(writer)
        return reader, writer

    def cut(self) -> None:
        """Cut every edge and the entry, as a hub does that dies."""
        for joint in self.joints:
            joint.cut()
        for writer in self._entries:
            writer.transport.abort()
        self._entries.clear()

    async def whole(self) -> None:
        """Wait until every rank has both its edges."""

        async def ready() -> bool:
            try:
                stats = [await stage.stats() for stage in self.stages if stage.client is not None]
            except KvasirError:
                return False
            return len(stats) == len(self.stages) and all(s["next_ready"] and s["prev_ready"] for s in stats)

        await until(ready)

    async def stats(self) -> list[dict[str, Any]]:
        return [await stage.stats() for stage in self.stages]

    async def empty(self) -> None:
        """Wait until no rank holds anything of a request."""

        async def released() -> bool:
            stats = await self.stats()
            return all(each["sequences"] == 0 and each["kv"]["reserved_bytes"] == 0 for each in stats)

        await until(released)


@contextlib.asynccontextmanager
async def ring(
    directory: Path, model: Path, windows: list[tuple[int, int]], n_layer: int, **options: float
) -> AsyncIterator[Ring]:
    """A whole ring; ``options`` are further fields of the ``ring`` that is loaded."""
    with Checkpoint.open(model) as checkpoint:
        digest = model_digest(checkpoint)
    size = len(windows)
    stages = [
        Stage(
            directory / f"s{rank}",
            model,
            window,
            {"id": "r", "epoch": 1, "rank": rank, "size": size, "n_layer": n_layer} | options,
        )
        for rank, window in enumerate(windows)
    ]
    joints = [Joint(stage, stages[(rank + 1) % size], digest) for rank, stage in enumerate(stages)]
    made = Ring(stages, joints)
    tasks = [asyncio.create_task(each.run()) for each in (*stages, *joints)]
    try:
        await made.whole()
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
