"""``kvasir-console bench experts``: what remote experts cost once round trips are hidden.

Real processes as in the network: a trunk engine, a gateway's front and hub behind TLS, a delay proxy on the node's
link, the node's uplinks, a worker engine for each remote layer. Measured, each in alternating pairs:

* ``batch512_over_batch1``: a layer's experts asked for 512 rows and for one, two experts a row, the network in; per
  row. Every answer is compared with the same experts' answer here.
* ``aggregate_loss``: what many streams lose when remote layers are a round trip away, against the best grouping of the
  same streams without one.
* ``single_stream_added_ms``: what a token of one stream takes more than with all experts here.
* ``tokens_per_round_trip``: of one stream that continues Python files, its drafts looked up in the text before.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvasir_console
from kvasir_console.bench.lines import LineChild
from kvasir_console.bench.links import Links
from kvasir_console.bench.stats import Interval, median, paired_ratio
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest, TokenEvent
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import EngineError, NetworkError, UsageError
from kvasir_console.local.certificates import make_certificates
from kvasir_console.node.supervisor import ChildProcess, module_argv

Say = Callable[[str], None]

BATCH_RATIO_BAR = 77.0
LOSS_BAR = 0.012
ADDED_MS_BAR = 1.0
TOKENS_PER_ROUND_TRIP_BAR = 1.5

BATCH = 512
STREAM_TOKENS = 32
SINGLE_TOKENS = 64
WARM_TOKENS = 24
PROMPT_TOKENS = 8
GROUPS = (1, 2, 4)
TRIES = 10
"""A busy machine may keep a stream from its first token until another is over; then there is nothing to measure."""
FILES = 6
FILE_TOKENS, CONTINUED_TOKENS = 640, 96
CONTEXT = 1024
_PARTS = "kvasir_console.bench.experts_parts"
_OPEN_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    model: Path
    pairs: int = 9
    rtt_ms: float = 13.0
    draft_rtt_ms: float = 50.0
    """The link's round trip while tokens are drafted."""
    streams: int = 32
    layers_remote: int = 1
    threads: int = 2
    kernels: str = "auto"
    wire: str = "v3"
    seed: int = 0


