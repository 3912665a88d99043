"""Control verbs: what a console may ask of its engine, and what a gateway may ask through a ring's entry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from kvasir_console.engine.process.client import GenerateRequest, TokenEvent
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.generate import Generator, event_message
from kvasir_console.engine.process.kept import Kept
from kvasir_console.engine.process.loaded import ComputeOptions, Loaded, load
from kvasir_console.engine.process.request import parse_request
from kvasir_console.engine.process.ring import RingConfig
from kvasir_console.engine.stage import Span
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import control

log = logging.getLogger(__name__)

Message = dict[str, Any]
ENTRY_VERBS = frozenset({"generate", "cancel", "count_tokens", "info"})
"""All that a gateway may ask of a node's engine: it can never load, inspect or stop anything there."""
RATE_WINDOW_S = 10.0
DRAIN_TIMEOUT_S = 10.0


class Engine:
    """The process's state: one load, the requests that run, and the counters."""

    def __init__(self, runtime: Path, options: ComputeOptions) -> None:
        self.runtime = runtime
        self.options = options
        self.compute = Compute()
        self.loaded: Loaded | None = None
        self.exiting = asyncio.Event()
        self.draining = False
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.listeners: set[Callable[[Message], None]] = set()
        """Owners' control streams: they hear events that answer no request."""
        self.tokens_total = 0
        self._recent: deque[float] = deque(maxlen=4096)
        self._loading = asyncio.Lock()

    async def load(self, fields: Message, progress: Any) -> Message:
        async with self._loading:
            if self.active:
                raise EngineError("engine_busy", "The engine runs requests; drain it before loading another model.")
            previous, self.loaded = self.loaded, None
            if previous is not None:
                await previous.close()
            del previous  # its weights are freed before the next ones are read: never two models at once
            self.loaded = await load(fields, self.compute, self.runtime, self.options, progress, self.announce)
            if self.loaded.ring is not None:
                self.loaded.ring.on_retired = self.exiting.set
            return self.loaded.info

    def announce(self, event: Message) -> None:
        for listener in list(self.listeners):
            listener(event)

    def require(self) -> Loaded:
        if self.loaded is None:
            raise EngineError("nothing_loaded", "The engine has no model loaded.", "Load a window first.")
        return self.loaded

    def count_token(self) -> None:
        self.tokens_total += 1
        self._recent.append(time.monotonic())

    def stats(self, *, experts: bool = False) -> Message:
        """The process's counters. ``experts`` adds how often each expert was chosen; a worker always says it, since it
        holds few."""
        loaded = self.loaded
        now = time.monotonic()
        recent = sum(1 for at in self._recent if now - at <= RATE_WINDOW_S)
        told = loaded is not None and (experts or loaded.experts is not None)
        return {
            "info": None if loaded is None else loaded.info,
            "tensor_bytes": 0 if loaded is None else loaded.tensor_bytes,
            "rss_bytes": psutil.Process().memory_info().rss,
            "threads": torch.get_num_threads(),
            "computing_s": 0.0 if loaded is None else self.compute.computing_s,  # a load takes as long as it takes
            "active_requests": self.active,
            "tokens_total": self.tokens_total,
            "rows_total": 0 if loaded is None else loaded.rows,
            "tokens_per_s": recent / RATE_WINDOW_S,
            "experts": loaded.activations() if loaded is not None and told else None,
            "served": None if loaded is None or loaded.experts is None else loaded.experts.stats(),
            "router": None if loaded is None or loaded.router is None else loaded.router.stats(),
            "ring": None if loaded is None or loaded.ring is None else loaded.ring.stats(),
            "serving": None if loaded is None or loaded.generator is None else loaded.generator.scheduler.stats(),
        }

    @contextlib.contextmanager
    def request(self) -> Any:
        """Count a running request, so that ``drain`` can wait for the last one."""
        if self.draining:
            raise EngineError("engine_draining", "The engine is draining and takes no new requests.")
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()


