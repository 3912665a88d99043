"""An engine whose compute thread hangs while its event loop answers: its console stops it and starts it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvasir_console.config import EngineConfig
from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest
from kvasir_console.errors import KvasirError
from kvasir_console.node import supervisor

import builders
from engines import until
from stopped_thread import StoppedThread

REQUEST = GenerateRequest(prompt="the inner thread", max_tokens=3000, ignore_eos=True, speculation="off")


class Console:
    """A supervisor, and a client that loads the model whenever the engine is there."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.lives: list[EngineClient] = []
        self.reasons: list[str] = []
        self.log_file = directory / "engine.log"
        self._model = model
        runtime = directory / "run"
        runtime.mkdir(mode=0o700)
        config = EngineConfig(threads=1)
        self.engine = supervisor.Engine("e", runtime, self.log_file, config, self._ready, self.reasons.append)

    async def _ready(self, client: EngineClient) -> None:
        await client.load(path=str(self._model), model="tiny", role="stage", layers=[0, 2])
        self.lives.append(client)


@pytest.fixture
async def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Console]:
    monkeypatch.setattr(supervisor, "STUCK_S", 15.0)
    monkeypatch.setattr(supervisor, "WATCH_S", 0.2)
    model = builders.write_tiny_llama(tmp_path / "tiny.gguf", n_layer=2, seed=3, context_length=4096)
    made = Console(tmp_path, model)
    running = asyncio.create_task(made.engine.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_computes_nothing_more_is_started_again(console: Console) -> None:
    await until(lambda: console.lives)
    seen = 0

    async def ask() -> None:
        """One request after the other, until the engine is gone."""
        nonlocal seen
        while True:
            async for _ in console.lives[0].generate(REQUEST):
                seen += 1

    asking = asyncio.create_task(ask())
    await until(lambda: seen > 50)
    stopped = await _stop_computing(console)

    async def computes_on() -> bool:
        stopped.reap()
        return len(console.lives) == 2

    try:
        await until(computes_on)
    finally:
        stopped.reap()
    assert console.reasons == ["engine e did not come to the end of a step in 15 s and was stopped."]
    assert "most recent call first" in console.log_file.read_text()
    with pytest.raises(KvasirError):
        await asking
    *_, done = [event async for event in console.lives[1].generate(REQUEST)]
    assert isinstance(done, DoneEvent)
    assert len(done.tokens) == REQUEST.max_tokens


async def _stop_computing(console: Console) -> StoppedThread:
    """Stop the compute thread within a step, where it holds no lock that the event loop needs: the engine answers."""
    assert console.engine.pid is not None
    while True:
        stopped = StoppedThread(console.engine.pid)
        await asyncio.sleep(1)
        asking = asyncio.create_task(console.lives[0].stats())
        if (await asyncio.wait([asking], timeout=1.5))[0] and asking.result()["computing_s"] > 0.5:
            return stopped
        stopped.go_on()
        await asking
