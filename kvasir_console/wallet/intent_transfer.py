"""Sending KVR or SOL, as an intent: the signer builds the one transaction message from typed fields by itself.

Nobody hands over a message: what is signed pays the named amount to the named recipient, out of this wallet, which
pays the fee too, and there is nothing else in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from solders.hash import Hash
from solders.message import MessageV0

from kvasir_console.errors import WalletError
from kvasir_console.wallet.chain_cluster import cluster_name
from kvasir_console.wallet.intent_base import Context, Shape, shown
from kvasir_console.wallet.keys import decode_address
from kvasir_console.wallet.money import DECIMALS, KVR, amount_text

if TYPE_CHECKING:
    from kvasir_console.wallet.transfers import Transfer


@dataclass(frozen=True, slots=True)
class TransferIntent(Shape):
    """Move ``amount`` of a token to ``recipient``."""

    kind: ClassVar[str] = "transfer"

    cluster: str
    """Where it is to be sent: the cluster's genesis hash."""
    token: str
    """``KVR`` or ``SOL``."""
    recipient: str
    amount: int
    """Micro-KVR or lamports."""
    memo: str
    blockhash: str
    """A recent one, in base58: the message can land only where and while it is known."""
    priority_micro_lamports: int = 0
    """Offered for each compute unit, on top of the fee for the signature."""

    payment: str = ""
    """The payment's own id. It is not signed: by it a payment that expired is known when it is signed again."""

    def check(self, context: Context) -> None:
        """Raises ``WalletError`` ``other_cluster`` or ``token_unknown``."""
        if not context.cluster or self.cluster != context.cluster:
            own = cluster_name(context.cluster) if context.cluster else "no cluster"
            raise WalletError(
                "other_cluster",
                f"The wallet is bound to {own} and does not sign for {shown(self.cluster)}.",
                "If that cluster is the one you mean, set wallet.rpc_url to it.",
            )
        if self.token not in DECIMALS:
            raise WalletError("token_unknown", f"A wallet does not send {shown(self.token)}.", "It sends KVR and SOL.")

    def transfer(self, context: Context) -> Transfer:
        """The transfer out of this signer's own wallet, of this signer's own mint."""
        from kvasir_console.wallet.transfers import KvrTransfer, SolTransfer  # it brings the RPC client along

        self.check(context)
        if self.token == KVR:
            return KvrTransfer(context.wallet, self.recipient, context.mint, self.amount, self.memo)
        return SolTransfer(context.wallet, self.recipient, self.amount, self.memo)

    def message(self, context: Context) -> MessageV0:
        """The message to sign.

        Raises:
            WalletError: ``other_cluster``, ``token_unknown`` or ``blockhash``.
            UsageError: an amount, recipient or memo that cannot be.
        """
        from kvasir_console.wallet.transfers import transfer_message

        try:
            blockhash = Hash.from_bytes(decode_address(self.blockhash))  # the same 32 bytes in base58
        except WalletError:
            raise WalletError(
                "blockhash", "The transfer names no blockhash.", "Ask the cluster for a new one."
            ) from None
        return transfer_message(self.transfer(context), blockhash, self.priority_micro_lamports)

    def describe(self) -> str:
        """Of a transfer that ``check`` has passed."""
        where = cluster_name(shown(self.cluster))
        lines = [f"Send {amount_text(self.token, self.amount)} to {shown(self.recipient)} on {where}"]
        lines += [f"  memo: {shown(self.memo, 256)}"] if self.memo else []
        if self.priority_micro_lamports:
            lines.append(f"  priority fee: {self.priority_micro_lamports} micro-lamports for each compute unit")
        return "\n".join(lines)

    def payment_digest(self) -> str:
        """SHA-256, in hex, of all that makes this the same payment again; "" for one without an id."""
        if not self.payment:
            return ""
        what = [self.payment, self.cluster, self.token, self.recipient, self.amount, self.memo]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()
