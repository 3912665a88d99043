"""Children: real processes that crash, hang, are killed, and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir_console.config import EngineConfig
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import EngineError, SystemResourceError
from kvasir_console.node import supervisor
from kvasir_console.node.supervisor import ChildProcess, Engine, ExitReport

FAKE_ENGINE = """
import asyncio, faulthandler, os, signal, sys
from pathlib import Path
from kvasir_console.relay.wire import control
faulthandler.register(signal.SIGUSR1)
computing_s, once, looks = 0.0, False, 0
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
async def serve(reader, writer):
    global computing_s, once, looks
    while True:
        message = await control.read_message(reader)
        match message["verb"]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stick":
                computing_s = 301.0
            case "stick once":
                computing_s, once, looks = 301.0, True, 0
            case "stats":
                looks += 1
            case "close":
                server.close(); writer.close(); os.unlink(path)
                await asyncio.Event().wait()
        answer = control.reply(message, options=options, computing_s=computing_s, looks=looks)
        if once and message["verb"] == "stats":
            computing_s, once = 0.0, False
        await control.write_message(writer, answer)
async def main():
    global server, path
    path = Path(options["--runtime"]) / (options["--name"] + ".ctl")
    server = await asyncio.start_unix_server(serve, str(path))
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "child.log"


def child(log_file: Path, script: str, **options) -> ChildProcess:
    return ChildProcess("worker", [sys.executable, "-c", textwrap.dedent(script)], log_file, **options)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - other processes set no event of ours
            await asyncio.sleep(0.01)


# One child


async def test_a_child_talks_to_its_log_and_not_to_the_terminal(log_file, capfd):
    process = child(log_file, "import sys; print('out'); print('err', file=sys.stderr); print(repr(sys.stdin.read()))")
    await process.start()
    assert process.running
    report = await process.wait()
    assert (report.returncode, report.pid, process.running) == (0, process.pid, False)
    assert report.reason == "worker ended."
    assert sorted(log_file.read_text().split()) == ["''", "err", "out"]
    assert capfd.readouterr() == ("", "")
    assert stat.S_IMODE(log_file.stat().st_mode) == 0o600


async def test_a_log_is_continued_and_set_aside_when_it_is_long(log_file, monkeypatch):
    for _ in range(2):
        process = child(log_file, "print('line')")
        await process.start()
        await process.wait()
    assert log_file.read_text() == "line\nline\n"
    monkeypatch.setattr(supervisor, "MAX_LOG_BYTES", 5)
    await process.start()
    await process.wait()
    assert log_file.read_text() == "line\n"
    assert log_file.with_name("child.log.1").read_text() == "line\nline\n"


async def test_a_crash_is_told_from_a_kill(log_file):
    process = child(log_file, "raise SystemExit(3)")
    await process.start()
    assert (await process.wait()).reason == "worker ended with code 3; its log says why."

    for number, words in (
        (signal.SIGKILL, "SIGKILL (the system may have been out of memory)"),
        (signal.SIGSEGV, "SIGSEGV"),
    ):
        process = child(log_file, "import time; time.sleep(60)")
        await process.start()
        assert process.pid is not None
        os.kill(process.pid, number)
        report = await process.wait()
        assert report.returncode == -number
        assert report.reason == f"worker was killed by {words}."


def test_a_signal_without_a_name_has_its_number():
    assert ExitReport("x", 1, -40, 0.0).reason == "x was killed by signal 40."


