"""What the gateway's tests share: wallets, a scripted model, and the HTTP application behind a real server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from nacl.signing import SigningKey

from kvasir_console.config import GatewayConfig, ServedModel, WalletConfig
from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent, TokenLogprob
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.app import make_app
from kvasir_console.node.gateway.authority import HubAuthority
from kvasir_console.node.gateway.backends import Backend, BackendInfo, Event, Limits
from kvasir_console.node.gateway.catalog import CatalogModel, Slices, read_catalog
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.generation import Generations
from kvasir_console.node.gateway.httpserver import serving
from kvasir_console.node.gateway.identity import Identity, Secrets
from kvasir_console.node.gateway.info import Info
from kvasir_console.node.gateway.ledger import Ledger
from kvasir_console.node.gateway.metering import Meter
from kvasir_console.node.gateway.openai import OpenAI
from kvasir_console.node.gateway.participation import Participation
from kvasir_console.node.gateway.payments import Payments
from kvasir_console.node.gateway.plans import PlannedRing, make_rings
from kvasir_console.node.gateway.stage_reports import StageReports
from kvasir_console.node.gateway.statements import Statements
from kvasir_console.node.gateway.store import Store
from kvasir_console.relay.front import Front
from kvasir_console.relay.hub import Hub
from kvasir_console.wallet.keys import encode_address

import builders

DOMAIN = "gateway.example:8443"
NOW = 1_790_000_000.0
MOE = "tiny-moe"
DENSE = "tiny-dense"
N_LAYER, N_EXPERT, N_EMBD = 3, 80, 64


class Clock:
    """Time that only moves when a test says so."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Wallet:
    """A key pair made from a label; deterministic, and worthless outside the tests."""

    label: str

    @property
    def key(self) -> SigningKey:
        return SigningKey(hashlib.sha256(self.label.encode()).digest())

    @property
    def address(self) -> str:
        return encode_address(bytes(self.key.verify_key))

    def sign(self, text: str) -> str:
        return base64.b64encode(self.key.sign(text.encode()).signature).decode()


ALICE, BOB, CAROL = Wallet("alice"), Wallet("bob"), Wallet("carol")


class Operator:
    """At the terminal, once entered: reads what is shown, and answers. ``None`` is nobody."""

    def __init__(self, answer: str | None, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.answer, self.meanwhile = answer, meanwhile
        self.shown = self.question = ""

    def __enter__(self) -> Operator | None:
        return None if self.answer is None else self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, text: str) -> None:
        self.shown += text

    def ask(self, question: str) -> str:
        self.question = question
        self.meanwhile()
        return self.answer or ""


@dataclass
class ScriptedBackend:
    """A model that answers with given tokens; at the seam ``Backend``.

    ``hold_at`` makes it wait for ``go`` before that token; ``fail_at`` raises ``error`` before that token.
    """

    info: BackendInfo
    texts: Sequence[str] = ("Par", "is", ".")
    tail: str = ""
    context: int = 64
    kv_tokens: int = 0
    cached_tokens: int = 3
    prompt_tokens: int = 5
    ready: bool = True
    finish_reason: str = "stop"
    hold_at: int | None = None
    fail_at: int | None = None
    error: Exception | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerateRequest] = field(default_factory=list)

    async def limits(self) -> Limits:
        return Limits(self.context, self.kv_tokens or self.context)

    async def count_tokens(self, prompt: str | None, messages: tuple[dict[str, Any], ...] | None) -> int:
        return self.prompt_tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.started.set()
        finished = False
        try:
            for index, text in enumerate(self.texts):
                if index == self.fail_at and self.error is not None:
                    raise self.error
                if index == self.hold_at:
                    self.holding.set()
                    await self.go.wait()
                yield TokenEvent(index, 100 + index, text, *logprobs(request, index, text))
            finished = True
            yield DoneEvent(
                finish_reason=self.finish_reason,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=len(self.texts),
                tokens=tuple(100 + index for index in range(len(self.texts))),
                text="".join(self.texts) + self.tail,
                tail=self.tail,
                rows=self.prompt_tokens + len(self.texts) - 1,
                pairs_local=7,
                pairs_remote=11,
                failovers=1,
                ttft_ms=1.5,
                decode_ms=2.5,
                trace_path="/runtime/trace-1.npy" if request.trace else None,
                queued_ms=0.5,
                cached_tokens=self.cached_tokens,
                decode_steps=2,
                drafted_tokens=4,
                accepted_tokens=1,
            )
        except KvasirError:
            finished = True
            raise
        finally:
            if not finished:
                self.cancelled.set()


def logprobs(
    request: GenerateRequest, index: int, text: str
) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...] | None]:
    """What an engine says of a token, if it is asked: its own probability, and that of alternatives."""
    if request.logprobs is None:
        return None, None
    own = TokenLogprob(100 + index, -0.25 * (index + 1), tuple(text.encode()))
    others = (TokenLogprob(200 + n, -1.0 - n, (0xE2, 0x82)) for n in range(1, request.logprobs))
    return own, (own, *others)[: request.logprobs]