class Bench:
    """The running processes and what is asked of them."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options = options
        self.say = say
        self._rng = random.Random(options.seed)  # noqa: S311 - prompts, not secrets

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        options = self.options
        async with AsyncExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-")))
            with Checkpoint.open(options.model) as checkpoint:
                self.shape = ModelShape.of(checkpoint)
                self.tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
            moe, count = self.shape.moe_layers, options.layers_remote
            if not moe:
                raise UsageError("dense_model", f"{options.model.name} has no experts.", "Give a mixture of experts.")
            if count > len(moe):
                raise UsageError("bad_shape", f"--layers-remote takes 1 to {len(moe)}, the layers with experts.")
            self.layers = [moe[(2 * number + 1) * len(moe) // (2 * count)] for number in range(count)]
            self.trunk = await stack.enter_async_context(self._engine("trunk"))
            info = await self._load_trunk()
            sessions = []
            for number, layer in enumerate(self.layers):
                name = f"worker{number}"
                worker = await stack.enter_async_context(self._engine(name))
                experts = [0, self.shape.n_expert]
                await worker.load(path=str(options.model), model="bench", role="experts", layer=layer, experts=experts)
                sessions.append(self._session(f"layer-{layer}", info["model_digest"], layer, "trunk.data", name))
            batch = self._session("batch", info["model_digest"], self.layers[0], "caller", "worker0")
            self.caller = await self._part(
                stack,
                "caller",
                session=batch,
                model=str(options.model),
                threads=options.threads,
                kernels=options.kernels,
                seed=options.seed,
            )
            await self._network(stack, [*sessions, batch])
            yield

    def _session(self, name: str, digest: str, layer: int, trunk_socket: str, worker: str) -> dict[str, Any]:
        return {
            "name": name,
            "digest": digest,
            "layer": layer,
            "begin": 0,
            "end": self.shape.n_expert,
            "wire": self.options.wire,
            "trunk_socket": str(self._folder / trunk_socket),
            "worker_socket": str(self._folder / f"{worker}.data"),
        }

    async def _part(self, stack: AsyncExitStack, role: str, **fields: Any) -> LineChild:
        return await stack.enter_async_context(LineChild(_PARTS, role, json.dumps(fields)))

    async def _network(self, stack: AsyncExitStack, sessions: list[dict[str, Any]]) -> None:
        certificates = await asyncio.to_thread(make_certificates, self._folder)
        files = {"certificate": str(certificates.chain), "key": str(certificates.key)}
        hub = await self._part(stack, "hub", sessions=sessions, **files)
        port = int((await hub.ask("port"))["port"])
        self.links = await stack.enter_async_context(Links(self.options.seed))
        link = await self.links.open("node", port, rtt_ms=0.0)
        gateway = f"https://127.0.0.1:{link}"
        node = await self._part(
            stack, "node", gateway=gateway, authority=str(certificates.authority), sessions=sessions
        )
        try:
            async with asyncio.timeout(_OPEN_S):
                await self.caller.ask("join")
                await self._connected()
        except TimeoutError:
            raise NetworkError("bench_session", f"The sessions did not open: {await node.ask('state')}.") from None

    @asynccontextmanager
    async def _engine(self, name: str) -> AsyncIterator[EngineClient]:
        options = self.options
        arguments = ("--runtime", str(self._folder), "--name", name, "--threads", str(options.threads))
        argv = module_argv("kvasir_console.engine.process", *arguments, "--kernels", options.kernels)
        child = ChildProcess(f"engine {name}", argv, self._folder / f"{name}.log")
        await child.start()
        try:
            client = await EngineClient.connect(self._folder / f"{name}.ctl", timeout_s=60)
            try:
                yield client
            finally:
                await client.close()
        finally:
            await child.stop()

    async def groups(self, count: int) -> None:
        """Put streams into so many groups from now on; 0 lets the trunk choose."""
        await self._load_trunk(count)
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._connected()
        except TimeoutError:
            raise NetworkError("bench_session", "The sessions did not come back after a load.") from None

    async def _load_trunk(self, groups: int = 0) -> dict[str, Any]:
        return await self.trunk.load(
            path=str(self.options.model),
            model="bench",
            role="stage",
            layers=[0, self.shape.n_layer],
            context_length=CONTEXT,
            dispatch_wire=self.options.wire,
            dispatch_policy={"seed": self.options.seed, "groups": groups},
        )

    async def _connected(self) -> None:
        while sum(each["connected"] for each in await self.trunk.coverage()) < len(self.layers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def link(self, rtt_ms: float) -> None:
        """Give the link another round trip, and the router time to learn it."""
        await self.links.set("node", rtt_ms=rtt_ms)
        await self.one(WARM_TOKENS)

    async def one(self, tokens: int, *, experts: str = "network") -> DoneEvent:
        """One stream of random prompt, without drafts."""
        return await self.done(self._request(tokens, experts))

    def _request(self, tokens: int, experts: str) -> GenerateRequest:
        vocabulary = self.shape.n_vocab
        prompt = tuple(self._rng.randrange(min(300, vocabulary // 2), vocabulary) for _ in range(PROMPT_TOKENS))
        return GenerateRequest(
            prompt_tokens=prompt, max_tokens=tokens, ignore_eos=True, speculation="off", experts=experts
        )

    async def done(self, request: GenerateRequest) -> DoneEvent:
        async for event in self.trunk.generate(request):
            if isinstance(event, DoneEvent):
                return event
        raise EngineError("engine_gone", "The engine ended in the middle of a request.")

    async def aggregate(self, experts: str = "network") -> tuple[float, float]:
        """Tokens a second of all streams while all of them decode, and the part of pairs that were remote."""
        clock = asyncio.get_running_loop().time
        times: list[list[float]] = []

        async def stream(request: GenerateRequest) -> DoneEvent:
            mine: list[float] = []
            times.append(mine)
            async for event in self.trunk.generate(request):
                if isinstance(event, TokenEvent):
                    mine.append(clock())
                else:
                    return event
            raise EngineError("engine_gone", "The engine ended in the middle of a request.")

        for _ in range(TRIES):
            times.clear()
            requests = [self._request(STREAM_TOKENS, experts) for _ in range(self.options.streams)]
            done = await asyncio.gather(*(stream(request) for request in requests))
            begin, end = max(each[0] for each in times), min(each[-1] for each in times)
            tokens = sum(sum(begin < at <= end for at in each) for each in times)
            if tokens and end > begin:
                return tokens / (end - begin), self.remote_share(done)
        raise EngineError("never_together", f"In {TRIES} tries the streams never decoded at once.")

    def remote_share(self, done: Sequence[DoneEvent]) -> float:
        """Of the remote layers' pairs."""
        pairs = sum(each.rows for each in done) * len(self.layers) * self.shape.n_expert_used
        return sum(each.pairs_remote for each in done) / pairs


