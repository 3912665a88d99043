"""Transfers as typed intents: what is moved, from whom, to whom; checked before anything is signed.

An intent becomes one message in one way only, so who signs (the payout process here, a wallet's signer elsewhere)
never has to trust bytes made by someone else.
"""

from __future__ import annotations

from dataclasses import dataclass

from solders.compute_budget import set_compute_unit_limit, set_compute_unit_price
from solders.hash import Hash
from solders.instruction import Instruction
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.system_program import ID as SYSTEM_PROGRAM_ID
from solders.system_program import TransferParams, transfer
from spl.token.constants import TOKEN_2022_PROGRAM_ID, TOKEN_PROGRAM_ID

from kvasir_console.errors import LedgerError, UsageError, WalletError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain import Chain, PreparedTransfer, sign
from kvasir_console.wallet.keys import decode_address

COMPUTE_UNITS = 200_000
"""Asked for where a priority fee is offered: opening an account, a transfer and the longest memo fit with room."""
MAX_PRIORITY_MICRO_LAMPORTS = 50_000_000
"""For each compute unit: 0.01 SOL for a transfer, and no slip of the keyboard costs more."""
_MAX_LAMPORTS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class KvrTransfer:
    """Move ``micro_kvr`` from one wallet's associated account to another's, which the source pays for if missing."""

    source: str
    recipient: str
    mint: str
    micro_kvr: int
    memo: str = ""

    def instructions(self) -> tuple[Instruction, ...]:
        """Raises ``UsageError`` for an amount, address or memo that cannot be."""
        _check_amount(self.micro_kvr, token.MAX_MICRO_KVR)
        source, recipient = _wallet(self.source, "source"), _wallet(self.recipient, "recipient")
        mint = _key(self.mint, "mint")
        if recipient == mint:
            raise _recipient_error("recipient_is_mint", "The recipient is the token's mint, not a wallet.")
        if recipient == source:
            raise _recipient_error("recipient_is_source", "Source and recipient are the same wallet.")
        return (
            token.create_token_account(source, recipient, mint),
            token.transfer_checked(source, recipient, mint, self.micro_kvr),
            *_memo(source, self.memo),
        )


@dataclass(frozen=True, slots=True)
class SolTransfer:
    """Move ``lamports`` from one wallet to another."""

    source: str
    recipient: str
    lamports: int
    memo: str = ""

    def instructions(self) -> tuple[Instruction, ...]:
        """Raises ``UsageError`` for an amount, address or memo that cannot be."""
        _check_amount(self.lamports, _MAX_LAMPORTS)
        source, recipient = _wallet(self.source, "source"), _wallet(self.recipient, "recipient")
        if recipient == source:
            raise _recipient_error("recipient_is_source", "Source and recipient are the same wallet.")
        return (
            transfer(TransferParams(from_pubkey=source, to_pubkey=recipient, lamports=self.lamports)),
            *_memo(source, self.memo),
        )


Transfer = KvrTransfer | SolTransfer


def transfer_message(intent: Transfer, blockhash: Hash, priority_micro_lamports: int = 0) -> MessageV0:
    """The one message of an intent, paid for by its source.

    Args:
        priority_micro_lamports: offered for each compute unit on top of the fee.

    Raises:
        UsageError: as ``instructions``, or ``priority_out_of_range``.
    """
    if not 0 <= priority_micro_lamports <= MAX_PRIORITY_MICRO_LAMPORTS:
        raise UsageError(
            "priority_out_of_range",
            f"A priority fee of {priority_micro_lamports} micro-lamports for each compute unit is not paid.",
            f"Set wallet.priority_micro_lamports to at most {MAX_PRIORITY_MICRO_LAMPORTS}.",
        )
    budget: tuple[Instruction, ...] = ()
    if priority_micro_lamports:
        budget = (set_compute_unit_limit(COMPUTE_UNITS), set_compute_unit_price(priority_micro_lamports))
    return MessageV0.try_compile(_wallet(intent.source, "source"), [*budget, *intent.instructions()], [], blockhash)


async def prepare_transfer(
    chain: Chain, intent: Transfer, signer: Keypair, priority_micro_lamports: int = 0
) -> PreparedTransfer:
    """Check the recipient on the chain and sign. Nothing is sent: store the result first, then ``submit``.

    Raises:
        UsageError: the intent cannot be carried out as written.
        LedgerError: the recipient is no wallet.
        WalletError: ``signer`` is not the source.
        NetworkError: the RPC does not answer.
    """
    if str(signer.pubkey()) != intent.source:
        raise WalletError("not_the_source", "The key that should sign is not that of the paying wallet.")
    intent.instructions()
    await check_recipient(chain, intent.recipient)
    recent = await chain.latest_blockhash()
    return sign(transfer_message(intent, recent.hash, priority_micro_lamports), (signer,), recent)


async def check_recipient(chain: Chain, recipient: str) -> None:
    """Refuse a recipient that is a token account, a program or an account of one: money sent there may be lost.

    A wallet belongs to the system program, or does not exist yet.

    Raises:
        LedgerError: ``recipient_is_token_account`` or ``recipient_is_program``.
    """
    account = await chain.account(recipient)
    if account is None or account.owner == SYSTEM_PROGRAM_ID:
        return
    if account.owner in (TOKEN_PROGRAM_ID, TOKEN_2022_PROGRAM_ID):
        raise LedgerError(
            "recipient_is_token_account",
            f"{recipient} is an account of the token program, not a wallet.",
            "Give the address of the wallet that owns it.",
        )
    raise LedgerError(
        "recipient_is_program",
        f"{recipient} belongs to a program, it is no wallet.",
        "Give the address of a wallet.",
    )


def _check_amount(amount: int, most: int) -> None:
    if not 0 < amount <= most:
        raise UsageError("amount_out_of_range", f"An amount of {amount} cannot be sent.", "Send more than zero.")


def _wallet(address: str, what: str) -> Pubkey:
    """A key that can sign: on the curve, where no program's own addresses are."""
    key = _key(address, what)
    if not key.is_on_curve():
        raise _recipient_error(
            f"{what}_off_curve",
            f"The {what} {address} is the address of a program's account; no wallet has its key.",
        )
    return key


def _key(address: str, what: str) -> Pubkey:
    try:
        return Pubkey.from_bytes(decode_address(address))
    except WalletError as error:
        raise UsageError(
            f"{what}_malformed", f"The {what} is not a Solana address.", "An address is 32 bytes in base58."
        ) from error


def _memo(signer: Pubkey, text: str) -> tuple[Instruction, ...]:
    return (token.memo(signer, text),) if text else ()


def _recipient_error(code: str, message: str) -> UsageError:
    return UsageError(code, message, "Give the address of a wallet.")
