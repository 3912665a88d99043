"""The gateway put together: one port, an engine that comes and goes, nodes that dial in, work that is settled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_parts import ALICE, BOB, DENSE, MOE, N_LAYER, Clock, Wallet, entry
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from kvasir_console.config import Config, GatewayConfig, ServedModel
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import ConfigError, KvasirError, ModelError, SystemResourceError
from kvasir_console.node.gateway import service as service_module
from kvasir_console.node.gateway.backends import RingBackend
from kvasir_console.node.gateway.census import STALE_S
from kvasir_console.node.gateway.service import GatewayService
from kvasir_console.node.placement.plan import verify_plan
from kvasir_console.paths import Paths
from kvasir_console.relay.wire import control
from kvasir_console.relay.wire.preamble import SIZE, Kind, Preamble

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
INFO = {"context_length": 64, "load_s": 0.1, "n_embd": 64}


class ScriptedEngine:
    """An engine at the seam ``SupervisedEngine``: real control messages and a real data socket, no tensors.

    ``die`` ends its life; the supervision begins the next one when ``revive`` is set.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        on_ready: Callable[[EngineClient], Awaitable[None]],
        on_exit: Callable[[str], None],
    ) -> None:
        self.data_socket = directory / f"{name}.data"
        self.loads: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []
        self.preambles: asyncio.Queue[Preamble] = asyncio.Queue()
        self.ready = asyncio.Event()
        self.revive = asyncio.Event()
        self.lives = 0
        self.silent = False
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._death = asyncio.Event()

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self._data, str(self.data_socket))
        try:
            while True:
                await self._life()
                self._on_exit("the engine was killed")
                await self.revive.wait()
                self.revive.clear()
        finally:
            server.close()

    async def _life(self) -> None:
        self.lives += 1
        self._death.clear()
        near, far = socket.socketpair()
        client = EngineClient(*await asyncio.open_unix_connection(sock=near))
        reader, writer = await asyncio.open_unix_connection(sock=far)
        serving = asyncio.create_task(answer(reader, writer, self._verb))
        try:
            await self._on_ready(client)
            self.ready.set()
            await self._death.wait()
        finally:
            self.ready.clear()
            serving.cancel()
            writer.close()
            await client.close()

    async def stop(self) -> None:
        self._death.set()

    def die(self) -> None:
        self.sessions = []
        self._death.set()

    async def _verb(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["verb"] == "load":
            self.loads.append(message)
            return [{"info": INFO}]
        if message["verb"] == "coverage":
            if self.silent:
                await asyncio.Event().wait()
            return [{"sessions": self.sessions}]
        return generation(message)

    async def _data(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            self.preambles.put_nowait(Preamble.decode(await reader.readexactly(SIZE)))
            while data := await reader.read(4096):
                writer.write(data.upper())
                await writer.drain()
        writer.close()


def generation(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What any engine answers to the verbs of a generation."""
    if message["verb"] == "info":
        return [{"info": INFO}]
    if message["verb"] == "count_tokens":
        return [{"tokens": 5, "context_length": 64}]
    assert message["verb"] == "generate", message
    done = {
        "event": "done",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "tokens": [7, 8],
        "text": "Hi!",
        "tail": "",
        "rows": 6,
        "pairs_local": 0,
        "pairs_remote": 0,
        "failovers": 0,
        "ttft_ms": 1.0,
        "decode_ms": 1.0,
        "trace_path": None,
    }
    tokens = [{"event": "token", "index": n, "token": 7 + n, "text": text} for n, text in enumerate(("Hi", "!"))]
    return [{"prompt_tokens": 5, "prompt_token_ids": [1, 2, 3, 4, 5]}, *tokens, done]


async def answer(
    reader: control.Reader,
    writer: control.Writer,
    verb: Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]],
) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError, ConnectionClosed):
        while True:
            message = await control.read_message(reader)
            for reply in await verb(message):
                base = {"id": message["id"]} if "event" in reply else {"id": message["id"], "ok": True}
                await control.write_message(writer, base | reply)


class Running:
    def __init__(self, service: GatewayService, engines: dict[str, ScriptedEngine], clock: Clock, paths: Paths) -> None:
        self.service = service
        self.engines = engines
        self.clock = clock
        self.paths = paths
        self.url = f"http://127.0.0.1:{service.port}"
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=120)

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines["trunk0"]

    @property
    def service_header(self) -> dict[str, str]:
        return {"X-Kvasir-Service-Token": (self.paths.data / "gateway" / "service-token").read_text()}

    async def token(self, wallet: Wallet) -> str:
        given = (await self.client.post("/api/auth/challenge", json={"wallet": wallet.address})).json()
        body = {"wallet": wallet.address, "nonce": given["nonce"], "signature": wallet.sign(given["message"])}
        return str((await self.client.post("/api/auth/node-token", json=body)).json()["node_token"])

    async def chat(self, model: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"model": model, "messages": HELLO})

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(120):
            while (await self.client.get("/v1/health")).status_code != status:
                pass

    @asynccontextmanager
    async def worker(self, wallet: Wallet = ALICE) -> AsyncIterator[ClientConnection]:
        """A node that holds experts [0, 8) of layer 1 and has dialled in."""
        token = await self.token(wallet)
        body = {"worker_id": "w", "model": MOE, "segments": [[1, 0, 8]]}
        bearer = {"Authorization": f"Bearer {token}"}
        report = (await self.client.post("/api/expert-coverage", json=body, headers=bearer)).json()
        assert report["wired"]
        uri = f"ws://127.0.0.1:{self.service.port}/api/expert-relay?session={report['session']}"
        async with connect(uri, additional_headers=bearer, proxy=None) as connection:
            yield connection


@asynccontextmanager
async def running(
    home: Path, models: tuple[ServedModel, ...], clock: Clock | None = None, **fields: Any
) -> AsyncIterator[Running]:
    paths = Paths.from_environment({"KVASIR_HOME": str(home)})
    clock, engines = clock or Clock(), {}
    options = {"port": 0, "models": models, "settlement_poll_s": 3600.0, "minimum_claim_micro_kvr": 1, **fields}

    def make_engine(name: str, on_ready: Any, on_exit: Any) -> ScriptedEngine:
        engines[name] = ScriptedEngine(name, paths.runtime, on_ready, on_exit)
        return engines[name]

    async with GatewayService(Config(gateway=GatewayConfig(**options)), paths, make_engine, clock) as service:
        made = Running(service, engines, clock, paths)
        async with made.client:
            yield made


async def test_it_serves_a_model_once_its_engine_is_loaded(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        (load,) = gateway.engine.loads
        assert (load["role"], load["model"], load["layers"]) == ("stage", MOE, [0, N_LAYER])
        assert (load["path"], load["dispatch_wire"], load["dispatch_timeout_s"]) == (models[0].path, "v3", 10.0)
        assert load["dispatch_dtype"] == "f32"
        assert (load["kv_budget_bytes"], load["kv_sharers"]) == (0, 1)
        assert (await gateway.client.get("/v1/health")).json()["status"] == "ok"
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            reply = await client.chat.completions.create(model=MOE, messages=HELLO)
        assert reply.choices[0].message.content == "Hi!"
        config = (await gateway.client.get("/api/config")).json()
        assert config["publicUrl"] == gateway.service.public_url == gateway.url
        assert config["extensions"]["hub_key"] == gateway.service.hub_key


async def test_an_engine_that_dies_is_503_until_it_is_back(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        gateway.engine.die()
        await gateway.until_health(503)
        reply = await gateway.chat(MOE)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "ring_recovering")
        gateway.engine.revive.set()
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        assert (await gateway.chat(MOE)).status_code == 200


async def test_a_node_dials_in_and_its_bytes_reach_the_engine(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        async with gateway.worker() as connection:
            preamble = await asyncio.wait_for(gateway.engine.preambles.get(), 120)
            assert (preamble.kind, preamble.session, preamble.wallet) == (Kind.DISPATCH, "expert-w", ALICE.address)
            assert (preamble.layer, preamble.begin, preamble.end) == (1, 0, 8)
            await connection.send(b"request")
            assert await asyncio.wait_for(connection.recv(), 120) == b"REQUEST"
            listed = await gateway.client.get("/api/expert-relay/sessions", headers=gateway.service_header)
            (session,) = listed.json()["sessions"]
            assert (session["connected"], session["owner"]) == (True, ALICE.address)
            assert session["bytes"] == {"ws2tcp": 7, "tcp2ws": 7}


async def test_work_is_settled_through_engine_restarts_and_at_the_end(
    tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        async with gateway.worker():
            gateway.engine.sessions = [entry("expert-w", ALICE.address, 100_000)]
            assert await gateway.service.settle() == 1000
            gateway.engine.die()
            gateway.engine.revive.set()
            await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        async with gateway.worker():
            gateway.engine.sessions = [entry("expert-w", ALICE.address, 100_000)]  # the same number, counted anew
            assert await gateway.service.settle() == 1000
            gateway.engine.sessions = [entry("expert-w", ALICE.address, 150_000)]  # not read before it stops
    async with running(tmp_path, models[:1]) as gateway:
        (account,) = gateway.service.ledger.accounts()
        assert (account.worker_id, account.micro_units, account.credited_micro_kvr) == ("w", 250_000, 2500)
        assert await gateway.service.settle() == 0


async def test_a_ring_answers_through_rank_0_and_its_stages_earn(
    tmp_path: Path, models: tuple[ServedModel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[RingBackend] = []

    def patient(*arguments: Any) -> RingBackend:
        backends.append(RingBackend(*arguments, recover_s=120.0))
        return backends[-1]

    monkeypatch.setattr("kvasir_console.node.gateway.backends.ENTRY_TIMEOUT_S", 120.0)
    monkeypatch.setattr(service_module, "RingBackend", patient)
    async with running(tmp_path, models[1:]) as gateway:
        reply = await gateway.client.get("/v1/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "unhealthy")
        bearer = {"Authorization": f"Bearer {await gateway.token(ALICE)}"}
        uri = f"ws://127.0.0.1:{gateway.service.port}/api/ring-relay?controller_id={DENSE}&edge=entry&role=N"
        async with connect(uri, additional_headers=bearer, proxy=None) as connection:
            stream = WebSocketStream(connection)

            async def verb(message: dict[str, Any]) -> list[dict[str, Any]]:
                return generation(message)

            rank0 = asyncio.create_task(answer(stream, stream, verb))
            await gateway.until_health(200)
            for _ in range(2):  # one stream serves every request
                assert (await gateway.chat(DENSE)).json()["choices"][0]["message"]["content"] == "Hi!"
            rank0.cancel()
        assert await gateway.service.settle() == 2 * 6 * 10  # six rows a request, 1000 micro-units a row, 1/100 KVR
        earned = {account.wallet: account.credited_micro_kvr for account in gateway.service.ledger.accounts()}
        assert earned == {ALICE.address: 30, BOB.address: 90}  # one and three of four layers
        monkeypatch.setattr("kvasir_console.node.gateway.backends.ENTRY_TIMEOUT_S", 0.1)
        backends[0]._recover_s = 0.0  # nobody is expected back any more
        assert (await gateway.chat(DENSE)).status_code == 503


class WebSocketStream:
    """A websocket as the byte stream that control messages travel on."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._held = b""
        self._out = b""

    async def readexactly(self, n: int, /) -> bytes:
        while len(self._held) < n:
            self._held += await self._connection.recv(decode=False)
        data, self._held = self._held[:n], self._held[n:]
        return data

    def write(self, data: bytes, /) -> None:
        self._out += data

    async def drain(self) -> None:
        data, self._out = self._out, b""
        await self._connection.send(data)


async def test_a_worker_that_goes_stale_is_cut_off(
    tmp_path: Path, models: tuple[ServedModel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SWEEP_S", 0.01)
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        async with gateway.worker() as connection:
            gateway.clock.now += STALE_S + 1
            with pytest.raises(ConnectionClosed) as caught:
                await asyncio.wait_for(connection.recv(), 120)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 4404


async def test_a_session_ends_when_its_worker_reports_another_window(
    tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        async with gateway.worker() as connection:
            await asyncio.wait_for(gateway.engine.preambles.get(), 120)
            bearer = {"Authorization": f"Bearer {await gateway.token(ALICE)}"}
            body = {"worker_id": "w", "model": MOE, "segments": [[1, 0, 8]]}
            await gateway.client.post("/api/expert-coverage", json=body, headers=bearer)  # the same: it goes on
            await connection.send(b"still here")
            assert await asyncio.wait_for(connection.recv(), 120) == b"STILL HERE"
            body["segments"] = [[2, 0, 8]]
            await gateway.client.post("/api/expert-coverage", json=body, headers=bearer)
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(connection.recv(), 120)


async def test_an_engine_that_hangs_is_ended(
    tmp_path: Path, models: tuple[ServedModel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "READ_S", 0.01)
    async with running(tmp_path, models[:1]) as gateway:
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        gateway.engine.revive.set()
        gateway.engine.silent = True
        monkeypatch.setattr("kvasir_console.node.gateway.trunk.READ_TIMEOUT_S", 0.01)
        async with asyncio.timeout(120):
            while gateway.engine.lives == 1:  # noqa: ASYNC110 - another task's doing
                await asyncio.sleep(0.01)
        gateway.engine.silent = False


async def test_a_restart_keeps_keys_tokens_and_plans(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models) as gateway:
        key, token = gateway.service.hub_key, await gateway.token(ALICE)
    swapped = replace(models[1], ring=((ALICE.address, 0, 2), (BOB.address, 2, 4)))
    generations = []
    for second in (models[1], swapped, swapped):
        async with running(tmp_path, (models[0], second)) as gateway:
            assert gateway.service.hub_key == key
            reply = await gateway.client.get("/api/placement", headers={"Authorization": f"Bearer {token}"})
            generations.append(verify_plan(reply.json()["plans"][0], key).generation)
    assert generations == [1, 2, 2]


async def test_its_secrets_are_private_and_apart(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        directory = gateway.paths.data / "gateway"
        files = sorted(directory.iterdir())
        assert [file.name for file in files] == ["hub-key", "node-token-key", "service-token"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len({file.read_bytes() for file in files}) == 3
    (directory / "service-token").chmod(0o644)
    with pytest.raises(SystemResourceError) as caught:
        async with running(tmp_path, models[:1]):
            raise AssertionError("it started with a secret that others can read")
    assert caught.value.code == "secret_exposed"


async def test_the_operator_may_name_the_service_token_file(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-operators-own\n")
    file.chmod(0o600)
    async with running(tmp_path / "home", models[:1], service_token_file=str(file)) as gateway:
        header = {"X-Kvasir-Service-Token": "a-token-of-the-operators-own"}
        assert (await gateway.client.get("/api/settlement", headers=header)).status_code == 200
    file.write_text("short")
    with pytest.raises(SystemResourceError, match="16"):
        async with running(tmp_path / "home", models[:1], service_token_file=str(file)):
            raise AssertionError("it started with a weak token")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: replace(m[1], ring=((ALICE.address, 0, 2),)), ConfigError),
        (lambda m: replace(m[1], ring=((ALICE.address, 0, 2), (BOB.address, 3, 4))), ConfigError),
        (lambda m: replace(m[1], ring=(("nobody", 0, 4),)), ConfigError),
        (lambda m: replace(m[1], ring=()), ConfigError),
        (lambda m: replace(m[1], id="a/b"), ConfigError),
        (lambda m: replace(m[1], id=m[0].id), ConfigError),
        (lambda m: replace(m[1], path="/no/such.gguf"), ModelError),
    ],
    ids=["short", "gap", "no wallet", "empty", "bad id", "id twice", "no file"],
)
async def test_a_model_that_cannot_be_served_stops_the_start(
    tmp_path: Path, models: tuple[ServedModel, ...], change: Any, error: type[KvasirError]
) -> None:
    with pytest.raises(error):
        async with running(tmp_path, (models[0], change(models))):
            raise AssertionError("it started")
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("gateway-")]


async def test_a_busy_port_stops_the_start_and_leaves_nothing_running(
    tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemResourceError) as caught:
        async with running(tmp_path, models[:1], port=taken.getsockname()[1]):
            raise AssertionError("it started")
    assert caught.value.code == "port_busy"
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("gateway-")]


async def test_a_gateway_of_rings_alone_goes_on(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[1:]) as gateway:
        waiting = asyncio.create_task(gateway.service.wait())
        assert (await gateway.client.get("/health")).status_code == 200
        assert not waiting.done()
        waiting.cancel()


async def test_a_gateway_without_models_says_so_and_keeps_its_books(
    tmp_path: Path, models: tuple[ServedModel, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, ()) as gateway:
        (told,) = [each.getMessage() for each in caplog.records if "serves no model" in each.getMessage()]
        assert told == gateway.service.warning
        assert "[[gateway.models]]" in told
        assert str(gateway.paths.config_file) in told
        health = await gateway.client.get("/v1/health")
        assert (health.status_code, health.json()["status"]) == (503, "no_model")
        assert (await gateway.chat("any")).status_code == 503
        assert (await gateway.client.get("/api/config")).status_code == 200
        assert await gateway.token(ALICE)
    async with running(tmp_path / "other", models[1:]) as gateway:
        assert gateway.service.warning == ""


async def test_a_part_that_ends_is_seen(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    async with running(tmp_path, models[:1]) as gateway:
        waiting = asyncio.create_task(gateway.service.wait())
        await asyncio.wait_for(gateway.engine.ready.wait(), 120)
        assert not waiting.done()
        (part,) = [task for task in asyncio.all_tasks() if task.get_name() == "gateway-settlement"]
        part.cancel()
        with pytest.raises((KvasirError, asyncio.CancelledError)):
            await asyncio.wait_for(waiting, 120)
