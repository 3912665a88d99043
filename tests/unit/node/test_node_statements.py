"""The node's book: agreement with an honest hub, and every way in which another one is found out."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nacl.signing import SigningKey
from node_parts import address

from kvasir_console.errors import NetworkError
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.session_key import SessionKey
from kvasir_console.node.statements import UNSEEN_S, StatementBook
from kvasir_console.relay.wire.statement import GENESIS, Rotation, Statement, acknowledgement_text
from kvasir_console.wallet.keys import encode_address, verify

HUB, NEXT = SigningKey(b"\1" * 32), SigningKey(b"\2" * 32)
WALLET = encode_address(bytes(SigningKey(b"\3" * 32).verify_key))
KEY = SessionKey("https://gateway.example", WALLET, 2_000_000_000, b"\4" * 32)
WORKER, SESSION = "box-1", "expert-box-1"


class FakeHub:
    """The gateway's statement routes, as ``Market`` calls them."""

    gateway = "https://gateway.example"

    def __init__(self, key: SigningKey = HUB) -> None:
        self.key = key
        self.chain: list[Statement] = []
        self.signatures: list[bytes] = []
        self.acknowledged: list[dict[str, Any]] = []
        self.rotations: tuple[Rotation, ...] = ()

    def state(self, up: int, down: int, rows: int, pairs: int) -> None:
        last = self.chain[-1] if self.chain else None
        self.put(
            Statement(
                key=address(self.key),
                wallet=WALLET,
                worker=WORKER,
                run="ab" * 16,
                sequence=1 if last is None else last.sequence + 1,
                model_digest=GENESIS,
                shard_digest=GENESIS,
                bytes_up=up,
                bytes_down=down,
                rows=rows,
                pairs=pairs,
                first_at=1,
                last_at=2,
                previous=GENESIS if last is None else last.hash,
            )
        )

    def put(self, statement: Statement) -> None:
        self.chain.append(statement)
        self.signatures.append(self.key.sign(statement.text().encode()).signature)

    async def statements(self, token: str, worker: str, since: int) -> dict[str, Any]:
        listed = [
            {"statement": each.text(), "signature": base64.b64encode(signature).decode()}
            for each, signature in zip(self.chain, self.signatures, strict=True)
            if each.sequence > since
        ]
        heads = {WORKER: {"sequence": self.chain[-1].sequence, "hash": self.chain[-1].hash}} if self.chain else {}
        return {"statements": listed, "heads": heads}

    async def acknowledge_statement(self, token: str, body: dict[str, Any]) -> dict[str, Any]:
        self.acknowledged.append(body)
        return {}

    @property
    def info(self) -> Any:
        return SimpleNamespace(hub_key=address(self.key), hub_key_rotations=self.rotations, statements=True)


