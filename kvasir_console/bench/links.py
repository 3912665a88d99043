"""The delay proxy's other end: links of a network that a benchmark or a fault test shapes while it runs.

async with Links(seed=7) as links:
    port = await links.open("node-0", to=8443, rtt_ms=20.0)
    await links.cut("node-0", direction="up", after_bytes=100_000)
"""

from __future__ import annotations

from typing import Self

from kvasir_console.bench.lines import LineChild

__all__ = ["Links"]


class Links:
    """A delay proxy as a child process; it ends with the block. ``delay.py`` says what each call does.

    Every call raises ``RuntimeError`` if the proxy refuses it or is gone.
    """

    def __init__(self, seed: int = 0) -> None:
        self._proxy = LineChild("kvasir_console.bench.delay", "--seed", str(seed))

    async def __aenter__(self) -> Self:
        await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._proxy.__aexit__(*details)

    @property
    def pid(self) -> int:
        return self._proxy.pid

    async def open(self, link: str, to: int, *, host: str = "127.0.0.1", port: int = 0, **shape: float | None) -> int:
        """Forward a loopback port (0: a free one) to port ``to``, shaped by the fields of ``delay.Shape``; the port."""
        return int((await self._proxy.ask("open", link=link, to=to, host=host, port=port, **shape))["port"])

    async def set(self, link: str, **shape: float | None) -> None:
        await self._proxy.ask("set", link=link, **shape)

    async def stall(self, link: str, for_s: float | None = None) -> None:
        await self._proxy.ask("stall", link=link, for_s=for_s)

    async def resume(self, link: str) -> None:
        await self._proxy.ask("resume", link=link)

    async def cut(self, link: str, *, direction: str | None = None, after_bytes: int = 0) -> None:
        await self._proxy.ask("cut", link=link, direction=direction, after_bytes=after_bytes)

    async def down(self, link: str, on: bool = True) -> None:
        await self._proxy.ask("down", link=link, on=on)

    async def stats(self) -> dict[str, dict[str, int]]:
        """By link: ``up_bytes``, ``down_bytes``, ``connections``, ``accepted``, ``cuts``, ``stalls``."""
        links: dict[str, dict[str, int]] = (await self._proxy.ask("stats"))["links"]
        return links
