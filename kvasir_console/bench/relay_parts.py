"""The four processes of the relay benchmark.

* ``trunk`` and ``worker`` are the two engines as the relay sees them: a data socket, a thread that multiplies
  matrices all the time, and the other end of a stream. Frames are ``op, count`` and a payload.
* ``hub`` is the front port with TLS and the hub behind it; ``node`` is one uplink. Both are the program's own.

Each reads JSON lines from standard input and answers them (``lines.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvasir_console.relay.authority import Admission, Refused
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.front import Front, server_context
from kvasir_console.relay.hub import EXPERT_PATH, Hub
from kvasir_console.relay.uplink import Uplink, client_context, expert_url
from kvasir_console.relay.wire.preamble import SIZE, Kind, Preamble

_HEAD = struct.Struct("<IQ")
_ECHO, _PULL, _PUSH = 1, 2, 3
_BLOCK_BYTES = 2**23
_TOKEN = "bench-token"  # noqa: S105 - opens nothing but this benchmark
SESSION = "expert-bench"

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Computing:
    """A thread that multiplies a matrix of 6 MB by a row, over and over, while ``on``."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self._weights = np.ones((1024, 1536), dtype=np.float32)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        row = np.ones(1536, dtype=np.float32)
        while True:
            self.on.wait()
            self._weights @ row


class End:
    """One end of a stream, with blocking calls: nothing of the benchmark's own stands in the way."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BLOCK_BYTES)

    def send(self, op: int, payload: bytes | memoryview = b"", count: int | None = None) -> None:
        head = _HEAD.pack(op, len(payload) if count is None else count)
        self._sock.sendall(head + payload if len(payload) < 2**16 else head)
        if len(payload) >= 2**16:
            self._sock.sendall(payload)

    def head(self) -> tuple[int, int]:
        op, count = _HEAD.unpack(self.exactly(_HEAD.size))
        return op, count

    def exactly(self, size: int) -> bytes:
        if size > _BLOCK_BYTES:
            raise ValueError("a payload is longer than a block")
        view = memoryview(self._buffer)[:size]
        self.fill(view)
        return bytes(view)

    def fill(self, block: bytearray | memoryview) -> None:
        view = memoryview(block)
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise ConnectionResetError("the stream ended")
            view = view[got:]

    def raw(self, data: bytes, times: int = 1) -> None:
        for _ in range(times):
            self._sock.sendall(data)


class Trunk:
    """Drives: the worker answers. ``direct`` goes over a socket between the two, ``relay`` through node and hub."""

    def __init__(self, data_socket: str, direct_socket: str, seed: int) -> None:
        self._computing = Computing()
        self._listener = _listen(data_socket)
        self._direct = direct_socket
        self._rng = random.Random(seed)  # noqa: S311
        self._ends: dict[str, End] = {}

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "join":
                direct = socket.socket(socket.AF_UNIX)
                direct.connect(self._direct)
                relayed, _ = self._listener.accept()
                self._ends = {"direct": End(direct), "relay": End(relayed)}
                preamble = Preamble.decode(self._ends["relay"].exactly(SIZE))
                return {"session": preamble.session}
            case "compute":
                (self._computing.on.set if request["on"] else self._computing.on.clear)()
                return {}
            case "latency":
                return {"ms": self._latency(self._ends[request["path"]], request["rounds"], request["bytes"])}
            case "stream":
                return {"mb_s": self._stream(self._ends[request["path"]], request["way"], request["blocks"])}
            case other:
                raise ValueError(f"there is nothing like {other}")

    def _latency(self, end: End, rounds: int, size: int) -> float:
        times = []
        for _ in range(rounds):
            payload = self._rng.randbytes(size)
            want = hashlib.sha256(payload).digest()
            start = time.perf_counter()
            end.send(_ECHO, payload)
            _op, count = end.head()
            back = end.exactly(count)
            times.append(time.perf_counter() - start)
            if hashlib.sha256(back).digest() != want:
                raise ValueError("an answer is not what was sent")
        return statistics.median(times) * 1e3

    def _stream(self, end: End, way: str, blocks: int) -> float:
        """10^6 bytes a second; digests are taken when the clock has stopped."""
        block = self._rng.randbytes(_BLOCK_BYTES)
        size = blocks * _BLOCK_BYTES
        if way == "down":
            end.send(_PUSH, count=size)
            end.exactly(1)  # the worker's buffers are ready
            start = time.perf_counter()
            end.raw(block, blocks)
            end.exactly(1)
            seconds = time.perf_counter() - start
            want = hashlib.sha256(block).digest()
            if any(end.exactly(32) != want for _ in range(blocks)):
                raise ValueError("the worker got other bytes than were sent")
        else:
            end.send(_PULL, count=size)
            want = end.exactly(32)
            made = _made(blocks)
            start = time.perf_counter()
            end.send(_PULL)
            for each in made:
                end.fill(each)
            seconds = time.perf_counter() - start
            if any(hashlib.sha256(each).digest() != want for each in made):
                raise ValueError("other bytes came than the worker sent")
        return size / 1e6 / seconds


class Worker:
    def __init__(self, data_socket: str, direct_socket: str, seed: int) -> None:
        self._computing = Computing()
        self._rng = random.Random(seed)  # noqa: S311
        for path, has_preamble in ((direct_socket, False), (data_socket, True)):
            threading.Thread(target=self._accept, args=(_listen(path), has_preamble), daemon=True).start()

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "compute":
            raise ValueError(f"there is nothing like {request['do']}")
        (self._computing.on.set if request["on"] else self._computing.on.clear)()
        return {}

    def _accept(self, listener: socket.socket, has_preamble: bool) -> None:
        while True:
            sock, _ = listener.accept()
            end = End(sock)
            try:
                if has_preamble:
                    end.exactly(SIZE)
                self._serve(end)
            except ConnectionError:
                sock.close()

    def _serve(self, end: End) -> None:
        while True:
            op, count = end.head()
            if op == _ECHO:
                end.send(_ECHO, end.exactly(count))
            elif op == _PUSH:
                made = _made(count // _BLOCK_BYTES)
                end.raw(b"r")
                for each in made:
                    end.fill(each)
                end.raw(b"d")
                for each in made:
                    end.raw(hashlib.sha256(each).digest())
            elif op == _PULL:
                block = self._rng.randbytes(_BLOCK_BYTES)
                end.raw(hashlib.sha256(block).digest())
                end.head()
                end.raw(block, count // _BLOCK_BYTES)
            else:
                return


class OneSession:
    """An authority that admits the benchmark's session."""

    def __init__(self, engine_socket: str) -> None:
        self._engine_socket = Path(engine_socket)

    async def admit(self, path: str, query: Mapping[str, str], token: str | None) -> Admission:
        if (path, query.get("session"), token) != (EXPERT_PATH, SESSION, _TOKEN):
            raise Refused(CloseCode.FORBIDDEN, "this relay serves one benchmark")
        preamble = Preamble(Kind.DISPATCH, SESSION, layer=0, begin=0, end=8)
        return Admission(SESSION, "bench", preamble=preamble, engine_socket=self._engine_socket)