class VerbSession:
    """One control stream: requests in any number at once, each answered with its id."""

    def __init__(
        self,
        engine: Engine,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        allowed: frozenset[str] | None = None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._allowed = allowed
        self._generating: dict[int, asyncio.Task[None]] = {}
        self._keys: dict[int, tuple[int, Kept]] = {}
        """Requests with a key that this stream follows, by id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._verbs = {
            "load": self._load,
            "generate": self._generate,
            "cancel": self._cancel,
            "count_tokens": self._count_tokens,
            "info": self._info,
            "coverage": self._coverage,
            "stats": self._stats,
            "quarantine": self._quarantine,
            "pardon": self._pardon,
            "replan": self._replan,
            "warm": self._warm,
            "drain": self._drain,
            "exit": self._exit,
        }

    async def run(self) -> None:
        """Serve until the peer leaves; its running generations are cancelled with it."""
        if self._allowed is None:
            self._engine.listeners.add(self._hear)
        try:
            while True:
                message = await control.read_message(self._reader)
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if message.get("verb") == "generate" and isinstance(message.get("id"), int):
                    self._generating[message["id"]] = task
        except (EOFError, OSError):
            pass
        except KvasirError as error:
            log.warning("a control stream is closed: %s", error)
        finally:
            self._engine.listeners.discard(self._hear)
            for task in self._tasks:
                task.cancel()

    def _hear(self, event: Message) -> None:
        task = asyncio.create_task(self._send({"id": 0, **event}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Message) -> None:
        verb = str(message.get("verb"))
        try:
            handler = self._verbs.get(verb)
            if handler is None or (self._allowed is not None and verb not in self._allowed):
                raise EngineError("unknown_verb", f"This stream takes no verb {verb!r}.")
            await handler(message)
        except KvasirError as error:
            await self._send(control.failure(message, error))
        except (OSError, EOFError):
            log.debug("the peer left before %s was answered", verb)
        except Exception as error:
            log.exception("the verb %s failed", verb)
            trouble = EngineError(
                "engine_failed", f"The engine failed while it ran {verb}: {type(error).__name__}.", "Read its log."
            )
            await self._send(control.failure(message, trouble))
        finally:
            if isinstance(message.get("id"), int):
                self._generating.pop(message["id"], None)

    async def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            await control.write_message(self._writer, message)

    async def _load(self, message: Message) -> None:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int) -> None:
            event = control.encode({"id": message.get("id"), "event": "load", "done_bytes": done, "total_bytes": total})
            loop.call_soon_threadsafe(self._writer.write, event)

        info = await self._engine.load(message, report)
        await self._send(control.reply(message, info=info))

    async def _generate(self, message: Message) -> None:
        request = parse_request(message)
        generator = self._engine.require().generator
        if generator is None:
            raise EngineError("no_generation_here", "This engine's window cannot begin a generation.")
        with self._engine.request():
            prompt = await generator.tokenize(request)
            if request.key:
                await self._follow(message, request, generator, prompt)
                return
            # A refusal comes instead of the reply; once that is sent, the request will be served.
            async with generator.start(request, prompt) as generation:
                await self._send(control.reply(message, prompt_tokens=len(prompt)))
                try:
                    async for event in generation:
                        if isinstance(event, TokenEvent):
                            self._engine.count_token()
                        await control.write_message(self._writer, {"id": message["id"], **event_message(event)})
                except KvasirError as error:
                    await self._send({"id": message["id"], "event": "error", "error": error.as_dict()})

    async def _follow(
        self, message: Message, request: GenerateRequest, generator: Generator, prompt: list[int]
    ) -> None:
        """A request with a key: the one that is kept, or a new one. It goes on when this stream ends."""
        kept, key = generator.kept, request.key
        generation = kept.get(key)
        if generation is None:
            generation = generator.start(request, prompt)
            kept.add(key, generation)
        self._keys[message["id"]] = key, kept
        try:
            with kept.following(key):
                await self._send(control.reply(message, prompt_tokens=len(prompt), prompt_token_ids=prompt))
                async for event in generation.follow(len(request.resumed)):
                    if isinstance(event, TokenEvent):
                        self._engine.count_token()
                    await control.write_message(self._writer, {"id": message["id"], **event_message(event)})
        except KvasirError as error:
            await kept.drop(key)
            await self._send({"id": message["id"], "event": "error", "error": error.as_dict()})
        finally:
            self._keys.pop(message["id"], None)

    async def _cancel(self, message: Message) -> None:
        task = self._generating.get(message.get("request", 0))
        if (entry := self._keys.get(message.get("request", 0))) is not None:
            key, kept = entry
            await kept.give_up(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._send(control.reply(message, cancelled=task is not None))

    async def _count_tokens(self, message: Message) -> None:
        loaded = self._engine.require()
        if loaded.generator is None:
            raise EngineError("no_tokenizer_here", "This engine's window has no tokenizer.")
        fields = {key: message[key] for key in ("prompt", "messages") if message.get(key) is not None}
        tokens = await loaded.generator.tokenize(parse_request(fields))
        context_length = loaded.info["context_length"]
        await self._send(control.reply(message, tokens=len(tokens), context_length=context_length))

    async def _info(self, message: Message) -> None:
        loaded = self._engine.require()
        whole = {} if loaded.ring is None else {"whole": loaded.ring.wholeness()}
        await self._send(control.reply(message, info={**loaded.info, **whole}))

    async def _coverage(self, message: Message) -> None:
        router = self._engine.require().router
        await self._send(control.reply(message, sessions=[] if router is None else router.coverage()))

    async def _stats(self, message: Message) -> None:
        await self._send(control.reply(message, **self._engine.stats(experts=message.get("experts") is True)))

    async def _quarantine(self, message: Message) -> None:
        router = self._engine.require().router
        wallet = message.get("wallet")
        found = router is not None and router.quarantine(
            str(message.get("session")), None if wallet is None else str(wallet)
        )
        await self._send(control.reply(message, quarantined=found))

    async def _pardon(self, message: Message) -> None:
        router = self._engine.require().router
        found = router is not None and router.pardon(str(message.get("session")), str(message.get("wallet")))
        await self._send(control.reply(message, pardoned=found))

    async def _replan(self, message: Message) -> None:
        """A ring's newer plan leaves this rank where it is: take its epoch, keep everything."""
        ring = self._engine.require().ring
        if ring is None:
            raise EngineError("no_ring_here", "This engine is no stage of a ring.", "Load a window of one.")
        try:
            config = RingConfig(**message["ring"])
        except (KeyError, TypeError) as error:
            raise EngineError("bad_replan", f"The plan is incomplete or malformed: {error!r}.") from error
        ring.replan(config)
        await self._send(control.reply(message))

    async def _warm(self, message: Message) -> None:
        """One row through the window, so that the first request meets faulted-in weights."""
        stage = self._engine.require().stage
        if stage is not None:
            started = time.monotonic()
            row = torch.zeros(1, stage.shape.n_embd)
            await self._engine.compute.run(lambda: stage.forward(row, [Span(stage.new_cache(1), 0, 1)]))
            await self._send(control.reply(message, warm_s=time.monotonic() - started))
        else:
            await self._send(control.reply(message, warm_s=0.0))

    async def _drain(self, message: Message) -> None:
        """Take no new work, and finish what there is: requests of clients, and answers that trunks wait for."""
        self._engine.draining = True
        await self._engine.idle.wait()
        loaded = self._engine.loaded
        drained = True
        if loaded is not None and loaded.experts is not None:
            drained = await loaded.experts.drain(float(message.get("timeout_s", DRAIN_TIMEOUT_S)))
        await self._send(control.reply(message, drained=drained))

    async def _exit(self, message: Message) -> None:
        await self._send(control.reply(message))
        self._engine.exiting.set()
