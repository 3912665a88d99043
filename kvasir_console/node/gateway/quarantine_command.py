"""``kvasir-console quarantine``: which workers were caught with a wrong answer, and letting one back in.

Works on the operator's database, whether or not the gateway runs; a running one hears of it at its next reading.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from kvasir_console.config import Config
from kvasir_console.errors import ExitCode, LedgerError, UsageError
from kvasir_console.node.gateway.quarantine import Case, Quarantines
from kvasir_console.node.gateway.store import Store, sqlite_file
from kvasir_console.paths import Paths
from kvasir_console.wallet.terminal import confirm, controlling_terminal, require


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Raises ``KvasirError``: no database here, nobody to ask, or no such quarantine."""
    store = _open(config, Paths.from_environment())
    try:
        book = Quarantines(store)
        if arguments.quarantine_command == "lift":
            return _lift(book, arguments)
        return _show(book.cases(lifted=arguments.all), arguments)
    finally:
        store.close()


def _open(config: Config, paths: Paths) -> Store:
    url = config.gateway.database or f"sqlite:///{paths.data / 'gateway.sqlite'}"
    file = sqlite_file(url)
    if file is not None and not file.exists():  # opening it would make one, in which nobody is quarantined
        raise UsageError(
            "no_gateway_here",
            f"There is no gateway's database at {file}.",
            "Run this with the gateway's KVASIR_HOME, or correct gateway.database.",
        )
    return Store.open(url)


def _show(cases: Sequence[Case], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps([case.to_json() for case in cases], indent=2))
        return ExitCode.OK
    print(_described(cases) or "No worker is quarantined.")
    return ExitCode.OK


def describe(case: Case) -> list[str]:
    """A case for a person."""
    who = f"the ring stage of {case.caught_by}" if case.caught_by else "this gateway's engine"
    lifted = "" if case.lifted_at is None else f", lifted {_moment(case.lifted_at)}"
    lines = [
        f"{case.wallet} {_shown(case.worker_id)}",
        f"  caught {_moment(case.at)} by {who}{lifted}",
        f"  {case.fault or 'nothing is known about why'}",
    ]
    if case.evidence or case.evidence_digest:
        where = case.evidence or "on the stage's machine"
        lines.append(f"  evidence {where}{f', sha256 {case.evidence_digest}' if case.evidence_digest else ''}")
    return lines


def _lift(book: Quarantines, arguments: argparse.Namespace) -> int:
    if arguments.worker == "":  # a script's variable that is not set must not lift them all
        raise UsageError("no_worker", "The worker id is empty.", "To lift all of the wallet, leave it out.")
    wallet, worker = arguments.wallet, arguments.worker or ""
    mine = book.against(wallet, worker)
    if not mine:
        who = f"No worker {worker} of {wallet}" if worker else f"No worker of {wallet}"
        raise LedgerError(
            "not_quarantined",
            f"{who} is quarantined.",
            "kvasir-console quarantine list names those that are.",
        )
    if not arguments.yes:
        with controlling_terminal() as person:
            asked = require(person, "Lifting a quarantine", "To lift it without a question, add --yes.")
            asked.show(_described(mine))
            asked.show("Who is let back is checked fully at first; what was void stays void.")
            if not confirm(asked, f"Lift {_counted(mine)}?"):
                raise UsageError("not_lifted", "Nothing was lifted.")
    lifted = book.lift(wallet, worker, int(time.time()), None if arguments.yes else mine)
    if arguments.json:
        print(json.dumps({"lifted": [case.to_json() for case in lifted]}, indent=2))
    else:
        if arguments.yes or lifted != mine:
            print(_described(lifted))
        print(f"Lifted: {_counted(lifted)}.")
    return ExitCode.OK


def _described(cases: Sequence[Case]) -> str:
    return "\n".join(line for case in cases for line in describe(case))


def _counted(cases: Sequence[Case]) -> str:
    workers = len({case.worker_id for case in cases})
    return f"{len(cases)} case{'s' * (len(cases) != 1)} of {workers} worker{'s' * (workers != 1)}"


def _shown(name: str) -> str:
    """A name that a stranger chose, without what a terminal would obey."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


def _moment(at_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
