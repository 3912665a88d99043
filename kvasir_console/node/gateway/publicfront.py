"""The gateway command as a public front: TLS and forwarding here; a gateway in the operator's LAN does the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

from kvasir_console.config import Config
from kvasir_console.relay.front import Front, server_context
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.upstream import RawUpgrades, parse_upstream

__all__ = ["PublicFront"]


class PublicFront:
    """``async with`` listens. Raises ``ConfigError`` or ``SystemResourceError`` as ``Front`` does."""

    def __init__(self, config: Config) -> None:
        gateway = config.gateway
        self._tls = gateway.tls_cert != ""
        upstream = parse_upstream(gateway.upstream, client_context(config.network.ca_file))
        self._front = Front(
            RawUpgrades(upstream),
            upstream,
            host=gateway.host,
            port=gateway.port,
            tls=server_context(Path(gateway.tls_cert), Path(gateway.tls_key)) if self._tls else None,
        )
        self._host = gateway.host

    @property
    def port(self) -> int:
        return self._front.port

    @property
    def public_url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self._host}:{self.port}"

    async def wait(self) -> None:
        """For ever: a front has no parts that end by themselves."""
        await asyncio.Event().wait()

    async def __aenter__(self) -> PublicFront:
        await self._front.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._front.close()
