"""How a transaction ended, by what one RPC or several know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from solana.rpc.commitment import Commitment
from solders.message import MessageV0
from solders.signature import Signature

from kvasir_console.errors import NetworkError
from kvasir_console.wallet.chain_errors import describe_error
from kvasir_console.wallet.chain_types import Outcome, OutcomeState, SignatureStatus


@dataclass(frozen=True, slots=True)
class Witness:
    """What one RPC knows of a transaction.

    Height is read before status and at ``finalized``, and the status must come from a node at least as far, which
    remembers back to where the transaction was signed: else a node that lags behind, or has forgotten, would declare
    dead what another has executed.
    """

    status: SignatureStatus | None
    passed: bool
    """The last height at which it could land is behind this RPC for good."""
    oldest_slot: int = 0
    """What it remembers begins here."""
    since_slot: int = 0
    """The transaction cannot have landed before; 0 if that is not known."""

    @property
    def says_expired(self) -> bool:
        return self.status is None and self.passed

    @property
    def forgot(self) -> bool:
        return self.oldest_slot > self.since_slot > 0

    def outcome(self, commitment: Commitment) -> Outcome | None:
        """``None`` while it may still land or is not yet deep enough."""
        if self.status is None:
            return Outcome(OutcomeState.EXPIRED) if self.passed else None
        if _rank(self.status.commitment) < _rank(commitment):
            return None
        if self.status.error is not None:
            return Outcome(OutcomeState.FAILED, self.status.slot, self.status.error)
        return Outcome(OutcomeState.CONFIRMED, self.status.slot)


def decide(witnesses: Sequence[Witness], commitment: Commitment) -> Outcome | None:
    """What several RPCs say together: expired only if all of them do, and one of them remembers far enough.

    Raises:
        NetworkError: ``history_too_short``: none of them does.
    """
    for each in witnesses:
        if not each.says_expired:
            return each.outcome(commitment)
    if all(each.forgot for each in witnesses):
        oldest, since = min(each.oldest_slot for each in witnesses), witnesses[0].since_slot
        raise NetworkError(
            "history_too_short",
            f"The RPC remembers from slot {oldest} on; this transaction was signed in slot {since}.",
            "Name an RPC with a longer memory in wallet.rpc_url; do not send another in its place.",
        )
    return Outcome(OutcomeState.EXPIRED)


async def witness(
    rpc: Any, signature: Signature, last_valid_block_height: int, since_slot: int, message: MessageV0 | None
) -> Witness:
    """Ask one RPC's client.

    The height was told by the RPC that gave the blockhash, and may be wrong; where the message is at hand, its
    blockhash has to be unknown here as well: no node has a fee for a message that can land no more.
    """
    epoch = (await rpc.get_epoch_info(Commitment.FINALIZED)).value
    status, seen_slot = await status_of(rpc, signature)
    passed = int(epoch.block_height) > last_valid_block_height and seen_slot >= int(epoch.absolute_slot)
    if status is None and passed and message is not None:
        passed = (await rpc.get_fee_for_message(message, Commitment.PROCESSED)).value is None
    oldest = int((await rpc.get_first_available_block()).value) if status is None and passed and since_slot else 0
    return Witness(status, passed, oldest, since_slot)


async def status_of(rpc: Any, signature: Signature) -> tuple[SignatureStatus | None, int]:
    """What one RPC knows of a transaction, and the slot as of which it says so."""
    response = await rpc.get_signature_statuses([signature], search_transaction_history=True)
    (value,) = response.value
    if value is None:
        return None, int(response.context.slot)
    reached = value.confirmation_status
    level = Commitment.FINALIZED if reached is None else list(Commitment)[int(reached)]
    error = None if value.err is None else describe_error(value.err)
    return SignatureStatus(int(value.slot), level, error), int(response.context.slot)


def _rank(commitment: Commitment) -> int:
    return list(Commitment).index(commitment)