async def _hub(options: Mapping[str, Any]) -> None:
    hub = Hub(OneSession(options["engine_socket"]))
    tls = server_context(Path(options["certificate"]), Path(options["key"]))
    async with Front(hub, Path("/nonexistent"), port=0, tls=tls) as front:
        await _answer_lines(lambda _: {"port": front.port})
        await hub.close()


async def _node(options: Mapping[str, Any]) -> None:
    async def token(*, refresh: bool) -> str:  # noqa: ARG001 (there is only the one)
        return _TOKEN

    uplink = Uplink(
        expert_url(options["gateway"], SESSION),
        SESSION,
        token,
        token_in_header=True,
        ssl_context=client_context(options["authority"]),
        engine_socket=Path(options["engine_socket"]),
        preamble=Preamble(Kind.EXPERTS, SESSION, layer=0, begin=0, end=8),
        user_agent="kvasir-console bench",
    )
    running = asyncio.create_task(uplink.run())

    def state(_: dict[str, Any]) -> dict[str, Any]:
        now = uplink.snapshot()
        return {"phase": now.phase.value, "last_close": now.last_close.text if now.last_close else ""}

    await _answer_lines(state)
    await uplink.close()
    await running


def _made(blocks: int) -> list[bytearray]:
    """Buffers whose memory is there before the clock starts."""
    return [bytearray(b"\1" * _BLOCK_BYTES) for _ in range(blocks)]


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


async def _answer_lines(answer: Answer) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        _say(answer, line)


def _say(answer: Answer, line: bytes | str) -> None:
    request = json.loads(line)
    try:
        print(json.dumps({"id": request["id"], "ok": True, **answer(request)}), flush=True)
    except (ValueError, KeyError, OSError) as error:
        print(json.dumps({"id": request["id"], "ok": False, "error": f"{type(error).__name__}: {error}"}), flush=True)


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    if role in ("trunk", "worker"):
        part = (Trunk if role == "trunk" else Worker)(options["data"], options["direct"], options["seed"])
        for line in sys.stdin:
            _say(part.do, line)
    else:
        asyncio.run((_hub if role == "hub" else _node)(options))


if __name__ == "__main__":
    main()
