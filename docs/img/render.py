"""Render the dashboard's pictures for the documentation from a real local network at work.

    python docs/img/render.py

starts ``kvasir-console local``'s processes, sends prompts for a minute, and writes ``dashboard-140x40.svg`` and
``dashboard-80x24.svg`` beside this file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvasir_console.local.chat import Gateway
from kvasir_console.local.network import MOE_MODEL, LocalNetwork, Models
from kvasir_console.local.passage import load_models, one_pass
from kvasir_console.node import catalogue
from kvasir_console.paths import Paths
from kvasir_console.screens.app import ConsoleApp
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.source import AttachedSource

SIZES = ((140, 40), (80, 24))
PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):", "The sea is", "To make bread one needs")


async def render(folder: Path, models: Models) -> None:
    async with (
        LocalNetwork(models, experts=2, port=0, directory=None, say=print) as network,
        Gateway(network) as gateway,
    ):
        await one_pass(network, gateway, models, PROMPTS[0], 32, print)
        for prompt in PROMPTS:
            await gateway.complete(models.moe_id, prompt, 64)
            await asyncio.sleep(3)
        members = (*network.experts, *network.ring)
        for columns, rows in SIZES:
            sources = [AttachedSource(member.node_socket, member.name) for member in members]
            app = ConsoleApp(sources, symbols=Symbols.BRAILLE)
            async with app.run_test(size=(columns, rows)) as pilot:
                await app.read_now()
                await pilot.pause()
                picture = app.export_screenshot(title="kvasir-console local")
            (folder / f"dashboard-{columns}x{rows}.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    paths = Paths.from_environment().ensure()
    models = load_models(catalogue.pull("smollm2", paths), catalogue.ensure_upcycled(paths), MOE_MODEL)
    asyncio.run(render(Path(__file__).parent, models))


if __name__ == "__main__":
    main()
