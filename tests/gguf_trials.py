"""Runs mutated GGUFs, each in a child forked from this warm process, and says what became of each.

    python tests/gguf_trials.py COUNT [--from SEED] [--kernels native,eager,reference] [--jobs N]
    python tests/gguf_trials.py --replay SEED [--keep FILE]

A mutant passes if the product refuses it with a code of its own error tree, or loads it and computes some tokens. It
fails if anything else is raised, if the child dies, takes more than 5 s of processor time (or 120 s of the clock), or
asks for an allocation beyond 1 GiB: the address space may not grow by more, and a refusal that hides a failed
allocation is found by the exceptions it came from.

One thread computes, here and in the children: a fork copies only the thread that forks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from gguf_mutants import Mutant, bases, mutant

MAX_ALLOCATION = 2**30
CPU_LIMIT_S = 5
CLOCK_LIMIT_S = 120
KERNELS = ("native", "eager", "reference")
REPLAY = "replay: python tests/gguf_trials.py --replay"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant. ``code`` is the refusal's, or empty; ``failure`` is empty if it passed."""

    seed: int
    kernels: str
    what: str
    code: str
    failure: str
    cpu_s: float
    grown_bytes: int
    """Growth of the address space at its peak."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all."""

    count: int
    loaded: int
    refused: dict[str, int]
    bases: dict[str, int]
    kernels: dict[str, int]
    slowest_cpu_s: float
    most_grown_bytes: int
    failures: list[Outcome]

    def text(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.refused.items(), key=lambda x: -x[1]))
        lines = [
            f"{self.count} mutated GGUFs: {self.loaded} loaded and computed, {sum(self.refused.values())} refused "
            f"({codes}), {len(self.failures)} failed; slowest {self.slowest_cpu_s:.2f} s of processor time, address "
            f"space grew by at most {self.most_grown_bytes / 2**20:.0f} MiB"
        ]
        lines += [f"{each.seed} ({each.kernels}) {each.what}\n  {each.failure}\n  {REPLAY} {each.seed}"
                  for each in self.failures]  # fmt: skip
        return "\n".join(lines)


def run(count: int, *, first: int = 0, jobs: int = 1, kernels: Sequence[str] = KERNELS) -> Report:
    """Run the seeds ``[first, first + count)`` in ``jobs`` warm processes of their own."""
    command = [sys.executable, __file__, str(count), "--from", str(first), "--kernels", ",".join(kernels)]
    shares = []
    for share in range(jobs):
        lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below
        argv = [*command, "--share", f"{share}/{jobs}", "--lines"]
        shares.append((subprocess.Popen(argv, stdout=lines), lines))
    outcomes = []
    for worker, lines in shares:
        with lines:
            if worker.wait():
                raise RuntimeError("a warm process ended early; its own words are above")
            lines.seek(0)
            outcomes += [Outcome(**json.loads(line)) for line in lines]
    return report(outcomes)


def report(outcomes: Sequence[Outcome]) -> Report:
    passed = [each for each in outcomes if not each.failure]
    return Report(
        count=len(outcomes),
        loaded=sum(not each.code for each in passed),
        refused=dict(Counter(each.code for each in passed if each.code)),
        bases=dict(Counter(each.what.partition(":")[0] for each in outcomes)),
        kernels=dict(Counter(each.kernels for each in outcomes)),
        slowest_cpu_s=max((each.cpu_s for each in outcomes), default=0.0),
        most_grown_bytes=max((each.grown_bytes for each in outcomes), default=0),
        failures=[each for each in outcomes if each.failure],
    )


