"""What this node counted, what its hub states, and whether the two agree: *mine · stated*.

The node pins the hub's key on the first statement it verifies and follows it through rotations that the old key
signed. It counts bytes at its end of every session (``relay.counting``) and rows and pairs in its engine, checks every
new statement against the chain it knows, and acknowledges those that do not state more than it did.

Everything is kept in one file of the state directory, so the comparison goes on after a restart.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.session_key import SessionKey
from kvasir_console.node.snapshot import StatementView
from kvasir_console.relay.counting import OwnCount
from kvasir_console.relay.wire.statement import (
    Head,
    SignedStatement,
    Statement,
    acknowledgement_text,
    anchor,
    verify_chain,
)
from kvasir_console.wallet import private_file
from kvasir_console.wallet.keys import verify

__all__ = ["StatementBook"]

log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 2**20
_MAX_PAGES = 64
"""Pages of new statements read at once; the rest comes with the next look."""
UNSEEN_S = 120.0
"""So long after an engine died, work may be stated that it did unseen: a stage reports it late, across faults of its
own. As long as a request waits for its ring."""
_COMPUTED = frozenset({"rows", "pairs"})
_COUNTED = _COMPUTED | {"bytes_up", "bytes_down"}
WithToken = Callable[[Callable[[str], Awaitable[dict[str, Any]]]], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class _Worker:
    """One chain and this node's own work beside it."""

    head: Head = field(default_factory=Head)
    acknowledged: int = 0
    base: dict[str, int] = field(default_factory=dict)
    """What was stated and is in no count of this node: its file was lost, or an engine died before it was looked at."""
    rows: int = 0
    pairs: int = 0
    sessions: dict[str, OwnCount] = field(default_factory=dict)

    def mine(self) -> dict[str, int]:
        own = {
            "bytes_up": sum(each.total_up for each in self.sessions.values()),
            "bytes_down": sum(each.total_down for each in self.sessions.values()),
            "rows": self.rows,
            "pairs": self.pairs,
        }
        return {name: value + self.base.get(name, 0) for name, value in own.items()}


