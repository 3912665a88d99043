"""``kvasir-console bench engine``: the engine process against a peer on the same file, alternately, in one run.

Both sides get the same random token prompts, each prompt once, so nothing is reused. Rates are each side's own:
``prefill_tps`` 512 rows, ``decode_tps`` one stream after its first token, ``batch8_tps`` eight streams at once, their
prompts included. ``kl_vs_f32`` is the mean KL divergence of next-token distributions from the float32 reference, at
the same places of the same texts for both sides.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvasir_console.bench.stats import paired_ratio
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import EngineError, UsageError
from kvasir_console.node.supervisor import ChildProcess, module_argv

Say = Callable[[str], None]
PREFILL_ROWS = 512
DECODE_TOKENS = 96
BATCH_STREAMS, BATCH_TOKENS = 8, 48
PROMPT_ROWS = 16
CONTEXT = 1024
FIGURES = ("decode_tps", "prefill_tps", "batch8_tps")

TEXTS = (
    "The capital of France is Paris, a city on the Seine that has been the seat of its kings and its republics.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Water boils at one hundred degrees Celsius at sea level, and at less the higher one climbs a mountain.",
    "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat, and little else.",
    "The committee met on Tuesday to discuss the budget. After two hours, nobody could say what had been decided.",
    "To make bread one needs flour, water, salt and time; yeast only shortens the waiting.",
    "In 1969 two people walked on the Moon while a third went round it alone, out of reach of every voice.",
    "A queue is first in, first out; a stack is last in, first out; a priority queue is neither.",
)
"""Prose and code to compare distributions on; three places of each are taken."""


@dataclass(slots=True)
class Side:
    """Measurements of one side, one a pair."""

    decode_tps: list[float] = field(default_factory=list)
    prefill_tps: list[float] = field(default_factory=list)
    batch8_tps: list[float] = field(default_factory=list)


class OurEngine:
    """An engine process as a node would run it."""

    def __init__(self, model: Path, folder: Path, name: str, threads: int, kernels: str) -> None:
        self._model, self._name = model, name
        self._socket = folder / f"{name}.ctl"
        arguments = ("--runtime", str(folder), "--name", name, "--threads", str(threads), "--kernels", kernels)
        argv = module_argv("kvasir_console.engine.process", *arguments)
        self._child = ChildProcess(f"engine {name}", argv, folder / f"{name}.log")

    async def __aenter__(self) -> OurEngine:
        await self._child.start()
        self.client = await EngineClient.connect(self._socket, timeout_s=60)
        self.info = await self.client.load(
            path=str(self._model),
            model=self._name,
            role="stage",
            layers=[0, _layers(self._model)],
            context_length=CONTEXT,
        )
        await self.client.call("warm")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self._child.stop()

    async def _run(self, tokens: list[int], n: int, *, trace: bool = False) -> DoneEvent:
        # Drafts would count: text of random prompts repeats itself, and a peer without them would look slow.
        request = GenerateRequest(
            prompt_tokens=tuple(tokens), max_tokens=n, ignore_eos=True, trace=trace, speculation="off"
        )
        async for event in self.client.generate(request):
            if isinstance(event, DoneEvent):
                return event
        raise EngineError("engine_gone", "The engine ended in the middle of a request.")

    async def prefill(self, tokens: list[int]) -> float:
        return len(tokens) / ((await self._run(tokens, 1)).ttft_ms / 1e3)

    async def decode(self, tokens: list[int], n: int) -> float:
        return (n - 1) / ((await self._run(tokens, n)).decode_ms / 1e3)

    async def ttft_ms(self, tokens: list[int]) -> float:
        return (await self._run(tokens, 1)).ttft_ms

    async def batch(self, prompts: list[list[int]], n: int) -> float:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._run(tokens, n) for tokens in prompts))
        return len(prompts) * n / (asyncio.get_running_loop().time() - started)

    async def distribution(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        path = (await self._run(tokens, 1, trace=True)).trace_path
        if path is None:
            raise EngineError("no_trace", "The engine kept no logits.")
        return log_softmax(np.load(path)[0])


class Peer:
    """A peer's child process; ``peer_llamacpp`` describes what it is asked."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self._argv, self._folder = argv, folder

    async def __aenter__(self) -> Peer:
        log = (self._folder / "peer.log").open("wb")
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=2**24
        )
        log.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            talk = (self._folder / "peer.log").read_text(errors="replace")[-600:]
            raise UsageError("peer_ended", f"The peer ended while it ran {op}.", talk.strip())
        answer: dict[str, Any] = json.loads(line)
        return answer