class NoTrunks:
    def __init__(self, sockets: Mapping[str, Path] | None = None) -> None:
        self.sockets = dict(sockets or {})

    def data_socket(self, model: str) -> Path | None:
        return self.sockets.get(model)


@dataclass
class Gateway:
    """The application with everything it stands on, served on a Unix socket and behind a front."""

    client: httpx.AsyncClient
    """Speaks to the Unix socket as the front does."""
    port: int
    store: Store
    ledger: Ledger
    census: Census
    meter: Meter
    identity: Identity
    secrets: Secrets
    hub: Hub
    rings: dict[str, PlannedRing]
    generations: Generations
    clock: Clock
    trunks: NoTrunks
    socket: Path
    statements: Statements
    stage_reports: StageReports

    @property
    def service(self) -> dict[str, str]:
        return {"X-Kvasir-Service-Token": self.secrets.service_token}

    async def token(self, wallet: Wallet) -> dict[str, str]:
        """Sign in over HTTP; the header to send from then on."""
        challenge = (await self.client.post("/api/auth/challenge", json={"wallet": wallet.address})).json()
        body = {"wallet": wallet.address, "nonce": challenge["nonce"], "signature": wallet.sign(challenge["message"])}
        reply = await self.client.post("/api/auth/node-token", json=body)
        assert reply.status_code == 200, reply.text
        return {"Authorization": f"Bearer {reply.json()['node_token']}"}


def entry(session: str, wallet: str, paid: int, rows: int = 3, **fields: Any) -> dict[str, Any]:
    """One session of an engine's ``coverage`` reply."""
    base = {"layer": 1, "begin": 0, "end": 8, "wire": "v2", "failures": 0, "in_flight": 0, "connected": True}
    counts = {"requests": 1, "rows": rows, "pairs": 2 * rows, "paid_bytes": paid, "rtt_ms": None, "quarantined": False}
    return {"session": session, "wallet": wallet, **base, **counts, **fields}


def tiny_models(directory: Path) -> tuple[ServedModel, ...]:
    """A mixture of experts with more experts than one shard may hold, and a dense model planned as a ring."""
    moe = builders.write_tiny_llama(
        directory / "moe.gguf", n_layer=N_LAYER, n_ff=32, n_expert=N_EXPERT, n_expert_used=2, seed=1
    )
    dense = builders.write_tiny_llama(directory / "dense.gguf", n_layer=4, seed=2)
    ring = ((ALICE.address, 0, 1), (BOB.address, 1, 4))
    return (
        ServedModel(MOE, str(moe), "trunk"),
        ServedModel(DENSE, str(dense), "ring", ring),
    )


@asynccontextmanager
async def gateway(
    directory: Path,
    backends: Sequence[Backend] = (),
    models: Sequence[ServedModel] = (),
    *,
    open_access: bool = True,
    minimum_micro_kvr: int = 1_000_000,
    target_replicas: int = 2,
) -> AsyncIterator[Gateway]:
    clock = Clock()
    secrets = Secrets.load(directory / "secrets")
    store = Store.open(f"sqlite:///{directory / 'gateway.sqlite'}")
    identity = Identity(secrets, store, clock)
    catalog: dict[str, CatalogModel] = read_catalog(tuple(models))
    census = Census(target_replicas)
    census.offer(offered for model in catalog.values() if (offered := model.offered))
    meter = Meter(store, census, clock)
    rings = make_rings(catalog.values(), store, identity)
    trunks = NoTrunks()
    hub = Hub(HubAuthority(identity, census, rings, trunks, meter, clock))
    meter.watch_bytes(hub.sessions)
    statements = Statements(store, identity, hub, clock)
    await statements.restore()
    stage_reports = StageReports(store, identity, census, rings, hub, clock)
    await stage_reports.restore()
    ledger = Ledger(store)
    generations = Generations(store, clock)
    socket = directory / "http.sock"
    front = Front(hub, socket, port=0)
    await front.start()
    identity.domains = (DOMAIN, f"127.0.0.1:{front.port}")
    openai = OpenAI(
        list(backends), generations, identity, public_url=f"http://127.0.0.1:{front.port}", open_access=open_access
    )
    config = GatewayConfig(minimum_claim_micro_kvr=minimum_micro_kvr)
    app = make_app(
        [
            *openai.routes(),
            *Info(identity, store, openai, config, WalletConfig(), f"http://127.0.0.1:{front.port}").routes(),
            *Participation(identity, census, Slices(directory / "slices", catalog), rings, meter, hub, clock).routes(),
            *Payments(identity, ledger, census, minimum_micro_kvr=minimum_micro_kvr, clock=clock).routes(),
            *statements.routes(),
            *stage_reports.routes(),
        ]
    )
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    try:
        async with (
            serving(app, socket),
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=120) as client,
        ):
            yield Gateway(
                client,
                front.port,
                store,
                ledger,
                census,
                meter,
                identity,
                secrets,
                hub,
                rings,
                generations,
                clock,
                trunks,
                socket,
                statements,
                stage_reports,
            )
            await generations.close()
            await hub.close()
    finally:
        await front.close()
        store.close()
