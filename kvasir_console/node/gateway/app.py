"""The HTTP application: all routes, one error envelope for each surface, CORS."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.web import on_exception, on_http_exception, on_kvasir_error

_CORS_HEADERS = {
    "access-control-allow-origin": "*",
    "access-control-allow-headers": "Content-Type",
    "access-control-allow-methods": "GET, POST, OPTIONS",
}


class Cors:
    """Lets web wallets read ``/api`` from any origin (gateway contract, section 0).

    Not ``/v1``: on loopback it serves without a key, and a web page must not use a visitor's machine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/api/"):
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_CORS_HEADERS)(scope, receive, send)
            return

        async def send_open(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["access-control-allow-origin"] = "*"
            await send(message)

        await self._app(scope, receive, send_open)


def make_app(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(
        routes=routes,
        middleware=[Middleware(Cors)],
        exception_handlers={
            KvasirError: on_kvasir_error,
            HTTPException: on_http_exception,
            Exception: on_exception,
        },
    )
