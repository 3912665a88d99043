"""Placement plans: signed by the hub, checked before anything is loaded."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey
from solders.pubkey import Pubkey

from kvasir_console.errors import NetworkError
from kvasir_console.node.placement.plan import Plan, PlannedStage, sign_plan, verify_plan

HUB = SigningKey(bytes(range(32)))
HUB_KEY = str(Pubkey.from_bytes(bytes(HUB.verify_key)))
A, B = (str(Pubkey.from_bytes(bytes(SigningKey(bytes([number] * 32)).verify_key))) for number in (1, 2))
PLAN = Plan(
    ring="smollm2-135m",
    model="smollm2-135m",
    model_digest="ab" * 32,
    n_layer=30,
    generation=7,
    stages=(PlannedStage(0, A, 0, 15), PlannedStage(1, B, 15, 30)),
)


def hub_signs(message: bytes) -> bytes:
    return HUB.sign(message).signature


def signed_by_hand(body: dict[str, Any]) -> dict[str, Any]:
    """A plan signed without our code: canonical JSON by the standard library."""
    text = "kvasir-plan-v1\n" + json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {"plan": body, "signature": base64.b64encode(hub_signs(text.encode())).decode()}


def refused(signed: Any, key: str = HUB_KEY) -> NetworkError:
    with pytest.raises(NetworkError) as caught:
        verify_plan(signed, key)
    return caught.value


def test_a_signed_plan_comes_back_whole_through_json():
    wire = json.loads(json.dumps(sign_plan(PLAN, hub_signs)))
    assert verify_plan(wire, HUB_KEY) == PLAN


def test_the_signed_text_is_the_canonical_one():
    assert sign_plan(PLAN, hub_signs) == signed_by_hand(PLAN.to_dict())


def test_a_wallet_finds_its_window():
    assert PLAN.stage_of(B) == PlannedStage(1, B, 15, 30)
    assert PLAN.stage_of(HUB_KEY) is None


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "wallet": lambda plan: plan["stages"][0].update(wallet=B),
    "layers": lambda plan: plan["stages"][0].update(layers=[0, 14]),
    "model": lambda plan: plan.update(model="other"),
    "digest": lambda plan: plan.update(model_digest="cd" * 32),
    "generation": lambda plan: plan.update(generation=8),
    "extra": lambda plan: plan.update(note="x"),
    "missing": lambda plan: plan.pop("ring"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_plan_is_not_the_signed_one(change):
    signed = copy.deepcopy(sign_plan(PLAN, hub_signs))
    change(signed["plan"])
    assert refused(signed).code == "plan_not_signed"


def test_another_key_did_not_sign_it():
    error = refused(sign_plan(PLAN, hub_signs), A)
    assert error.code == "plan_not_signed"
    assert "hub key" in error.message
    for key in ("", "not a key", HUB_KEY[:-1]):
        assert refused(sign_plan(PLAN, hub_signs), key).code == "plan_not_signed"


@pytest.mark.parametrize(
    "signed",
    [
        {},
        {"plan": None, "signature": "AAAA"},
        {"plan": [], "signature": None},
        {"plan": PLAN.to_dict()},
        {"plan": PLAN.to_dict(), "signature": "not base64!"},
        {"plan": PLAN.to_dict(), "signature": "é"},
        {"plan": PLAN.to_dict(), "signature": ""},
    ],
)
def test_what_is_not_signed_is_refused(signed):
    assert refused(signed).code in ("plan_not_signed", "plan_malformed")


@pytest.mark.parametrize("field", ["n_layer", "generation", "version"])
def test_a_number_with_a_point_is_refused_even_if_signed(field):
    body = PLAN.to_dict()
    body[field] = float(body[field])
    assert refused(signed_by_hand(body)).code == "plan_malformed"
    with pytest.raises(NetworkError):
        Plan.from_dict(body)


BAD: dict[str, dict[str, Any]] = {
    "gap": {"stages": [{"rank": 0, "wallet": A, "layers": [0, 14]}, {"rank": 1, "wallet": B, "layers": [15, 30]}]},
    "overlap": {"stages": [{"rank": 0, "wallet": A, "layers": [0, 16]}, {"rank": 1, "wallet": B, "layers": [15, 30]}]},
    "late start": {"stages": [{"rank": 0, "wallet": A, "layers": [1, 30]}]},
    "short": {"stages": [{"rank": 0, "wallet": A, "layers": [0, 29]}]},
    "long": {"stages": [{"rank": 0, "wallet": A, "layers": [0, 31]}]},
    "empty stage": {
        "stages": [{"rank": 0, "wallet": A, "layers": [0, 0]}, {"rank": 1, "wallet": B, "layers": [0, 30]}]
    },
    "wrong rank": {"stages": [{"rank": 1, "wallet": A, "layers": [0, 30]}]},
    "three bounds": {"stages": [{"rank": 0, "wallet": A, "layers": [0, 15, 30]}]},
    "no wallet": {"stages": [{"rank": 0, "layers": [0, 30]}]},
    "wallet not base58": {"stages": [{"rank": 0, "wallet": "../../etc", "layers": [0, 30]}]},
    "wallet a number": {"stages": [{"rank": 0, "wallet": 5, "layers": [0, 30]}]},
    "no stages": {"stages": []},
    "stages a number": {"stages": 3},
    "stages a table": {"stages": {"rank": 0}},
    "stages of text": {"stages": ["x"]},
    "too many": {"stages": [{"rank": rank, "wallet": A, "layers": [rank, rank + 1]} for rank in range(257)]},
    "version 2": {"version": 2},
    "version true": {"version": True},
    "generation too large": {"generation": 2**32},
    "generation negative": {"generation": -1},
    "no layers": {"n_layer": 0},
    "short digest": {"model_digest": "ab"},
    "spaced digest": {"model_digest": "ab " * 32},
    "digest a number": {"model_digest": 5},
    "model climbs": {"model": "../../../home/x"},
    "model absolute": {"model": "/etc"},
    "model empty": {"model": ""},
    "model a number": {"model": 5},
    "ring with a slash": {"ring": "a/b"},
    "ring too long": {"ring": "r" * 129},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_plan_that_makes_no_sense_is_refused_though_signed(change):
    error = refused(signed_by_hand({**PLAN.to_dict(), **change}))
    assert error.code == "plan_malformed"
    assert len(error.message) < 300


@pytest.mark.parametrize("field", sorted(PLAN.to_dict()))
def test_every_field_is_needed(field):
    body = PLAN.to_dict()
    del body[field]
    assert field in refused(signed_by_hand(body)).message


def test_fields_of_a_later_version_do_not_disturb():
    assert verify_plan(signed_by_hand({**PLAN.to_dict(), "comment": "x"}), HUB_KEY) == PLAN


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_every_contiguous_plan_survives_signing(widths, generation):
    at, stages = 0, []
    for rank, width in enumerate(widths):
        stages.append(PlannedStage(rank, A if rank % 2 else B, at, at + width))
        at += width
    plan = Plan("r", "m", "00" * 32, at, generation, tuple(stages))
    assert verify_plan(json.loads(json.dumps(sign_plan(plan, hub_signs))), HUB_KEY) == plan


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(PLAN.to_dict(), JSON)))
def test_no_signed_nonsense_breaks_the_reader(change):
    body = {**PLAN.to_dict(), **change}
    try:
        plan = Plan.from_dict(body)
    except NetworkError:
        return
    assert plan.to_dict() == body
