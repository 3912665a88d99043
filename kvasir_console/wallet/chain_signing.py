"""A message and its signatures as one transaction: what is stored before it is sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from solders.hash import Hash
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console.errors import UsageError, WalletError

MAX_TRANSACTION_BYTES = 1232
"""Solana's packet size."""


@dataclass(frozen=True, slots=True)
class RecentBlockhash:
    hash: Hash
    last_valid_block_height: int
    slot: int = 0
    """Slot as of which it was given: nothing signed over it has landed before."""


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A signed transaction. Store all of it before it is submitted."""

    raw: bytes = field(repr=False)
    signature: str
    last_valid_block_height: int
    slot: int = 0
    """It cannot have landed before this slot; 0 if that is not known."""


def sign(message: MessageV0, signers: Sequence[Keypair], recent: RecentBlockhash) -> PreparedTransfer:
    """Sign a message compiled over ``recent``. Raises ``UsageError`` ``transaction_too_large``."""
    return _prepared(VersionedTransaction(message, list(signers)), recent)


def assemble(message: MessageV0, signature: bytes, recent: RecentBlockhash) -> PreparedTransfer:
    """A message with its payer's signature, made elsewhere.

    Raises:
        WalletError: ``signature_mismatch``: it is not the payer's signature of this message.
        UsageError: ``transaction_too_large``.
    """
    if len(signature) != 64 or message.header.num_required_signatures != 1:
        raise _mismatch()
    transaction = VersionedTransaction.populate(message, [Signature.from_bytes(signature)])
    if transaction.verify_with_results() != [True]:
        raise _mismatch()
    return _prepared(transaction, recent)


def _prepared(transaction: VersionedTransaction, recent: RecentBlockhash) -> PreparedTransfer:
    raw = bytes(transaction)
    if len(raw) > MAX_TRANSACTION_BYTES:
        raise UsageError(
            "transaction_too_large",
            f"The transaction has {len(raw)} bytes; the network carries at most {MAX_TRANSACTION_BYTES}.",
            "Shorten the memo, or split it.",
        )
    if transaction.message.recent_blockhash != recent.hash:
        raise UsageError("blockhash_mismatch", "The message was not made over the blockhash that is to be stored.")
    signature = str(transaction.signatures[0])
    return PreparedTransfer(raw, signature, recent.last_valid_block_height, recent.slot)


def _mismatch() -> WalletError:
    return WalletError("signature_mismatch", "The signature is not the payer's for this message.")
