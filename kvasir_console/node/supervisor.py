"""Child processes: started, watched, restarted with backoff, stopped; their talk goes to a log, never a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.config import EngineConfig
from kvasir_console.engine.process.client import STUCK_S, EngineClient
from kvasir_console.errors import EngineError, KvasirError, SystemResourceError

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 4 * 2**20
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0
STEADY_S = 10.0
"""A run of this length resets the pause before a restart: others wait for what only this engine can do."""
WATCH_S = 5.0
TRACE_S = 0.5
HANG_S = 45.0
"""An engine that answers nothing for so long is taken for hung and killed."""
UP_S, LOOK_S = 60.0, 0.05
"""How long an engine that is on its way up is waited for, and how often it is looked for."""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """Why a child is gone. ``returncode`` is negative for a signal, as ``subprocess`` has it."""

    name: str
    pid: int
    returncode: int
    at_s: float

    @property
    def reason(self) -> str:
        if self.returncode == 0:
            return f"{self.name} ended."
        if self.returncode > 0:
            return f"{self.name} ended with code {self.returncode}; its log says why."
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-self.returncode, f"signal {-self.returncode}")
        cause = " (the system may have been out of memory)" if self.returncode == -signal.SIGKILL else ""
        return f"{self.name} was killed by {name}{cause}."


class ChildProcess:
    """One child. Its own session, so that a terminal's Ctrl-C reaches the console only; it dies with its parent."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_file: Path,
        *,
        env: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self.name = name
        self._argv = list(argv)
        self._log_file = log_file
        self._env = env
        self._stdout = stdout
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        return None if self._process is None else self._process.stdout

    async def start(self) -> None:
        """Raises ``SystemResourceError`` if the process cannot be started."""
        descriptor = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor if self._stdout is None else self._stdout,
                stderr=descriptor,
                env={**os.environ, **(self._env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise SystemResourceError(
                "child_not_started", f"{self.name} cannot be started: {error.strerror}.", "Check memory and limits."
            ) from error
        finally:
            os.close(descriptor)
        log.info("%s runs as process %d", self.name, self._process.pid)

    def _open_log(self) -> int:
        """A descriptor to append to; a log that has grown long is set aside first, replacing the one before."""
        try:
            self._log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._log_file.exists() and self._log_file.stat().st_size > MAX_LOG_BYTES:
                os.replace(self._log_file, self._log_file.with_name(self._log_file.name + ".1"))
            return os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SystemResourceError(
                "child_not_started", f"{self.name} has no log {self._log_file}: {error.strerror}.", "Check the disk."
            ) from error

    async def wait(self) -> ExitReport:
        """Wait for the end of a started child."""
        assert self._process is not None  # noqa: S101 - start() came first
        code = await self._process.wait()
        return ExitReport(self.name, self._process.pid, code, time.time())

    async def trace(self) -> None:
        """Let the child write to its log where each of its threads is, if it handles SIGUSR1; it ends otherwise."""
        if self.running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(TRACE_S)

    async def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``; a child that is gone is no error."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s did not stop within %g s and is killed", self.name, grace_s)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def module_argv(module: str, *arguments: str) -> list[str]:
    """The command line of a child that is part of this program; it dies with this process, however that ends."""
    return [sys.executable, "-m", "kvasir_console.child", str(os.getpid()), module, *arguments]


class Engine:
    """A supervised engine process.

    ``run`` starts it, calls ``on_ready`` with a connected client each time it is up, and starts it again with a
    doubling pause (50 ms to 30 s) when it ends or hangs; ``on_exit`` hears why. A run of more than ten seconds resets
    the pause.
    """

    def __init__(
        self,
        name: str,
        runtime: Path,
        log_file: Path,
        config: EngineConfig,
        on_ready: Callable[[EngineClient], Awaitable[None]],
        on_exit: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.control_socket = runtime / f"{name}.ctl"
        self.data_socket = runtime / f"{name}.data"
        self.client: EngineClient | None = None
        self._on_ready = on_ready
        self._on_exit = on_exit
        arguments = ["--runtime", str(runtime), "--name", name, "--device", config.device]
        arguments += ["--threads", str(config.threads), "--kernels", config.kernels, "--kv-type", config.kv_type]
        arguments += ["--expert-device", config.expert_device] if config.expert_device else []
        self._child = ChildProcess(f"engine {name}", module_argv("kvasir_console.engine.process", *arguments), log_file)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child.running else None

    async def connected(self) -> EngineClient:
        """The client of the engine that is up, or comes up soon. Raises ``EngineError`` ``engine_not_up``."""
        deadline = time.monotonic() + UP_S
        while (client := self.client) is None or client.closed:
            if time.monotonic() > deadline:
                raise EngineError("engine_not_up", "The engine process does not come up.", "Read engine.log.")
            await asyncio.sleep(LOOK_S)
        return client

    async def run(self) -> None:
        """Supervise until cancelled."""
        pause_s = MIN_PAUSE_S
        try:
            while True:
                started = time.monotonic()
                reason = await self._once()
                if time.monotonic() - started > STEADY_S:
                    pause_s = MIN_PAUSE_S
                if self._on_exit is not None:
                    self._on_exit(reason)
                log.warning("%s It is started again in %g s.", reason, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self.restarts += 1
        finally:
            await self.stop()

    async def _once(self) -> str:
        """One life of the process; returns why it ended."""
        try:
            self.control_socket.unlink(missing_ok=True)
            await self._child.start()
        except SystemResourceError as error:
            return str(error)
        exited = asyncio.create_task(self._child.wait())
        connecting = asyncio.create_task(EngineClient.connect(self.control_socket))
        tasks: list[asyncio.Task[Any]] = [exited, connecting]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                self.client = await connecting
                watch = asyncio.create_task(self._watch(self.client))
                tasks += [asyncio.create_task(self._ready(self.client)), watch]
                await asyncio.wait((exited, watch), return_when=asyncio.FIRST_COMPLETED)
                if not exited.done():
                    await self._child.trace()
                    await self._child.stop(grace_s=1.0)
                    return watch.result()
            return (await exited).reason
        except EngineError as error:
            await self._child.stop()
            return str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.client is not None:
                await self.client.close()
                self.client = None

    async def _watch(self, client: EngineClient) -> str:
        """Returns, with the reason, once an engine that still runs can no longer be talked to, or is stuck."""
        paused_s, was_stuck = 0.0, False  # a machine that stood still computed nothing
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(WATCH_S)
            late_s = time.monotonic() - asleep - WATCH_S
            try:
                async with asyncio.timeout(HANG_S):
                    computing_s = (await client.stats()).get("computing_s", 0.0)
                paused_s = min(paused_s + (late_s if late_s > HANG_S else 0.0), computing_s)
                stuck = computing_s - paused_s > STUCK_S
                if stuck and was_stuck:  # once may be a whole machine that stood still meanwhile, and goes on now
                    return f"engine {self.name} did not come to the end of a step in {STUCK_S:g} s and was stopped."
                was_stuck = stuck
            except TimeoutError:
                return f"engine {self.name} answered nothing for {HANG_S:g} s and was stopped."
            except KvasirError as error:
                if client.closed:
                    await asyncio.sleep(WATCH_S)  # the usual case: it is just ending, and its exit says more
                    return f"engine {self.name} closed its control socket and was stopped."
                log.debug("engine %s: %s", self.name, error)

    async def _ready(self, client: EngineClient) -> None:
        try:
            await self._on_ready(client)
        except KvasirError as error:
            log.error("engine %s: %s", self.name, error)

    async def stop(self) -> None:
        await self._child.stop()
