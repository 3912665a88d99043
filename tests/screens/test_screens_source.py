"""Sources over real sockets: an attached console against the node's own admin server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from console_fakes import SERVING

from kvasir_console.errors import NetworkError, WalletError
from kvasir_console.node.admin import AdminServer
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens.source import AttachedSource, EmbeddedSource, claim_text


class Node:
    """What a node's admin socket stands for."""

    def __init__(self) -> None:
        self.json: dict[str, Any] = SERVING.to_json()
        self.passphrases: list[str] = []
        self.claiming = asyncio.Event()

    def snapshot(self) -> NodeSnapshot:
        return SERVING

    async def claim(self) -> dict[str, Any]:
        await self.claiming.wait()
        return {"claim_id": "c1", "micro_kvr": 2_141_592, "state": "reserved"}

    async def unlock(self, passphrase: str) -> None:
        self.passphrases.append(passphrase)
        if passphrase != "right":
            raise WalletError("wrong_passphrase", "The passphrase is wrong.", "Try again.")

    def verbs(self) -> dict[str, Any]:
        async def status(_: Any) -> dict[str, Any]:
            return {"snapshot": self.json}

        async def claim(_: Any) -> dict[str, Any]:
            return {"claim": await self.claim()}

        async def unlock(message: Any) -> dict[str, Any]:
            await self.unlock(message["passphrase"])
            return {}

        return {"status": status, "claim": claim, "unlock": unlock}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Node, AttachedSource]]:
    node = Node()
    async with AdminServer(tmp_path / "node.sock", node.verbs()):
        source = AttachedSource(tmp_path / "node.sock", "n")
        yield node, source
        await source.close()


async def test_snapshots_claims_and_unlocks_cross_the_socket(served: tuple[Node, AttachedSource]) -> None:
    node, source = served
    assert await source.snapshot() == SERVING
    node.claiming.set()
    assert await source.claim() == "2.141592 KVR claimed; the claim is reserved."
    await source.unlock("right")
    with pytest.raises(WalletError, match="wrong"):
        await source.unlock("wrong")
    assert node.passphrases == ["right", "wrong"]


async def test_a_claim_that_takes_long_does_not_stop_the_snapshots(served: tuple[Node, AttachedSource]) -> None:
    node, source = served
    claim = asyncio.create_task(source.claim())
    assert await asyncio.wait_for(source.snapshot(), 60) == SERVING
    assert not claim.done()
    node.claiming.set()
    assert "claimed" in await claim


async def test_an_act_that_was_given_up_leaves_no_answer_for_the_next(served: tuple[Node, AttachedSource]) -> None:
    node, source = served
    claim = asyncio.create_task(source.claim())
    await source.snapshot()
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    node.claiming.set()
    await source.unlock("right")
    assert node.passphrases == ["right"]


async def test_nobody_there_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(NetworkError) as caught:
        await AttachedSource(tmp_path / "nothing.sock").snapshot()
    assert caught.value.hint


@pytest.mark.parametrize("change", [{"surprise": 1}, {"state": None}, {"relays": 7}, {"state": {"phase": "dancing"}}])
async def test_a_node_of_another_version_is_named_so(
    served: tuple[Node, AttachedSource], change: dict[str, Any]
) -> None:
    node, source = served
    node.json = {**SERVING.to_json(), **change}
    with pytest.raises(NetworkError) as caught:
        await source.snapshot()
    assert "version" in caught.value.hint
    node.json = SERVING.to_json()
    assert await source.snapshot() == SERVING


async def test_an_embedded_node_is_asked_directly() -> None:
    node = Node()
    node.claiming.set()
    source = EmbeddedSource(node, "here")
    assert source.title == "here"
    assert await source.snapshot() is SERVING
    assert "2.141592 KVR" in await source.claim()
    await source.unlock("right")
    assert node.passphrases == ["right"]


def test_a_claim_without_an_amount_invents_none() -> None:
    assert claim_text({}) == "What was pending claimed; the claim is accepted."
    assert claim_text({"micro_kvr": "1"}) == "What was pending claimed; the claim is accepted."