class StatementBook:
    """``count`` and ``work`` take in what this node does, ``fetch`` and ``agree`` compare; ``view`` is for people."""

    def __init__(
        self, market: Market, wallet: str, file: Path, pin: HubPin, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._market = market
        self._wallet = wallet
        self._file = file
        self._pin = pin
        self._keys: tuple[str, ...] = ()
        self._served = False
        self._worker = ""
        self._refused = ""
        self._compared = _COUNTED
        self._last_work = (0, 0)
        kept = self._read()
        self._workers = kept or {}
        self._unsure = _COMPUTED if kept is not None else _COUNTED
        """What may have been done that no count has seen: before this start, or by an engine that died."""
        self._unsure_until = clock() + (UNSEEN_S if kept is not None else 0.0)

    def learn(self, info: GatewayInfo) -> None:
        """Take the announced key. Raises ``NetworkError`` ``hub_key_changed``."""
        self._served = info.statements
        self._keys = self._pin.follow(info.hub_key, info.hub_key_rotations) if info.hub_key else ()

    def count(self, worker: str, session: str, *, compare_rows: bool = True) -> OwnCount:
        """The byte count of a session, to be handed to its uplink.

        Args:
            compare_rows: the hub's rows are rows this node computes. A ring's stage is credited with token rows
                through the whole model, and computes fewer of them where a prompt's beginning was known already.
        """
        self._worker = worker
        self._compared = _COUNTED if compare_rows else _COUNTED - _COMPUTED
        return self._of(worker).sessions.setdefault(session, OwnCount())

    def work(self, rows: int, pairs: int) -> None:
        """The engine's counters since this process started; they never fall."""
        rows_before, pairs_before = self._last_work
        self._last_work = (rows, pairs)
        if self._worker:
            mine = self._of(self._worker)
            mine.rows += rows - rows_before
            mine.pairs += pairs - pairs_before

    def view(self) -> StatementView:
        if not self._worker:
            return StatementView()
        worker = self._of(self._worker)
        mine, stated = worker.mine(), worker.head.latest
        return StatementView(
            worker=self._worker,
            sequence=worker.head.sequence if stated is not None else None,
            acknowledged=worker.acknowledged,
            refused=self._refused,
            mine_bytes_up=mine["bytes_up"],
            mine_bytes_down=mine["bytes_down"],
            mine_rows=mine["rows"],
            mine_pairs=mine["pairs"],
            stated_bytes_up=None if stated is None else stated.bytes_up,
            stated_bytes_down=None if stated is None else stated.bytes_down,
            stated_rows=None if stated is None else stated.rows,
            stated_pairs=None if stated is None else stated.pairs,
            lost_bytes_up=sum(each.lost_up for each in worker.sessions.values()),
            disputed_bytes=sum(each.disputed for each in worker.sessions.values()),
        )

    def unsure(self) -> None:
        """The engine ended: what it did since it was last looked at is not in the counts."""
        self._unsure |= _COMPUTED
        self._unsure_until = self._clock() + UNSEEN_S

    async def fetch(self, with_token: WithToken) -> None:
        """Read and verify what is new. A refused chain is shown and asked for again; nothing of it is kept.

        Raises:
            NetworkError: the gateway cannot be reached.
            WalletError: a token must be signed for, and the wallet is locked.
        """
        self._refused = ""
        if not self._served or not self._worker or not self._keys:
            return
        name = self._worker
        worker = self._of(name)
        try:
            for _ in range(_MAX_PAGES):
                if not await self._read_page(with_token, name, worker):
                    break
        except NetworkError as error:
            if not error.code.startswith("statement_"):
                raise
            log.warning("%s", error)
            self._refused = error.message

    async def agree(self, with_token: WithToken, key: SessionKey | None) -> None:
        """Compare the latest statement with this node's counts, which are up to date, and acknowledge it with ``key``.

        Raises as ``fetch``.
        """
        if self._refused or not self._worker:
            return
        name = self._worker
        worker = self._of(name)
        if worker.head.latest is not None:
            mine = worker.mine()
            for count in self._unsure & self._compared:
                unseen = max(0, getattr(worker.head.latest, count) - mine[count])
                worker.base[count] = worker.base.get(count, 0) + unseen
            self._unsure = self._unsure & _COMPUTED if self._clock() < self._unsure_until else frozenset()
        self._refused = self._disagreement(worker)
        if not self._refused and key is not None and worker.head.sequence > worker.acknowledged:
            await self._acknowledge(with_token, name, worker, key)
        self.save()

    def save(self) -> None:
        """Write the book; a failure is logged, the counts go on."""
        content = {
            "gateway": self._market.gateway,
            "wallet": self._wallet,
            "workers": {name: _worker_json(worker) for name, worker in self._workers.items()},
        }
        try:
            private_file.write(self._file, json.dumps(content).encode(), replace=True)
        except KvasirError as error:
            log.warning("the statements are not kept: %s", error)

    async def _read_page(self, with_token: WithToken, name: str, worker: _Worker) -> bool:
        """Take one page; whether there may be another."""
        page = await with_token(lambda token: self._market.statements(token, name, worker.head.sequence))
        signed = _signed(page)
        head = worker.head
        if head.latest is None and signed:
            head = anchor(signed[0])
        after = verify_chain(signed, self._keys, verify, self._wallet, name, head)
        _check_end(page, name, after)
        if signed:
            self._pin.keep(self._keys[-1])
        worker.head = after
        return bool(signed)

    def _disagreement(self, worker: _Worker) -> str:
        """Why the latest statement cannot be acknowledged, or nothing."""
        stated = worker.head.latest
        if stated is None:
            return ""
        mine = worker.mine()
        over = [name for name in mine if name in self._compared and getattr(stated, name) > mine[name]]
        return f"the hub states more {' and '.join(over)} than this node counted".replace("_", " ") if over else ""

    async def _acknowledge(self, with_token: WithToken, name: str, worker: _Worker, key: SessionKey) -> None:
        head = worker.head
        text = acknowledgement_text(self._wallet, name, head.sequence, head.hash)
        body = {
            "worker": name,
            "sequence": head.sequence,
            "hash": head.hash,
            "key": key.address,
            "signature": base64.b64encode(key.sign(text.encode())).decode(),
        }
        await with_token(lambda token: self._market.acknowledge_statement(token, body))
        worker.acknowledged = head.sequence

    def _of(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker())

    def _read(self) -> dict[str, _Worker] | None:
        """The kept book, unless it is another wallet's or gateway's, or not readable: then a new one begins."""
        with contextlib.suppress(KvasirError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            data = json.loads(private_file.read(self._file, _MAX_FILE_BYTES))
            if (data["gateway"], data["wallet"]) == (self._market.gateway, self._wallet):
                return {str(name): _worker_from_json(each) for name, each in data["workers"].items()}
        return None


def _signed(page: Mapping[str, Any]) -> list[SignedStatement]:
    """Raises ``NetworkError``."""
    entries = page.get("statements")
    if not isinstance(entries, list):
        raise _malformed("the answer holds no list")
    found = []
    for entry in entries:
        try:
            signature = base64.b64decode(entry["signature"], validate=True)
            text = entry["statement"]
        except (KeyError, TypeError, ValueError):
            raise _malformed("an entry is no statement with a signature") from None
        if not isinstance(text, str):
            raise _malformed("an entry is no statement with a signature")
        found.append(SignedStatement(Statement.parse(text), signature))
    return found


def _check_end(page: Mapping[str, Any], worker: str, head: Head) -> None:
    """A hub that forgot statements it had served before would end its chain earlier, or elsewhere."""
    heads = page.get("heads")
    end = heads.get(worker) if isinstance(heads, dict) else None
    if end is None:
        end = {"sequence": 0, "hash": ""}
    sequence = end.get("sequence") if isinstance(end, dict) else None
    if (
        type(sequence) is not int
        or sequence < head.sequence
        or (sequence == head.sequence > 0) != (end.get("hash") == head.hash)
    ):
        raise NetworkError(
            "statement_chain",
            f"A statement of the hub is refused: its chain no longer leads to statement {head.sequence}.",
            "Nothing was acknowledged.",
        )


def _worker_json(worker: _Worker) -> dict[str, Any]:
    latest = worker.head.latest
    return {
        "latest": None if latest is None else latest.text(),
        "acknowledged": worker.acknowledged,
        "base": worker.base,
        "rows": worker.rows,
        "pairs": worker.pairs,
        "sessions": {name: count.to_json() for name, count in worker.sessions.items()},
    }


def _worker_from_json(data: Mapping[str, Any]) -> _Worker:
    latest = None if data["latest"] is None else Statement.parse(data["latest"])
    return _Worker(
        head=Head() if latest is None else Head(latest.sequence, latest.hash, latest),
        acknowledged=int(data["acknowledged"]),
        base={str(name): int(value) for name, value in data["base"].items()},
        rows=int(data["rows"]),
        pairs=int(data["pairs"]),
        sessions={str(name): OwnCount.from_json(count) for name, count in data["sessions"].items()},
    )


def _malformed(what: str) -> NetworkError:
    return NetworkError("statement_malformed", f"A statement of the hub is refused: {what}.")
