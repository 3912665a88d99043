"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_parts import tiny_models

from kvasir_console.config import ServedModel
from kvasir_console.node.gateway import tables
from kvasir_console.node.gateway.store import Store

import postgresql_server


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
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").url()
    return f"sqlite:///{tmp_path / 'data' / 'gateway.sqlite'}"


@pytest.fixture
def emptied(url: str) -> Iterator[Callable[[], Store]]:
    """Gives one store, with nothing in its tables at each call: much cheaper than a new database."""
    store = Store.open(url)

    def empty() -> Store:
        with store.write() as connection:
            for table in reversed(tables.metadata.sorted_tables):
                if table is not tables.facts:
                    connection.execute(table.delete())
        return store

    yield empty
    store.close()
