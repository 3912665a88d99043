"""Readers of texts: statements, signed actions, tokens, plans, HTTP heads, bodies at the gateway, answers at the node,
and the headers of model files."""

from __future__ import annotations

import base64
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h11
import httpx
from fuzz_peers import run
from fuzz_wire import at_once
from nacl.signing import SigningKey
from starlette.requests import Request

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import verify_shard
from kvasir_console.engine.checkpoint.shard_info import read_expert_shard
from kvasir_console.engine.process.request import parse_request, sampling_of
from kvasir_console.errors import KvasirError, ModelError
from kvasir_console.node.gateway import settle, web
from kvasir_console.node.gateway.chatrequest import parse_chat
from kvasir_console.node.gateway.coverage import MAX_SEGMENTS, parse_report
from kvasir_console.node.gateway.generation import plausible_prompt_tokens
from kvasir_console.node.gateway.idempotency import name_request
from kvasir_console.node.market import Market
from kvasir_console.node.placement.plan import Plan, PlannedStage, sign_plan, verify_plan
from kvasir_console.node.statements import _check_end, _signed
from kvasir_console.relay.direct import parse_address
from kvasir_console.relay.http_requests import HeadError, RequestStream
from kvasir_console.relay.wire import signed, statement
from kvasir_console.relay.wire.stage_report import SliceWork, StageReport, check_growth, check_passed
from kvasir_console.wallet.delegation import Delegation, parse_details
from kvasir_console.wallet.keys import encode_address, verify

from codec_fuzz import Target, altered, broken, dumped, json_shape, plain

# RFC 8032 section 7.1, tests 1 and 2: their secret keys.
HUB = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
NEXT = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
WALLET = "9xQeWvG816bUx9EPjHmaT23yvVM2ZWbrrpZb9PusVFin"
WORKER = "box-1"
SHARD = Path(__file__).parent / "data" / "conformance" / "dispatch" / "shard_small-f32.gguf"
JSON_FACTOR = 60.0
"""A JSON text of empty objects takes some forty times its size; a few readers copy what they found."""


def address(key: SigningKey) -> str:
    return encode_address(bytes(key.verify_key))


def stated(sequence: int, previous: str, **changes: Any) -> statement.Statement:
    fields = {
        "key": address(HUB),
        "wallet": WALLET,
        "worker": WORKER,
        "run": "00112233445566778899aabbccddeeff",
        "sequence": sequence,
        "model_digest": "ab" * 32,
        "shard_digest": statement.GENESIS,
        "previous": previous,
        "bytes_up": 1000 * sequence,
        "bytes_down": 2000 * sequence,
        "rows": 3 * sequence,
        "pairs": 6 * sequence,
        "first_at": 1_790_000_000,
        "last_at": 1_790_000_000 + sequence,
    }
    return statement.Statement(**(fields | changes))


def entry(text: str, key: SigningKey = HUB) -> dict[str, str]:
    signature = key.sign(text.encode(errors="surrogatepass")).signature
    return {"statement": text, "signature": base64.b64encode(signature).decode()}


def page(length: int) -> dict[str, Any]:
    entries, previous = [], statement.GENESIS
    for sequence in range(1, length + 1):
        each = stated(sequence, previous)
        entries.append(entry(each.text()))
        previous = each.hash
    return {"statements": entries, "heads": {WORKER: {"sequence": length, "hash": previous}}}


def statement_pages() -> Target:
    """A node reads a page of a hub's statements: parsed, verified as a chain, held against its end."""
    pages = [page(length) for length in (1, 2, 4)]

    def shape(rng: random.Random) -> bytearray:
        chosen = json.loads(json.dumps(rng.choice(pages)))
        match rng.randrange(4):
            case 0:
                chosen = altered(rng, chosen)
            case 1:  # a lie in good order: the hub's own key signs it
                at = rng.randrange(len(chosen["statements"]))
                head, _, body = chosen["statements"][at]["statement"].partition("\n")
                text = f"{head}\n{dumped(rng, altered(rng, json.loads(body))).decode(errors='surrogatepass')}"
                chosen["statements"][at] = entry(text, rng.choice([HUB, HUB, NEXT]))
            case 2:
                rng.shuffle(chosen["statements"])
            case _:
                del chosen["statements"][rng.randrange(len(chosen["statements"]))]
        data = bytearray(dumped(rng, chosen))
        return broken(rng, [bytes(data)], data) if rng.random() < 0.1 else data

    def read(pieces: list[bytes]) -> bool:
        try:
            found = json.loads(b"".join(pieces))
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        try:
            chain = _signed(found)
            keys = (address(HUB),)
            head = statement.verify_chain(chain, keys, verify, WALLET, WORKER, statement.Head())
            _check_end(found, WORKER, head)
        except KvasirError:
            return False
        # What was taken is what the hub signed, from the first on.
        assert [each.statement.sequence for each in chain] == list(range(1, head.sequence + 1))
        return True

    return Target("statements", tuple(plain(each) for each in pages), read, shape=shape, factor=80)


