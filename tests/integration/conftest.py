"""Fixtures of tests over real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines import EngineProcess, engine


@pytest.fixture
async def trunk(tmp_path: Path) -> AsyncIterator[EngineProcess]:
    """An engine that has loaded nothing yet."""
    async with engine(tmp_path / "trunk", "trunk") as process:
        yield process
