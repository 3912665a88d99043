"""Carrying out a fault on a running network, and saying whether its victim was at work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

import psutil

from kvasir_console.bench.faults import HUB, STOP_S, Fault, Kind, Part
from kvasir_console.bench.network import RingNetwork

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that happened. ``pid`` is ``None`` for a cut."""

    at_s: float
    """On the event loop's clock."""
    pid: int | None


class Striker:
    """Strikes members of one network. A stopped process goes on by itself after ``STOP_S``."""

    def __init__(self, network: RingNetwork) -> None:
        self._network = network
        self._continuing: dict[str, asyncio.Task[None]] = {}

    async def at_work(self, fault: Fault, timeout_s: float) -> bool:
        """Wait until the victim has work of requests that run; ``False`` if it has none in time.

        A stage has sequences. A worker answers its stage: requests are under way, or were between two looks. The hub
        carries both, so it is at work when a stage is.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    if fault.target.startswith("worker"):
                        if await self._worker_at_work(fault.target):
                            return True
                    elif await self._stage_at_work("stage-0" if fault.target == HUB else fault.target):
                        return True
                    await asyncio.sleep(_LOOK_S)
        return False

    async def strike(self, fault: Fault) -> Struck:
        """Raises ``ProcessLookupError`` if the victim does not run."""
        await self.continued(fault.target)
        loop = asyncio.get_running_loop()
        if fault.kind is Kind.CUT:
            names = [member.name for member in self._network.members] if fault.target == HUB else [fault.target]
            direction = "up" if fault.after_bytes else None
            for name in names:
                await self._network.links.cut(name, direction=direction, after_bytes=fault.after_bytes)
            return Struck(loop.time(), None)
        pid = self._pid(fault)
        if pid is None:
            raise ProcessLookupError(f"{fault.target} does not run")
        if fault.kind is Kind.KILL:
            os.kill(pid, signal.SIGKILL)
        else:
            process = psutil.Process(pid)
            process.suspend()
            self._continuing[fault.target] = asyncio.create_task(_go_on(process), name=f"continue {fault.target}")
        return Struck(loop.time(), pid)

    async def continued(self, target: str) -> None:
        """Wait until a stopped member goes on."""
        if task := self._continuing.pop(target, None):
            await task

    async def close(self) -> None:
        """Let every stopped process go on now."""
        for task in self._continuing.values():
            task.cancel()
        await asyncio.gather(*self._continuing.values(), return_exceptions=True)
        self._continuing.clear()

    def _pid(self, fault: Fault) -> int | None:
        if fault.part is Part.ENGINE:
            return self._network.engine_pid(fault.target)
        return self._network.console_pid(fault.target)

    async def _stage_at_work(self, name: str) -> bool:
        member = next(member for member in self._network.stages if member.name == name)
        stats = await self._network.engine_stats(member)
        return stats is not None and stats["ring"] is not None and stats["ring"]["sequences"] > 0

    async def _worker_at_work(self, name: str) -> bool:
        before = await self._requests(name)
        if before is None:
            return False
        await asyncio.sleep(_LOOK_S)
        after = await self._requests(name)
        return after is not None and (after[1] > 0 or after[0] > before[0])

    async def _requests(self, name: str) -> tuple[int, int] | None:
        """(requests answered, pairs under way) of a worker that is joined to its stage."""
        wallet = next(member.address for member in self._network.workers if member.name == name)
        mine = [each for each in await self._network.coverage() if each["wallet"] == wallet and each["connected"]]
        return (int(mine[0]["requests"]), int(mine[0]["in_flight"])) if mine else None


async def _go_on(process: psutil.Process) -> None:
    try:
        await asyncio.sleep(STOP_S)
    finally:
        with contextlib.suppress(psutil.Error):
            process.resume()