def rotations() -> Target:
    plain = statement.Rotation(address(HUB), address(NEXT), 1_790_000_000)
    samples = (plain.text().encode(),)

    def read(pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode("utf-8", "replace")
        try:
            found = statement.Rotation.parse(text, HUB.sign(text.encode()).signature)
            keys = statement.follow_rotations(address(HUB), found.new, [found], verify)
        except KvasirError:
            return False
        assert keys[0] == address(HUB)
        return True

    return Target("hub key rotations", samples, read)


def stage_reports() -> Target:
    slices = tuple(SliceWork(layer, 0, 4, 10 + layer, 20, "cd" * 32, True) for layer in (3, 5))
    real = StageReport(
        hub=address(HUB), stage=WALLET, key=address(NEXT), ring="r", epoch=3, run="ab" * 16, sequence=7,
        model_digest="ef" * 32, wallet=address(NEXT), session=WORKER, requests=4, slices=slices,
        quarantined=True, convictions=1, fault="gain", evidence="00" * 32,
    )  # fmt: skip
    before = replace(real, sequence=6, slices=(replace(slices[0], rows=9), slices[1]), requests=3)

    def shape(rng: random.Random) -> bytearray:
        head, _, body = real.text().partition("\n")
        if rng.random() < 0.5:
            body = json.dumps(altered(rng, json.loads(body)), sort_keys=True, separators=(",", ":"))
        data = bytearray(f"{head}\n{body}".encode(errors="surrogatepass"))
        return broken(rng, [bytes(data)], data) if rng.random() < 0.5 else data

    def read(pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode("utf-8", "replace")
        try:
            report = StageReport.parse(text)
            check_growth(before, report)
            check_passed(64, [report.work], 10**5, 10**5)
        except KvasirError:
            return False
        assert report.text() == text
        return True

    return Target("stages' reports", (real.text().encode(),), read, shape=shape, factor=JSON_FACTOR)


def actions() -> Target:
    details: Sequence[tuple[str, dict[str, Any]]] = (
        ("claim", {"amount": 5, "nested": {"a": [1, None, "é"]}}),
        ("delegate", Delegation(address(NEXT), 1_790_000_000).details()),
    )
    texts = [
        signed.action_text(
            *("gateway.example:8791", kind, WALLET, fields, "n" * 20, "2026-11-30T03:00:00Z", "2026-11-30T03:04:00Z")
        )
        for kind, fields in details
    ]

    def shape(rng: random.Random) -> bytearray:
        lines = rng.choice(texts).split("\n")
        at = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                name, _, body = lines[5 - 0 if lines[5].startswith("details") else 4].partition(": ")
                where = lines.index(f"{name}: {body}")
                lines[where] = f"{name}: {dumped(rng, altered(rng, json.loads(body))).decode(errors='replace')}"
            case 1:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 2:
                lines[at] = lines[at] + rng.choice(["\r", " ", "\0", "\n", "\u2028"])
            case _:
                rng.shuffle(lines)
        data = bytearray("\n".join(lines).encode())
        return broken(rng, [bytes(data)], data) if rng.random() < 0.4 else data

    def read(pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode("utf-8", "replace")
        try:
            action = signed.parse_action(text)
        except KvasirError:
            return False
        assert action.text() == text
        for kind in signed.ActionKind:
            try:
                action.check(domain="gateway.example:8791", kind=kind, wallet=WALLET, nonce="n" * 20, now=1_796_007_700)
                parse_details(action.details).check(WALLET, 1_790_000_000)
            except KvasirError:
                pass
        return True

    return Target("signed actions", tuple(text.encode() for text in texts), read, shape=shape, factor=JSON_FACTOR)


def tokens() -> Target:
    secret = b"s" * 32
    real = signed.mint_node_token(secret, WALLET, 1_800_000_000)

    def read(pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode("latin-1")
        try:
            assert signed.check_node_token(secret, text, 1_790_000_000) == WALLET
        except KvasirError:
            return False
        assert text == real
        return True

    return Target("node tokens", (real.encode(),), read)


def plans() -> Target:
    stages = (PlannedStage(0, WALLET, 0, 4, (address(HUB),)), PlannedStage(1, address(NEXT), 4, 9))
    real = sign_plan(Plan("r", "tiny", "ab" * 32, 9, 3, stages), lambda text: HUB.sign(text).signature)

    def shape(rng: random.Random) -> bytearray:
        chosen = json.loads(json.dumps(real))
        if rng.random() < 0.6:  # the hub's own key signs a plan that is none
            chosen["plan"] = altered(rng, chosen["plan"])
            try:
                text = signed.plan_text(chosen["plan"])
                signature = HUB.sign(text.encode()).signature
                chosen["signature"] = base64.b64encode(signature).decode()
            except (KvasirError, TypeError, ValueError):
                pass
        else:
            chosen = altered(rng, chosen)
        return bytearray(dumped(rng, chosen))

    def read(pieces: list[bytes]) -> bool:
        try:
            found = json.loads(b"".join(pieces))
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        try:
            plan = verify_plan(found, address(HUB))
        except KvasirError:
            return False
        assert plan.stages[0].begin == 0
        assert plan.stages[-1].end == plan.n_layer
        return True

    return Target("placement plans", (plain(real),), read, shape=shape, factor=JSON_FACTOR)


def addresses_seen_by_h11(data: bytes) -> None:
    """What a reader that is not ours finds behind the front: requests that say whose they are, as the front knows."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        while isinstance(event := connection.next_event(), h11.Request):
            shown = [value for name, value in event.headers if name == b"x-forwarded-for"]
            assert shown == [b"9.9.9.9"], event
            while isinstance(connection.next_event(), h11.Data):
                pass
            if connection.their_state is not h11.DONE:
                return
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return
            connection.start_next_cycle()
    except h11.RemoteProtocolError:
        pass  # it refuses more than the front does


def http_requests() -> Target:
    """The front rewrites heads: what leaves it must read the same to a second front."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n"
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\nhello world"
    chunked = (
        b"POST /api/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
    )

    def feed(pieces: Sequence[bytes]) -> bytes:
        stream = RequestStream("9.9.9.9", "https")
        return b"".join(stream.feed(piece) for piece in pieces)

    def read(pieces: list[bytes]) -> bool:
        try:
            out = feed(pieces)
        except HeadError:
            return False
        addresses_seen_by_h11(out)
        assert feed([out]) == out  # nothing in it reads as another request than the first front saw
        return True

    samples = (get, post, chunked, get + post + chunked + get)
    return Target("HTTP requests at the front", samples, read, factor=12)


def body_reader(name: str, samples: Sequence[Any], use: Callable[[dict[str, Any]], None]) -> Target:
    """A JSON body as the gateway takes it from a client or a node."""

    def read(pieces: list[bytes]) -> bool:
        left = list(pieces)

        async def receive() -> dict[str, Any]:
            piece = left.pop(0) if left else b""
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        try:
            use(at_once(web.read_json(request)))
        except KvasirError:
            return False
        return True

    texts = tuple(plain(sample) for sample in samples)
    return Target(name, texts, read, shape=json_shape(samples), factor=JSON_FACTOR, constant=2**19)


def bodies() -> list[Target]:
    chat = [
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True, "seed": 3},
        {"model": "m", "prompt": "a", "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "logprobs": True, "top_k": 4},
        {"model": "m", "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}], "user": "u"},
    ]
    report = [
        {"worker_id": "box-1", "model": "m", "segments": [[0, 0, 8], [1, 2, 4]], "wires": ["v2", "v3"], "os": "linux"},
        {"worker_id": "box 2", "model": "a/b", "segments": [[0, 0.0, 8]], "url": "relay:expert-a", "backend": "cpu"},
        {"worker_id": "b", "model": "m", "direct": {"address": "h:1", "certificate": CERTIFICATE}, "direct_live": True},
    ]
    rows = [
        {"owner": WALLET, "node_id": "n", "micro_units": 5, "kind": "expert", "run_id": "e", "model": "m", "os": "x"},
        {"owner": WALLET, "node_id": "n", "units": 3, "perf_tps": 4},
    ]
    generate = [
        {"id": 1, "verb": "generate", "prompt": "a", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "seed": 1},
        {"id": 2, "verb": "generate", "prompt_tokens": [1, 2], "resumed": [3], "key": 9, "logprobs": 2, "top_k": 4},
        {"id": 3, "verb": "generate", "messages": [{"role": "user", "content": "a"}], "session": "s", "trace": False},
    ]

    def take_chat(body: dict[str, Any]) -> None:
        name_request({"idempotency-key": "k"}, body)
        asked = parse_chat(body).to_engine(5, caller="c")
        assert plausible_prompt_tokens(asked) >= 0

    def take_report(body: dict[str, Any]) -> None:
        found = parse_report(body)
        assert len(found.windows) <= MAX_SEGMENTS
        assert all(0 <= each.begin < each.end < 2**31 for each in found.windows)
        assert found.direct is None or parse_address(found.direct.address)[1] > 0

    def take_generate(body: dict[str, Any]) -> None:
        sampling_of(parse_request(body))

    return [
        body_reader("gateway: chat requests", chat, take_chat),
        body_reader("gateway: coverage reports", report, take_report),
        body_reader("gateway: contributions", rows, lambda body: settle.parse_row(body) and None),
        body_reader("engine: generate requests", generate, take_generate),
    ]


CERTIFICATE = "c" * 64


def market() -> Target:
    """A node asks a hostile gateway for everything."""
    hub_key = address(HUB)
    rotation = statement.Rotation(address(NEXT), hub_key, 1_790_000_000)
    turned = {"text": rotation.text(), "signature": base64.b64encode(b"s" * 64).decode()}
    samples: list[dict[str, Any]] = [
        {
            "mint": "m",
            "dispatch_wires": ["v2", "v3"],
            "extensions": {"hub_key": hub_key, "hub_key_rotations": [turned]},
        },
        {"assigned": True, "model": "m", "layer": 1, "experts": [0, 4], "n_embd": 8, "n_layer": 2, "n_expert": 8},
        {"nonce": "ab" * 16, "message": "Kvasir", "node_token": "token", "expires_in": 60, "wallet": WALLET},
        {"wired": True, "session": "expert-a", "plans": [{"plan": {}, "signature": ""}], "claims": [{"id": 1}]},
        {
            "edges": [
                {"ring": "r", "edge": 1, "role": "P", "ticket": "ab" * 32, "address": "h:1", "certificate": CERTIFICATE}
            ]
        },
        {"error": {"message": "no", "code": "not_admitted"}, "detail": "x", "code": "ring_busy"},
        page(1),
    ]
    calls: tuple[Callable[[Market], Any], ...] = (
        lambda m: m.config(),
        lambda m: m.challenge(WALLET),
        lambda m: m.node_token(WALLET, "n", b"s" * 64, 0.0),
        lambda m: m.volunteer("t", model="m", max_experts=4),
        lambda m: m.report("t", {}),
        lambda m: m.placements("t"),
        lambda m: m.edges("t"),
        lambda m: m.statements("t", WORKER, 0),
        lambda m: m.claims(WALLET),
    )
    state = {"status": 200, "body": b""}
    market_ = Market(
        "https://gateway.example",
        transport=httpx.MockTransport(lambda _: httpx.Response(state["status"], content=state["body"])),
    )

    async def once(call: Callable[[Market], Any]) -> bool:
        try:
            await call(market_)
        except KvasirError:
            return False
        return True

    def read(pieces: list[bytes]) -> bool:
        body = b"".join(pieces)
        kind = sum(body) % len(calls)
        state["status"], state["body"] = (200, 200, 200, 401, 403, 409, 429, 503)[len(body) % 8], body
        taken = run(once(calls[kind]))
        return taken or body in texts

    texts = tuple(plain(sample) for sample in samples)
    return Target("node: a gateway's answers", texts, read, shape=json_shape(samples), factor=80, constant=2**20)


def shards() -> Target:
    """An expert shard's header and manifest, from the file a gateway sent."""
    real = SHARD.read_bytes()
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "shard.gguf"
    with Checkpoint.open(SHARD) as checkpoint:
        info = read_expert_shard(checkpoint)
        header = len(real) - sum(tensor.n_bytes for tensor in checkpoint.tensors.values())

    def shape(rng: random.Random) -> bytearray:
        return broken(rng, [real[:header]], bytearray(real[:header])) + real[header:]

    def read(pieces: list[bytes]) -> bool:
        assert folder.name
        file.write_bytes(b"".join(pieces))
        try:
            with Checkpoint.open(file) as found:
                read_expert_shard(found)
                verify_shard(
                    *(found,),
                    model=info.model,
                    layer=info.layer,
                    begin=info.begin,
                    end=info.end,
                    n_embd=info.n_embd,
                )
        except ModelError:
            return False
        return True

    return Target("expert shards", (real,), read, shape=shape, factor=8, constant=2**20)


def targets() -> list[Target]:
    return [
        statement_pages(),
        rotations(),
        stage_reports(),
        actions(),
        tokens(),
        plans(),
        http_requests(),
        *bodies(),
        market(),
        shards(),
    ]
