"""One or several RPCs of one cluster behind one question: when the first cannot answer, the next is asked.

An RPC that wants a pause gets it. One that is far behind the others, or does not answer, is asked last for a while. One
that belongs to another cluster is never asked: what it does not know proves nothing.
Asking a second RPC is safe for every request but an airdrop: a transaction that is sent twice lands once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Commitment

from kvasir_console import __version__
from kvasir_console.errors import ConfigError, KvasirError, LedgerError, NetworkError
from kvasir_console.wallet.chain_errors import RateLimitedError, ask

MAX_LAG_SLOTS = 150
"""Slots behind the others from which an RPC counts as stale: as long as a blockhash is usable."""
SURVEY_S = 60.0
"""Pause between two comparisons of several RPCs."""
PATIENCE_S = 20.0
"""Longest pause that is waited for within one question."""
REST_S = 1.0
MAX_REST_S = 30.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ROUNDS = 2
"""A connection that the other side has closed meanwhile fails once."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Pin(Protocol):
    """Which cluster this is supposed to be."""

    def check(self, genesis: str, url: str) -> None:
        """Raises ``LedgerError`` ``cluster_changed`` when ``url`` leads to another cluster."""
        ...


class _FirstSeen:
    """Without a pin: the cluster of the first RPC that answers is that of all."""

    def __init__(self) -> None:
        self._genesis = ""

    def check(self, genesis: str, url: str) -> None:
        self._genesis = self._genesis or genesis
        if genesis != self._genesis:
            raise LedgerError(
                "cluster_changed",
                f"The RPC at {host_of(url)} belongs to another cluster than the others.",
                "Correct wallet.rpc_url and wallet.rpc_fallbacks.",
            )


@dataclass(slots=True)
class _Endpoint:
    url: str
    client: Any
    known: bool = False
    """Its genesis hash was checked."""
    lags: bool = False
    failures: int = 0
    rests_until_s: float = 0.0
    pause: RateLimitedError | None = None
    """It asked for the pause it has."""


