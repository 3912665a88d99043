"""Windows fetched ahead: found again as they were, and not once they were touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from node_parts import PLAN, B

from kvasir_console.node.ahead import Ahead, as_if_served, identity


def test_a_window_is_found_for_its_model_and_layers_only(tmp_path: Path) -> None:
    file, ahead = tmp_path / "w.gguf", Ahead()
    file.write_bytes(b"layers")
    ahead.keep(PLAN, PLAN.stages[0], file)
    assert ahead.find(PLAN, PLAN.stages[0]) == (file, identity((file,)))
    assert ahead.find(PLAN.moved(0, B, 5), PLAN.moved(0, B, 5).stages[0]) is not None
    assert ahead.find(PLAN, PLAN.stages[1]) is None
    assert ahead.find(replace(PLAN, model_digest="cd" * 32), PLAN.stages[0]) is None


def test_a_file_that_was_touched_or_lost_has_to_be_verified_again(tmp_path: Path) -> None:
    file, ahead = tmp_path / "w.gguf", Ahead()
    ahead.keep(PLAN, PLAN.stages[0], file)  # it is not there
    assert ahead.find(PLAN, PLAN.stages[0]) is None
    file.write_bytes(b"layers")
    ahead.keep(PLAN, PLAN.stages[0], file)
    file.write_bytes(b"others!")
    assert ahead.find(PLAN, PLAN.stages[0]) is None
    ahead.keep(PLAN, PLAN.stages[0], file)
    file.unlink()
    assert ahead.find(PLAN, PLAN.stages[0]) is None


def test_a_window_is_fetched_as_the_wallet_would_serve_it() -> None:
    holding = as_if_served(PLAN, PLAN.stages[0], B)
    assert holding.describe() == "layers 0 to 14 of m"
    assert holding.stage.window == (0, 0, 15)
