"""Statements: a fixed vector signed by an ed25519 key of RFC 8032, and every way to tamper with a chain."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire.statement import (
    GENESIS,
    Head,
    Rotation,
    SignedStatement,
    Statement,
    acknowledgement_text,
    follow_rotations,
    held_digest,
    verify_chain,
)
from kvasir_console.wallet.keys import encode_address, verify

# RFC 8032 section 7.1, test 1 and 2: their secret keys.
HUB = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
NEXT = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
WALLET = "9xQeWvG816bUx9EPjHmaT23yvVM2ZWbrrpZb9PusVFin"
WORKER = "box-1"


def address(key: SigningKey) -> str:
    return encode_address(bytes(key.verify_key))


def statement(sequence: int = 1, previous: str = GENESIS, key: SigningKey = HUB, **changes: object) -> Statement:
    return Statement(
        **{
            "key": address(key),
            "wallet": WALLET,
            "worker": WORKER,
            "run": "00112233445566778899aabbccddeeff",
            "sequence": sequence,
            "model_digest": "ab" * 32,
            "shard_digest": GENESIS,
            "bytes_up": 1000 * sequence,
            "bytes_down": 2000 * sequence,
            "rows": 3 * sequence,
            "pairs": 6 * sequence,
            "first_at": 1_790_000_000,
            "last_at": 1_790_000_000 + sequence,
            "previous": previous,
            **changes,
        }
    )


def signed(each: Statement, key: SigningKey = HUB) -> SignedStatement:
    return SignedStatement(each, key.sign(each.text().encode()).signature)


def chain(length: int) -> list[SignedStatement]:
    found, previous = [], GENESIS
    for sequence in range(1, length + 1):
        found.append(signed(statement(sequence, previous)))
        previous = found[-1].statement.hash
    return found


def check(found: list[SignedStatement], head: Head | None = None, keys: tuple[str, ...] = (address(HUB),)) -> Head:
    return verify_chain(found, keys, verify, WALLET, WORKER, head or Head())


def test_the_signed_text_is_sorted_ascii_json_without_spaces() -> None:
    assert statement().text() == (
        'kvasir-statement-v1\n{"bytes_down":2000,"bytes_up":1000,"first_at":1790000000,'
        '"key":"FVen3X669xLzsi6N2V91DoiyzHzg1uAgqiT8jZ9nS96Z","last_at":1790000001,'
        f'"model_digest":"{"ab" * 32}","pairs":6,"previous":"{"0" * 64}","rows":3,'
        f'"run":"00112233445566778899aabbccddeeff","sequence":1,"shard_digest":"{"0" * 64}",'
        f'"wallet":"{WALLET}","worker":"box-1"}}'
    )
    assert statement().hash == hashlib.sha256(statement().text().encode()).hexdigest()


@given(
    st.integers(1, 2**63 - 1),
    st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256),
)
def test_a_statement_reads_back_as_written(sequence: int, counts: list[int], worker: str) -> None:
    names = ("bytes_up", "bytes_down", "rows", "pairs")
    each = statement(sequence=sequence, worker=worker, first_at=0, last_at=9, **dict(zip(names, counts, strict=True)))
    assert Statement.parse(each.text()) == each


@given(st.data())
def test_no_other_text_than_the_written_one_is_read(data: st.DataObject) -> None:
    """Any one character changed: refused, or read as what it says now; never as the original."""
    text = statement().text()
    at = data.draw(st.integers(0, len(text) - 1))
    other = text[:at] + data.draw(st.characters(max_codepoint=0x2FF)) + text[at + 1 :]
    try:
        read = Statement.parse(other)
    except NetworkError:
        assert other != text
    else:
        assert (read == statement()) is (other == text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvasir-statement-v1\n",
        "kvasir-statement-v1\n[]",
        "kvasir-statement-v2\n{}",
        "kvasir-statement-v1\n" + "[" * 100_000,
        statement().text() + " ",
        statement().text().replace('"rows":3', '"rows":3.0'),
        statement().text().replace('"rows":3', '"rows":true'),
        statement().text().replace('"rows":3', '"rows":-1'),
        statement().text().replace('"rows":3', '"rows":9223372036854775808'),
        statement().text().replace('"rows":3', '"rows":3,"rows":3'),
        statement().text().replace('"worker":"box-1"', '"worker":"box-1","zebra":1'),
    ],
)
def test_malformed_texts_are_refused_by_name(text: str) -> None:
    with pytest.raises(NetworkError) as caught:
        Statement.parse(text)
    assert caught.value.code == "statement_malformed"


def test_a_whole_chain_is_accepted_at_once_or_piece_by_piece() -> None:
    found = chain(5)
    head = check(found[2:], check(found[:2]))
    assert head == check(found)
    assert (head.sequence, head.hash) == (5, found[-1].statement.hash)


@given(st.permutations(range(4)))
def test_every_reordering_is_refused(order: list[int]) -> None:
    found = chain(4)
    if order == [0, 1, 2, 3]:
        return
    with pytest.raises(NetworkError) as caught:
        check([found[index] for index in order])
    assert caught.value.code == "statement_chain"


@given(st.integers(0, 3))
def test_a_statement_left_out_is_missed(index: int) -> None:
    found = chain(5)
    del found[index]
    with pytest.raises(NetworkError) as caught:
        check(found)
    assert caught.value.code == "statement_chain"


def test_a_chain_rewritten_after_what_the_node_saw_is_refused() -> None:
    head = check(chain(3))
    other = signed(statement(4, previous=statement(3, "11" * 32).hash))
    with pytest.raises(NetworkError) as caught:
        check([other], head)
    assert caught.value.code == "statement_chain"


def test_forged_statements_are_refused() -> None:
    good = chain(1)[0]
    for bad in (
        SignedStatement(replace(good.statement, rows=99), good.signature),
        SignedStatement(good.statement, bytes(64)),
        SignedStatement(good.statement, good.signature[:-1]),
        signed(statement(key=NEXT), NEXT),
        signed(statement(worker="box-2")),
    ):
        with pytest.raises(NetworkError) as caught:
            check([bad])
        assert caught.value.code == "statement_forged"


@pytest.mark.parametrize("name", ["bytes_up", "bytes_down", "rows", "pairs"])
def test_totals_never_fall(name: str) -> None:
    first = signed(statement())
    second = signed(statement(2, first.statement.hash, **{name: 0}))
    with pytest.raises(NetworkError) as caught:
        check([first, second])
    assert caught.value.code == "statement_shrunk"


def rotation(old: SigningKey = HUB, new: SigningKey = NEXT, signer: SigningKey | None = None) -> Rotation:
    bare = Rotation(address(old), address(new), 1_790_000_000)
    return replace(bare, signature=(signer or old).sign(bare.text().encode()).signature)


def test_a_rotation_is_followed_and_the_chain_goes_on_under_the_new_key() -> None:
    keys = follow_rotations(address(HUB), address(NEXT), [rotation()], verify)
    assert keys == (address(HUB), address(NEXT))
    head = check(chain(2))
    third = signed(statement(3, head.hash, NEXT), NEXT)
    after = check([third], head, keys)
    assert after.sequence == 3
    with pytest.raises(NetworkError) as caught:  # whoever stole the old key cannot go on with it
        check([signed(statement(4, after.hash))], after, keys)
    assert caught.value.code == "statement_forged"


def test_a_key_nobody_signed_for_is_not_followed() -> None:
    forged = rotation(signer=NEXT)
    for rotations in ([], [forged], [rotation(NEXT, HUB)]):
        with pytest.raises(NetworkError) as caught:
            follow_rotations(address(HUB), address(NEXT), rotations, verify)
        assert caught.value.code == "hub_key_changed"
    assert follow_rotations(address(HUB), address(HUB), [], verify) == (address(HUB),)
    assert Rotation.parse(rotation().text(), rotation().signature) == rotation()


def test_what_a_node_acknowledges_names_one_statement() -> None:
    each = statement()
    assert acknowledgement_text(WALLET, WORKER, 1, each.hash) == (
        f'kvasir-acknowledge-v1\n{{"hash":"{each.hash}","sequence":1,"wallet":"{WALLET}","worker":"box-1"}}'
    )
    with pytest.raises(NetworkError):
        acknowledgement_text(WALLET, "two words", 1, each.hash)


def test_what_a_worker_holds_has_one_digest_or_none_that_is_known() -> None:
    one, two = (0, 0, 4, "ab" * 32), (3, 4, 8, "cd" * 32)
    assert held_digest([one]) == "ab" * 32
    body = f'[[0,0,4,"{"ab" * 32}"],[3,4,8,"{"cd" * 32}"]]'
    assert held_digest([two, one]) == hashlib.sha256(body.encode()).hexdigest()
    for unknown in ([], [one, (3, 4, 8, "")], [one, (3, 4, 8, GENESIS)], [(0, 0, 4, "AB" * 32)]):
        assert held_digest(unknown) == GENESIS