async def run(options: Options, say: Say) -> dict[str, Any]:
    """The report as JSON values. Raises ``NetworkError`` if a session does not open."""
    bench = Bench(options, say)
    async with bench.running():
        shape = bench.shape
        say(f"E {shape.n_embd}, FF {shape.n_ff_expert}, {shape.n_expert} experts, layers {bench.layers} remote, TLS")
        report: dict[str, Any] = {
            "bench": "experts",
            "model": options.model.name,
            "pairs": options.pairs,
            "rtt_ms": options.rtt_ms,
            "draft_rtt_ms": options.draft_rtt_ms,
            "streams": options.streams,
            "layers_remote": bench.layers,
            "threads": options.threads,
            "wire": options.wire,
            "seed": options.seed,
        }
        bars: dict[str, bool] = {}
        for measure in (_batches, _single, _aggregate, _drafts):
            await measure(bench, report, bars)
        router = (await bench.trunk.stats())["router"]
        keys = ("steps", "asks", "hedges", "checked_pairs", "mismatches")
        report["router"] = {key: router[key] for key in keys}
        report["bars"] = bars
    return report


async def _batches(bench: Bench, report: dict[str, Any], bars: dict[str, bool]) -> None:
    options, ratios = bench.options, dict[float, list[float]]()
    single: dict[float, list[float]] = {}
    large: dict[float, list[float]] = {}
    for pair in range(options.pairs + 1):
        for rtt_ms in (options.rtt_ms, 0.0) if pair % 2 else (0.0, options.rtt_ms):
            await bench.links.set("node", rtt_ms=rtt_ms)
            one = (await bench.caller.ask("batch", rows=1, rounds=15))["ms"]
            many = (await bench.caller.ask("batch", rows=BATCH, rounds=3))["ms"]
            if pair:  # the first is for warming up
                ratios.setdefault(rtt_ms, []).append(BATCH * one / many)
                single.setdefault(rtt_ms, []).append(one)
                large.setdefault(rtt_ms, []).append(many)
    for rtt_ms, suffix in ((0.0, "_rtt0"), (options.rtt_ms, "")):
        ratio = median(ratios[rtt_ms], options.seed)
        _enter(report, f"batch{BATCH}_over_batch1{suffix}", ratio)
        report[f"batch1_ms{suffix}"] = median(single[rtt_ms]).median
        report[f"batch{BATCH}_ms{suffix}"] = median(large[rtt_ms]).median
        bars[f"batch{BATCH}_over_batch1"] = ratio.low >= BATCH_RATIO_BAR
        bench.say(
            f"RTT {rtt_ms:g} ms: one row {report[f'batch1_ms{suffix}']:.2f} ms, {BATCH} rows "
            f"{report[f'batch{BATCH}_ms{suffix}']:.2f} ms: {_text(ratio)} times the rows a second"
        )


async def _single(bench: Bench, report: dict[str, Any], bars: dict[str, bool]) -> None:
    options = bench.options
    await bench.link(options.rtt_ms)
    for _ in range(4):
        await bench.one(WARM_TOKENS)
    here, remote, added, shares = [], [], [], []
    for pair in range(options.pairs + 1):
        found: dict[str, float] = {}
        for experts in ("local", "network") if pair % 2 else ("network", "local"):
            done = await bench.one(SINGLE_TOKENS, experts=experts)
            found[experts] = done.decode_ms / (SINGLE_TOKENS - 1)
            if experts == "network" and pair:
                shares.append(bench.remote_share([done]))
        if pair:
            here.append(found["local"])
            remote.append(found["network"])
            added.append(found["network"] - found["local"])
    interval = median(added, options.seed)
    _enter(report, "single_stream_added_ms", interval)
    report["single_stream_local_ms"], report["single_stream_remote_share"] = median(here).median, min(shares)
    bars["single_stream_added_ms"] = interval.high <= len(bench.layers) * (options.rtt_ms + ADDED_MS_BAR)
    bench.say(
        f"one stream: {median(here).median:.2f} ms a token here, {median(remote).median:.2f} remote: "
        f"{_text(interval)} ms more; {min(shares):.1%} of the layer's pairs were remote"
    )


