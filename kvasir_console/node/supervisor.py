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

from kvasir_console.config import EngineConfig
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import EngineError, KvasirError, SystemResourceError

log = logging.getLogger(__name__)


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
        name = signal.Signals(-self.returncode).name
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
        self._log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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

    async def wait(self) -> ExitReport:
        """Wait for the end of a started child."""
        assert self._process is not None  # noqa: S101 - start() came first
        code = await self._process.wait()
        return ExitReport(self.name, self._process.pid, code, time.time())

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
    """The command line of a child that is part of this program."""
    return [sys.executable, "-m", module, *arguments]


class Engine:
    """A supervised engine process.

    ``run`` starts it, calls ``on_ready`` with a connected client each time it is up, and starts it again with a
    doubling pause (1 s to 30 s) when it ends; ``on_exit`` hears why. A run of more than a minute resets the pause.
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
        arguments += ["--threads", str(config.threads), "--parent", str(os.getpid())]
        self._child = ChildProcess(f"engine {name}", module_argv("kvasir_console.engine.process", *arguments), log_file)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child.running else None

    async def run(self) -> None:
        """Supervise until cancelled."""
        pause_s = 1.0
        try:
            while True:
                started = time.monotonic()
                reason = await self._once()
                if self._on_exit is not None:
                    self._on_exit(reason)
                log.warning("%s It is started again in %g s.", reason, pause_s)
                pause_s = 1.0 if time.monotonic() - started > 60 else min(2 * pause_s, 30.0)
                await asyncio.sleep(pause_s)
                self.restarts += 1
        finally:
            await self.stop()

    async def _once(self) -> str:
        """One life of the process; returns why it ended."""
        self.control_socket.unlink(missing_ok=True)
        await self._child.start()
        exited = asyncio.create_task(self._child.wait())
        connecting = asyncio.create_task(EngineClient.connect(self.control_socket))
        ready: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({exited, connecting}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                self.client = await connecting
                ready = asyncio.create_task(self._ready(self.client))
            return (await exited).reason
        except EngineError as error:
            await self._child.stop()
            return str(error)
        finally:
            for task in (connecting, ready):
                if task is not None:
                    task.cancel()
            if self.client is not None:
                await self.client.close()
                self.client = None

    async def _ready(self, client: EngineClient) -> None:
        try:
            await self._on_ready(client)
        except KvasirError as error:
            log.error("engine %s: %s", self.name, error)

    async def stop(self) -> None:
        await self._child.stop()
