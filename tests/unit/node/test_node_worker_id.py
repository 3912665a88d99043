"""Worker ids as the contract writes them (section 2, Identities)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.node.worker_id import worker_id

WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"


@pytest.mark.parametrize(
    ("name", "slot", "expected"),
    [
        ("gpu-box", 0, "server-HAgk14Jp-gpu-box"),
        ("gpu-box", 1, "server-HAgk14Jp-gpu-box-2"),
        ("gpu-box", 7, "server-HAgk14Jp-gpu-box-8"),
        ("My Machine.local", 0, "server-HAgk14Jp-my-machine-local"),
        ("a" * 40, 0, "server-HAgk14Jp-" + "a" * 24),
        ("x" * 23 + "--tail", 0, "server-HAgk14Jp-" + "x" * 23),
        ("Ünïcode", 0, "server-HAgk14Jp-n-code"),
        ("", 0, "server-HAgk14Jp-node"),
        ("---", 0, "server-HAgk14Jp-node"),
    ],
)
def test_a_worker_id_is_formed_as_the_network_forms_it(name, slot, expected):
    assert worker_id(WALLET, name, slot) == expected


@given(st.text(max_size=60), st.integers(0, 7))
def test_any_name_gives_a_legal_id(name, slot):
    assert re.fullmatch(r"server-HAgk14Jp-[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?(-[2-8])?", worker_id(WALLET, name, slot))