async def run(
    model: Path, *, peer: str | None, pairs: int, threads: int, kernels: str, seed: int, say: Say
) -> dict[str, Any]:
    """The report (see the module). Raises ``UsageError`` for a peer that cannot be had."""
    rng = random.Random(seed)  # noqa: S311 - prompts, not secrets
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        folder = Path(name)
        say(f"Loading {model.name} with {threads} threads")
        async with OurEngine(model, folder, "ours", threads, kernels) as ours:
            stats = await ours.client.stats()
            report: dict[str, Any] = {
                "model": model.name,
                "threads": threads,
                "pairs": pairs,
                "kernels": ours.info.get("kernels", kernels),
                "load_s": ours.info["load_s"],
                "rss_mib": stats["rss_bytes"] / 2**20,
            }
            vocabulary = int(ours.info["n_vocab"])
            if peer is None:
                side = Side()
                for number in range(pairs):
                    await _measure_ours(ours, side, _prompts(rng, vocabulary))
                    say(f"round {number + 1} of {pairs}")
                report |= _medians(side)
                report["kl_vs_f32"] = await _kl(ours, None, model, folder, threads, report)
            else:
                async with Peer(peer_argv(peer, model, threads), folder) as other:
                    await _against(report, ours, other, rng, vocabulary, pairs, say)
                    report["kl_vs_f32"] = await _kl(ours, other, model, folder, threads, report)
            waits = [await ours.ttft_ms(_tokens(rng, vocabulary, PROMPT_ROWS)) for _ in range(5)]
            report["ttft_ms"] = statistics.median(waits)
    return report


async def _against(
    report: dict[str, Any], ours: OurEngine, other: Peer, rng: random.Random, vocabulary: int, pairs: int, say: Say
) -> None:
    info = await other.ask("info")
    mine, theirs = Side(), Side()
    for number in range(pairs + 1):
        prompts = _prompts(rng, vocabulary)
        # One warm-up pair is thrown away; who goes first alternates.
        a, b = (Side(), Side()) if number == 0 else (mine, theirs)
        if number % 2:
            await _measure_ours(ours, a, prompts)
            await _measure_peer(other, b, prompts)
        else:
            await _measure_peer(other, b, prompts)
            await _measure_ours(ours, a, prompts)
        say(f"pair {number} of {pairs}" if number else "warm-up")
    report |= _medians(mine)
    report["peer"] = info | _medians(theirs)
    report["samples"] = {"ours": asdict(mine), "peer": asdict(theirs)}
    for figure in FIGURES:
        ratio = paired_ratio(getattr(mine, figure), getattr(theirs, figure))
        key = figure.replace("_tps", "_ratio")
        report[key], report[f"{key}_ci"] = ratio.median, [ratio.low, ratio.high]


async def _measure_ours(ours: OurEngine, side: Side, prompts: list[list[int]]) -> None:
    side.prefill_tps.append(await ours.prefill(prompts[0]))
    side.decode_tps.append(await ours.decode(prompts[1], DECODE_TOKENS))
    side.batch8_tps.append(await ours.batch(prompts[2:], BATCH_TOKENS))


async def _measure_peer(other: Peer, side: Side, prompts: list[list[int]]) -> None:
    side.prefill_tps.append((await other.ask("prefill", tokens=prompts[0]))["tps"])
    side.decode_tps.append((await other.ask("decode", tokens=prompts[1], n=DECODE_TOKENS))["tps"])
    side.batch8_tps.append((await other.ask("batch", prompts=prompts[2:], n=BATCH_TOKENS))["tps"])