class Endpoints:
    """Connections to the RPCs of a cluster, in the order of preference."""

    def __init__(
        self,
        urls: Sequence[str],
        auth: str | None,
        *,
        commitment: Commitment,
        timeout_s: float,
        pin: Pin | None = None,
        patience_s: float = PATIENCE_S,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            auth: value of the ``Authorization`` header. Only the first URL gets it.

        Raises:
            ConfigError: ``rpc_url_insecure``.
        """
        for url in urls:
            check_rpc_url(url)
        self._endpoints = [
            _Endpoint(url, _client(url, auth if place == 0 else None, commitment, timeout_s))
            for place, url in enumerate(urls)
        ]
        self._pin = pin if pin is not None else _FirstSeen() if len(urls) > 1 else None
        self._patience_s = patience_s
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._surveyed_s: float | None = None

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.client.close()

    async def ask(self, what: str, request: Callable[[Any], Awaitable[_T]], *, once: bool = False) -> _T:
        """The answer of the first RPC that gives one.

        Args:
            what: the request in a few words, for messages.
            request: makes it, or several that have to be answered by the same RPC, with a client.
            once: ask one RPC, once: for what may not happen twice.

        Raises:
            NetworkError: none answers; ``RateLimitedError`` when all want a longer pause than is waited for here.
            LedgerError: the RPC refused, or no RPC belongs to the right cluster.
        """
        patience_ends_s = self._monotonic_s() + self._patience_s
        rounds = 0
        while True:
            await self._survey()
            failed: list[KvasirError] = []
            for endpoint in self._willing():
                try:
                    await self._identify(endpoint)
                    answer = await ask(what, request(endpoint.client))
                except (NetworkError, LedgerError) as error:
                    if not _concerns_the_rpc(error):
                        raise
                    self._rest(endpoint, error)
                    if once:
                        raise
                    failed.append(error)
                else:
                    endpoint.failures = 0
                    return answer
            pause_s = self._pause_s()
            rounds += 1
            if pause_s is not None and self._monotonic_s() + pause_s <= patience_ends_s and not once:
                await self._sleep(pause_s)
            elif rounds >= _ROUNDS or not any(each.code == "rpc_unreachable" for each in failed):
                raise _worst(failed, self._endpoints)

    async def ask_each(self, what: str, request: Callable[[Any], Awaitable[_T]]) -> list[_T]:
        """The answers of all RPCs that give one and do not lag: for what one alone may be wrong about."""
        await self._survey()
        answers = []
        for endpoint in self._willing():
            if endpoint.lags:
                continue
            try:
                await self._identify(endpoint)
                answers.append(await ask(what, request(endpoint.client)))
            except (NetworkError, LedgerError) as error:
                if not _concerns_the_rpc(error):
                    raise
                self._rest(endpoint, error)
        return answers

    @property
    def several(self) -> bool:
        return len(self._endpoints) > 1

    def _willing(self) -> list[_Endpoint]:
        """The endpoints that did not ask for a pause; those that lag, or failed a moment ago, come last."""
        now_s = self._monotonic_s()
        asked = [each for each in self._endpoints if each.pause is None or each.rests_until_s <= now_s]
        return sorted(asked, key=lambda each: (each.lags, each.rests_until_s > now_s))

    def _pause_s(self) -> float | None:
        """Seconds until the first RPC that asked for a pause can be asked again, if all did."""
        now_s = self._monotonic_s()
        if any(each.pause is None or each.rests_until_s <= now_s for each in self._endpoints):
            return None
        return min(each.rests_until_s for each in self._endpoints) - now_s

    def _rest(self, endpoint: _Endpoint, error: KvasirError) -> None:
        endpoint.failures += 1
        rest_s = min(REST_S * 2 ** min(endpoint.failures - 1, 10), MAX_REST_S)
        endpoint.pause = None
        if isinstance(error, RateLimitedError):
            endpoint.pause = error
            if error.retry_after_s is not None:
                rest_s = error.retry_after_s
        endpoint.rests_until_s = self._monotonic_s() + rest_s
        level = logging.INFO if self.several else logging.DEBUG  # the failure of the only one is the caller's to tell
        level = logging.WARNING if error.code == "cluster_changed" else level
        _log.log(level, "the RPC at %s rests for %.1f s: %s", host_of(endpoint.url), rest_s, error.message)

    async def _identify(self, endpoint: _Endpoint) -> None:
        if endpoint.known or self._pin is None:
            return
        genesis = str((await ask("its genesis hash", endpoint.client.get_genesis_hash())).value)
        self._pin.check(genesis, endpoint.url)
        endpoint.known = True

    async def _survey(self) -> None:
        """Compare the slots of several RPCs from time to time: one alone cannot be seen to lag."""
        now_s = self._monotonic_s()
        if len(self._endpoints) == 1 or (self._surveyed_s is not None and now_s - self._surveyed_s < SURVEY_S):
            return
        self._surveyed_s = now_s
        # One after the other and in their order: were all asked at once, a fallback of another cluster could answer
        # first and be taken for the right one.
        known = []
        for endpoint in self._willing():
            try:
                await self._identify(endpoint)
                known.append(endpoint)
            except (NetworkError, LedgerError) as error:
                self._rest(endpoint, error)
        slots = await asyncio.gather(*(self._slot(each) for each in known))
        newest = max((slot for _, slot in slots), default=0)
        for endpoint, slot in slots:
            lagged, endpoint.lags = endpoint.lags, 0 <= slot < newest - MAX_LAG_SLOTS
            if endpoint.lags and not lagged:
                _log.warning("the RPC at %s is %d slots behind the others", host_of(endpoint.url), newest - slot)

    async def _slot(self, endpoint: _Endpoint) -> tuple[_Endpoint, int]:
        """Its newest slot, or -1 without an answer."""
        try:
            return endpoint, int((await ask("its slot", endpoint.client.get_slot(Commitment.PROCESSED))).value)
        except (NetworkError, LedgerError) as error:
            self._rest(endpoint, error)
            return endpoint, -1


def check_rpc_url(rpc_url: str) -> None:
    """Raises ``ConfigError`` for anything but https, or http to this machine."""
    parts = urlsplit(rpc_url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname in _LOOPBACK:
        return
    raise ConfigError(
        "rpc_url_insecure",
        f"The RPC address {rpc_url!r} is neither https nor on this machine.",
        "Use an https:// address in wallet.rpc_url and wallet.rpc_fallbacks.",
    )


def host_of(url: str) -> str:
    """The host of an RPC: its path or query may hold a key."""
    parts = urlsplit(url)
    return parts.hostname or "?"


def _client(url: str, auth: str | None, commitment: Commitment, timeout_s: float) -> Any:
    headers = {"User-Agent": f"kvasir-console/{__version__}"}  # some public RPCs refuse a library's own name
    if auth is not None:
        headers["Authorization"] = auth
    client = AsyncClient(url, commitment=commitment, timeout=timeout_s, extra_headers=headers, max_transport_retries=0)
    if urlsplit(url).hostname in _LOOPBACK:
        # Talk to this machine directly: HTTP_PROXY without a NO_PROXY would send the token and the request elsewhere.
        # ``AsyncClient`` has no such option, so its session is exchanged before it is used.
        provider = client._provider
        provider.session = type(provider.session)(trust_env=False, timeout=timeout_s)
    return client


def _concerns_the_rpc(error: KvasirError) -> bool:
    """Whether another RPC may do better; what the ledger says of a transaction, each of them says."""
    return isinstance(error, NetworkError) or error.code in ("rpc_internal", "cluster_changed")


def _worst(failed: list[KvasirError], endpoints: list[_Endpoint]) -> KvasirError:
    """The failure to tell: a wrong cluster before all else, then that of the preferred RPC."""
    pauses = [each.pause for each in endpoints if each.pause is not None]
    every = [*failed, *pauses]
    return next((each for each in every if each.code == "cluster_changed"), every[0])
