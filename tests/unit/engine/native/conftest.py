"""The kernels, compiled for three kinds of processor. The cache is kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_blocks import TARGETS

from kvasir_console.engine.native.build import build
from kvasir_console.engine.native.library import Library


@pytest.fixture(scope="session", params=TARGETS)
def library(request: pytest.FixtureRequest, model_cache: Path) -> Library:
    """Two threads at first; a test that sets another number sets them back."""
    path = build(model_cache / "kernels", targets=(TARGETS[request.param],))
    if path is None:
        pytest.skip("no C++ compiler here takes " + " ".join(TARGETS[request.param]))
    kernels = Library(path)
    kernels.set_threads(2)
    return kernels
