"""``python -m kvasir_console.wallet.localnet``: the ledger process.

Standard output carries one line, when requests are accepted: ``{"port": 40123, "genesis": "<base58>"}``. All else goes
to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from kvasir_console import logs
from kvasir_console.errors import ExitCode, KvasirError
from kvasir_console.wallet.localnet.auth import ensure_auth_file
from kvasir_console.wallet.localnet.server import serve
from kvasir_console.wallet.localnet.slots import SLOT_MS


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns a process exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvasir_console.wallet.localnet", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of the ledger, made if there is none")
    parser.add_argument("--port", type=int, default=0, help="TCP port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--auth-file", type=Path, required=True, help="file with the header to ask for, made if absent")
    parser.add_argument("--slot-ms", type=int, default=SLOT_MS, help="length of a slot of a new ledger (default: 400)")
    options = parser.parse_args(argv)
    if not 0 <= options.port <= 65535 or not 1 <= options.slot_ms <= 60_000:
        parser.error("--port is 0 to 65535 and --slot-ms 1 to 60000")
    logs.configure(to_stderr=True)
    try:
        auth = ensure_auth_file(options.auth_file)
        asyncio.run(serve(options.data, options.port, auth, slot_ms=options.slot_ms, ready=_ready))
    except KvasirError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def _ready(port: int, genesis: str) -> None:
    print(json.dumps({"port": port, "genesis": genesis}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
