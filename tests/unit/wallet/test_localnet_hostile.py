"""What a hostile or broken client may send to the ledger process."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_clients import SOL
from solders.keypair import Keypair
from solders.message import MessageV0, to_bytes_versioned
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.system_program import TransferParams, transfer
from spl.memo.constants import MEMO_PROGRAM_ID
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.wallet import token
from kvasir_console.wallet.localnet import base58, rpc
from kvasir_console.wallet.localnet.ledger import Ledger
from kvasir_console.wallet.localnet.methods import METHODS
from kvasir_console.wallet.localnet.server import MAX_BODY_BYTES

from ledger_process import LedgerProcess

CALL = {"jsonrpc": "2.0", "id": 7}
HOSTILE: list[tuple[bytes, int]] = [
    (b"", -32700),
    (b"\xff\xfe", -32700),
    (b"{", -32700),
    (b"[" * 60_000, -32700),
    (b'{"a":' * 10_000, -32700),
    (b"9" * 60_000, -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"getSlot","params":[NaN]}', -32700),
    (b"[]", -32600),
    (b"null", -32600),
    (b'"getSlot"', -32600),
    (b'{"jsonrpc":"2.0","id":true,"method":"getSlot"}', -32600),
    (b'{"jsonrpc":"1.0","id":1,"method":"getSlot"}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":["getSlot"]}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":"getSlot","params":{"a":1}}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":"close","params":[]}', -32601),
    (b'{"jsonrpc":"2.0","id":1,"method":"__class__","params":[]}', -32601),
]
BAD_PARAMS: list[tuple[str, list[Any]]] = [
    ("getBalance", []),
    ("getBalance", [None]),
    ("getBalance", ["0OIl"]),
    ("getBalance", ["1" * 31]),
    ("getBalance", ["z" * 60_000]),
    ("getBalance", [str(Pubkey.default()), "finalized"]),
    ("getBalance", [str(Pubkey.default()), {"commitment": "surely"}]),
    ("getBalance", [str(Pubkey.default()), {"minContextSlot": -1}]),
    ("getAccountInfo", [str(MEMO_PROGRAM_ID), {"encoding": "base58"}]),
    ("getAccountInfo", [str(TOKEN_PROGRAM_ID), {"encoding": "base64+zstd"}]),
    ("getAccountInfo", [str(TOKEN_PROGRAM_ID), {"dataSlice": {"offset": 0, "length": 2**64}}]),
    ("getMultipleAccounts", [[str(Pubkey.default())] * 101]),
    ("getMultipleAccounts", [["not one"]]),
    ("getMinimumBalanceForRentExemption", [2**63]),
    ("getMinimumBalanceForRentExemption", [1.5]),
    ("getMinimumBalanceForRentExemption", [True]),
    ("getTokenAccountBalance", [str(Pubkey.default())]),
    ("getTokenSupply", [str(TOKEN_PROGRAM_ID)]),
    ("getTokenAccountsByOwner", [str(Pubkey.default()), {}]),
    ("getTokenAccountsByOwner", [str(Pubkey.default()), {"programId": str(Pubkey.default())}]),
    ("getSignatureStatuses", [["1" * 64] * 257]),
    ("getSignatureStatuses", ["1" * 64]),
    ("getSignaturesForAddress", [str(Pubkey.default()), {"limit": 0}]),
    ("getSignaturesForAddress", [str(Pubkey.default()), {"limit": 1001}]),
    ("getSignaturesForAddress", [str(Pubkey.default()), {"before": "x"}]),
    ("getTransaction", ["z" * 200]),
    ("getBlock", [0, {"transactionDetails": "accounts"}]),
    ("getBlock", [0, {"commitment": "processed"}]),
    ("getBlockTime", ["1"]),
    ("getRecentPrioritizationFees", [["x"]]),
    ("isBlockhashValid", ["zz"]),
    ("requestAirdrop", [str(Pubkey.default()), -1]),
    ("requestAirdrop", [str(Pubkey.default()), 2**64]),
    ("requestAirdrop", [str(Pubkey.default()), "1"]),
    ("sendTransaction", [""]),
    ("sendTransaction", ["z" * 1683]),
    ("sendTransaction", ["AAAA", {"encoding": "base64"}]),
    ("sendTransaction", ["A" * 2000, {"encoding": "base64"}]),
    ("sendTransaction", ["%%%%", {"encoding": "base64"}]),
    ("sendTransaction", ["AQ==", {"encoding": "hex"}]),
    ("simulateTransaction", ["AQ==", {"encoding": "base64", "sigVerify": 1}]),
    ("getFeeForMessage", ["gAEAAQ=="]),
]


async def post(process: LedgerProcess, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=120) as plain:
        return await plain.post(process.url, content=body, headers={"Authorization": process.auth})


@pytest.mark.parametrize(("body", "code"), HOSTILE)
async def test_hostile_bodies_get_the_error_of_the_specification(
    process: LedgerProcess, body: bytes, code: int
) -> None:
    reply = await post(process, body)
    assert reply.status_code == 200
    assert reply.json()["error"]["code"] == code
    assert (await post(process, json.dumps({**CALL, "method": "getHealth"}).encode())).json()["result"] == "ok"


@pytest.mark.parametrize(("method", "params"), BAD_PARAMS)
async def test_bad_parameters_are_named(process: LedgerProcess, method: str, params: list[Any]) -> None:
    reply = (await post(process, json.dumps({**CALL, "method": method, "params": params}).encode())).json()
    assert reply["id"] == 7
    assert reply["error"]["code"] == -32602
    assert len(reply["error"]["message"]) < 200


async def test_only_a_post_of_bounded_size_is_read(process: LedgerProcess) -> None:
    assert (await post(process, b" " * (MAX_BODY_BYTES + 1))).status_code == 413
    async with httpx.AsyncClient(trust_env=False, timeout=120, headers={"Authorization": process.auth}) as plain:
        assert (await plain.get(process.url)).status_code == 405
        assert (await plain.post(process.url + "/admin", content=b"{}")).status_code == 404


async def test_batches_answer_each_call_and_skip_notifications(process: LedgerProcess) -> None:
    calls = [
        {**CALL, "method": "getHealth"},
        {"jsonrpc": "2.0", "method": "getHealth"},
        {"jsonrpc": "2.0", "id": "b", "method": "nothing"},
    ]
    replies = (await post(process, json.dumps(calls).encode())).json()
    assert [each["id"] for each in replies] == [7, "b"]
    assert replies[0]["result"] == "ok"
    assert replies[1]["error"]["code"] == -32601
    assert (await post(process, json.dumps(calls[1]).encode())).status_code == 204
    too_many = (await post(process, json.dumps([calls[0]] * 51).encode())).json()
    assert too_many["error"]["code"] == -32600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
OPTION_NAMES = (
    *("commitment", "preflightCommitment", "encoding", "dataSlice", "minContextSlot", "mint", "programId"),
    *("limit", "before", "until", "accounts", "skipPreflight", "sigVerify", "replaceRecentBlockhash"),
    *("innerInstructions", "maxSupportedTransactionVersion"),
)
OPTIONS = st.dictionaries(
    st.sampled_from(OPTION_NAMES),
    JSON | st.sampled_from(["processed", "confirmed", "finalized", "base64", "jsonParsed", str(TOKEN_PROGRAM_ID)]),
    max_size=4,
)
FIRST = JSON | st.sampled_from([str(TOKEN_PROGRAM_ID), str(Signature.default()), "AQ=="])


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with closing(Ledger.open(tmp_path_factory.mktemp("fuzz"))) as opened:
        yield opened


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(METHODS)), FIRST, st.lists(JSON | OPTIONS, max_size=2))
def test_any_parameters_give_a_result_or_an_error_and_never_an_internal_one(
    ledger: Ledger, method: str, first: Any, more: list[Any]
) -> None:
    body = json.dumps({**CALL, "method": method, "params": [first, *more]}).encode()
    raw = rpc.answer(ledger, METHODS, body)
    assert raw is not None
    reply = json.loads(raw)
    assert reply["id"] == 7
    assert ("result" in reply) != ("error" in reply)
    assert reply.get("error", {}).get("message") != "Internal error"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.booleans(), st.booleans())
def test_well_signed_nonsense_never_breaks_the_ledger(
    ledger: Ledger, changes: list[tuple[int, int]], trial: bool, skip: bool
) -> None:
    """Bytes of a good message are overwritten and the result signed, so that it gets past the signature check."""
    payer = Keypair.from_seed(bytes(31) + b"\x07")
    if ledger.account(payer.pubkey()) is None:
        ledger.airdrop(payer.pubkey(), 10 * SOL)
    blockhash, _ = ledger.latest_blockhash()
    instructions = [
        token.create_token_account(payer.pubkey(), Keypair().pubkey(), payer.pubkey()),
        transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=Keypair().pubkey(), lamports=SOL // 100)),
        token.memo(payer.pubkey(), "nonsense"),
    ]
    message = bytearray(to_bytes_versioned(MessageV0.try_compile(payer.pubkey(), instructions, [], blockhash)))
    for place, value in changes:
        message[place % len(message)] = value
    raw = b"\x01" + bytes(payer.sign_message(bytes(message))) + bytes(message)
    params = [base64.b64encode(raw).decode(), {"encoding": "base64", "skipPreflight": skip}]
    method = "simulateTransaction" if trial else "sendTransaction"
    reply = json.loads(rpc.answer(ledger, METHODS, json.dumps({**CALL, "method": method, "params": params}).encode()))
    assert reply.get("error", {}).get("message") != "Internal error"
    assert ledger.account(payer.pubkey()) is not None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_base58_comes_back(data: bytes) -> None:
    assert base58.decode(base58.encode(data)) == data


@given(st.binary(min_size=32, max_size=32))
def test_base58_agrees_with_the_solana_bindings(data: bytes) -> None:
    assert base58.encode(data) == str(Pubkey.from_bytes(data))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        # The Base58 Encoding Scheme, draft-msporny-base58-03, section 5.
        (b"Hello World!", "2NEpo7TZRRrLZSi2U"),
        (
            b"The quick brown fox jumps over the lazy dog.",
            "USm3fpXnKG5EUBx2ndxBDMPVciP5hGey2Jh4NDv6gmeo1LkMeiKrLJUUBk6Z",
        ),
        (bytes.fromhex("0000287fb4cd"), "11233QC4"),
    ],
)
def test_base58_of_the_draft(data: bytes, text: str) -> None:
    assert base58.encode(data) == text
    assert base58.decode(text) == data
