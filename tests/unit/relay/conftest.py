from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tls import TlsFiles, make_tls_files


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets."""
    directory = Path(tempfile.mkdtemp(prefix="kv"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls_files(tmp_path_factory.mktemp("tls"))
