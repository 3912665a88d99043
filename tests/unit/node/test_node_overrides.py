"""Settings that a running node does not have in force are told by name, whoever asks and however they were given."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvasir_console import config
from kvasir_console.errors import UsageError
from kvasir_console.node import overrides
from kvasir_console.node.admin import AdminClient, AdminServer

RUNS_WITH = {"node.name": "box", "node.max_experts": "8", "node.poll_s": "5", "node.auto_claim": "yes"}


@asynccontextmanager
async def running(path: Path, handlers: dict[str, Any] | None = None) -> AsyncIterator[AdminClient]:
    """A client of a node that was started with ``RUNS_WITH``."""
    made = overrides.verbs(config.load(None, {}, RUNS_WITH)) if handlers is None else handlers
    async with AdminServer(path / "node.sock", made):
        client = AdminClient(path / "node.sock")
        yield client
        await client.close()


async def ignored(client: AdminClient, flags: dict[str, str]) -> tuple[str, ...]:
    return await overrides.without_effect(client, config.load(None, {}, flags), flags)


async def test_only_what_differs_is_without_effect(runtime: Path) -> None:
    async with running(runtime) as client:
        assert await ignored(client, {}) == ()
        assert await ignored(client, RUNS_WITH) == ()
        assert await ignored(client, {"node.poll_s": "5.0", "node.auto_claim": "1", "engine.device": "cpu"}) == ()
        other = {"node.name": "box", "node.max_experts": "9", "node.poll_s": "5.5", "engine.device": "cuda"}
        assert await ignored(client, other) == ("node.max_experts", "node.poll_s", "engine.device")


async def test_flags_are_refused_with_the_next_step(runtime: Path) -> None:
    flags = {"node.max_experts": "9", "node.name": "box", "node.poll_s": "6"}
    async with running(runtime) as client:
        with pytest.raises(UsageError) as caught:
            await overrides.refuse_ignored(client, config.load(None, {}, flags), flags, "look at it")
        assert "--set node.max_experts, node.poll_s would have no effect" in caught.value.message
        assert "Leave them out to look at it" in caught.value.hint
        await overrides.refuse_ignored(client, config.load(None, {}, RUNS_WITH), RUNS_WITH, "look at it")


async def test_variables_are_named_as_they_were_set(runtime: Path) -> None:
    env = {"KVASIR_NODE_NAME": "box", "KVASIR_NODE_MAX_EXPERTS": "9", "KVASIR_HOME": "/x", "KVASIR_GATEWAY_PORT": "1"}
    async with running(runtime) as client:
        assert await overrides.ignored_environment(client, config.load(None, env), env) == ("KVASIR_NODE_MAX_EXPERTS",)


async def test_a_path_that_is_not_utf_8_is_compared_like_any_other(runtime: Path) -> None:
    env = {"KVASIR_NETWORK_CA_FILE": os.fsdecode(b"/home/j\xe9r/ca.pem")}  # as the environment gives it
    given = config.load(None, env)
    async with running(runtime, overrides.verbs(given)) as client:
        assert await overrides.ignored_environment(client, given, env) == ()
    async with running(runtime) as client:
        assert await overrides.ignored_environment(client, given, env) == ("KVASIR_NETWORK_CA_FILE",)


async def test_a_node_that_cannot_be_asked_follows_none_of_them(runtime: Path) -> None:
    async with running(runtime, {}) as client:
        assert await ignored(client, RUNS_WITH) == tuple(RUNS_WITH)


@pytest.mark.parametrize("settings", [None, [], "node.name", {str(n): n for n in range(257)}])
async def test_a_question_without_settings_is_refused(runtime: Path, settings: Any) -> None:
    async with running(runtime) as client:
        with pytest.raises(UsageError):
            await client.call("differ", settings=settings)


async def test_names_that_are_no_settings_differ(runtime: Path) -> None:
    asked = {"node": 1, "": 1, "x.y": 1, "node.nam": 1, "engine.kv_budget_bytes": 0, "__class__.__name__": "Config"}
    async with running(runtime) as client:
        assert (await client.call("differ", settings=asked))["differ"] == list(asked)
