"""Settings given to a command that finds a node running: they change nothing there, so that is said of each by name.

A setting that the node has in force anyway is none of those: the same command line may start a node and look at it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvasir_console.config import Config, set_by_environment, value_of
from kvasir_console.errors import KvasirError, UsageError
from kvasir_console.node.admin import AdminClient, Handler
from kvasir_console.relay.wire.control import Message

MAX_ASKED = 256


def verbs(config: Config) -> dict[str, Handler]:
    """``differ``, for the admin socket of a node that runs with ``config``: which of these settings are not in force.

    The values stay here; who asks sends his.
    """

    async def differ(message: Message) -> dict[str, Any]:
        asked = message.get("settings")
        if not isinstance(asked, dict) or len(asked) > MAX_ASKED:
            raise UsageError("missing_field", f"settings is needed: at most {MAX_ASKED} names with their values.")
        return {"differ": [name for name, value in asked.items() if _told(config, name) != value]}

    return {"differ": differ}


def _told(config: Config, name: str) -> Any:
    """A setting as a message can carry it: a path need not be UTF-8, a message has to."""
    value = value_of(config, name)
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


async def without_effect(client: AdminClient, config: Config, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the settings ``names`` (``section.key``) that the running node does not have in force.

    Of a node that is too old to be asked, all.

    Raises:
        KvasirError: the node is not there, or fails at it.
    """
    asked = {name: _told(config, name) for name in names}
    if not asked:
        return ()
    try:
        differ = (await client.call("differ", settings=asked)).get("differ")
    except KvasirError as error:
        if error.code != "unknown_verb":
            raise
        differ = None
    return tuple(name for name in asked if not isinstance(differ, list) or name in differ)


async def refuse_ignored(client: AdminClient, config: Config, flags: Iterable[str], do: str) -> None:
    """Raises ``UsageError`` that names every ``--set`` which the running node would ignore.

    Args:
        do: what can be done without them.
    """
    ignored = await without_effect(client, config, flags)
    if ignored:
        them = "it" if len(ignored) == 1 else "them"
        raise UsageError(
            "set_without_effect",
            f"A node runs here already, with other settings: --set {', '.join(ignored)} would have no effect on it.",
            f"Leave {them} out to {do}, or stop the node and start it with {them}.",
        )


async def ignored_environment(
    client: AdminClient, config: Config, env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Environment variables whose settings the running node does not have in force, but those that are a gateway's."""
    found = set_by_environment(os.environ if env is None else env)
    names = {name: variable for variable, name in found.items() if not name.startswith("gateway.")}
    return tuple(names[name] for name in await without_effect(client, config, names))


def flag_names(settings: Iterable[str] | None) -> tuple[str, ...]:
    """The names of ``--set NAME=VALUE`` options."""
    return tuple(setting.partition("=")[0] for setting in settings or ())