async def test_a_polite_child_is_asked_first(log_file):
    script = """
        import signal, sys, time
        def leave(*_):
            print("leaving", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = child(log_file, script)
    await process.start()
    await until(lambda: "ready" in log_file.read_text())
    await process.stop()
    assert (await process.wait()).returncode == 0
    assert log_file.read_text() == "ready\nleaving\n"
    await process.stop()  # once more is no error


READY = "print('ready', flush=True)"
IGNORES = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
STOPPED = f"{READY}; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("deaf", [IGNORES, STOPPED])
async def test_a_child_that_does_not_listen_is_killed(log_file, deaf):
    process = child(log_file, f"import os, signal, time; {deaf}; time.sleep(60)")
    await process.start()
    await until(lambda: "ready" in log_file.read_text())
    await process.stop(grace_s=0.3)
    assert (await process.wait()).returncode == -signal.SIGKILL


async def test_ctrl_c_on_the_terminal_does_not_reach_it(log_file):
    process = child(log_file, "import time; time.sleep(60)")
    await process.start()
    assert process.pid is not None
    assert os.getpgid(process.pid) != os.getpgid(0)
    assert os.getsid(process.pid) == process.pid
    await process.stop()


async def test_the_environment_is_extended_and_stdout_can_be_read(log_file):
    process = child(
        log_file, "import os; print(os.environ['ADDED'], 'PATH' in os.environ)", env={"ADDED": "5"}, stdout=-1
    )
    await process.start()
    assert process.stdout is not None
    assert await process.stdout.read() == b"5 True\n"
    await process.wait()


async def test_what_cannot_be_started_is_named(log_file, tmp_path):
    with pytest.raises(SystemResourceError) as caught:
        await ChildProcess("worker", [str(tmp_path / "missing")], log_file).start()
    assert (caught.value.code, "worker" in caught.value.message) == ("child_not_started", True)
    tmp_path.joinpath("file").write_text("")
    with pytest.raises(SystemResourceError, match="log"):
        await child(tmp_path / "file" / "x.log", "").start()


async def test_a_child_dies_with_the_console(log_file, tmp_path):
    """A console that is killed outright leaves no engine behind."""
    (tmp_path / "kept_busy.py").write_text("import sys, time\nprint(sys.argv[1:], flush=True)\ntime.sleep(60)\n")
    console = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from kvasir_console.node.supervisor import ChildProcess, module_argv
        async def main():
            child = ChildProcess("engine", module_argv("kept_busy", "--name", "x"), Path({str(log_file)!r}))
            await child.start()
            print(child.pid, flush=True)
            await child.wait()
        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", console, stdout=-1, env=environment)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    await until(lambda: log_file.exists() and log_file.read_text() == "['--name', 'x']\n")
    parent.kill()
    await parent.wait()
    await until(lambda: over(pid))


def over(pid: int) -> bool:
    """It is gone, or waits for whoever buries it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# The supervised engine


class Supervised:
    """An engine under supervision and what it reported."""

    def __init__(self, runtime: Path, log_file: Path, script: str) -> None:
        self.clients: list[EngineClient] = []
        self.reasons: list[str] = []
        self.engine = Engine(
            "e",
            runtime,
            log_file,
            EngineConfig(threads=2, kv_type="f16", expert_device="cpu"),
            self._ready,
            self.reasons.append,
        )
        argv = self.engine._child._argv
        place = argv.index("kvasir_console.engine.process")
        self.engine._child._argv = [sys.executable, "-c", script, *argv[place + 1 :]]

    async def _ready(self, client: EngineClient) -> None:
        self.clients.append(client)


Start = Callable[[str], Supervised]


@pytest.fixture
async def supervised(runtime: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr(supervisor, "MIN_PAUSE_S", 0.01)
    tasks: list[asyncio.Task[None]] = []

    def start(script: str) -> Supervised:
        started = Supervised(runtime, log_file, script)
        tasks.append(asyncio.create_task(started.engine.run()))
        return started

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_engine_is_started_with_its_configuration(supervised):
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    options = (await under.clients[0].call("stats"))["options"]
    assert (options["--name"], options["--threads"], options["--device"]) == ("e", "2", "cpu")
    assert (options["--kv-type"], options["--expert-device"]) == ("f16", "cpu")
    assert under.engine.pid is not None


async def test_a_killed_engine_comes_back_and_its_end_is_told(supervised):
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    first = under.engine.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(under.clients) == 2)
    assert under.engine.pid not in (None, first)
    assert under.reasons == ["engine e was killed by SIGKILL (the system may have been out of memory)."]
    assert under.engine.restarts == 1
    assert under.clients[0].closed
    assert "options" in await under.clients[1].call("stats")


async def test_an_engine_that_never_comes_up_is_tried_with_growing_pauses(supervised, monkeypatch):
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds >= 0.125:
            pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr(supervisor, "MIN_PAUSE_S", 0.125)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.5)
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    under = supervised("raise SystemExit(4)")
    while len(pauses) < 5:
        await real_sleep(0.01)
    assert pauses[:5] == [0.125, 0.25, 0.5, 0.5, 0.5]
    assert under.reasons[0] == "engine e ended with code 4; its log says why."
    assert under.clients == []


