"""Derivation, addresses and signatures against SLIP-0010, other wallets' keys and wrong signatures."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.signing import SigningKey
from solders.keypair import Keypair
from solders.pubkey import Pubkey

from kvasir_console.errors import WalletError
from kvasir_console.wallet import keys

DATA = Path(__file__).parents[2] / "data" / "conformance"
DERIVATION = json.loads((DATA / "wallet_derivation.json").read_text())
SIGNED = json.loads((DATA / "signed_messages.json").read_text())

KEYS = [
    pytest.param(bytes.fromhex(phrase["bip39_seed_hex"]), key, id=f"{phrase['name']}-{key['path']}")
    for phrase in DERIVATION["phrases"]
    for key in phrase["keys"]
]


@pytest.mark.parametrize(("seed", "expected"), KEYS)
def test_keys_of_every_path(seed, expected):
    derived = keys.derive(seed, expected["path"])
    assert derived.hex() == expected["seed32_hex"]
    with keys.Key(derived) as key:
        assert key.address == expected["address"]
        assert keys.decode_address(key.address).hex() == expected["public_key_hex"]
        assert str(key.keypair()) == expected["secret_key_base58"]


def test_the_kvasir_path():
    assert DERIVATION["kvasir_path"] == keys.KVASIR_PATH


@pytest.mark.parametrize("expected", DERIVATION["slip10_ed25519"]["keys"], ids=lambda key: key["path"])
def test_the_first_vector_of_slip_0010(expected):
    derived = keys.derive(bytes.fromhex(DERIVATION["slip10_ed25519"]["seed_hex"]), expected["path"])
    assert derived.hex() == expected["private_key_hex"]
    with keys.Key(derived) as key:
        assert keys.decode_address(key.address).hex() == expected["public_key_hex"]


@pytest.mark.parametrize(
    "path",
    [case["path"] for case in DERIVATION["invalid_paths"]]
    + ["m/", "m/44", "M/44'", "m/44h", "m/044'", "m/٤'", "m/44' ", "m/44''", "m/+1'", "m" + "/0'" * 11, "m/1'\n"],
)
def test_paths_are_refused_before_anything_is_derived(path):
    with pytest.raises(WalletError) as refusal:
        keys.derive(bytes(64), path)
    assert refusal.value.code == "derivation_path"


@settings(max_examples=50)
@given(st.binary(min_size=64, max_size=64), st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=5))
def test_derivation_agrees_with_the_solana_bindings(seed, indices):
    path = "".join(["m", *(f"/{index}'" for index in indices)])
    with keys.Key(keys.derive(seed, path)) as key:
        assert key.address == str(Keypair.from_seed_and_derivation_path(seed, path).pubkey())


@pytest.mark.parametrize("case", SIGNED["messages"], ids=lambda case: case["name"])
def test_signatures_are_those_of_another_signer(case):
    seed = bytearray.fromhex(SIGNED["keys"][case["signer"]]["seed32_hex"])
    message = bytes.fromhex(case["utf8_hex"])
    with keys.Key(seed) as key:
        assert key.address == case["signer"]
        assert key.sign(message) == base64.b64decode(case["signature_base64"])
    assert keys.verify(case["signer"], message, keys.decode_signature(case["signature_base64"]))


@pytest.mark.parametrize("case", SIGNED["wrong_signatures"]["cases"], ids=lambda case: case["name"])
def test_wrong_signatures_are_refused(case):
    wrong = SIGNED["wrong_signatures"]

    def accepted(signature: str) -> bool:
        try:
            return keys.verify(wrong["wallet"], wrong["text"].encode(), keys.decode_signature(signature))
        except WalletError:
            return False

    assert accepted(wrong["right_signature_base64"])
    assert not accepted(case["signature"])


@pytest.mark.parametrize("name", ["sixty_three_bytes", "sixty_five_bytes", "base58_instead_of_base64", "empty"])
def test_what_is_no_signature_is_told_apart_from_a_wrong_one(name):
    (case,) = (case for case in SIGNED["wrong_signatures"]["cases"] if case["name"] == name)
    with pytest.raises(WalletError) as refusal:
        keys.decode_signature(case["signature"])
    assert refusal.value.code == "signature_malformed"


def test_a_signature_has_one_spelling():
    right = SIGNED["wrong_signatures"]["right_signature_base64"]
    assert right.endswith("Q==")
    with pytest.raises(WalletError) as refusal:  # the same bytes, with bits set that no byte has
        keys.decode_signature(right[:-3] + "R==")
    assert refusal.value.code == "signature_malformed"


@pytest.mark.parametrize("size", [0, 63, 65, 128])
def test_signatures_of_another_size_are_false_not_an_error(size):
    assert not keys.verify(SIGNED["wrong_signatures"]["wallet"], b"text", bytes(size))


def test_a_key_of_small_order_signs_nothing():
    # With the identity as public key, R = [S]B would satisfy the equation for any message (RFC 8032, 5.1.7).
    identity = bytes([1]) + bytes(31)
    assert not keys.verify(str(Pubkey.from_bytes(identity)), b"text", identity + bytes(32))


@pytest.mark.parametrize("case", SIGNED["addresses"], ids=lambda case: repr(case["text"][:12]))
def test_addresses(case):
    assert keys.is_address(case["text"]) is case["valid"]
    assert keys.verify(case["text"], b"text", bytes(64)) is False
    if case["valid"]:
        assert keys.encode_address(keys.decode_address(case["text"])) == case["text"]


@given(st.binary(min_size=32, max_size=32))
def test_every_public_key_has_one_address(public_key):
    text = keys.encode_address(public_key)
    assert keys.decode_address(text) == public_key
    assert not keys.is_address(f"1{text}")
    assert not keys.is_address(f"{text}\n")


@given(
    st.text(max_size=60)
    | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=30, max_size=46)
)
def test_addresses_are_those_the_solana_bindings_write(text):
    try:
        expected = str(Pubkey.from_string(text)) == text
    except ValueError:
        expected = False
    assert keys.is_address(text) is expected


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_signing_agrees_with_libsodium(seed, message):
    with keys.Key(bytearray(seed)) as key:
        signature = key.sign(message)
        assert signature == SigningKey(seed).sign(message).signature
        assert keys.verify(key.address, message, signature)
        assert not keys.verify(key.address, message + b".", signature)


def test_a_wiped_key_is_gone():
    seed = bytearray(range(32))
    key = keys.Key(seed)
    key.wipe()
    assert seed == bytes(32)
    for use in (lambda: key.sign(b""), key.keypair):
        with pytest.raises(WalletError) as refusal:
            use()
        assert refusal.value.code == "wallet_locked"


def test_a_key_does_not_show_or_travel():
    seed = bytearray(range(32))
    with keys.Key(seed) as key:
        assert bytes(seed).hex() not in repr(key)
        assert repr(key) == f"Key({key.address})"
        with pytest.raises(TypeError):
            pickle.dumps(key)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_seed_has_32_bytes(size):
    with pytest.raises(WalletError) as refusal:
        keys.Key(bytearray(size))
    assert refusal.value.code == "key_size"
