"""Snapshots cross the admin socket without losing anything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.node import phase, snapshot
from kvasir_console.node.phase import Phase, PhaseState
from kvasir_console.node.snapshot import NodeSnapshot

number = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=12)
count = st.integers(0, 2**63)
SNAPSHOTS = st.builds(
    NodeSnapshot,
    at_s=number,
    version=text,
    pid=count,
    engine_pid=st.none() | count,
    name=text,
    worker_id=text,
    wallet=text,
    wallet_locked=st.booleans(),
    gateway=text,
    state=st.builds(PhaseState, phase=st.sampled_from(Phase), since_s=number, why=text, next_action=text),
    held=st.none()
    | st.builds(
        snapshot.SliceView,
        kind=st.sampled_from(["experts", "layers"]),
        model=text,
        layer=st.none() | count,
        begin=count,
        end=count,
        total=count,
        tensor_bytes=st.none() | count,
        model_digest=text,
    ),
    relays=st.lists(
        st.builds(
            snapshot.RelayView,
            session=text,
            state=text,
            since_s=number,
            rtt_ms=st.none() | number,
            bytes_up=count,
            bytes_down=count,
            retry_in_s=st.none() | number,
            last_close=text,
        ),
        max_size=3,
    ).map(tuple),
    work=st.builds(
        snapshot.WorkView,
        requests=count,
        rows=count,
        pairs=count,
        tokens=count,
        rows_per_s=number,
        tokens_per_s=number,
        history=st.lists(number, max_size=5).map(tuple),
        expert_pairs=st.lists(count, max_size=5).map(tuple),
    ),
    earnings=st.builds(
        snapshot.EarningsView,
        micro_units=st.none() | count,
        credited_micro_kvr=st.none() | count,
        carried_micro_kvr=st.none() | text,
        pending_micro_kvr=st.none() | count,
        paid_micro_kvr=st.none() | count,
        wallet_micro_kvr=st.none() | count,
        minimum_claim_micro_kvr=st.none() | count,
        claim_state=text,
        last_signature=text,
    ),
    download=st.none() | st.builds(snapshot.DownloadView, what=text, done_bytes=count, total_bytes=st.none() | count),
    machine=st.builds(
        snapshot.MachineView,
        cpu_percent=st.none() | number,
        memory_used_bytes=st.none() | count,
        memory_total_bytes=st.none() | count,
        engine_rss_bytes=st.none() | count,
        accelerator=text,
    ),
    log=st.lists(text, max_size=3).map(tuple),
)
PLAIN = NodeSnapshot(1.0, "0", 1, None, "box", "server-x", "w", True, "https://h", phase.initial(1.0))


@given(SNAPSHOTS)
def test_a_snapshot_survives_json(original):
    received = NodeSnapshot.from_json(json.loads(json.dumps(original.to_json())))
    assert received == original
    assert isinstance(received.state.phase, Phase)
    assert hash(received) == hash(original)  # every list became a tuple again


def test_what_is_not_known_stays_unknown():
    received = NodeSnapshot.from_json(json.loads(json.dumps(PLAIN.to_json())))
    assert received.earnings.pending_micro_kvr is None
    assert received.machine.cpu_percent is None
    assert received.held is None
    zero = replace(PLAIN, earnings=snapshot.EarningsView(pending_micro_kvr=0))
    assert NodeSnapshot.from_json(zero.to_json()).earnings.pending_micro_kvr == 0


def test_no_secret_has_a_place_in_a_snapshot():
    names = json.dumps(PLAIN.to_json())
    assert not any(word in names for word in ("token_value", "passphrase", "secret", "phrase"))


@pytest.mark.parametrize(
    "change",
    [{"state": {"phase": "flying", "since_s": 1.0}}, {"relays": None}, {"held": {"kind": "x"}}, {"colour": "red"}],
)
def test_another_shape_is_refused(change):
    with pytest.raises((TypeError, KeyError, ValueError)):
        NodeSnapshot.from_json({**PLAIN.to_json(), **change})
    with pytest.raises(KeyError):
        NodeSnapshot.from_json({})
