"""Where a process computes: its owner's settings reach the stage and its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_console.engine.forms import EAGER, REFERENCE
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.loaded import ComputeOptions, load
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError

import builders


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.write_tiny_llama(
        tmp_path_factory.mktemp("model") / "moe.gguf", n_layer=2, n_expert=4, n_expert_used=2
    )


class TakenError(Exception):
    """What a stage was asked to load with is known; no more is needed."""


@pytest.mark.parametrize(
    ("options", "device", "experts", "forms", "expert_forms"),
    [
        (ComputeOptions("cpu", "eager"), "cpu", None, EAGER, None),
        (ComputeOptions("cuda", "eager"), "cuda", None, REFERENCE, None),
        (ComputeOptions("cuda", "eager", expert_device="cpu"), "cuda", "cpu", REFERENCE, EAGER),
        (ComputeOptions("cpu", "eager", expert_device="cuda:1"), "cpu", "cuda:1", EAGER, REFERENCE),
    ],
    ids=["one", "accelerator", "experts in memory", "experts on an accelerator"],
)
async def test_layers_and_experts_are_where_their_owner_wants_them(
    moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: ComputeOptions,
    device: str,
    experts: str | None,
    forms: object,
    expert_forms: object,
) -> None:
    asked: dict[str, Any] = {}

    def taken(*_: Any, **fields: Any) -> Stage:
        asked.update(fields)
        raise TakenError

    monkeypatch.setattr(Stage, "load", taken)
    monkeypatch.setattr(ComputeOptions, "check", lambda _: None)  # this machine need not have them
    fields = {"path": str(moe), "role": "stage", "layers": [0, 2]}
    with pytest.raises(TakenError):
        await load(fields, Compute(), tmp_path, options, lambda *_: None)
    assert (asked["device"], asked["experts_device"]) == (device, experts)
    assert (asked["forms"], asked["expert_forms"]) == (forms, expert_forms)


async def test_a_device_that_is_not_there_is_refused_by_name(moe: Path, tmp_path: Path) -> None:
    fields = {"path": str(moe), "role": "experts", "layer": 0, "experts": [0, 2]}
    for options in (ComputeOptions("cuda:77"), ComputeOptions("cpu", expert_device="cuda:77"), ComputeOptions("disk")):
        with pytest.raises(EngineError) as refusal:
            await load(fields, Compute(), tmp_path, options, lambda *_: None)
        assert refusal.value.code == "no_such_device"


@pytest.mark.parametrize(("kernels", "threads"), [("native", 1), ("eager", 3)])
async def test_torch_keeps_its_threads_only_where_it_multiplies(
    moe: Path, tmp_path: Path, kernels: str, threads: int
) -> None:
    """Those that wait for torch's next operation would take processors from the compiled kernels' threads."""
    compute, before = Compute(), torch.get_num_threads()
    fields = {"path": str(moe), "role": "experts", "layer": 0, "experts": [0, 2]}
    try:
        await load(fields, compute, tmp_path, ComputeOptions("cpu", kernels, threads=3), lambda *_: None)
    except EngineError as error:
        if error.code != "no_compiled_kernels":
            raise
        pytest.skip(error.message)
    else:
        assert await compute.run(torch.get_num_threads) == threads
    finally:
        torch.set_num_threads(before)
        compute.close()
