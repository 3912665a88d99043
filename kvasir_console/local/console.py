"""The local network behind the dashboard: its nodes to look at, its models to talk to."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator

from kvasir_console.local.chat import Gateway
from kvasir_console.local.network import RING_MODEL, LocalNetwork, Models
from kvasir_console.local.passage import one_pass, ready
from kvasir_console.local.report import describe
from kvasir_console.screens.app import LocalAction, run_local
from kvasir_console.screens.source import AttachedSource


async def run_console(network: LocalNetwork, gateway: Gateway, models: Models, arguments: argparse.Namespace) -> int:
    """Show the dashboard until the person quits. A prompt goes to the experts; ``/ring`` before it sends it round the
    ring."""
    await network.wait_ready(lambda: ready(network, gateway, models), "a model is not served")
    sources = [AttachedSource(member.node_socket, member.name) for member in (*network.experts, *network.ring)]

    async def prompt(text: str) -> AsyncGenerator[str, None]:
        model = models.moe_id
        if text.startswith("/ring "):
            model, text = RING_MODEL, text.removeprefix("/ring ")
        async for piece in gateway.stream_text(model, text, arguments.max_tokens):
            yield piece

    async def whole_pass() -> str:
        steps: list[str] = []
        report = await one_pass(network, gateway, models, arguments.prompt, arguments.max_tokens, steps.append)
        return describe(report)

    actions = [LocalAction("w", "Whole pass", whole_pass)]
    return await run_local(
        sources,
        prompt,
        prompt_hint="a prompt for the experts; begin it with /ring to send it round the ring",
        actions=actions,
        quit_warning="Quitting stops the whole local network: ledger, gateway and every node.",
    )
