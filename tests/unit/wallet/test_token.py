"""KVR amounts and instructions. Expected values: the public contract, spl-token's layout, and known addresses."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solders.keypair import Keypair
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.errors import UsageError
from kvasir_console.wallet import token

TREASURY = "8uu2gDKFVtNS79yqYyztJeerEKAh4cnZGdQytCjsYNfF"
VAULT = "38kt9QVdwt8r6auHK57rF1zkHSLq1dPChhJX2FuoY4CF"
"""Treasury of the public network and its KVR account, as the network announces them."""


@pytest.mark.parametrize(
    ("micro", "text"),
    [
        (8945, "0.008945"),
        (0, "0.000000"),
        (1, "0.000001"),
        (1_000_000, "1.000000"),
        (1_000_000_000_000_000, "1000000000.000000"),
        (-1, "-0.000001"),
        (-12_500_000, "-12.500000"),
        (2**64 - 1, "18446744073709.551615"),
    ],
)
def test_amounts_are_written_with_six_decimals(micro: int, text: str) -> None:
    assert token.format_kvr(micro) == text


@pytest.mark.parametrize(
    ("text", "micro"),
    [
        ("0.008945", 8945),
        ("12.5", 12_500_000),
        ("1", 1_000_000),
        (" 0.1\n", 100_000),
        ("007", 7_000_000),
        ("18446744073709.551615", 2**64 - 1),
    ],
)
def test_amounts_are_read_exactly(text: str, micro: int) -> None:
    assert token.parse_kvr(text) == micro


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "1.", ".5", "-1", "+1", "1e3", "1,5", "1_000", "0x10", "1.0000001", "nan", "١", "1 000", "1.2.3"],
)
def test_anything_else_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError) as error:
        token.parse_kvr(text)
    assert error.value.code == "amount_malformed"


@pytest.mark.parametrize("text", ["18446744073709.551616", "99999999999999999999"])
def test_more_than_an_account_can_hold_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        token.parse_kvr(text)
    assert error.value.code == "amount_too_large"


@given(st.integers(0, 2**64 - 1))
def test_amounts_come_back_and_agree_with_decimal(micro: int) -> None:
    text = token.format_kvr(micro)
    assert token.parse_kvr(text) == micro
    assert Decimal(text) == Decimal(micro).scaleb(-6)


def test_the_associated_address_is_that_of_the_public_vault() -> None:
    assert token.associated_token_address(TREASURY, token.DEVNET_MINT) == VAULT


def test_a_transfer_names_its_mint_and_decimals() -> None:
    """spl-token's TransferChecked: tag 12, amount as u64 little-endian, decimals."""
    source, recipient, mint = (Keypair().pubkey() for _ in range(3))
    instruction = token.transfer_checked(source, recipient, mint, 8945)
    assert instruction.program_id == TOKEN_PROGRAM_ID
    assert bytes(instruction.data) == bytes([12]) + (8945).to_bytes(8, "little") + bytes([6])
    accounts = [str(each.pubkey) for each in instruction.accounts]
    assert accounts == [
        token.associated_token_address(str(source), str(mint)),
        str(mint),
        token.associated_token_address(str(recipient), str(mint)),
        str(source),
    ]
    assert [each.is_signer for each in instruction.accounts] == [False, False, False, True]


def test_memos_are_utf8_and_bounded_in_bytes() -> None:
    signer = Keypair().pubkey()
    instruction = token.memo(signer, "ü" * 128)
    assert bytes(instruction.data) == ("ü" * 128).encode()
    assert [each.pubkey for each in instruction.accounts if each.is_signer] == [signer]
    with pytest.raises(UsageError):
        token.memo(signer, "ü" * 129)