async def _aggregate(bench: Bench, report: dict[str, Any], bars: dict[str, bool]) -> None:
    options = bench.options
    rates: dict[int, float] = {}
    for count in GROUPS:
        await bench.groups(count)
        await bench.link(0.0)
        rates[count] = median([(await bench.aggregate())[0] for _ in range(3)]).median
    bench.say(f"zero RTT, tokens a second by groups: {', '.join(f'{n}: {rate:.0f}' for n, rate in rates.items())}")
    await bench.groups(0)
    near: list[float] = []
    far: list[float] = []
    shares: list[float] = []
    for pair in range(options.pairs + 1):
        for rtt_ms in (0.0, options.rtt_ms) if pair % 2 else (options.rtt_ms, 0.0):
            await bench.link(rtt_ms)
            rate, share = await bench.aggregate()
            if pair:
                (far if rtt_ms else near).append(rate)
                shares.append(share)
    loss = paired_ratio(far, near, options.seed)
    _enter(report, "aggregate_loss", Interval(1 - loss.median, 1 - loss.high, 1 - loss.low))
    report["aggregate_tps"], report["aggregate_tps_rtt0"] = median(far).median, median(near).median
    report["aggregate_groups_rtt0"] = {str(count): rate for count, rate in rates.items()}
    report["aggregate_remote_share"] = min(shares)
    bars["aggregate_loss"] = 1 - loss.low <= LOSS_BAR
    bench.say(
        f"{options.streams} streams: {median(near).median:.0f} tokens a second without a round trip, "
        f"{median(far).median:.0f} with one of {options.rtt_ms:g} ms: {1 - loss.median:.1%} lost "
        f"({1 - loss.high:.1%} to {1 - loss.low:.1%})"
    )


async def _drafts(bench: Bench, report: dict[str, Any], bars: dict[str, bool]) -> None:
    options = bench.options
    await bench.link(options.draft_rtt_ms)
    for _ in range(2):
        await bench.one(WARM_TOKENS)
    texts = python_files(bench.tokenizer, options.seed)
    tokens = steps = 0
    each: list[float] = []
    for prompt in texts:
        request = GenerateRequest(prompt_tokens=tuple(prompt), max_tokens=CONTINUED_TOKENS, ignore_eos=True)
        done = await bench.done(request)
        tokens += done.completion_tokens - 1
        steps += done.decode_steps
        each.append((done.completion_tokens - 1) / done.decode_steps)
    report["tokens_per_round_trip"] = tokens / steps
    report["tokens_per_round_trip_by_file"] = each
    bars["tokens_per_round_trip"] = tokens / steps >= TOKENS_PER_ROUND_TRIP_BAR
    bench.say(f"Python files continued, RTT {options.draft_rtt_ms:g} ms: {tokens / steps:.2f} tokens a round trip")


def python_files(tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """The beginnings of some of this package's own files, drawn by ``seed``, in tokens."""
    root = Path(kvasir_console.__file__).parent
    paths = sorted(path for path in root.rglob("*.py") if path.stat().st_size > 6 * FILE_TOKENS)
    chosen = random.Random(seed).sample(paths, FILES)  # noqa: S311
    return [tokenizer.encode(path.read_text(encoding="utf-8")[: 8 * FILE_TOKENS])[:FILE_TOKENS] for path in chosen]


def _enter(report: dict[str, Any], field: str, interval: Interval) -> None:
    report[field], report[f"{field}_ci"] = interval.median, [interval.low, interval.high]


def _text(interval: Interval) -> str:
    return f"{interval.median:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def describe(report: dict[str, Any]) -> str:
    lines = [f"{report['model']}, layers {report['layers_remote']} remote, RTT {report['rtt_ms']:g} ms"]
    for field, label in (
        (f"batch{BATCH}_over_batch1_rtt0", f"rows a second, {BATCH} over 1, no RTT"),
        (f"batch{BATCH}_over_batch1", f"rows a second, {BATCH} over 1"),
        ("single_stream_added_ms", "added to a token of one stream, ms"),
        ("aggregate_loss", f"lost by {report['streams']} streams"),
        ("tokens_per_round_trip", "tokens a round trip"),
    ):
        bar = {True: "holds", False: "missed", None: ""}[report["bars"].get(field)]
        low_high = report.get(f"{field}_ci")
        sure = f"  95% of it {low_high[0]:.3f} to {low_high[1]:.3f}" if low_high else ""
        lines.append(f"{label:38}{report[field]:>9.3f}{sure}  {bar}".rstrip())
    return "\n".join(lines)
