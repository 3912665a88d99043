"""The KVR token: amounts as integers of 10⁻⁶ KVR, addresses, and the instructions that move it.

KVR is a classic SPL token with 6 decimals. Everything here is pure; ``chain`` talks to a cluster.
"""

from __future__ import annotations

import re

from solders.instruction import Instruction
from solders.pubkey import Pubkey
from solders.system_program import CreateAccountParams, create_account
from spl.memo.constants import MEMO_PROGRAM_ID
from spl.memo.instructions import create_memo
from spl.memo.models import MemoParams
from spl.token import instructions as spl
from spl.token.constants import TOKEN_PROGRAM_ID
from spl.token.models import InitializeMint2Params, MintToCheckedParams, TransferCheckedParams

from kvasir_console.errors import UsageError

DECIMALS = 6
MICRO_PER_KVR = 1_000_000
DEVNET_MINT = "6cuJAmqtMuGzJ7s7eWQSqfJvEFRUdTiYR3cuMmiNoCPQ"
INITIAL_SUPPLY_MICRO_KVR = 1_000_000_000 * MICRO_PER_KVR
MAX_MICRO_KVR = 2**64 - 1
"""The largest amount a token account can hold."""
MINT_BYTES = 82
MAX_MEMO_BYTES = 256

_AMOUNT = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,6}))?")


def format_kvr(micro: int) -> str:
    """``8945`` as ``"0.008945"``: always six decimals, exact, with a minus sign below zero."""
    whole, part = divmod(abs(micro), MICRO_PER_KVR)
    return f"{'-' if micro < 0 else ''}{whole}.{part:0{DECIMALS}d}"


def parse_kvr(text: str) -> int:
    """``"0.008945"`` as ``8945``: ASCII digits and at most six decimals, no sign, exponent or separators.

    Raises:
        UsageError: ``amount_malformed``, or ``amount_too_large`` above what a token account can hold.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            "amount_malformed",
            f"{text[:40]!r} is not an amount of KVR.",
            "Write digits with at most six decimals and a point, like 12.5.",
        )
    micro = int(match[1]) * MICRO_PER_KVR + int((match[2] or "").ljust(DECIMALS, "0"))
    if micro > MAX_MICRO_KVR:
        raise UsageError("amount_too_large", f"{text.strip()} KVR is more than a token account can hold.")
    return micro


def associated_token_address(owner: str, mint: str) -> str:
    """Where ``owner``'s KVR lie: the associated token account, both addresses in base58."""
    return str(spl.get_associated_token_address(Pubkey.from_string(owner), Pubkey.from_string(mint)))


def create_token_account(payer: Pubkey, owner: Pubkey, mint: Pubkey) -> Instruction:
    """Make ``owner``'s associated token account unless it is there; it fails if someone else controls it."""
    return spl.create_idempotent_associated_token_account(payer, owner, mint)


def transfer_checked(source: Pubkey, recipient: Pubkey, mint: Pubkey, micro_kvr: int) -> Instruction:
    """Move KVR between the associated accounts of two wallets; the program checks mint and decimals."""
    return spl.transfer_checked(
        TransferCheckedParams(
            program_id=TOKEN_PROGRAM_ID,
            source=spl.get_associated_token_address(source, mint),
            mint=mint,
            dest=spl.get_associated_token_address(recipient, mint),
            owner=source,
            amount=micro_kvr,
            decimals=DECIMALS,
        )
    )


def memo(signer: Pubkey, text: str) -> Instruction:
    """A note on the chain, signed by ``signer``. Raises ``UsageError`` ``memo_too_long`` above 256 bytes."""
    data = text.encode()
    if len(data) > MAX_MEMO_BYTES:
        raise UsageError("memo_too_long", f"The memo has {len(data)} bytes; at most {MAX_MEMO_BYTES} are allowed.")
    return create_memo(MemoParams(program_id=MEMO_PROGRAM_ID, signer=signer, message=data))


def create_mint(authority: Pubkey, mint: Pubkey, rent_lamports: int, supply_micro_kvr: int) -> tuple[Instruction, ...]:
    """Create a KVR mint with all its supply in ``authority``'s associated account, in one transaction.

    Signed by ``authority`` (payer, mint and freeze authority) and ``mint``.
    """
    vault = spl.get_associated_token_address(authority, mint)
    return (
        create_account(
            CreateAccountParams(
                from_pubkey=authority,
                to_pubkey=mint,
                lamports=rent_lamports,
                space=MINT_BYTES,
                owner=TOKEN_PROGRAM_ID,
            )
        ),
        spl.initialize_mint2(
            InitializeMint2Params(
                decimals=DECIMALS,
                program_id=TOKEN_PROGRAM_ID,
                mint=mint,
                mint_authority=authority,
                freeze_authority=authority,
            )
        ),
        create_token_account(authority, authority, mint),
        spl.mint_to_checked(
            MintToCheckedParams(
                program_id=TOKEN_PROGRAM_ID,
                mint=mint,
                dest=vault,
                mint_authority=authority,
                amount=supply_micro_kvr,
                decimals=DECIMALS,
            )
        ),
    )