async def with_token(call: Callable[[str], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    return await call("token")


def book(hub: FakeHub, directory: Path, clock: Callable[[], float] = time.monotonic) -> StatementBook:
    made = StatementBook(hub, WALLET, directory / "statements.json", HubPin(directory / "hub-key"), clock)
    made.learn(hub.info)
    return made


def do(made: StatementBook, up: int, down: int, rows: int, pairs: int) -> None:
    """Work up to these totals."""
    count = made.count(WORKER, SESSION)
    count.sent, count.received = up, down
    made.work(rows, pairs)


async def look(made: StatementBook, key: SessionKey | None = KEY) -> str:
    await made.fetch(with_token)
    await made.agree(with_token, key)
    return made.view().refused


async def test_an_honest_hub_is_acknowledged_with_the_session_key(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 100, 200, 3, 6)
    hub.state(100, 200, 3, 6)
    assert await look(made) == ""
    [body] = hub.acknowledged
    text = acknowledgement_text(WALLET, WORKER, 1, hub.chain[0].hash)
    assert verify(body["key"], text.encode(), base64.b64decode(body["signature"]))
    view = made.view()
    assert (view.mine_rows, view.stated_rows, view.sequence, view.acknowledged) == (3, 3, 1, 1)
    assert (view.mine_bytes_up, view.stated_bytes_up) == (100, 100)
    assert await look(made) == ""
    assert len(hub.acknowledged) == 1  # nothing new, nothing signed


async def test_a_hub_that_states_less_is_shown_and_one_that_states_more_is_not_signed_for(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 100, 200, 3, 6)
    hub.state(90, 200, 2, 4)
    assert await look(made) == ""
    assert (made.view().mine_rows, made.view().stated_rows) == (3, 2)
    hub.state(101, 200, 3, 7)
    assert "bytes up and pairs" in await look(made)
    assert len(hub.acknowledged) == 1


async def test_a_rings_stage_compares_bytes_only(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    made.count(WORKER, SESSION, compare_rows=False).sent = 5
    for rows in (3, 9):
        hub.state(5, 0, rows, 0)
        assert await look(made) == ""
    assert (made.view().mine_rows, made.view().stated_rows) == (0, 9)
    hub.state(6, 0, 9, 0)
    assert "bytes up" in await look(made)


async def test_a_chain_that_shrinks_changes_or_ends_early_is_refused_and_the_head_stays(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 100, 200, 9, 9)
    for rows in (1, 2, 3):
        hub.state(1, 1, rows, rows)
    assert await look(made) == ""
    chain, signatures = list(hub.chain), list(hub.signatures)

    hub.chain, hub.signatures = chain[:2], signatures[:2]  # truncated
    assert "no longer leads to statement 3" in await look(made)
    hub.chain, hub.signatures = chain[:2], signatures[:2]
    hub.state(1, 1, 7, 7)  # rewritten
    assert "no longer leads to statement 3" in await look(made)
    hub.chain, hub.signatures = list(chain), list(signatures)
    hub.state(1, 1, 2, 2)  # shrunk
    assert "counts less" in await look(made)
    hub.chain, hub.signatures = list(chain), list(signatures)
    hub.state(1, 1, 4, 4)
    hub.signatures[-1] = signatures[0]  # forged
    assert "not signed" in await look(made)
    assert made.view().sequence == 3

    hub.signatures[-1] = HUB.sign(hub.chain[-1].text().encode()).signature
    assert await look(made) == ""
    assert made.view().sequence == 4


async def test_the_book_goes_on_after_a_restart(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 100, 200, 3, 6)
    hub.state(100, 200, 3, 6)
    await look(made)
    again = book(hub, tmp_path)
    count = again.count(WORKER, SESSION)
    count.opened({"Kvasir-Connection": "0" * 16})
    again.work(2, 2)
    hub.state(100, 200, 5, 8)
    assert await look(again) == ""
    view = again.view()
    assert (view.mine_rows, view.mine_pairs, view.mine_bytes_up, view.sequence) == (5, 8, 100, 2)
    assert (tmp_path / "statements.json").stat().st_mode & 0o077 == 0


async def test_rows_that_a_dead_engine_did_unseen_are_taken_from_the_hub_while_they_may_still_be_reported(
    tmp_path: Path,
) -> None:
    hub, now = FakeHub(), [0.0]
    made = book(hub, tmp_path, lambda: now[0])
    do(made, 10, 10, 3, 6)
    hub.state(10, 10, 3, 6)
    await look(made)
    now[0] = 1000.0
    made.unsure()
    for later_s in (0, UNSEEN_S - 1, UNSEEN_S):  # the last look takes what came since the one before
        now[0] = 1000 + later_s
        rows = made.view().mine_rows + 1
        hub.state(10, 10, rows, 2 * rows)
        assert await look(made) == ""
    hub.state(10, 10, rows + 1, 2 * rows + 2)
    assert "rows and pairs" in await look(made)
    hub.state(11, 10, rows + 1, 2 * rows + 2)
    assert "bytes up" in await look(made)  # of bytes nothing is ever unseen


async def test_a_node_without_a_book_begins_where_the_kept_chain_begins(tmp_path: Path) -> None:
    hub = FakeHub()
    for rows in (1, 2, 3):
        hub.state(10 * rows, 0, rows, rows)
    hub.chain, hub.signatures = hub.chain[1:], hub.signatures[1:]  # the oldest are not kept for ever
    made = book(hub, tmp_path)
    made.count(WORKER, SESSION)
    await look(made)
    assert made.view().sequence == 3
    assert made.view().mine_bytes_up == 30  # what came before its time is the hub's word
    hub.state(31, 0, 3, 3)
    assert "bytes up" in await look(made)


async def test_another_hub_key_is_refused_and_a_rotated_one_followed(tmp_path: Path) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 9, 9, 9, 9)
    hub.state(1, 1, 1, 1)
    await look(made)
    assert (tmp_path / "hub-key").read_text().strip() == address(HUB)
    hub.key = NEXT
    with pytest.raises(NetworkError) as caught:
        made.learn(hub.info)
    assert caught.value.code == "hub_key_changed"
    bare = Rotation(address(HUB), address(NEXT), 5)
    hub.rotations = (replace(bare, signature=HUB.sign(bare.text().encode()).signature),)
    made.learn(hub.info)
    assert (tmp_path / "hub-key").read_text().strip() == address(NEXT)
    hub.state(2, 2, 2, 2)
    assert await look(made) == ""
    assert made.view().sequence == 2


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"statements": {}},
        {"statements": [1]},
        {"statements": [{"statement": 1, "signature": ""}]},
        {"statements": [{"statement": "x", "signature": "!"}]},
        {"statements": [], "heads": 3},
        {"statements": [], "heads": {WORKER: 3}},
    ],
)
async def test_answers_of_another_shape_are_refused_or_empty(tmp_path: Path, answer: dict[str, Any]) -> None:
    hub = FakeHub()
    made = book(hub, tmp_path)
    do(made, 9, 9, 9, 9)
    hub.state(1, 1, 1, 1)
    await look(made)

    async def answering(token: str, worker: str, since: int) -> dict[str, Any]:
        return answer

    hub.statements = answering  # type: ignore[method-assign]
    assert "refused" in await look(made)
    assert made.view().sequence == 1
