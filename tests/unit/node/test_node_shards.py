"""Downloads from real HTTP servers on loopback: cut, resumed, changed, wrong, too large."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import stat
from collections import namedtuple
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Route

from kvasir_console.engine.checkpoint.digest import model_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import read_expert_shard, write_expert_shard, write_stage
from kvasir_console.errors import ModelError, NetworkError, SystemResourceError, WalletError
from kvasir_console.node import shards
from kvasir_console.node.market import Assignment

from builders import write_tiny_llama

MODEL, TOKEN = "tiny-moe", "a node token"
ASSIGNMENT = Assignment(MODEL, layer=1, begin=2, end=6, n_embd=64, n_layer=2, n_expert=8)
PATH = f"/api/proxy/models/{MODEL}/expert-shard"
BUDGET = 2**30


@dataclass(frozen=True)
class Files:
    shard: bytes
    other: bytes
    """The same experts of a model with other weights."""
    stage: bytes
    digest: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("models")
    cut: list[bytes] = []
    for seed in (1, 2):
        source = write_tiny_llama(folder / f"{seed}.gguf", n_expert=8, n_expert_used=2, seed=seed)
        with Checkpoint.open(source) as checkpoint:
            write_expert_shard(checkpoint, folder / "shard.gguf", model=MODEL, layer=1, begin=2, end=6)
            cut.append((folder / "shard.gguf").read_bytes())
            if seed == 1:
                write_stage(checkpoint, folder / "stage.gguf", model=MODEL, begin=0, end=1)
                digest = model_digest(checkpoint).hex()
    return Files(cut[0], cut[1], (folder / "stage.gguf").read_bytes(), digest)


@dataclass
class Server:
    """An HTTP server that misbehaves on request and counts what it sends."""

    body: bytes
    digest: str = "d1"
    etag: str = ""
    status: int = 0
    cuts: list[int] = field(default_factory=list)
    """For each coming answer, after how many bytes of body the connection is dropped."""
    announce: str | None = "content-length"
    understands_ranges: bool = True
    shifted: int = 0
    requests: list[dict[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            self.requests.append(headers)
            self.targets.append(head[0].split()[1])
            await self._answer(headers, writer)
        writer.close()

    async def _answer(self, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        begin, status = 0, self.status or 200
        unchanged = headers.get("if-range", self.etag) == self.etag
        if status == 200 and self.understands_ranges and unchanged and "range" in headers:
            begin = int(headers["range"].removeprefix("bytes=").removesuffix("-")) + self.shifted
            status = 206 if begin < len(self.body) else 416
        body = self.body[begin:] if status < 300 else b"no"
        lines = [f"HTTP/1.1 {status} X", "connection: close"]
        if self.announce:
            lines.append(f"{self.announce}: {len(body)}")
        if status == 206:
            lines.append(f"content-range: bytes {begin}-{len(self.body) - 1}/{len(self.body)}")
        if self.digest:
            lines.append(f"x-kvasir-shard-digest: {self.digest}")
        if self.etag:
            lines.append(f"etag: {self.etag}")
        body = body[: self.cuts.pop(0)] if self.cuts else body
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.sent += len(body)
        await writer.drain()


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    async with (
        listener,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=120) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "RETRY_PAUSE_S", 0.0)


def silent(_done: int, _total: int | None) -> None:
    pass


async def fetch(
    client: httpx.AsyncClient, directory: Path, assignment: Assignment = ASSIGNMENT, budget: int = BUDGET, progress=None
) -> Path:
    return await shards.fetch_expert_shard(
        client, TOKEN, directory, assignment, budget_bytes=budget, progress=progress or silent
    )


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


async def test_a_shard_is_fetched_verified_and_put_in_its_place(files, tmp_path):
    server, seen = Server(files.shard), []
    async with running(server) as client:
        file = await fetch(client, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert file == tmp_path / MODEL / "L1_e002-006.gguf"
    assert file.read_bytes() == files.shard
    assert leftovers(tmp_path) == ["L1_e002-006.gguf"]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with Checkpoint.open(file) as checkpoint:
        info = read_expert_shard(checkpoint)
    assert (info.layer, info.begin, info.end) == (1, 2, 6)
    assert server.targets == [f"{PATH}?layer=1&expert_begin=2&expert_end=6"]
    assert server.requests[0]["authorization"] == f"Bearer {TOKEN}"
    assert "range" not in server.requests[0]
    assert seen[-1] == (len(files.shard), len(files.shard))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


async def test_a_cut_download_fetches_only_the_missing_bytes(files, tmp_path):
    third = len(files.shard) // 3
    server = Server(files.shard, cuts=[third, third])
    async with running(server) as client:
        file = await fetch(client, tmp_path)
    assert file.read_bytes() == files.shard
    assert server.sent == len(files.shard)
    assert [request.get("range") for request in server.requests] == [None, f"bytes={third}-", f"bytes={2 * third}-"]


async def test_a_download_goes_on_after_a_restart_of_the_program(files, tmp_path):
    server = Server(files.shard, cuts=[100, 100, 100])
    async with running(server) as client:
        with pytest.raises(NetworkError):
            await fetch(client, tmp_path)
        assert len(server.requests) == shards.ATTEMPTS
        assert leftovers(tmp_path) == ["L1_e002-006.gguf.part", "L1_e002-006.gguf.part.json"]
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert server.sent == len(files.shard)
    assert leftovers(tmp_path) == ["L1_e002-006.gguf"]


async def test_a_finished_download_that_was_not_verified_is_not_fetched_again(files, tmp_path):
    folder = tmp_path / MODEL
    folder.mkdir()
    (folder / "L1_e002-006.gguf.part").write_bytes(files.shard)
    note = {"digest": "d1", "etag": "", "total": len(files.shard)}
    (folder / "L1_e002-006.gguf.part.json").write_text(json.dumps(note))
    server = Server(files.shard)
    async with running(server) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert server.requests == []


@pytest.mark.parametrize("change", ["digest", "etag"])
async def test_bytes_of_another_file_are_never_joined_on(files, tmp_path, change):
    server = Server(files.shard, cuts=[1000] * 3, etag='"one"', digest="d1" if change == "digest" else "")
    async with running(server) as client:
        with pytest.raises(NetworkError):
            await fetch(client, tmp_path)
        server.body, server.etag = files.other, '"two"'
        server.digest = "d2" if change == "digest" else ""
        server.cuts = []
        before = server.sent
        assert (await fetch(client, tmp_path)).read_bytes() == files.other
    assert server.sent - before == len(files.other)


async def test_a_server_that_ignores_the_etag_is_found_out_by_the_digest(files, tmp_path):
    server = Server(files.shard, cuts=[1000] * 3)
    async with running(server) as client:
        with pytest.raises(NetworkError):
            await fetch(client, tmp_path)
        server.body, server.digest, server.cuts = files.other, "d2", []
        assert (await fetch(client, tmp_path)).read_bytes() == files.other


async def test_without_digest_or_etag_a_download_begins_anew(files, tmp_path):
    server = Server(files.shard, digest="", cuts=[1000])
    async with running(server) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert [request.get("range") for request in server.requests] == [None, None]


async def test_a_server_without_ranges_sends_it_all_again(files, tmp_path):
    server = Server(files.shard, cuts=[1000], understands_ranges=False)
    async with running(server) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert server.sent == 1000 + len(files.shard)


async def test_a_server_that_continues_at_another_place_is_not_believed(files, tmp_path):
    server = Server(files.shard, cuts=[1000], shifted=-7)
    async with running(server) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert server.requests[-1].get("range") is None


async def test_a_partial_file_longer_than_the_whole_begins_anew(files, tmp_path):
    folder = tmp_path / MODEL
    folder.mkdir()
    (folder / "L1_e002-006.gguf.part").write_bytes(bytes(len(files.shard) + 5))
    (folder / "L1_e002-006.gguf.part.json").write_text(json.dumps({"digest": "d1", "etag": "", "total": 9}))
    async with running(Server(files.shard)) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard


@pytest.mark.parametrize("note", ["", "{", "[]", "5", '{"digest": "d1"}', '{"digest": "d1", "etag": "", "total": "x"}'])
async def test_a_damaged_note_costs_only_the_bytes(files, tmp_path, note):
    folder = tmp_path / MODEL
    folder.mkdir()
    (folder / "L1_e002-006.gguf.part").write_bytes(b"rubbish")
    (folder / "L1_e002-006.gguf.part.json").write_text(note)
    async with running(Server(files.shard)) as client:
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard


async def test_a_good_cached_file_is_not_fetched(files, tmp_path):
    server = Server(files.shard)
    async with running(server) as client:
        first = await fetch(client, tmp_path)
        assert await fetch(client, tmp_path) == first
        assert len(server.requests) == 1
        damaged = bytearray(files.shard)
        damaged[-1000] ^= 1
        first.write_bytes(damaged)
        assert (await fetch(client, tmp_path)).read_bytes() == files.shard
    assert len(server.requests) == 2


async def test_one_wrong_bit_of_a_tensor_is_refused_and_the_file_removed(files, tmp_path):
    wrong = bytearray(files.shard)
    wrong[-1000] ^= 1
    async with running(Server(bytes(wrong))) as client:
        with pytest.raises(ModelError, match="SHA-256"):
            await fetch(client, tmp_path)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [{"layer": 0}, {"begin": 1, "end": 5}, {"end": 7}, {"n_embd": 128}, {"model": "another"}],
    ids=["layer", "begin", "end", "width", "model"],
)
async def test_another_shard_than_was_asked_for_is_refused(files, tmp_path, change):
    async with running(Server(files.shard)) as client:
        with pytest.raises(ModelError):
            await fetch(client, tmp_path, replace(ASSIGNMENT, **change))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("body", [b"<html>not a model</html>", b"GGUF" + bytes(100), b"\x1f\x8b" + bytes(50)])
async def test_what_is_no_model_is_refused(tmp_path, body):
    async with running(Server(body)) as client:
        with pytest.raises(ModelError):
            await fetch(client, tmp_path)
    assert leftovers(tmp_path) == []


async def test_more_bytes_than_announced_are_never_written(files, tmp_path):
    def answer(request: httpx.Request) -> httpx.Response:
        stream = httpx.ByteStream(files.shard + b"more")
        return httpx.Response(200, headers={"content-length": str(len(files.shard))}, stream=stream)

    async with httpx.AsyncClient(base_url="http://127.0.0.1", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(NetworkError) as caught:
            await fetch(client, tmp_path)
    assert caught.value.code == "too_many_bytes"
    part = tmp_path / MODEL / "L1_e002-006.gguf.part"
    assert part.stat().st_size <= len(files.shard)


@pytest.mark.parametrize("announce", [None, "x-length"])
async def test_a_download_without_a_length_is_refused(files, tmp_path, announce):
    server = Server(files.shard, announce=announce)
    async with running(server) as client:
        with pytest.raises(NetworkError) as caught:
            await fetch(client, tmp_path)
    assert caught.value.code == "no_length"


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 500])
async def test_a_refusal_is_not_asked_again(files, tmp_path, status):
    server = Server(files.shard, status=status)
    async with running(server) as client:
        with pytest.raises(NetworkError, match=str(status)):
            await fetch(client, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_server_that_cannot_now_is_asked_again(files, tmp_path, status):
    server = Server(files.shard, status=status)
    async with running(server) as client:
        with pytest.raises(NetworkError):
            await fetch(client, tmp_path)
    assert len(server.requests) == shards.ATTEMPTS


async def test_a_refused_token_is_told_as_such_so_that_it_is_renewed(files, tmp_path):
    server = Server(files.shard, status=401)
    async with running(server) as client:
        with pytest.raises(WalletError) as caught:
            await fetch(client, tmp_path)
    assert caught.value.code == "token_refused"
    assert len(server.requests) == 1


async def test_nobody_there_is_a_network_error(tmp_path):
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1", trust_env=False, timeout=120) as client:
        with pytest.raises(NetworkError) as caught:
            await fetch(client, tmp_path)
    assert caught.value.code == "gateway_unreachable"


async def test_a_slice_over_the_budget_is_refused_before_its_bytes(files, tmp_path):
    server = Server(files.shard)
    async with running(server) as client:
        with pytest.raises(SystemResourceError) as caught:
            await fetch(client, tmp_path, budget=len(files.shard) - 1)
        assert caught.value.code == "slice_too_large"
        assert "node.memory_budget_mib" in caught.value.hint
        assert leftovers(tmp_path) == []
        await fetch(client, tmp_path, budget=len(files.shard))
        with pytest.raises(SystemResourceError):  # a cached one takes as much memory
            await fetch(client, tmp_path, budget=len(files.shard) - 1)


async def test_a_full_disk_is_said_before_the_download(files, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, len(files.shard) - 1))
    async with running(Server(files.shard)) as client:
        with pytest.raises(SystemResourceError) as caught:
            await fetch(client, tmp_path)
    assert caught.value.code == "disk_full"
    assert "KVASIR_CACHE" in caught.value.hint


async def test_a_disk_that_refuses_is_named(files, tmp_path):
    (tmp_path / MODEL).write_text("in the way")
    async with running(Server(files.shard)) as client:
        with pytest.raises(SystemResourceError, match=str(tmp_path)):
            await fetch(client, tmp_path)


# Windows of layers


async def fetch_stage(client: httpx.AsyncClient, directory: Path, digest: str) -> Path:
    return await shards.fetch_stage(
        client,
        TOKEN,
        directory,
        model=MODEL,
        model_digest=digest,
        begin=0,
        end=1,
        budget_bytes=BUDGET,
        progress=silent,
    )


async def test_a_window_is_bound_to_the_digest_in_the_plan(files, tmp_path):
    server = Server(files.stage)
    async with running(server) as client:
        with pytest.raises(ModelError, match="another model"):
            await fetch_stage(client, tmp_path, "00" * 32)
        assert leftovers(tmp_path) == []
        file = await fetch_stage(client, tmp_path, files.digest)
    assert file == tmp_path / MODEL / "layers_000-001.gguf"
    assert file.read_bytes() == files.stage
    assert server.targets[-1] == f"/api/proxy/models/{MODEL}/stage?layer_begin=0&layer_end=1"


async def test_a_real_file_server_is_resumed_too(files, tmp_path):
    """Starlette's own range handling, behind uvicorn."""
    served = tmp_path / "served.gguf"
    served.write_bytes(files.stage)
    seen: list[tuple[str | None, int]] = []

    def stage(request):
        response = FileResponse(served, headers={"x-kvasir-shard-digest": "d"})
        seen.append((request.headers.get("range"), served.stat().st_size))
        return response

    app = Starlette(routes=[Route(f"/api/proxy/models/{MODEL}/stage", stage)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    half = len(files.stage) // 2
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as client:
            folder = tmp_path / "cache" / MODEL
            folder.mkdir(parents=True)
            (folder / "layers_000-001.gguf.part").write_bytes(files.stage[:half])
            note = {"digest": "d", "etag": "", "total": len(files.stage)}
            (folder / "layers_000-001.gguf.part.json").write_text(json.dumps(note))
            file = await fetch_stage(client, tmp_path / "cache", files.digest)
    finally:
        server.should_exit = True
        await task
    assert file.read_bytes() == files.stage
    assert [asked for asked, _ in seen] == [f"bytes={half}-"]
