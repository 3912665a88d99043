"""A client of the local gateway: the public HTTP interface over TLS, as any program would use it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from kvasir_console.errors import EngineError, NetworkError, RequestError
from kvasir_console.local.certificates import Certificates
from kvasir_console.node.market import USER_AGENT, unreachable
from kvasir_console.relay.tls import client_context

REQUEST_TIMEOUT_S = 300.0


class Served(Protocol):
    """A network with a gateway, and what its operator's clients need."""

    @property
    def url(self) -> str: ...
    @property
    def certificates(self) -> Certificates: ...
    @property
    def service_token(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One completed request. Times are the client's own."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    ttft_ms: float
    tokens_per_s: float
    kvasir: dict[str, Any]


class Gateway:
    """HTTP to the gateway of a network on this machine, trusting its authority and nothing else of it."""

    def __init__(self, network: Served) -> None:
        self._client = httpx.AsyncClient(
            base_url=network.url,
            verify=client_context(network.certificates.authority),
            headers={"User-Agent": USER_AGENT},
            timeout=httpx.Timeout(20.0, read=REQUEST_TIMEOUT_S),
            trust_env=False,
        )
        self._service = {"X-Kvasir-Service-Token": network.service_token}

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """An operator's read, with the service token."""
        try:
            response = await self._client.get(path, headers=self._service)
        except httpx.HTTPError as error:
            raise unreachable(str(self._client.base_url), error) from error
        if response.status_code != 200:
            raise NetworkError(f"http_{response.status_code}", f"The gateway answers {path} with {response.text[:200]}")
        data: dict[str, Any] = response.json()
        return data

    async def complete(
        self,
        model: str,
        prompt: str,
        max_tokens: int,
        *,
        experts: str = "network",
        trace: bool = False,
        sampling: Mapping[str, Any] | None = None,
        on_text: Callable[[], None] | None = None,
        idempotency_key: str = "",
    ) -> Answer:
        """A streamed completion of a raw prompt, of exactly ``max_tokens``. Raises what was answered.

        Args:
            sampling: fields of the request that say how tokens are chosen (default: greedily).
            on_text: called for each piece of text, as it comes.
            idempotency_key: the same request under the same key is the same answer, told from its beginning.
        """
        text: list[str] = []
        started = time.monotonic()
        first = ended = 0.0
        usage: dict[str, Any] = {}
        kvasir: dict[str, Any] = {}
        extension = {"experts": experts, "trace": trace} if trace or experts != "network" else None
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        events = self._stream(model, prompt, max_tokens, extension, ignore_eos=True, sampling=sampling, headers=headers)
        async for event in events:
            for choice in event.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    first = first or time.monotonic()
                    text.append(piece)
                    if on_text is not None:
                        on_text()
            usage, kvasir = event.get("usage") or usage, event.get("kvasir") or kvasir
        ended = time.monotonic()
        tokens = tuple(kvasir.get("tokens", ()))
        decode_s = ended - first
        return Answer(
            text="".join(text),
            tokens=tokens,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            ttft_ms=(first - started) * 1e3,
            tokens_per_s=(len(tokens) - 1) / decode_s if len(tokens) > 1 and decode_s > 0 else 0.0,
            kvasir=kvasir,
        )

    async def stream_text(self, model: str, prompt: str, max_tokens: int) -> AsyncGenerator[str, None]:
        """Pieces of a completion as they come."""
        async for event in self._stream(model, prompt, max_tokens, None, ignore_eos=False):
            for choice in event.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    yield piece

    async def _stream(
        self,
        model: str,
        prompt: str,
        max_tokens: int,
        extension: dict[str, Any] | None,
        *,
        ignore_eos: bool,
        sampling: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            **(sampling or {}),
        }
        sent = dict(headers or {})
        if extension is not None:
            body["kvasir"] = extension
            sent |= self._service
        try:
            request = self._client.stream("POST", "/v1/chat/completions", json=body, headers=sent)
            async with request as response:
                if response.status_code != 200:
                    raise _refusal(json.loads(await response.aread()))
                finished = False
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        finished = True
                    elif line.startswith("data: "):
                        event = json.loads(data)
                        if "error" in event:
                            raise _refusal(event)
                        yield event
                if not finished:
                    raise NetworkError("stream_cut", "The gateway's answer ended in the middle.", "Try again.")
        except httpx.HTTPError as error:
            raise unreachable(str(self._client.base_url), error) from error


def _refusal(body: dict[str, Any]) -> EngineError:
    error = body.get("error") or {}
    code, message = str(error.get("code", "refused")), str(error.get("message", "The gateway refused the request."))
    kind = RequestError if error.get("type") == "invalid_request_error" else EngineError
    return kind(code, message, str(error.get("detail", "")))
