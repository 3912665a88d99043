"""Transactions in words, as the unmodified client reads them from a real ledger; values are those that were signed."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Confirmed, Processed
from solders.instruction import AccountMeta, Instruction
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.system_program import (
    ID as SYSTEM_PROGRAM_ID,
)
from solders.system_program import (
    TransferParams,
    transfer,
)
from solders.transaction import VersionedTransaction
from solders.transaction_status import ParsedInstruction, TransactionConfirmationStatus, UiPartiallyDecodedInstruction
from spl.memo.constants import MEMO_PROGRAM_ID
from spl.token import instructions as spl
from spl.token.constants import ASSOCIATED_TOKEN_PROGRAM_ID, TOKEN_2022_PROGRAM_ID, TOKEN_PROGRAM_ID
from spl.token.models import TransferParams as TokenTransferParams

from kvasir_console.wallet import token
from kvasir_console.wallet.localnet.instructions import Compiled, instruction_json

from ledger_process import LedgerProcess

SOL = 10**9
OWNER, MINT, FRIEND = Keypair(), Keypair(), Keypair().pubkey()
MINT_RENT = 1_461_600
"""Lamports for 82 bytes on every public cluster."""


@pytest.fixture
async def client(process: LedgerProcess) -> AsyncIterator[AsyncClient]:
    headers = {"Authorization": process.auth}
    async with AsyncClient(process.url, commitment=Processed, timeout=60, extra_headers=headers) as connected:
        await connected.request_airdrop(OWNER.pubkey(), 10 * SOL)
        yield connected


async def landed(client: AsyncClient, instructions: list[Instruction], *signers: Keypair) -> Signature:
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    message = MessageV0.try_compile(signers[0].pubkey(), instructions, [], blockhash)
    signature: Signature = (await client.send_transaction(VersionedTransaction(message, list(signers)))).value
    while True:
        status = (await client.get_signature_statuses([signature])).value[0]
        if int(status.confirmation_status) >= int(TransactionConfirmationStatus.Confirmed):
            return signature


async def read(client: AsyncClient, signature: Signature) -> Any:
    found = await client.get_transaction(
        signature, encoding="jsonParsed", commitment=Confirmed, max_supported_transaction_version=0
    )
    return found.value.transaction


def words(instruction: ParsedInstruction) -> tuple[str, Any]:
    return instruction.program, instruction.parsed


async def test_a_mint_and_a_transfer_read_as_what_was_signed(client: AsyncClient) -> None:
    owner, mint = str(OWNER.pubkey()), str(MINT.pubkey())
    mine, theirs = (token.associated_token_address(each, mint) for each in (owner, str(FRIEND)))
    instructions = [
        *token.create_mint(OWNER.pubkey(), MINT.pubkey(), MINT_RENT, 1_000_000),
        token.create_token_account(OWNER.pubkey(), FRIEND, MINT.pubkey()),
        token.transfer_checked(OWNER.pubkey(), FRIEND, MINT.pubkey(), 250_000),
        spl.transfer(
            TokenTransferParams(
                program_id=TOKEN_PROGRAM_ID,
                source=Pubkey.from_string(mine),
                dest=Pubkey.from_string(theirs),
                owner=OWNER.pubkey(),
                amount=7,
            )
        ),
        token.memo(OWNER.pubkey(), "grüße"),
        transfer(TransferParams(from_pubkey=OWNER.pubkey(), to_pubkey=FRIEND, lamports=SOL)),
    ]
    transaction = await read(client, await landed(client, instructions, OWNER, MINT))
    amount = {"amount": "250000", "decimals": 6, "uiAmount": 0.25, "uiAmountString": "0.25"}
    whole = {"amount": "1000000", "decimals": 6, "uiAmount": 1.0, "uiAmountString": "1"}
    created = {
        "source": owner,
        "mint": mint,
        "systemProgram": str(SYSTEM_PROGRAM_ID),
        "tokenProgram": str(TOKEN_PROGRAM_ID),
    }
    associated = "spl-associated-token-account"
    expected = [
        (
            "system",
            {
                "type": "createAccount",
                "info": {
                    "source": owner,
                    "newAccount": mint,
                    "lamports": MINT_RENT,
                    "space": 82,
                    "owner": str(TOKEN_PROGRAM_ID),
                },
            },
        ),
        (
            "spl-token",
            {
                "type": "initializeMint2",
                "info": {"mint": mint, "decimals": 6, "mintAuthority": owner, "freezeAuthority": owner},
            },
        ),
        (associated, {"type": "createIdempotent", "info": {**created, "account": mine, "wallet": owner}}),
        (
            "spl-token",
            {
                "type": "mintToChecked",
                "info": {"mint": mint, "account": mine, "mintAuthority": owner, "tokenAmount": whole},
            },
        ),
        (associated, {"type": "createIdempotent", "info": {**created, "account": theirs, "wallet": str(FRIEND)}}),
        (
            "spl-token",
            {
                "type": "transferChecked",
                "info": {
                    "source": mine,
                    "mint": mint,
                    "destination": theirs,
                    "authority": owner,
                    "tokenAmount": amount,
                },
            },
        ),
        (
            "spl-token",
            {
                "type": "transfer",
                "info": {"source": mine, "destination": theirs, "authority": owner, "amount": "7"},
            },
        ),
        ("spl-memo", "grüße"),
        ("system", {"type": "transfer", "info": {"source": owner, "destination": str(FRIEND), "lamports": SOL}}),
    ]
    assert [words(each) for each in transaction.transaction.message.instructions] == expected
    signers = [str(key.pubkey) for key in transaction.transaction.message.account_keys if key.signer]
    assert signers == [owner, mint]

    inner = {group.index: [words(each) for each in group.instructions] for group in transaction.meta.inner_instructions}
    assert set(inner) == {2, 4}  # the two that made an associated account
    kinds = [parsed["type"] for _, parsed in inner[2]]
    assert kinds[0] == "getAccountDataSize"
    assert {"createAccount", "initializeImmutableOwner", "initializeAccount3"} <= set(kinds)
    opened = next(parsed["info"] for _, parsed in inner[4] if parsed["type"] == "createAccount")
    assert (opened["newAccount"], opened["lamports"], opened["space"]) == (theirs, 2_039_280, 165)
    named = next(parsed["info"] for _, parsed in inner[4] if parsed["type"] == "initializeAccount3")
    assert named == {"account": theirs, "mint": mint, "owner": str(FRIEND)}


async def test_the_inner_instructions_keep_their_compiled_form_in_json(client: AsyncClient) -> None:
    friend, mint = Keypair().pubkey(), Keypair()
    await landed(client, token.create_mint(OWNER.pubkey(), mint.pubkey(), MINT_RENT, 1), OWNER, mint)
    instruction = token.create_token_account(OWNER.pubkey(), friend, mint.pubkey())
    signature = await landed(client, [instruction], OWNER)
    found = await client.get_transaction(
        signature, encoding="json", commitment=Confirmed, max_supported_transaction_version=0
    )
    (group,) = found.value.transaction.meta.inner_instructions
    keys = found.value.transaction.transaction.message.account_keys
    assert {str(keys[each.program_id_index]) for each in group.instructions} == {
        str(TOKEN_PROGRAM_ID),
        str(SYSTEM_PROGRAM_ID),
    }


async def test_what_is_not_known_keeps_its_accounts_and_data(client: AsyncClient) -> None:
    """A compute-budget instruction: a cluster does not put it in words either."""
    from solders.compute_budget import ID as COMPUTE_BUDGET_ID
    from solders.compute_budget import set_compute_unit_price

    pay = transfer(TransferParams(from_pubkey=OWNER.pubkey(), to_pubkey=FRIEND, lamports=SOL))
    signature = await landed(client, [set_compute_unit_price(5), pay], OWNER)
    budget, _ = (await read(client, signature)).transaction.message.instructions
    assert isinstance(budget, UiPartiallyDecodedInstruction)
    assert (budget.program_id, budget.accounts) == (COMPUTE_BUDGET_ID, [])


ACCOUNTS = tuple(str(Keypair.from_seed(bytes([seed]) * 32).pubkey()) for seed in range(1, 8))


def token_words(data: bytes, count: int, program: Pubkey = TOKEN_PROGRAM_ID) -> Any:
    return instruction_json(Compiled(program, ACCOUNTS[:count], data, 1)).get("parsed")


def test_a_multisig_and_its_members_are_named() -> None:
    data = b"\x0c" + struct.pack("<QB", 5, 2)
    info = token_words(data, 7)["info"]
    assert info["multisigAuthority"] == ACCOUNTS[3]
    assert info["signers"] == list(ACCOUNTS[4:])
    assert "authority" not in info
    info = token_words(b"\x07" + struct.pack("<Q", 5), 5)["info"]
    assert info["multisigMintAuthority"] == ACCOUNTS[2]


@pytest.mark.parametrize(
    ("data", "count", "kind", "info"),
    [
        (b"\x04" + struct.pack("<Q", 9), 3, "approve", {"source": 0, "delegate": 1, "owner": 2, "amount": "9"}),
        (b"\x05", 2, "revoke", {"source": 0, "owner": 1}),
        (b"\x07" + struct.pack("<Q", 9), 3, "mintTo", {"mint": 0, "account": 1, "mintAuthority": 2, "amount": "9"}),
        (b"\x08" + struct.pack("<Q", 9), 3, "burn", {"account": 0, "mint": 1, "authority": 2, "amount": "9"}),
        (b"\x09", 3, "closeAccount", {"account": 0, "destination": 1, "owner": 2}),
    ],
)
def test_the_other_token_instructions(data: bytes, count: int, kind: str, info: dict[str, Any]) -> None:
    named = {name: ACCOUNTS[each] if isinstance(each, int) else each for name, each in info.items()}
    for program in (TOKEN_PROGRAM_ID, TOKEN_2022_PROGRAM_ID):
        assert token_words(data, count, program) == {"type": kind, "info": named}


def test_a_burn_names_its_exact_amount() -> None:
    info = token_words(b"\x0f" + struct.pack("<QB", 2**64 - 1, 6), 3)["info"]
    assert info["tokenAmount"]["uiAmountString"] == "18446744073709.551615"


PROGRAMS = (
    SYSTEM_PROGRAM_ID,
    TOKEN_PROGRAM_ID,
    TOKEN_2022_PROGRAM_ID,
    ASSOCIATED_TOKEN_PROGRAM_ID,
    MEMO_PROGRAM_ID,
    Pubkey.from_bytes(bytes([9]) * 32),
)
STARTS = st.sampled_from([bytes([tag]) for tag in range(30)] + [struct.pack("<I", tag) for tag in range(12)])


@given(st.sampled_from(PROGRAMS), st.integers(0, 7), STARTS, st.binary(max_size=80))
def test_any_data_has_a_form_that_the_client_can_read(program: Pubkey, count: int, start: bytes, rest: bytes) -> None:
    form = instruction_json(Compiled(program, ACCOUNTS[:count], start + rest, 1))
    if "parsed" in form:
        assert form["program"]
    else:
        assert form["accounts"] == list(ACCOUNTS[:count])
        assert UiPartiallyDecodedInstruction.from_json(json.dumps(form)).program_id == program


def test_an_instruction_of_the_bindings_is_read_back() -> None:
    metas = [AccountMeta(Pubkey.from_string(each), False, False) for each in ACCOUNTS[:2]]
    instruction = transfer(TransferParams(from_pubkey=metas[0].pubkey, to_pubkey=metas[1].pubkey, lamports=2**64 - 1))
    form = instruction_json(Compiled(SYSTEM_PROGRAM_ID, ACCOUNTS[:2], bytes(instruction.data), 1))
    assert form["parsed"]["info"] == {"source": ACCOUNTS[0], "destination": ACCOUNTS[1], "lamports": 2**64 - 1}
