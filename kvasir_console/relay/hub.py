"""The hub: accepts relay sessions and splices each to where its bytes belong.

* An expert session is joined to the data socket of the engine that dispatches to it.
* The two ends of a ring edge are joined to each other, whichever comes first waiting for the other.
* An expert session of a ring's stage is joined to one of the sessions that the stage's node keeps waiting for workers.
* The entry edge of a ring is joined to the gateway, in this process.

The hub reads no payload but the role byte that opens a ring edge. It counts every payload byte it delivered, by
session, for as long as it lives.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

from websockets.http11 import Request

from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.relay.authority import Admission, Authority, Refused
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.counting import CONNECTION_HEADER, COUNTED_HEADER, RECEIVED_HEADER, Joint, SessionCount, Tally
from kvasir_console.relay.server_socket import MAX_FRAME_BYTES, Ending, ServerSocket
from kvasir_console.relay.session import HOLD_BYTES, PEER_LEFT, Session
from kvasir_console.relay.splice import SocketEnd, close_writer, deliver, pump, race

__all__ = ["EXPERT_PATH", "RING_PATH", "Admission", "Authority", "Hub", "Refused", "SessionCount"]

EXPERT_PATH = "/api/expert-relay"
RING_PATH = "/api/ring-relay"
MAX_NAMES = 1024
"""Most sessions of one wallet that are counted, ever: names are the node's to choose, and counts are never dropped."""
MAX_TALLIES = 16_384
"""Most sessions whose counts are in memory, of all wallets: others are in the books (``Hub.trim``)."""
QUIET_S = 60.0
"""So long after its last connection a session's counts may leave the memory."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Books(Protocol):
    """Where counts are written down, those that are not in memory any more included. Both raise ``KvasirError``."""

    async def names(self, wallet: str) -> Collection[str]:
        """Every session name of a wallet that was written."""
        ...

    async def recall(self, wallet: str, key: str) -> Tally | None:
        """A session's totals as they were written last."""
        ...


