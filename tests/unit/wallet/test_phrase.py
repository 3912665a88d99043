"""Recovery phrases against the public BIP39 list and the ways people type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mnemonic import Mnemonic

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.wallet import keys, phrase

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "wallet_derivation.json").read_text())


def named(section: str):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in VECTORS[section]])


@named("phrases")
def test_seeds_of_the_public_list(case):
    assert phrase.check(case["mnemonic"]) == case["mnemonic"]
    assert phrase.seed(case["mnemonic"]).hex() == case["bip39_seed_hex"]
    assert phrase.seed(case["mnemonic"], "TREZOR").hex() == case["bip39_seed_with_passphrase_TREZOR_hex"]


@named("invalid_mnemonics")
def test_invalid_phrases_are_refused_with_their_reason(case):
    with pytest.raises(WalletError) as refusal:
        phrase.check(case["input"])
    assert refusal.value.code == f"phrase_{case['reason']}"
    with pytest.raises(WalletError):
        phrase.seed(case["input"])


@named("invalid_mnemonics")
def test_a_refusal_repeats_no_word(case):
    with pytest.raises(WalletError) as refusal:
        phrase.check(case["input"])
    said = set(str(refusal.value).lower().replace(".", " ").replace(",", " ").split())
    assert not said & {word for word in case["input"].split() if len(word) > 3}


@named("normalisation")
def test_phrases_are_read_as_people_type_them(case):
    assert phrase.normalise(case["input"]) == case["canonical"]
    assert phrase.check(case["input"]) == case["canonical"]
    seed = phrase.seed(case["input"])
    assert seed.hex() != case.get("wrong_bip39_seed_if_not_normalised_hex")
    with keys.Key(keys.derive(seed, keys.KVASIR_PATH)) as key:
        assert key.address == case["address"]


def test_the_word_that_is_wrong_is_named_by_its_place():
    words = VECTORS["phrases"][1]["mnemonic"].split()
    with pytest.raises(WalletError, match=r"Word 7 is not"):
        phrase.check(" ".join([*words[:6], "usefull", *words[7:]]))


@pytest.mark.parametrize("words", [12, 24])
def test_new_phrases_are_valid_and_all_different(words):
    made = {phrase.generate(words) for _ in range(20)}
    assert len(made) == 20
    for each in made:
        assert len(each.split()) == words
        assert Mnemonic("english").check(each)
        assert phrase.check(each) == each


@pytest.mark.parametrize("words", [0, 11, 15, 25])
def test_other_lengths_are_not_made(words):
    with pytest.raises(UsageError):
        phrase.generate(words)


@settings(max_examples=50)
@given(st.sampled_from([16, 20, 24, 28, 32]).flatmap(lambda size: st.binary(min_size=size, max_size=size)))
def test_every_phrase_of_the_standard_is_read(entropy):
    written = Mnemonic("english").to_mnemonic(entropy)
    assert phrase.check(written.upper().replace(" ", "\n")) == written


@given(st.text(max_size=200))
def test_no_text_does_worse_than_a_refusal(text):
    with pytest.raises(WalletError) as refusal:  # no such text has a right checksum, for all practical purposes
        phrase.check(text)
    assert refusal.value.code in {"phrase_checksum", "phrase_word", "phrase_length"}
