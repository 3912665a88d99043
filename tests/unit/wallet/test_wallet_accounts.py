"""What can be done to a vault's accounts, on contents that are only values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import KvasirError
from kvasir_console.wallet import accounts
from kvasir_console.wallet.formats import Phrase, RawKey
from kvasir_console.wallet.keys import KVASIR_PATH
from kvasir_console.wallet.vault_format import Account, AccountKind, Contents

CASES = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "wallet_derivation.json").read_text())[
    "phrases"
]
CASE = CASES[2]
KEYS = {key["path"]: key for key in CASE["keys"]}
PHRASE = Phrase(CASE["mnemonic"])
RAW = RawKey(bytes.fromhex(KEYS[None]["seed32_hex"]), KEYS[None]["address"])
OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


def refused(code: str, change, *arguments: object) -> None:
    with pytest.raises(KvasirError) as caught:
        change(*arguments)
    assert caught.value.code == code
    assert PHRASE.words.split()[3] not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_path_of_the_vectors_is_among_the_candidates(case):
    wanted = {key["path"] for key in case["keys"]}
    assert wanted <= set(accounts.CANDIDATE_PATHS)
    assert len(set(accounts.CANDIDATE_PATHS)) == len(accounts.CANDIDATE_PATHS)


def test_a_phrase_and_a_key_make_a_vault():
    assert accounts.of_secret(PHRASE).accounts == (Account(KEYS[KVASIR_PATH]["address"], KVASIR_PATH),)
    assert accounts.of_secret(PHRASE, None).accounts[0].address == RAW.address
    contents = accounts.of_secret(RAW)
    assert contents.accounts == (Account(RAW.address, None, AccountKind.KEY),)
    assert contents.keys == {RAW.address: RAW.seed}
    assert contents.phrase is None


def test_the_next_account_fills_the_first_gap():
    contents = accounts.of_secret(PHRASE)
    for index in (1, 2):
        path = accounts.next_path(contents.accounts)
        assert path == f"m/44'/501'/{index}'/0'"
        contents = accounts.add_derived(contents, path)
    contents = accounts.remove(contents, contents.accounts[1].address)
    assert accounts.next_path(contents.accounts) == "m/44'/501'/1'/0'"


def test_the_same_account_is_not_added_twice():
    contents = accounts.add_key(accounts.of_secret(PHRASE), RAW)
    refused("account_exists", accounts.add_key, contents, RAW)
    refused("account_exists", accounts.add_derived, contents, KVASIR_PATH)
    refused("account_exists", accounts.add_derived, contents, None)  # the raw key's own address
    refused("account_exists", accounts.add_watched, contents, RAW.address)


def test_a_watched_address_becomes_an_account_when_its_key_comes():
    watched = accounts.add_watched(accounts.of_secret(PHRASE), RAW.address)
    by_key, by_path = accounts.add_key(watched, RAW), accounts.add_derived(watched, None)
    assert by_key.accounts[1:] == (Account(RAW.address, None, AccountKind.KEY),)
    assert by_path.accounts[1:] == (Account(RAW.address, None, AccountKind.PHRASE),)


def test_a_vault_holds_one_phrase():
    contents = accounts.add_phrase(accounts.of_secret(RAW), PHRASE, KVASIR_PATH)
    assert contents.phrase == PHRASE.words
    again = accounts.add_phrase(contents, PHRASE, "m/44'/501'/1'/0'")
    assert len(again.accounts) == 3
    refused("vault_other_phrase", accounts.add_phrase, contents, Phrase(CASES[0]["mnemonic"]), KVASIR_PATH)
    refused("vault_no_phrase", accounts.add_derived, accounts.of_secret(RAW), KVASIR_PATH)
    refused("derivation_path", accounts.add_derived, contents, "m/44'/501'/0/0")
    refused("address", accounts.add_watched, contents, OTHER + "1")


def test_the_account_in_use_is_the_first():
    contents = accounts.add_watched(accounts.add_key(accounts.of_secret(PHRASE), RAW), OTHER)
    assert accounts.use(contents, OTHER).accounts[0].address == OTHER
    assert accounts.use(contents, "2").accounts[0].address == RAW.address
    assert {each.address for each in accounts.use(contents, "3").accounts} == {
        each.address for each in contents.accounts
    }


@pytest.mark.parametrize("which", ["", "0", "4", "-1", "\u0661", "1.0", OTHER.lower(), "9" * 5000])
def test_accounts_are_named_by_place_or_address(which):
    contents = accounts.add_watched(accounts.add_key(accounts.of_secret(PHRASE), RAW), OTHER)
    refused("no_such_account", accounts.find, contents.accounts, which)


def test_a_removed_key_is_gone_and_the_last_account_stays():
    contents = accounts.add_key(accounts.of_secret(PHRASE), RAW)
    left = accounts.remove(contents, RAW.address)
    assert left.keys == {}
    refused("last_account", accounts.remove, left, "1")


@given(st.lists(st.sampled_from(["derive", "key", "watch", "use", "remove"]), max_size=12), st.randoms())
def test_whatever_is_done_the_first_account_is_named_once_and_has_its_key(steps, random):
    contents = accounts.of_secret(PHRASE)
    for step in steps:
        which = str(random.randint(1, len(contents.accounts)))
        change = {
            "derive": lambda c: accounts.add_derived(c, accounts.next_path(c.accounts)),
            "key": lambda c: accounts.add_key(c, RAW),
            "watch": lambda c: accounts.add_watched(c, OTHER),
            "use": lambda c, which=which: accounts.use(c, which),
            "remove": lambda c, which=which: accounts.remove(c, which),
        }[step]
        contents = changed(contents, change)
        addresses = [each.address for each in contents.accounts]
        assert addresses
        assert len(set(addresses)) == len(addresses)
        assert set(contents.keys) == {each.address for each in contents.accounts if each.kind is AccountKind.KEY}


def changed(contents: Contents, change) -> Contents:
    try:
        return change(contents)
    except KvasirError:
        return contents