async def test_an_engine_that_closes_its_socket_is_replaced(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.02)
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    with pytest.raises(Exception, match="closed its control stream"):
        await under.clients[0].call("close")
    await until(lambda: len(under.clients) == 2)
    assert "closed its control socket" in under.reasons[0]


async def test_an_engine_that_hangs_is_replaced(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.5)  # so that no question is under way yet, with the time of before
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    first = under.engine.pid
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(supervisor, "HANG_S", 0.3)
    await until(lambda: under.reasons)
    monkeypatch.setattr(supervisor, "HANG_S", 45.0)  # a slow one that comes back is not hung
    await until(lambda: len(under.clients) == 2)
    assert "answered nothing for 0.3 s" in under.reasons[0]
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_an_engine_that_answers_and_is_stuck_in_a_step_is_replaced_and_its_log_says_where(
    supervised, monkeypatch, log_file
):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.02)
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    await under.clients[0].call("stick")
    await until(lambda: len(under.clients) == 2)
    assert under.reasons == ["engine e did not come to the end of a step in 300 s and was stopped."]
    assert "most recent call first" in log_file.read_text()


@pytest.mark.parametrize("awake_s", [250.0, 1000.0], ids=["a long step", "a step without an end"])
async def test_a_pause_of_the_whole_machine_is_no_time_that_an_engine_computed(runtime, log_file, monkeypatch, awake_s):
    """Both were stopped for an hour in the middle of a step, which goes on for ``awake_s`` afterwards."""
    now, woken, slept = 0.0, 3600.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, slept
        slept += seconds
        now += seconds + (woken if now < 20.0 <= now + seconds else 0.0)
        if slept > 2000.0:
            raise asyncio.CancelledError

    class Client:
        async def stats(self) -> dict[str, float]:
            return {"computing_s": now if slept < awake_s else 0.0}

    client: Any = Client()
    watch = Engine("e", runtime, log_file, EngineConfig(), lambda _: asyncio.sleep(0))._watch(client)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    try:
        reason = await watch
    except asyncio.CancelledError:
        reason = ""
    monkeypatch.undo()
    if awake_s < 300:
        assert reason == ""
    else:
        assert reason.startswith("engine e did not come to the end of a step in 300 s")
        assert 300 <= slept < 350


async def test_a_machine_that_stood_still_for_long_does_not_cost_an_engine(supervised, monkeypatch):
    """The first look after a pause finds a step that is older than the pause."""
    monkeypatch.setattr(supervisor, "WATCH_S", 0.02)
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.clients)
    await under.clients[0].call("stick once")
    looks = 0
    while looks < 5:
        looks = (await under.clients[0].call("looks"))["looks"]
        await asyncio.sleep(0.02)
    assert under.reasons == []


async def test_the_end_of_supervision_is_the_end_of_the_engine(runtime, log_file):
    under = Supervised(runtime, log_file, FAKE_ENGINE)
    task = asyncio.create_task(under.engine.run())
    await until(lambda: under.clients)
    pid = under.engine.pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert under.engine.pid is None
    assert under.engine.client is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert under.reasons == []


async def test_a_machine_that_cannot_start_processes_is_tried_again(supervised, log_file):
    log_file.parent.mkdir(parents=True)
    log_file.mkdir()  # no log, no child
    under = supervised(FAKE_ENGINE)
    await until(lambda: under.reasons)
    assert "log" in under.reasons[0]
    log_file.rmdir()
    await until(lambda: under.clients)


async def test_who_needs_the_engine_waits_until_it_is_up(supervised):
    under = supervised(FAKE_ENGINE)
    assert under.engine.client is None
    client = await under.engine.connected()
    assert client is under.engine.client
    os.kill(under.engine.pid, signal.SIGKILL)
    await until(lambda: client.closed)
    after = await under.engine.connected()
    assert after is not client
    assert "options" in await after.call("stats")


async def test_an_engine_that_does_not_come_up_is_waited_for_no_longer_than_that(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "UP_S", 0.0)
    under = supervised("raise SystemExit(4)")
    with pytest.raises(EngineError) as caught:
        await under.engine.connected()
    assert caught.value.code == "engine_not_up"


async def test_a_client_whose_engine_closed_it_is_handed_to_nobody(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.1)
    under = supervised(FAKE_ENGINE)
    client = await under.engine.connected()
    with pytest.raises(EngineError):
        await client.call("close")
    await until(lambda: client.closed)
    assert await under.engine.connected() is not client
