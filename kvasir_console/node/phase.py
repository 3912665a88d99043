"""The phases of a node, and how one leads to the next: pure values, no clock and no socket.

Every phase answers four questions for the person who looks at the screen: what state is this, since when, why, and
what happens (or has to be done) next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir_console.errors import ConfigError, KvasirError


class Phase(StrEnum):
    """What the node is doing, in the order of the claim path."""

    STOPPED = "stopped"
    LOCKED = "locked"
    """The wallet must be unlocked before a token can be minted."""
    AUTHENTICATING = "authenticating"
    VOLUNTEERING = "volunteering"
    """Authenticated, but the market has no slice for this machine yet."""
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    STARTING = "starting"
    """The engine loads its window."""
    REPORTING = "reporting"
    """The slice is loaded and reported; the hub has not asked for a relay yet."""
    DIALLING = "dialling"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


# What a person reads beside the phase when the code gives no better reason.
_NEXT_ACTION: dict[Phase, str] = {
    Phase.STOPPED: "Start the node.",
    Phase.LOCKED: "Unlock the wallet.",
    Phase.AUTHENTICATING: "The gateway answers the challenge.",
    Phase.VOLUNTEERING: "The market is asked again.",
    Phase.DOWNLOADING: "The slice is fetched, then verified.",
    Phase.VERIFYING: "The slice is loaded into the engine.",
    Phase.STARTING: "The slice is reported to the gateway.",
    Phase.REPORTING: "The gateway wires a relay session.",
    Phase.DIALLING: "The relay session opens.",
    Phase.SERVING: "Nothing to do: work is metered as it comes.",
    Phase.DRAINING: "The last requests end, then the node stops.",
    Phase.FAILED: "The node tries again after a pause.",
}


@dataclass(frozen=True, slots=True)
class PhaseState:
    """A phase with its reason.

    ``since_s`` is Unix time in seconds.
    """

    phase: Phase
    since_s: float
    why: str = ""
    next_action: str = ""

    def to(self, phase: Phase, now_s: float, why: str = "", next_action: str = "") -> PhaseState:
        """The state after a change; staying in a phase keeps ``since_s`` and takes the newer reason."""
        since = self.since_s if phase is self.phase else now_s
        return PhaseState(phase, since, why, next_action or _NEXT_ACTION[phase])


def after(error: KvasirError, retry_s: float) -> tuple[Phase, str, str]:
    """The phase that a failed step leads to, why, and what is next: it is tried again within ``retry_s``."""
    if error.code in ("signer_locked", "wallet_locked"):
        return Phase.LOCKED, error.message, error.hint
    by_itself = error.code == "engine_restarted" or isinstance(error, ConfigError)
    again = "" if by_itself else f"It is tried again within {retry_s:g} s."
    return Phase.FAILED, error.message, f"{error.hint} {again}".strip()


def initial(now_s: float) -> PhaseState:
    return PhaseState(Phase.STOPPED, now_s, "", _NEXT_ACTION[Phase.STOPPED])
