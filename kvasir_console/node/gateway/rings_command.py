"""``kvasir-console rings``: what the gateway of this home says of its rings, and moving a window by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvasir_console.config import Config
from kvasir_console.errors import ConfigError, ExitCode, KvasirError, NetworkError, UsageError
from kvasir_console.node.gateway.identity import Secrets
from kvasir_console.paths import Paths
from kvasir_console.wallet.keys import is_address
from kvasir_console.wallet.terminal import confirm, controlling_terminal, require

TIMEOUT_S = 30.0
SHOW = "kvasir-console rings shows ranks and wallets."


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Print the rings, after the move that was asked for, if any.

    Raises:
        UsageError: a move without its other half, one that cannot be or is declined, or nobody is there to be asked.
        NetworkError: the gateway does not run here, or hangs.
        KvasirError: the gateway fails at it.
    """
    if (arguments.move is None) != (arguments.to is None):
        raise UsageError("bad_move", "--move RANK and --to WALLET belong together.", "Give both, or neither.")
    if arguments.move is None and (arguments.ring or arguments.yes):
        flag, what = ("--ring", "says whose window --move moves") if arguments.ring else ("--yes", "belongs to --move")
        raise UsageError("bad_move", f"{flag} {what}.", "Leave it out: all rings are shown.")
    paths = Paths.from_environment()
    token_file = Path(config.gateway.service_token_file).expanduser() if config.gateway.service_token_file else None
    socket = paths.runtime / "gateway.http"
    if not socket.exists():
        raise _not_running()
    token = Secrets.load(paths.data / "gateway", token_file).service_token
    found = asyncio.run(_with(socket, token, _read))
    if arguments.move is not None:
        move = _chosen(found, arguments)
        if not arguments.yes:
            _confirm(move)
        found = asyncio.run(_with(socket, token, move.make))
    print(json.dumps(found, indent=2) if arguments.json else describe(found))
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Move:
    """A window that is to move, as the gateway showed it."""

    ring: str
    generation: int
    stage: dict[str, Any]
    wallet: str

    async def make(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """Move it, if the plan is still the one that was shown; the rings afterwards."""
        body = {"ring": self.ring, "rank": self.stage["rank"], "wallet": self.wallet, "generation": self.generation}
        _answer(await client.post("/api/rings/move", json=body))
        return await _read(client)


async def _read(client: httpx.AsyncClient) -> dict[str, Any]:
    return _answer(await client.get("/api/rings"))


async def _with(
    socket: Path, token: str, ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    client = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket)),
        base_url="http://gateway",
        headers={"X-Kvasir-Service-Token": token},
        timeout=TIMEOUT_S,
        trust_env=False,
    )
    try:
        async with client:
            return await ask(client)
    except httpx.TimeoutException as error:
        raise NetworkError(
            "gateway_silent",
            f"The gateway that runs here has not answered for {TIMEOUT_S:g} s.",
            "Its log may say why; if it hangs, start it again.",
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise _not_running() from error


def _chosen(found: dict[str, Any], arguments: argparse.Namespace) -> Move:
    """The move that is asked for. What the gateway would refuse is refused before a person is asked."""
    name = _named(found, arguments.ring)
    ring = next(each for each in found["rings"] if each["ring"] == name)
    stages = {stage["rank"]: stage for stage in ring["stages"]}
    if arguments.move not in stages:
        raise UsageError("unknown_rank", f"The ring {name} has the ranks 0 to {len(stages) - 1}.", SHOW)
    if not is_address(arguments.to):
        raise UsageError("bad_wallet", f"{arguments.to[:60]!r} is not a wallet.", SHOW)
    for rank, stage in stages.items():
        if stage["wallet"] == arguments.to:
            raise UsageError("serves_already", f"That wallet serves a window of this ring already, rank {rank}.", SHOW)
    return Move(name, ring["generation"], stages[arguments.move], arguments.to)


def _confirm(move: Move) -> None:
    """Raises ``UsageError``: it is declined, or there is no terminal."""
    with controlling_terminal() as person:
        asked = require(person, "Moving a window", "To move it without a question, add --yes.")
        asked.show(explain(move))
        if not confirm(asked, "Move it?"):
            raise UsageError("not_moved", "Nothing was moved.")


def explain(move: Move) -> str:
    """What a move does, before it is done."""
    stage, named = move.stage, {each["wallet"]: each["ready"] for each in move.stage["replicas"]}
    begin, end = stage["layers"]
    who = {
        True: "stands by with these layers",
        False: "stands by, but has not said lately that it has these layers",
        None: "does not stand by: not known here whether it runs",
    }[named.get(move.wallet)]
    lines = [
        f"Ring {move.ring}, rank {stage['rank']}, layers {begin} to {end - 1}, at once:",
        f"  from {stage['wallet']}  {_state(stage)}",
        f"  to   {move.wallet}  {who}",
        "Requests of this ring stop until the new node has loaded the layers and dialled, then go on where they were,",
        "with the same tokens; one that waits for longer than two minutes fails.",
        "The old node loses its sessions, is paid nothing for requests that are not over yet, and stands by for the",
        "window, last in line.",
    ]
    if named.get(move.wallet) is not True:
        lines.append(
            "If the new node does not come within gateway.standby_grace_s, one that stands by and is ready takes over."
        )
    return "\n".join(lines)


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
        raise UsageError("gateway_refused", text, SHOW)
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
            lines.append(f"  rank {stage['rank']}  layers {begin} to {end - 1}  {stage['wallet']}  {_state(stage)}")
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


def _state(stage: dict[str, Any]) -> str:
    if stage["connected"]:
        return "connected"
    # A gateway that was started before this program was renewed says nothing of "seen".
    return f"{'gone' if stage.get('seen', True) else 'awaited'} for {stage['gone_s']:.0f} s"


def _moment(at_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
