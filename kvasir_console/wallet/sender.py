"""Sending from a wallet so that it happens once: check, sign, store, send, and ask until the chain knows.

"Timed out" is never a reason to send again: the send stays in the outbox, and whoever looks next goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from solders.transaction import VersionedTransaction

from kvasir_console.errors import LedgerError, NetworkError, WalletError
from kvasir_console.wallet.chain import OUTCOME_TIMEOUT_S, Chain
from kvasir_console.wallet.chain_cluster import cluster_name
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.chain_signing import PreparedTransfer, RecentBlockhash
from kvasir_console.wallet.chain_types import OutcomeState, Preview
from kvasir_console.wallet.outbox import Outbox, Send, SendState, request_id_used
from kvasir_console.wallet.transfers import Transfer, check_recipient, transfer_message

MAX_SIGNINGS = 3
"""How often one call signs at most: once, and again after each expiry."""
_NEW_BLOCKHASH_S = 0.5

Sign = Callable[[Transfer, RecentBlockhash], Awaitable[PreparedTransfer]]
"""Signs the one message of a transfer (``transfer_message``). It may ask a person, and raises ``WalletError``."""

_ENDS = {
    OutcomeState.CONFIRMED: SendState.CONFIRMED,
    OutcomeState.FAILED: SendState.FAILED,
    OutcomeState.EXPIRED: SendState.EXPIRED,
}


class Sender:
    """One wallet's sends on one cluster."""

    def __init__(
        self,
        outbox: Outbox,
        chain: Chain,
        *,
        priority_micro_lamports: int = 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._chain = chain
        self._priority = priority_micro_lamports
        self._now_s = now_s

    async def preview(self, intent: Transfer) -> Preview:
        """What a transfer would cost and whether it would succeed; nothing is signed.

        Raises:
            UsageError: the transfer cannot be carried out as written.
            LedgerError: the recipient is no wallet.
            NetworkError: the RPC does not answer.
        """
        intent.instructions()
        await check_recipient(self._chain, intent.recipient)
        recent = await self._chain.latest_blockhash()
        return await self._chain.preview(transfer_message(intent, recent.hash, self._priority))

    async def send(
        self,
        request_id: str,
        intent: Transfer,
        sign: Sign,
        *,
        twin: bool = False,
        timeout_s: float = OUTCOME_TIMEOUT_S,
    ) -> Send:
        """Carry out a transfer once, however often this is called with the same ``request_id``.

        Args:
            request_id: names the payment; the caller keeps it if it may have to ask again.
            twin: also when an equal payment is still undecided.
            timeout_s: longest wait for the outcome of each signed transaction.

        Returns:
            The send: confirmed, failed, or expired after ``MAX_SIGNINGS`` tries.

        Raises:
            LedgerError: ``send_undecided``: an equal payment may still land; ``cluster_changed``; a refused recipient.
            PreflightError: the RPC's trial run refused it; it may have been passed on all the same.
            NetworkError: no RPC answers, or ``outcome_unknown``: call again with the same id.
            UsageError, WalletError: as the intent and ``sign`` raise.
        """
        known = self._outbox.get(request_id)
        if known is None:
            known = await self._begin(request_id, intent, sign, twin=twin)
        elif known.intent != intent:
            raise request_id_used(request_id)
        signings = 1
        while True:
            known = await self._settle(known, timeout_s)
            if known.state is not SendState.EXPIRED or signings >= MAX_SIGNINGS:
                return known
            signings += 1
            known = await self._sign_again(known, sign)

    async def resume(self, *, timeout_s: float = 0.0) -> tuple[Send, ...]:
        """Go on with everything that is undecided on this cluster, without a key; what is known of each then."""
        genesis = await self._chain.genesis_hash()
        found = []
        for send in self._outbox.undecided(genesis):
            try:
                found.append(await self._settle(send, timeout_s))
            except (NetworkError, PreflightError):
                found.append(self._outbox.get(send.request_id) or send)
        return tuple(found)

    async def _begin(self, request_id: str, intent: Transfer, sign: Sign, *, twin: bool) -> Send:
        intent.instructions()
        genesis = await self._chain.genesis_hash()
        other = None if twin else self._outbox.twin(intent, genesis)
        if other is not None:
            raise LedgerError(
                "send_undecided",
                f"The same payment ({other.request_id}) is under way and not decided yet.",
                "Wait for its outcome. It may still land: do not send another in its place.",
            )
        await self._chain.check_fresh()
        await check_recipient(self._chain, intent.recipient)
        while True:
            prepared = await self._signed(intent, sign)
            try:
                send, _ = self._outbox.add(request_id, intent, genesis, prepared, self._now())
                return send
            except LedgerError as error:
                # The same transfer over the same blockhash is the same transaction, which would pay for both.
                if error.code != "signature_used":
                    raise
            await asyncio.sleep(_NEW_BLOCKHASH_S)

    async def _signed(self, intent: Transfer, sign: Sign) -> PreparedTransfer:
        """Raises ``WalletError`` ``signed_another`` when what was signed is not this transfer."""
        recent = await self._chain.latest_blockhash()
        prepared = await sign(intent, recent)
        message = VersionedTransaction.from_bytes(prepared.raw).message
        if message != transfer_message(intent, recent.hash, self._priority):
            raise WalletError("signed_another", "What was signed is not the transfer that was asked for.")
        return prepared

    async def _settle(self, send: Send, timeout_s: float) -> Send:
        """Send what is stored until the chain says how it ended; what is final or expired is left as it is."""
        if not send.undecided:
            return send
        await self._check_cluster(send)
        if send.state is SendState.SENT:
            with contextlib.suppress(NetworkError, PreflightError):  # an RPC may have lost it; its outcome is asked for
                await self._chain.submit(send.prepared)
        elif not send.error:
            try:
                with contextlib.suppress(NetworkError):  # it may have arrived; its signature tells
                    await self._chain.submit(send.prepared)
            except PreflightError as error:
                # Kept: an RPC that passed it on before it refused it would still let it land.
                self._outbox.advance(send, SendState.SIGNED, self._now(), error.message)
                raise
            send = self._outbox.advance(send, SendState.SENT, self._now())
        outcome = await self._chain.await_outcome(
            send.prepared.signature,
            send.prepared.last_valid_block_height,
            raw=send.prepared.raw,
            resend=not send.error,  # what was refused is not pressed upon the chain
            slot=send.prepared.slot,
            timeout_s=timeout_s,
        )
        return self._outbox.advance(send, _ENDS[outcome.state], self._now(), outcome.error)

    async def _sign_again(self, send: Send, sign: Sign) -> Send:
        """Sign anew what expired, after a second look: another RPC may know more."""
        look = await self._chain.outcome(send.prepared, timeout_s=0.0)
        if look.state is not OutcomeState.EXPIRED:
            return self._outbox.advance(send, _ENDS[look.state], self._now(), look.error)
        prepared = await self._signed(send.intent, sign)
        # Another process may have signed it meanwhile: then that one counts, and this one is never sent.
        return self._outbox.sign_again(send, prepared, self._now()) or self._outbox.get(send.request_id) or send

    async def _check_cluster(self, send: Send) -> None:
        genesis = await self._chain.genesis_hash()
        if genesis != send.genesis:
            raise LedgerError(
                "cluster_changed",
                f"The payment {send.request_id} was sent on {cluster_name(send.genesis)}; this is "
                f"{cluster_name(genesis)}.",
                "Set wallet.rpc_url to the cluster it was sent on to learn how it ended.",
            )

    def _now(self) -> int:
        return int(self._now_s())
