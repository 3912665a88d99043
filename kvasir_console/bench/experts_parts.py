"""Processes of the experts benchmark beside its engines.

* ``hub``: the front port with TLS and the hub behind it, which joins each named session to an engine's socket.
* ``node``: one uplink a session, to a worker engine's socket. Both are the program's own.
* ``caller``: a trunk's end of a session without a trunk: it asks for a batch of rows and keeps the time.

Each reads JSON lines from standard input and answers them (``lines.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvasir_console.relay.authority import Admission, Refused
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.front import Front, server_context
from kvasir_console.relay.hub import EXPERT_PATH, Hub
from kvasir_console.relay.uplink import Uplink, client_context, expert_url
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import SIZE, Kind, Preamble, Wire

_TOKEN = "bench-token"  # noqa: S105 - opens nothing but this benchmark
WALLET = "bench"

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def preamble(session: Mapping[str, Any], kind: Kind) -> Preamble:
    """Of one session as it stands in a part's options."""
    return Preamble(
        kind,
        session["name"],
        WALLET,
        bytes.fromhex(session["digest"]),
        session["layer"],
        session["begin"],
        session["end"],
        wires=Wire[session["wire"].upper()] | Wire.V2,
    )


class Sessions:
    """An authority that admits the benchmark's sessions."""

    def __init__(self, sessions: list[dict[str, Any]]) -> None:
        self._sessions = {each["name"]: each for each in sessions}

    async def admit(self, path: str, query: Mapping[str, str], token: str | None) -> Admission:
        session = self._sessions.get(query.get("session", ""))
        if session is None or (path, token) != (EXPERT_PATH, _TOKEN):
            raise Refused(CloseCode.FORBIDDEN, "this relay serves one benchmark")
        opening = preamble(session, Kind.DISPATCH)
        return Admission(session["name"], WALLET, preamble=opening, engine_socket=Path(session["trunk_socket"]))


async def _hub(options: Mapping[str, Any]) -> None:
    hub = Hub(Sessions(options["sessions"]))
    tls = server_context(Path(options["certificate"]), Path(options["key"]))
    async with Front(hub, Path("/nonexistent"), port=0, tls=tls) as front:

        async def answer(_: dict[str, Any]) -> dict[str, Any]:
            return {"port": front.port}

        await _answer_lines(answer)
        await hub.close()


async def _node(options: Mapping[str, Any]) -> None:
    async def token(*, refresh: bool) -> str:  # noqa: ARG001 - there is only the one
        return _TOKEN

    context = client_context(options["authority"])
    uplinks = [
        Uplink(
            expert_url(options["gateway"], session["name"]),
            session["name"],
            token,
            token_in_header=True,
            ssl_context=context,
            engine_socket=Path(session["worker_socket"]),
            preamble=preamble(session, Kind.EXPERTS),
            user_agent="kvasir-console bench",
            redial_min_s=0.1,
            redial_max_s=0.5,
        )
        for session in options["sessions"]
    ]
    running = [asyncio.create_task(uplink.run()) for uplink in uplinks]

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        states = [uplink.snapshot() for uplink in uplinks]
        return {
            "phases": [state.phase.value for state in states],
            "last_close": next((state.last_close.text for state in states if state.last_close), ""),
        }

    await _answer_lines(answer)
    for uplink in uplinks:
        await uplink.close()
    await asyncio.gather(*running)


class Caller:
    """Asks for batches of rows, two experts each, and compares every answer with its own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch

        from kvasir_console.engine.checkpoint.gguf import Checkpoint
        from kvasir_console.engine.experts import ExpertBank
        from kvasir_console.engine.process.loaded import ComputeOptions
        from kvasir_console.engine.process.worker import SessionStats, Worker

        self._torch, self._worker_class, self._stats_class = torch, Worker, SessionStats
        torch.set_num_threads(options["threads"])
        session = options["session"]
        self._layer, self._n_expert = session["layer"], session["end"]
        with Checkpoint.open(Path(options["model"])) as checkpoint:
            self._bank = ExpertBank.load(
                checkpoint,
                self._layer,
                0,
                self._n_expert,
                forms=ComputeOptions(kernels=options["kernels"]).forms("cpu"),
            )
        self._rng = np.random.default_rng(options["seed"])
        self._socket = session["trunk_socket"]
        self._wire = Wire[session["wire"].upper()]
        self._batches: dict[int, tuple[dispatch.Request, bytes]] = {}
        self._joined = asyncio.Event()

    async def listen(self) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opening = Preamble.decode(await reader.readexactly(SIZE))

            def stats_of(held: Any) -> Any:
                return self._stats_class(opening.session, opening.wallet, held.layer, held.begin, held.end)

            self._worker = self._worker_class(opening, self._wire, reader, writer, stats_of, n_embd=self._bank.n_embd)
            await self._worker.open()
            running = asyncio.create_task(self._worker.run())
            self._joined.set()
            await running

        return await asyncio.start_unix_server(accepted, self._socket, limit=2**20)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "join":
                await self._joined.wait()
                return {}
            case "batch":
                rows = int(request["rows"])
                times = [await self._ask(rows) for _ in range(int(request["rounds"]))]
                return {"ms": float(np.median(times)) * 1e3}
            case other:
                raise ValueError(f"there is nothing like {other}")

    async def _ask(self, rows: int) -> float:
        request, want = self._batch(rows)
        start = time.perf_counter()
        values = await self._worker.ask(self._layer, request)
        seconds = time.perf_counter() - start
        if self._worker.dtype == "f32" and hashlib.sha256(values.tobytes()).digest() != want:
            raise ValueError("an answer is not what the same experts give here")
        return seconds

    def _batch(self, rows: int) -> tuple[dispatch.Request, bytes]:
        """Rows with two fixed experts each, evenly over the layer, and the digest of their answer."""
        if rows not in self._batches:
            torch = self._torch
            states = self._rng.standard_normal((rows, self._bank.n_embd), dtype=np.float32)
            row_idx = np.repeat(np.arange(rows, dtype=np.int32), 2)
            ids = (np.arange(2 * rows, dtype=np.int32)) % self._n_expert
            weights = np.tile(np.array([0.6, 0.4], dtype=np.float32), rows)
            with torch.inference_mode():
                mine = self._bank.weighted_sum(
                    torch.from_numpy(states),
                    torch.from_numpy(row_idx.astype(np.int64)),
                    torch.from_numpy(ids.astype(np.int64)),
                    torch.from_numpy(weights),
                )
            digest = hashlib.sha256(mine.numpy().tobytes()).digest()
            self._batches[rows] = (dispatch.Request(self._wire, states, row_idx, ids, weights), digest)
        return self._batches[rows]


async def _caller(options: Mapping[str, Any]) -> None:
    caller = Caller(options)
    async with await caller.listen():
        await _answer_lines(caller.answer)


async def _answer_lines(answer: Answer) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        try:
            reply = {"ok": True, **await answer(request)}
        except (ValueError, KeyError, OSError) as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": request["id"], **reply}), flush=True)


def main() -> None:
    roles = {"hub": _hub, "node": _node, "caller": _caller}
    asyncio.run(roles[sys.argv[1]](json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