async def _kl(
    ours: OurEngine, other: Peer | None, model: Path, folder: Path, threads: int, report: dict[str, Any]
) -> float:
    """Our mean divergence from the reference; the peer's goes into the report beside it."""
    mine, theirs = [], []
    async with OurEngine(model, folder, "reference", threads, "reference") as reference:
        for tokens in _texts(model):
            for count in sorted({max(2, len(tokens) // 3), 2 * len(tokens) // 3, len(tokens)}):
                exact = await reference.distribution(tokens[:count])
                mine.append(kl_divergence(exact, await ours.distribution(tokens[:count])))
                if other is not None:
                    path = folder / "peer.npy"
                    await other.ask("logits", tokens=tokens[:count], path=str(path))
                    theirs.append(kl_divergence(exact, log_softmax(np.load(path))))
    if other is not None:
        report["peer"]["kl_vs_f32"] = statistics.mean(theirs)
    return statistics.mean(mine)


def _texts(model: Path) -> list[list[int]]:
    """``TEXTS`` in tokens of the model."""
    with Checkpoint.open(model) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    return [tokenizer.encode(text) for text in TEXTS]


def check_peer(peer: str) -> None:
    """Raises ``UsageError`` for a peer that cannot be had, before anything is loaded for it."""
    if peer == "native":
        native_python()
    elif peer == "xllamacpp":
        if importlib.util.find_spec("xllamacpp") is None:
            raise UsageError("no_peer", "The package xllamacpp is not installed here.", "Install it with make setup.")
    elif shutil.which(next(iter(peer.split()), "")) is None:
        raise UsageError(
            "no_peer",
            f"The peer {peer!r} is no program of this machine.",
            "Give xllamacpp, native, or a command that answers as bench/peer_llamacpp.py does.",
        )


def peer_argv(peer: str, model: Path, threads: int) -> list[str]:
    """The command of a named peer, or of any program that speaks the same protocol."""
    program = str(Path(__file__).with_name("peer_llamacpp.py"))
    arguments = [str(model), str(threads), str(CONTEXT)]
    if peer == "xllamacpp":
        return [sys.executable, program, "xllamacpp", *arguments]
    if peer == "native":
        return [str(native_python()), program, "native", *arguments]
    return [*peer.split(), *arguments]


def native_python() -> Path:
    """The interpreter of the environment that ``make native-peer`` builds."""
    python = Path(".venv-native/bin/python").absolute()
    if not python.exists():
        raise UsageError(
            "no_native_peer",
            "There is no native build of llama.cpp here.",
            "Build it with make native-peer (it takes a quarter of an hour), or use --peer xllamacpp.",
        )
    return python


def _prompts(rng: random.Random, vocabulary: int) -> list[list[int]]:
    sizes = [PREFILL_ROWS] + [PROMPT_ROWS] * (1 + BATCH_STREAMS)
    return [_tokens(rng, vocabulary, size) for size in sizes]


def _tokens(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    """Random ordinary tokens; the first few ids of a vocabulary are special ones."""
    return [rng.randrange(min(300, vocabulary // 2), vocabulary) for _ in range(count)]


def _medians(side: Side) -> dict[str, float]:
    return {figure: statistics.median(getattr(side, figure)) for figure in FIGURES}


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(V,) log-probabilities in f64; log-probabilities stay what they are."""
    x = logits.astype(np.float64)
    x = x - x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def kl_divergence(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    """KL(p || q) in nats of two log-distributions; a shorter one lacks its last, least likely entries."""
    count = min(len(p), len(q))
    p, q = p[:count], np.maximum(q[:count], -60.0)
    return float(np.sum(np.exp(p) * (p - q)))


def _layers(model: Path) -> int:
    with Checkpoint.open(model) as checkpoint:
        return ModelShape.of(checkpoint).n_layer
