"""The node's money: what the gateway and the chain state, and a claim that can be verified."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey
from node_parts import address

from kvasir_console.config import WalletConfig
from kvasir_console.errors import KvasirError, LedgerError, NetworkError, WalletError
from kvasir_console.node.accounts import Accounts
from kvasir_console.node.market import Market
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.signed import ActionKind, action_text, parse_action, rfc3339
from kvasir_console.wallet.chain_cluster import ClusterPin
from kvasir_console.wallet.keys import verify

from ledger_process import LedgerProcess

KEY = SigningKey(bytes(range(32)))
WALLET = address(KEY)
HOST, GATEWAY = "127.0.0.1:8791", "http://127.0.0.1:8791"
NOWHERE = WalletConfig(rpc_url="http://127.0.0.1:1")
TOTALS = {
    "microUnits": 1_277_952,
    "creditedMicroKvr": 12_779,
    "carriedMicroKvr": "13/25",
    "pendingMicroKvr": 12_779,
    "paidMicroKvr": 0,
}


class Signer:
    """Stands in for the signer process at its seam; the signature is a real one."""

    def __init__(self, *, locked: bool = False) -> None:
        self.locked = locked

    async def sign_action(self, action: ActionKind, details: dict, challenge: dict) -> tuple[str, bytes]:
        if self.locked:
            raise WalletError("wallet_locked", "The wallet is locked.", "Unlock it first.")
        nonce, issued, expires = (challenge[key] for key in ("nonce", "issued_at", "expires_at"))
        text = action_text(HOST, action, WALLET, details, nonce, issued, expires)
        return text, KEY.sign(text.encode()).signature


class Gate:
    def __init__(self, totals: Any = None, claims: Any = ()) -> None:
        self.totals = TOTALS if totals is None else totals
        self.claim_list = list(claims) if isinstance(claims, tuple) else claims
        self.config: dict[str, Any] = {"minimumClaimMicroKvr": 1, "extensions": {"signed_actions": 1}}
        self.claimed: list[dict[str, Any]] = []
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        now = datetime.now(UTC)
        match request.url.path:
            case "/api/config":
                reply: Any = self.config
            case "/api/action/challenge":
                assert json.loads(request.content) == {"wallet": WALLET, "action": "claim"}
                expires = rfc3339(now + timedelta(minutes=5))
                reply = {"nonce": "n" * 24, "issued_at": rfc3339(now), "expires_at": expires, "domain": HOST}
            case "/api/node/claim":
                self.claimed.append(json.loads(request.content))
                reply = {"claim_id": "c1", "micro_kvr": 12_779, "state": "reserved"}
                self.claim_list = [{"id": "c1", "state": "reserved", "signature": None}]
                self.totals = {**TOTALS, "pendingMicroKvr": 0}
            case path if path == f"/api/node/claims/{WALLET}":
                reply = {"claims": self.claim_list}
            case path if path == f"/api/node/status/{WALLET}":
                reply = {"owner": WALLET, "totals": self.totals, "nodes": []}
            case _:
                return httpx.Response(404, json={"error": "unknown"})
        return httpx.Response(self.status, json=reply)


def accounts(
    gate: Gate, signer: Signer | None = None, config: WalletConfig = NOWHERE, home: Path = Path("/nonexistent")
) -> Accounts:
    market = Market(GATEWAY, transport=httpx.MockTransport(gate))
    return Accounts(market, signer or Signer(), WALLET, config, Paths.from_environment({"KVASIR_HOME": str(home)}))


async def test_before_the_first_answer_nothing_is_known():
    view = accounts(Gate()).view()
    assert (view.micro_units, view.pending_micro_kvr, view.wallet_micro_kvr) == (None, None, None)


async def test_the_gateways_numbers_are_shown_exactly():
    gate = Gate(
        claims=({"id": "a", "state": "confirmed", "signature": "S1"}, {"id": "b", "state": "sent", "signature": "S2"})
    )
    money = accounts(gate)
    await money.refresh()
    view = money.view()
    assert (view.micro_units, view.credited_micro_kvr, view.carried_micro_kvr) == (1_277_952, 12_779, "13/25")
    assert (view.pending_micro_kvr, view.paid_micro_kvr) == (12_779, 0)
    assert (view.claim_state, view.last_signature) == ("sent", "S2")
    assert view.wallet_micro_kvr is None  # no ledger answers, and that is no zero


async def test_a_gateway_that_cannot_be_read_leaves_the_last_values():
    gate = Gate()
    money = accounts(gate)
    await money.refresh()
    gate.status = 503
    with pytest.raises(NetworkError):
        await money.refresh()
    assert money.view().pending_micro_kvr == 12_779


async def test_a_claim_is_signed_and_verifiable_without_our_signer():
    gate = Gate()
    money = accounts(gate)
    claim = await money.claim()
    assert (claim["micro_kvr"], claim["state"]) == (12_779, "reserved")
    (sent,) = gate.claimed
    assert sent["owner"] == WALLET
    assert verify(WALLET, sent["message"].encode(), base64.b64decode(sent["signature"]))
    action = parse_action(sent["message"])
    action.check(domain=HOST, kind="claim", wallet=WALLET, nonce="n" * 24, now=datetime.now(UTC))
    assert money.view().pending_micro_kvr == 0
    assert money.view().claim_state == "reserved"


@pytest.mark.parametrize(("minimum", "pending"), [(1, 0), (12_780, 12_779), (1_000_000, 999_999), (0, 0)])
async def test_below_the_minimum_nothing_is_signed(minimum, pending):
    gate = Gate(totals={**TOTALS, "pendingMicroKvr": pending})
    gate.config["minimumClaimMicroKvr"] = minimum
    money = accounts(gate)
    money.learn(await money._market.config())
    with pytest.raises(LedgerError) as caught:
        await money.claim()
    assert caught.value.code == "nothing_to_claim"
    assert f"{pending} micro-KVR" in caught.value.message
    assert gate.claimed == []


async def test_the_minimum_is_asked_for_when_it_is_not_known_yet():
    gate = Gate()
    gate.config["minimumClaimMicroKvr"] = 20_000
    with pytest.raises(LedgerError, match="20000"):
        await accounts(gate).claim()


async def test_a_locked_wallet_claims_nothing():
    gate = Gate()
    with pytest.raises(WalletError) as caught:
        await accounts(gate, Signer(locked=True)).claim()
    assert caught.value.code == "wallet_locked"
    assert gate.claimed == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def _no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: Accounts) -> None:
        return None

    monkeypatch.setattr(Accounts, "_refresh_balance", nothing)


@pytest.mark.usefixtures("_no_chain")
@given(totals=JSON | st.dictionaries(st.sampled_from(sorted(TOTALS)), JSON), claims=JSON)
async def test_nonsense_about_money_is_not_shown_as_money(totals, claims):
    money = accounts(Gate(totals if totals is not None else [], claims))
    try:
        await money.refresh()
    except KvasirError:
        return
    view = money.view()
    for value in (view.micro_units, view.credited_micro_kvr, view.pending_micro_kvr, view.paid_micro_kvr):
        assert value is None or type(value) is int
    assert view.carried_micro_kvr is None or "/" in view.carried_micro_kvr


# The balance on chain


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    process = LedgerProcess(tmp_path_factory.mktemp("accounts")).start()
    yield process
    process.stop()


async def test_the_balance_comes_from_a_real_ledger(ledger, tmp_path: Path):
    config = WalletConfig(rpc_url=ledger.url, rpc_auth_file=str(ledger.auth_file))
    money = accounts(Gate(), config=config, home=tmp_path)
    await money.refresh()
    assert money.view().wallet_micro_kvr == 0  # asked and answered: this zero is true


async def test_another_cluster_than_the_wallets_shows_no_balance(ledger, tmp_path: Path, caplog):
    """The same file as the wallet's commands keep: what either met first holds for both."""
    config = WalletConfig(rpc_url=ledger.url, rpc_auth_file=str(ledger.auth_file))
    paths = Paths.from_environment({"KVASIR_HOME": str(tmp_path)})
    pin = ClusterPin(paths.state / "clusters.json", WALLET)
    pin.accept("4uhcVJyU9pJkvQyS88uRDiswHXSCkY3zQawwpjk2NsNY")
    money = accounts(Gate(), config=config, home=tmp_path)
    caplog.set_level("INFO", logger="kvasir_console.node.accounts")
    for _ in range(3):
        await money.refresh()
    assert money.view().wallet_micro_kvr is None
    pin.accept(ledger.genesis)
    await money.refresh()
    assert money.view().wallet_micro_kvr == 0
    told = [record.getMessage() for record in caplog.records if record.name == "kvasir_console.node.accounts"]
    assert [line.partition(":")[0] for line in told] == [  # once each, however often it is asked
        "the balance on chain is not refreshed",
        "the balance on chain is refreshed again",
    ]


async def test_the_first_cluster_that_a_node_meets_is_pinned(ledger, tmp_path: Path):
    config = WalletConfig(rpc_url=ledger.url, rpc_auth_file=str(ledger.auth_file))
    await accounts(Gate(), config=config, home=tmp_path).refresh()
    paths = Paths.from_environment({"KVASIR_HOME": str(tmp_path)})
    assert ClusterPin(paths.state / "clusters.json", WALLET).pinned == ledger.genesis


async def test_a_missing_authorization_file_costs_the_balance_only(ledger, tmp_path: Path):
    config = WalletConfig(rpc_url=ledger.url, rpc_auth_file=str(tmp_path / "gone"))
    money = accounts(Gate(), config=config, home=tmp_path)
    await money.refresh()
    assert money.view().wallet_micro_kvr is None
    assert money.view().pending_micro_kvr == 12_779