class Hub:
    """All relay sessions of one gateway. ``serve`` runs one; everything else looks at or ends them."""

    def __init__(
        self,
        authority: Authority,
        *,
        ping_interval_s: float = 10.0,
        recheck_s: float = 60.0,
        admission_timeout_s: float = 10.0,
        engine_timeout_s: float = 5.0,
        role_timeout_s: float = 10.0,
        close_timeout_s: float = 2.0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        hold_bytes: int = HOLD_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._authority = authority
        self._ping_interval_s = ping_interval_s
        self._recheck_s = recheck_s
        self._admission_timeout_s = admission_timeout_s
        self._engine_timeout_s = engine_timeout_s
        self._role_timeout_s = role_timeout_s
        self._close_timeout_s = close_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._hold_bytes = hold_bytes
        self._now = now
        self.books: Books | None = None
        """Without them nothing leaves the memory."""
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._names: dict[str, set[str]] = {}
        """Session names of a wallet, once it dialled."""
        self._joints: dict[tuple[str, str, str, str], Joint] = {}
        self._live: dict[str, Session] = {}
        self._entries: dict[str, Session] = {}
        self._entry_arrived = asyncio.Condition()
        self._serving: set[asyncio.Task[None]] = set()
        self._closing = False

    async def serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run one session on an open stream whose request head (``head``, to its blank line) has been read.

        Returns when the session is over and the stream is closed. Refusals are close codes sent after the 101.
        """
        task = asyncio.ensure_future(self._serve(head, reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        await task

    def sessions(self) -> list[SessionCount]:
        """What every session in memory has carried, by key: all that live, and those that lived last."""
        return sorted((tally.count() for tally in self._tallies.values()), key=lambda count: (count.key, count.wallet))

    def tallies(self) -> list[Tally]:
        """The totals themselves, for whoever keeps them over a restart."""
        return list(self._tallies.values())

    def joints(self) -> list[Joint]:
        """What passed between each stage and each of its workers."""
        return list(self._joints.values())

    def joint(self, star: str, stage: str, wallet: str, session: str) -> Joint | None:
        """What passed between a stage's wallet and a worker's session; ``None`` if they never met."""
        return self._joints.get((star, stage, wallet, session))

    def restore(self, tallies: Iterable[Tally], joints: Iterable[Joint] = ()) -> None:
        """Go on from these totals; to be called before the first session."""
        self._tallies |= {(tally.wallet, tally.key): tally for tally in tallies}
        self._joints |= {joint.key: joint for joint in joints}

    def trim(self, written: Callable[[Tally], bool]) -> list[tuple[str, str]]:
        """Let go of what ``MAX_TALLIES`` does not hold: the sessions that ended first, if the books have all of them.

        Returns:
            (wallet, key) of those. When such a session dials again, it goes on from the books.
        """
        over, before = len(self._tallies) - MAX_TALLIES, self._now() - QUIET_S
        if self.books is None:
            return []
        gone: list[Tally] = []
        if over > 0:
            quiet = (tally for tally in self._tallies.values() if not tally.connected and tally.closed_at <= before)
            gone = [tally for tally in sorted(quiet, key=lambda tally: tally.closed_at) if written(tally)][:over]
        for tally in gone:
            del self._tallies[tally.wallet, tally.key]
        # Names are in the books too; a wallet that was only refused has nothing else here.
        here = {wallet for wallet, _ in self._tallies} | {each.admission.wallet for each in self._live.values()}
        self._names = {wallet: names for wallet, names in self._names.items() if wallet in here}
        return [(tally.wallet, tally.key) for tally in gone]

    async def close_sessions(
        self,
        *,
        wallet: str | None = None,
        key: str | None = None,
        code: int = CloseCode.NORMAL,
        reason: str = "",
    ) -> int:
        """End the live sessions of ``wallet``, or with ``key``, or both; returns how many there were."""
        ended = [
            session
            for session in self._live.values()
            if (wallet is not None or key is not None)
            and wallet in (None, session.admission.wallet)
            and key in (None, session.admission.key)
        ]
        for session in ended:
            session.end(Ending(code, reason))
        await asyncio.gather(*(session.left.wait() for session in ended))
        return len(ended)

    def entry_connected(self, ring_id: str) -> bool:
        """Whether rank 0 of the ring has dialled its entry edge."""
        return ring_id in self._entries

    async def open_entry(self, ring_id: str, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A byte stream to rank 0 of the ring; closing it ends the session, and rank 0 dials again.

        Raises:
            NetworkError: rank 0 did not come within ``timeout_s``, or its one session is in use.
        """

        def free() -> bool:
            return self._closing or (ring_id in self._entries and self._entries[ring_id].free)

        near, far = socket.socketpair()
        gateway = SocketEnd(*await asyncio.open_unix_connection(sock=far))
        reader, writer = await asyncio.open_unix_connection(sock=near)
        joined = False
        try:
            async with asyncio.timeout(timeout_s), self._entry_arrived:
                await self._entry_arrived.wait_for(free)
                if not self._closing:
                    self._entries[ring_id].partner.set_result(gateway)
                    joined = True
        except TimeoutError:
            pass
        finally:
            if not joined:
                await gateway.close()
                await close_writer(writer)
        if joined:
            return reader, writer
        if ring_id in self._entries and not self._closing:
            raise NetworkError(
                "entry_in_use", f"The entry of ring {ring_id} is already in use.", "Close the other stream first."
            )
        raise NetworkError(
            "entry_not_connected",
            f"Rank 0 of ring {ring_id} is not connected to this relay.",
            "Check that the node of the first stage runs and holds its window.",
        )

    async def close(self) -> None:
        """End every session with 1001 and wait for them; new ones are refused."""
        self._closing = True
        async with self._entry_arrived:
            self._entry_arrived.notify_all()
        for session in list(self._live.values()):
            session.end(Ending(CloseCode.GOING_AWAY, "the relay is stopping"))
        if self._serving:
            _, late = await asyncio.wait(set(self._serving), timeout=2 * self._close_timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ws = ServerSocket(
            reader,
            writer,
            max_frame_bytes=self._max_frame_bytes,
            ping_interval_s=self._ping_interval_s,
            close_timeout_s=self._close_timeout_s,
        )
        ending = Ending(CloseCode.UPSTREAM, "the relay failed")
        try:
            request = ws.handshake(head)
            if request is not None:
                ending = await self._session(request, ws)
        except asyncio.CancelledError:
            ending = Ending(CloseCode.ABNORMAL, "")
            raise
        except Exception:
            _log.exception("a relay session failed")
        finally:
            ws.welcome({})  # whoever is refused before is told by a close code, and that needs an open WebSocket
            await ws.close(*ending)

    async def _session(self, request: Request, ws: ServerSocket) -> Ending:
        try:
            dial = _dial(request)
            session = Session(await self._admit(dial), ws)
            await self._check_name(session.admission)
        except Refused as refusal:
            return Ending(refusal.close_code, refusal.reason)
        ending = Ending(CloseCode.UPSTREAM, "the relay failed")
        try:
            ws.welcome(await self._enter(session, _header(request, RECEIVED_HEADER)))
            ending = await self._run(session, dial)
        except Refused as refusal:
            ending = Ending(refusal.close_code, refusal.reason)
        finally:
            self._leave(session, ending)
        return ending

    async def _admit(self, dial: Dial) -> Admission:
        if self._closing:
            raise Refused(CloseCode.GOING_AWAY, "the relay is stopping")
        if dial.path not in (EXPERT_PATH, RING_PATH):
            raise Refused(CloseCode.UNKNOWN_SESSION, "there is no relay at this path")
        try:
            async with asyncio.timeout(self._admission_timeout_s):
                return await self._authority.admit(dial.path, dial.query, dial.token)
        except TimeoutError:
            raise Refused(CloseCode.UPSTREAM, "the relay is too busy") from None

    async def _check_name(self, admission: Admission) -> None:
        """Raises ``Refused`` for yet another name of a wallet that has had many."""
        if admission.wallet not in self._names:
            written = () if self.books is None else await _from_books(self.books.names(admission.wallet))
            here = {key for wallet, key in self._tallies if wallet == admission.wallet}
            self._names.setdefault(admission.wallet, here | set(written))
        names = self._names[admission.wallet]
        if admission.key not in names and len(names) >= MAX_NAMES:
            raise Refused(CloseCode.FORBIDDEN, f"this wallet has used {MAX_NAMES} session names; use one of them")
        names.add(admission.key)

    async def _enter(self, session: Session, received: str) -> dict[str, str]:
        """Make ``session`` the live one of its key; an older one is ended first, its engine side included.

        Returns what the node is to be told: the connection's name, and what its last one came to.
        """
        admission = session.admission
        older = self._live.get(admission.key)
        self._live[admission.key] = session
        if older is not None:
            older.end(Ending(CloseCode.NORMAL, "replaced by a newer connection"))
            await older.left.wait()
        session.tally = tally = await self._tally(session)
        tally.worker, tally.model_digest = admission.worker, admission.model_digest
        counted = tally.settle(received)
        told = {CONNECTION_HEADER: tally.enter(self._now())}
        session.ws.on_pong, session.ws.on_sent = tally.confirm, tally.add_tcp2ws
        return {**told, COUNTED_HEADER: counted} if counted else told

    async def _tally(self, session: Session) -> Tally:
        """The session's totals: in memory, in the books, or new."""
        key = (session.admission.wallet, session.admission.key)
        if key not in self._tallies:
            written = None if self.books is None else await _from_books(self.books.recall(*key))
            self._tallies[key] = written or session.tally
        return self._tallies[key]

    def _leave(self, session: Session, ending: Ending) -> None:
        session.tally.leave(*ending)
        session.tally.closed_at = self._now()
        if self._live.get(session.admission.key) is session:
            del self._live[session.admission.key]
        for ring_id in [ring_id for ring_id, entry in self._entries.items() if entry is session]:
            del self._entries[ring_id]
        session.left.set()

    async def _recheck(self, session: Session, dial: Dial) -> None:
        """Ask from time to time whether the session would still be admitted; returns once it has been ended."""
        while True:
            await asyncio.sleep(self._recheck_s)
            try:
                admission = await self._admit(dial)
            except Refused as refusal:
                if refusal.close_code in (CloseCode.UPSTREAM, CloseCode.GOING_AWAY):
                    continue  # says nothing about this node
                session.end(Ending(refusal.close_code, refusal.reason))
                return
            if admission != session.admission:
                session.end(Ending(CloseCode.NORMAL, "the session is for something else now"))
                return

    async def _run(self, session: Session, dial: Dial) -> Ending:
        """Carry the session's bytes until something ends it; returns what."""
        path, query = dial.path, dial.query
        if session.ending.done():
            return session.ending.result()
        if path == EXPERT_PATH:
            carry = self._carry_dispatch(session) if session.admission.star is None else self._carry_worker(session)
        elif session.admission.star is not None:
            carry = self._carry_waiting(session)
        elif query.get("edge") == "entry":
            carry = self._carry_entry(session, query.get("controller_id", ""))
        else:
            carry = self._carry_edge(session, query.get("role", ""))
        alive = session.ws.keep_alive(session.tally.mark)
        ended_by = await race(carry, session.ended(), alive, self._recheck(session, dial))
        if session.ending.done():
            return session.ending.result()
        if ended_by == 2 and session.ws.open:
            return Ending(CloseCode.ABNORMAL, "no sign of life from the node")
        if session.ws.open:
            return Ending(CloseCode.UPSTREAM, "the engine ended the session")
        return session.ws.ending

    async def _carry_dispatch(self, session: Session) -> None:
        admission = session.admission
        if admission.engine_socket is None or admission.preamble is None:
            raise Refused(CloseCode.UPSTREAM, "nothing is listening for this session")
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                engine = SocketEnd(*await asyncio.open_unix_connection(admission.engine_socket))
        except OSError as error:  # a timeout is one too
            _log.info("session %s: the engine at %s: %s", admission.key, admission.engine_socket, error.strerror)
            raise Refused(CloseCode.UPSTREAM, "nothing is listening for this session") from None
        try:
            await engine.write(admission.preamble.encode())
            await race(pump(session.ws, engine, session.tally.add_ws2tcp), pump(engine, session))
        except ConnectionError:
            pass  # one side is gone; which one, ``_run`` sees
        finally:
            await engine.close()

    async def _carry_edge(self, session: Session, role: str) -> None:
        """One direction of an edge: from this end to the other, whose own task carries the other direction."""
        if session.admission.peer_key is None or role not in ("P", "N"):
            raise Refused(CloseCode.PROTOCOL, "a ring edge needs role P or N")
        try:
            async with asyncio.timeout(self._role_timeout_s):
                first = await session.ws.read()
        except TimeoutError:
            raise Refused(CloseCode.PROTOCOL, "no role byte came") from None
        if first and first[:1] != role.encode():
            raise Refused(CloseCode.PROTOCOL, "the first byte is not the role this end dialled with")
        if not first:
            return
        peer = self._live.get(session.admission.peer_key)
        if peer is not None and peer.free:
            peer.partner.set_result(session)
            session.partner.set_result(peer)
        await self._carry_joined(session, first)

    async def _carry_waiting(self, session: Session) -> None:
        """A stage's session, until a worker comes and as long as it stays."""
        session.ready = True
        async with self._entry_arrived:
            self._entry_arrived.notify_all()
        await self._carry_joined(session, b"")

    async def _carry_worker(self, session: Session) -> None:
        """Join a worker to its stage, whose engine is told first who it is."""
        preamble, star = session.admission.preamble, session.admission.star

        def waiting() -> Session | None:
            live = (each for each in self._live.values() if each.admission.star == star and each is not session)
            return next((each for each in live if each.free and each.admission.preamble is None), None)

        try:
            async with asyncio.timeout(self._engine_timeout_s), self._entry_arrived:
                stage = await self._entry_arrived.wait_for(waiting)
        except TimeoutError:
            stage = None
        if stage is None or preamble is None:
            raise Refused(CloseCode.UPSTREAM, "the stage of this window is not connected")
        own = session.admission
        made = Joint(str(star), stage.admission.wallet, own.wallet, own.key, own.worker)
        joint = self._joints.setdefault(made.key, made)
        session.passed, stage.passed = joint.add_up, joint.add_down
        stage.partner.set_result(session)
        try:
            await stage.write(preamble.encode())
        except ConnectionError:
            session.end(PEER_LEFT)
            return
        session.partner.set_result(stage)
        await self._carry_joined(session, b"")

    async def _carry_entry(self, session: Session, ring_id: str) -> None:
        self._entries[ring_id] = session
        session.ready = True
        async with self._entry_arrived:
            self._entry_arrived.notify_all()
        await self._carry_joined(session, b"")

    async def _carry_joined(self, session: Session, first: bytes) -> None:
        """Wait for the partner, then pump to it; the gateway is pumped from as well, an edge's end does it itself."""
        try:
            held = await session.hold(first, self._hold_bytes)
            if held is None:
                return
            partner = session.partner.result()
            await deliver(held, partner, session.delivered)
            forth = pump(session.ws, partner, session.delivered)
            if isinstance(partner, SocketEnd):
                await race(forth, pump(partner, session))
            else:
                await forth
        except ConnectionError:
            pass  # one side is gone; which one, ``_run`` sees
        finally:
            if session.partner.done():
                await session.partner.result().part()
                if session.ws.open:
                    session.end(PEER_LEFT)


async def _from_books(asked: Coroutine[Any, Any, T]) -> T:
    """Raises ``Refused`` while the books cannot be read."""
    try:
        return await asked
    except KvasirError as error:
        _log.warning("a session is turned away, for its counts cannot be read: %s", error)
        raise Refused(CloseCode.UPSTREAM, "the relay is too busy") from error


@dataclass(frozen=True, slots=True)
class Dial:
    """What a node asked for."""

    path: str
    query: dict[str, str]
    token: str | None = field(repr=False)


def _dial(request: Request) -> Dial:
    """Raises ``Refused`` for a query that is none."""
    path, _, text = request.path.partition("?")
    query = _query(text)
    return Dial(path, query, _token(request, query.pop("token", None)))


def _query(text: str) -> dict[str, str]:
    """The query as a mapping. One name twice is refused: two readers could each believe another of them."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=16, errors="strict")
    except ValueError:
        raise Refused(CloseCode.PROTOCOL, "the query is malformed") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise Refused(CloseCode.PROTOCOL, "a query parameter is given twice")
    return query


def _token(request: Request, from_query: str | None) -> str | None:
    scheme, _, value = _header(request, "Authorization").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return from_query or None


def _header(request: Request, name: str) -> str:
    """The one value of a header; empty if there is none, or more than one."""
    values = request.headers.get_all(name)
    return values[0] if len(values) == 1 else ""
