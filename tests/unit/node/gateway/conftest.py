"""Fixtures of the gateway's tests."""

from __future__ import annotations

import pytest
from gateway_parts import tiny_models

from kvasir_console.config import ServedModel


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, ...]:
    """A small mixture of experts and a small dense model, written once."""
    return tiny_models(tmp_path_factory.mktemp("models"))
