"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_parts import tiny_models

from kvasir_console.config import ServedModel

import postgresql_server

NewDatabase = Callable[[], str]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, ...]:
    """A small mixture of experts and a small dense model, written once."""
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_server.PostgresqlServer]:
    """A real server; tests that need it are skipped where it cannot run."""
    if reason := postgresql_server.missing():
        pytest.skip(reason)
    server = postgresql_server.PostgresqlServer().start()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> NewDatabase:
    """Gives the URL of an empty database at each call."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").url
    numbers = iter(range(10**6))
    return lambda: f"sqlite:///{tmp_path / 'data' / f'gateway{next(numbers)}.sqlite'}"


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    return new_database()