class Arena:
    """The warm process: everything is imported, every kind of kernel has run once."""

    def __init__(self, folder: Path, kernels: Sequence[str]) -> None:
        import torch

        from kvasir_console.engine import native
        from kvasir_console.engine.forms import EAGER, REFERENCE, compiled

        logging.disable()  # weights that are no numbers make the engine wonder about the machine
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        self.bases = bases(folder)
        self._forms = {"eager": EAGER, "reference": REFERENCE}
        library = native.load(Path(os.environ["KVASIR_KERNELS"])) if "native" in kernels else None
        if library is not None:
            library.set_threads(1)
            self._forms["native"] = compiled(library)
        self.kernels = [name for name in kernels if name in self._forms]
        for name in self.kernels:
            for base in self.bases:
                base.path.write_bytes(base.data)
                if code := trial(base.path, base.kind, self._forms[name]):
                    raise AssertionError(f"{base.name} is valid, but {code} refuses it")
                if failure := self._child(-1, name, Mutant(base, base.name, base.data)).failure:
                    raise AssertionError(f"{base.name} is valid, but its child fails: {failure}")

    def run(self, seed: int) -> Outcome:
        name = self.kernels[seed // len(self.bases) % len(self.kernels)]
        return self._child(seed, name, mutant(self.bases, seed))

    def _child(self, seed: int, kernels: str, spoiled: Mutant) -> Outcome:
        spoiled.base.path.write_bytes(spoiled.data)
        verdict = in_child(lambda: trial(spoiled.base.path, spoiled.base.kind, self._forms[kernels]))
        return Outcome(seed, kernels, spoiled.what, **asdict(verdict))


@dataclass(frozen=True, slots=True)
class Verdict:
    """See ``Outcome``."""

    code: str
    failure: str
    cpu_s: float
    grown_bytes: int


def in_child(act: Callable[[], str]) -> Verdict:
    """Fork, act within the limits, and wait for what comes of it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            os.write(writing, pickle.dumps(_judge(act)))
        finally:
            os._exit(0)
    os.close(writing)
    status, usage, late = _wait(pid, reading)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    code, failure, grown = pickle.loads(answer) if answer else ("", "", 0)  # noqa: S301 - our own child's
    if late:
        failure = f"took more than {CLOCK_LIMIT_S} s"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        failure = (f"took more than {CPU_LIMIT_S} s of processor time" if number == signal.SIGXCPU
                   else f"died of {signal.Signals(number).name}")  # fmt: skip
    elif not answer:
        failure = "ended without a verdict"
    return Verdict(code, failure, usage.ru_utime + usage.ru_stime, grown)


def _wait(pid: int, reading: int) -> tuple[int, resource.struct_rusage, bool]:
    """The child's exit status and usage, and whether it had to be killed for being late."""
    late = not select.select([reading], [], [], CLOCK_LIMIT_S)[0]
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status, usage, late


def _judge(act: Callable[[], str]) -> tuple[str, str, int]:
    """In the child: (code of the refusal, failure, growth of the address space)."""
    from kvasir_console.errors import KvasirError

    before = _status_bytes("VmSize")
    # More than may be grown by, so that the measure shows what the limit does not.
    resource.setrlimit(resource.RLIMIT_AS, (before + MAX_ALLOCATION + 2**26,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    code = failure = ""
    try:
        code = act()
    except KvasirError as error:
        code = error.code
        if hidden := _hidden_allocation(error):
            failure = f"{code} hides {hidden!r:.200}"
    except BaseException as error:  # also what a foreign library throws past Exception
        where = traceback.extract_tb(error.__traceback__)[-4:]
        steps = " < ".join(f"{Path(step.filename).name}:{step.lineno} {step.name}" for step in reversed(where))
        failure = f"{type(error).__name__}: {error!s:.300} at {steps}"
    grown = _status_bytes("VmPeak") - before
    if grown > MAX_ALLOCATION and not failure:
        failure = f"the address space grew by {grown} bytes"
    return code, failure, grown


def _hidden_allocation(error: BaseException | None) -> BaseException | None:
    while error is not None:
        if isinstance(error, MemoryError) or "alloc" in str(error).lower():
            return error
        error = error.__cause__ or error.__context__
    return None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def trial(path: Path, kind: str, forms: object) -> str:
    """What an engine does with a file that came from anywhere, up to some tokens; returns the code of a late refusal
    that is the request's or the numbers' fault, not the file's shape."""
    import numpy as np
    import torch

    from kvasir_console.engine.chat import ChatTemplate
    from kvasir_console.engine.checkpoint.digest import model_digest, shard_digest
    from kvasir_console.engine.checkpoint.gguf import Checkpoint
    from kvasir_console.engine.checkpoint.inspect import inspect
    from kvasir_console.engine.checkpoint.shape import ModelShape, stage_window
    from kvasir_console.engine.checkpoint.shard import read_expert_shard
    from kvasir_console.engine.experts import ExpertBank
    from kvasir_console.engine.kvcache import Span
    from kvasir_console.engine.sampling import SamplingParams, sample
    from kvasir_console.engine.stage import Stage
    from kvasir_console.engine.tokens import Tokenizer
    from kvasir_console.errors import EngineError, ModelError

    with contextlib.suppress(ModelError):  # a summary may need less, or more, than the model
        inspect(path)
    with torch.inference_mode(), Checkpoint.open(path) as checkpoint:
        model_digest(checkpoint)
        shard_digest(checkpoint)
        if kind == "shard":
            info = read_expert_shard(checkpoint)
            bank = ExpertBank.load(checkpoint, info.layer, info.begin, info.end, forms=forms)  # type: ignore[arg-type]
            ids = torch.arange(2 * len(bank.pairs)) % len(bank.pairs)
            bank.weighted_sum(torch.ones(3, bank.n_embd), torch.zeros_like(ids), ids, torch.ones(len(ids)))
            return ""
        shape = ModelShape.of(checkpoint)
        begin, end = stage_window(checkpoint) or (0, shape.n_layer)
        stage = Stage.load(checkpoint, begin, end, forms=forms)  # type: ignore[arg-type]
        tokens = [1, 2, 3, 260, 261, 17]
        if stage.first:
            tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
            ChatTemplate.from_metadata(checkpoint.metadata, tokenizer).close()
            tokens = tokenizer.encode("the <|im_start|>inner\nÜ 😀" + chr(0))[:9] or [0]
            tokenizer.decode(tokens)
    try:
        with torch.inference_mode():
            cache = stage.new_cache(min(32, shape.context_length))
            for step in ([*tokens], [tokens[0]]):
                hidden = stage.embed(torch.tensor(step)) if stage.first else torch.ones(len(step), shape.n_embd)
                hidden = stage.forward(hidden, [Span(cache, cache.length, len(step))])
                if stage.last:
                    logits = stage.logits(hidden[-1:])[0]
                    sample(logits, SamplingParams(temperature=0.7, top_k=5, top_p=0.9), cache.length, tokens)
                    np.asarray(logits)
    except EngineError as error:
        return error.code
    except ModelError as error:
        raise AssertionError(f"the file was accepted and is refused when it is used: {error}") from error
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--lines", action="store_true", help="one JSON outcome a line")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where the mutant of --replay is kept")
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    if not arguments.lines and arguments.replay is None:
        print(run(arguments.count, first=arguments.first, jobs=arguments.jobs, kernels=kernels).text())
        return
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir-console" / "test" / "kernels"
    os.environ.setdefault("KVASIR_KERNELS", str(default))
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder), kernels)
        if arguments.replay is not None:
            if arguments.keep:
                arguments.keep.write_bytes(mutant(arena.bases, arguments.replay).data)
            outcome = arena.run(arguments.replay)
            print(json.dumps(asdict(outcome), indent=2))
            sys.exit(bool(outcome.failure))
        share, jobs = map(int, arguments.share.split("/"))
        for seed in range(arguments.first + share, arguments.first + arguments.count, jobs):
            print(json.dumps(asdict(arena.run(seed))), flush=True)


if __name__ == "__main__":
    main()
