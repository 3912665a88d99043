"""The first question of whoever runs a node: does it earn, and if not, why? A pure function of one snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens import format as fmt

QUIET_S = 60
"""Serving without a row of work for this long is worth saying."""


class Answer(StrEnum):
    YES = "yes"
    NOT_YET = "not yet"
    """On the way; nothing for a person to do."""
    NO = "no"
    """It will stay so until something changes or somebody acts."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Answer
    because: str
    """Follows "because"; a sentence without a capital or a full stop."""

    @property
    def text(self) -> str:
        return f"{self.answer}, because {self.because}"


def verdict(snapshot: NodeSnapshot) -> Verdict:
    """Whether this node earns at the moment of ``snapshot``, and the first reason that decides it."""
    state = snapshot.state
    said = _sentence(state.why)
    match state.phase:
        case Phase.STOPPED:
            return Verdict(Answer.NO, said or "the node is stopped")
        case Phase.FAILED:
            return Verdict(Answer.NO, said or "the last attempt failed")
        case Phase.DRAINING:
            return Verdict(Answer.NO, "the node ends its last requests and then stops")
        case Phase.LOCKED:
            return Verdict(Answer.NO, "the wallet is locked, so the gateway cannot know who works here")
        case Phase.VOLUNTEERING:
            return Verdict(Answer.NO, f"the market has no slice for this node{f': {said}' if said else ''}")
        case Phase.AUTHENTICATING:
            return Verdict(Answer.NOT_YET, "the gateway has not admitted this node yet")
        case Phase.DOWNLOADING | Phase.VERIFYING:
            return Verdict(Answer.NOT_YET, f"the slice is still being {_FETCH[state.phase]}{_progress(snapshot)}")
        case Phase.STARTING:
            return Verdict(Answer.NOT_YET, f"the engine loads the slice{_progress(snapshot)}")
        case Phase.REPORTING:
            return Verdict(Answer.NO, "the slice is ready, but the gateway has wired no relay session to it yet")
        case Phase.DIALLING:
            return _unreached(snapshot)
        case Phase.SERVING:
            return _serving(snapshot)


_FETCH = {Phase.DOWNLOADING: "downloaded", Phase.VERIFYING: "verified"}


def quiet_s(snapshot: NodeSnapshot) -> int:
    """Seconds without work at the end of the history, which has one value a second."""
    history = snapshot.work.history
    return next((index for index, value in enumerate(reversed(history)) if value > 0), len(history))


def _unreached(snapshot: NodeSnapshot) -> Verdict:
    if any(relay.state == "waiting" for relay in snapshot.relays):
        relay = next(relay for relay in snapshot.relays if relay.state == "waiting")
        retry = "" if relay.retry_in_s is None else f"; next try in {fmt.duration(relay.retry_in_s)}"
        return Verdict(Answer.NO, f"the relay session does not open: {_reason(relay.last_close)}{retry}")
    return Verdict(Answer.NOT_YET, "the relay session is being dialled")


def _serving(snapshot: NodeSnapshot) -> Verdict:
    opened = [relay for relay in snapshot.relays if relay.carries]
    if len(opened) < len(snapshot.relays) or not snapshot.relays:
        lost = next((relay for relay in snapshot.relays if not relay.carries), None)
        reason = _reason(lost.last_close) if lost is not None else "none was dialled"
        kind = "a" if opened else "no"
        return Verdict(Answer.NO, f"{kind} relay session is {'not ' if opened else ''}open: {reason}")
    work = snapshot.work
    if work.requests == 0 and work.rows == 0 and work.tokens == 0:
        serving = fmt.duration(snapshot.at_s - snapshot.state.since_s)
        return Verdict(Answer.NOT_YET, f"it has served for {serving} and no request has come")
    quiet = quiet_s(snapshot)
    if work.history and quiet >= QUIET_S:
        more = "more than " if quiet == len(work.history) else ""
        return Verdict(Answer.NO, f"no work has come for {more}{fmt.duration(quiet)}")
    earnings = snapshot.earnings
    if earnings.credited_micro_kvr is None:
        return Verdict(Answer.YES, "it works; the gateway has not stated the credit yet")
    if earnings.credited_micro_kvr == 0:
        return Verdict(Answer.NOT_YET, "it works, but the gateway has credited nothing so far")
    return Verdict(Answer.YES, f"it serves work, and {fmt.kvr(earnings.credited_micro_kvr)} are credited so far")


def _progress(snapshot: NodeSnapshot) -> str:
    download = snapshot.download
    done = None if download is None else fmt.percent(download.done_bytes, download.total_bytes)
    return "" if done is None else f", {done}% done"


def _reason(close: str) -> str:
    return close.strip().rstrip(".") or "it gave no reason"


def _sentence(why: str) -> str:
    """A reason of the node, fit to follow another clause. Names in capitals stay."""
    why = why.strip().rstrip(".")
    return why[:1].lower() + why[1:] if why[1:2].islower() or why[1:2] == " " else why
