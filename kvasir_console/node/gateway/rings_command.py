"""``kvasir-console rings``: what the gateway of this home says of its rings, and moving a window by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from kvasir_console.config import Config
from kvasir_console.errors import ConfigError, ExitCode, KvasirError, NetworkError, UsageError
from kvasir_console.node.gateway.identity import Secrets
from kvasir_console.paths import Paths

TIMEOUT_S = 30.0


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Print the rings, after the move that was asked for, if any.

    Raises:
        UsageError: a move without its other half, or one that the gateway refuses.
        NetworkError: the gateway does not run here, or hangs.
        KvasirError: the gateway fails at it.
    """
    if (arguments.move is None) != (arguments.to is None):
        raise UsageError("bad_move", "--move RANK and --to WALLET belong together.", "Give both, or neither.")
    if arguments.ring and arguments.move is None:
        raise UsageError("bad_move", "--ring says whose window --move moves.", "Leave it out: all rings are shown.")
    paths = Paths.from_environment()
    token_file = Path(config.gateway.service_token_file).expanduser() if config.gateway.service_token_file else None
    socket = paths.runtime / "gateway.http"
    if not socket.exists():
        raise _not_running()
    secrets = Secrets.load(paths.data / "gateway", token_file)
    found = asyncio.run(_ask(socket, secrets.service_token, arguments))
    print(json.dumps(found, indent=2) if arguments.json else describe(found))
    return ExitCode.OK


async def _ask(socket: Path, token: str, arguments: argparse.Namespace) -> dict[str, Any]:
    client = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket)),
        base_url="http://gateway",
        headers={"X-Kvasir-Service-Token": token},
        timeout=TIMEOUT_S,
        trust_env=False,
    )
    try:
        async with client:
            found = _answer(await client.get("/api/rings"))
            if arguments.move is not None:
                body = {"ring": _named(found, arguments.ring), "rank": arguments.move, "wallet": arguments.to}
                _answer(await client.post("/api/rings/move", json=body))
                found = _answer(await client.get("/api/rings"))
            return found
    except httpx.TimeoutException as error:
        raise NetworkError(
            "gateway_silent",
            f"The gateway that runs here has not answered for {TIMEOUT_S:g} s.",
            "Its log may say why; if it hangs, start it again.",
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise _not_running() from error


def _not_running() -> NetworkError:
    return NetworkError(
        "gateway_not_running", "No gateway runs with this KVASIR_HOME.", "Start one: kvasir-console gateway"
    )


def _answer(response: httpx.Response) -> dict[str, Any]:
    """Raises the ``KvasirError`` that the gateway answered with."""
    try:
        body = response.json()
    except ValueError:
        body = None
    given: dict[str, Any] = body if isinstance(body, dict) else {}
    status = response.status_code
    if status == httpx.codes.OK and given:
        return given
    error = given.get("error")
    text = error if isinstance(error, str) else f"The gateway answers with status {status}."
    if status == httpx.codes.BAD_REQUEST:
        raise UsageError("gateway_refused", text, "kvasir-console rings shows ranks and wallets.")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ConfigError(
            "gateway_refused",
            "The gateway that runs here was started with another service token.",
            "Use its gateway.service_token_file.",
        )
    raise KvasirError("gateway_refused", text, "The gateway's log says why.")


def _named(found: dict[str, Any], ring: str) -> str:
    names = [each["ring"] for each in found["rings"]]
    if not ring and len(names) == 1:
        return str(names[0])
    if ring not in names:
        what = f"There is no ring {ring!r} here." if ring else "It is not said whose window moves."
        raise UsageError("unknown_ring", what, f"Name the ring with --ring: {', '.join(names) or 'there is none'}.")
    return ring


def describe(found: dict[str, Any]) -> str:
    """Rings and moves as a person reads them."""
    lines: list[str] = []
    for ring in found["rings"]:
        missing = f"; {ring['missing']}" if ring["missing"] else ""
        lines.append(f"{ring['ring']}, generation {ring['generation']}{missing}")
        for stage in ring["stages"]:
            begin, end = stage["layers"]
            # A gateway that was started before this program was renewed says nothing of "seen".
            gone = "gone" if stage.get("seen", True) else "awaited"
            state = "connected" if stage["connected"] else f"{gone} for {stage['gone_s']:.0f} s"
            lines.append(f"  rank {stage['rank']}  layers {begin} to {end - 1}  {stage['wallet']}  {state}")
            lines += [
                f"    stands by: {each['wallet']}{'' if each['ready'] else ' (not ready)'}"
                for each in stage["replicas"]
            ]
    for move in found["moves"]:
        lines.append(
            f"{_moment(move['at'])} {move['ring']} rank {move['rank']} moved from {move['old']} to {move['new']}, "
            f"generation {move['generation']}: {move['why']}"
        )
    return "\n".join(lines) or "This gateway serves no ring."


def _moment(at_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
