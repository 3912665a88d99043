"""An engine's data socket as the network sees it: whoever connects says first what the connection is for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir_console.relay.wire.preamble import SIZE, Preamble

TIMEOUT_S = 120.0


@dataclass
class Link:
    """One connection an engine accepted."""

    preamble: Preamble
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Engine:
    """A data socket as an engine has one: every connection opens with a preamble."""

    def __init__(self, path: Path, behave: Callable[[Link], Awaitable[None]] | None = None) -> None:
        self.path = path
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self._behave = behave
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            link = Link(Preamble.decode(await reader.readexactly(SIZE)), reader, writer)
            self.links.put_nowait(link)
            if self._behave is not None:
                await self._behave(link)
            else:
                await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def next_link(self) -> Link:
        return await asyncio.wait_for(self.links.get(), TIMEOUT_S)
