"""Where snapshots come from: a node in this process, or one that runs already and answers on its socket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvasir_console.config import Config
from kvasir_console.node.admin import AdminClient
from kvasir_console.node.overrides import ignored_environment, refuse_ignored
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens import format as fmt


class SnapshotSource(Protocol):
    """One node as the screens know it. Every method raises ``KvasirError`` when the node cannot be reached."""

    @property
    def title(self) -> str:
        """What to call the node before its first snapshot."""
        ...

    async def snapshot(self) -> NodeSnapshot: ...

    async def claim(self) -> str:
        """Claim what is pending. Returns what became of it, for a person to read."""
        ...

    async def unlock(self, passphrase: str) -> None:
        """Raises ``WalletError`` for a wrong passphrase."""
        ...


class EmbeddedNode(Protocol):
    """What the screens need of a ``Node`` in this process."""

    def snapshot(self) -> NodeSnapshot: ...
    async def claim(self) -> Mapping[str, Any]: ...
    async def unlock(self, passphrase: str) -> None: ...


class EmbeddedSource:
    """A node in this process."""

    def __init__(self, node: EmbeddedNode, title: str = "") -> None:
        self._node = node
        self.title = title or "this node"

    async def snapshot(self) -> NodeSnapshot:
        return self._node.snapshot()

    async def claim(self) -> str:
        return claim_text(await self._node.claim())

    async def unlock(self, passphrase: str) -> None:
        await self._node.unlock(passphrase)


class AttachedSource:
    """A node that runs already, over its admin socket.

    Snapshots and acts have a connection each: a claim takes as long as the gateway takes, and the screen must not
    stand still meanwhile.
    """

    def __init__(self, path: Path, title: str = "") -> None:
        self.title = title or path.parent.name
        self._reading = AdminClient(path)
        self._acting = AdminClient(path)

    async def snapshot(self) -> NodeSnapshot:
        return await self._reading.snapshot()

    async def ignored(self, config: Config, flags: Iterable[str]) -> tuple[str, ...]:
        """Environment variables that the node does not follow; raises ``UsageError`` for a ``--set`` of that kind."""
        await refuse_ignored(self._acting, config, flags, "look at it")
        return await ignored_environment(self._acting, config)

    async def claim(self) -> str:
        return claim_text((await self._acting.call("claim"))["claim"])

    async def unlock(self, passphrase: str) -> None:
        await self._acting.call("unlock", passphrase=passphrase)

    async def close(self) -> None:
        await self._reading.close()
        await self._acting.close()


def claim_text(claim: Mapping[str, Any]) -> str:
    """What a gateway answered to a claim: ``{claim_id, micro_kvr, state}``."""
    amount = claim.get("micro_kvr")
    what = fmt.kvr(amount) if type(amount) is int else "What was pending"
    return f"{what} claimed; the claim is {claim.get('state') or 'accepted'}."
