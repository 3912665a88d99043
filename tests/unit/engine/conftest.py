"""The forms a matrix can take, as fixtures; kernels are compiled once and kept beside the checkpoints."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvasir_console.engine import native
from kvasir_console.engine.forms import EAGER, REFERENCE, Forms, compiled


@pytest.fixture(scope="session")
def library(model_cache: Path) -> native.Library:
    """The compiled kernels."""
    library = native.load(model_cache / "kernels")
    if library is None:
        pytest.skip("there is no C++ compiler here")
    return library


@pytest.fixture(scope="session", params=["reference", "eager", "native"])
def forms(request: pytest.FixtureRequest) -> Forms:
    """Each way to hold matrices in turn."""
    if request.param == "native":
        return compiled(request.getfixturevalue("library"))
    if request.param == "eager" and platform.machine() != "x86_64":
        pytest.skip("torch packs half precision on x86 only")
    return {"reference": REFERENCE, "eager": EAGER}[request.param]
