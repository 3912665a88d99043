"""The vault's passphrase in the desktop's key ring: opt-in, asked in a process of its own that has three seconds.

A key ring may hang for ever (a dialog that nobody sees), prompt on the terminal, or be a file in clear. So it is never
asked when a node starts, only the back-ends of desktops are used, and the asking is done by a child that can be
killed:

    python -m kvasir_console.wallet.passphrase_cache     JSON on stdin, JSON on stdout

Whoever can read the key ring can read the passphrase: every program of this user, while the desktop is unlocked.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from typing import Any

from kvasir_console.errors import SystemResourceError

TIMEOUT_S = 3.0
SERVICE = "kvasir-console"
ALLOWED = (
    "keyring.backends.SecretService.Keyring",
    "keyring.backends.libsecret.Keyring",
    "keyring.backends.kwallet.DBusKeyring",
    "keyring.backends.macOS.Keyring",
    "keyring.backends.Windows.WinVaultKeyring",
)


def recall(wallet: str) -> str | None:
    """The passphrase that was kept for a wallet; ``None`` when there is none or the key ring cannot be asked."""
    with contextlib.suppress(SystemResourceError):
        passphrase = _ask("recall", wallet).get("passphrase")
        return passphrase if isinstance(passphrase, str) and passphrase else None
    return None


def remember(wallet: str, passphrase: str) -> None:
    """Keep a wallet's passphrase. Raises ``SystemResourceError`` ``keyring_unavailable``."""
    _ask("remember", wallet, passphrase=passphrase)


def forget(wallet: str) -> None:
    """Drop what was kept. Raises ``SystemResourceError`` ``keyring_unavailable``."""
    _ask("forget", wallet)


def _ask(verb: str, wallet: str, **fields: str) -> dict[str, Any]:
    request = json.dumps({"verb": verb, "wallet": wallet, **fields})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvasir_console.wallet.passphrase_cache"],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            start_new_session=True,  # no terminal to prompt on
            check=False,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise _unavailable(f"it did not answer within {TIMEOUT_S:g} seconds") from None
    except (OSError, ValueError):
        raise _unavailable("it failed") from None
    if not isinstance(answer, dict) or "refusal" in answer:
        raise _unavailable(str(answer.get("refusal")) if isinstance(answer, dict) else "it failed")
    return answer


def _unavailable(why: str) -> SystemResourceError:
    return SystemResourceError(
        "keyring_unavailable",
        f"The desktop's key ring cannot be used: {why}.",
        "Give the passphrase by --passphrase-file, or type it.",
    )


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """What the child does with one request. Foreign errors are told by their type: their text may hold the secret."""
    try:
        backend = _backend(importlib.import_module("keyring").get_keyring())
        if backend is None:
            return {"refusal": "no back-end of a desktop is there"}
        wallet = str(request["wallet"])
        match request["verb"]:
            case "recall":
                return {"passphrase": backend.get_password(SERVICE, wallet)}
            case "remember":
                backend.set_password(SERVICE, wallet, request["passphrase"])
            case "forget":
                if backend.get_password(SERVICE, wallet) is not None:
                    backend.delete_password(SERVICE, wallet)
    except ModuleNotFoundError:
        return {"refusal": "the package keyring is not installed"}
    except Exception as error:
        return {"refusal": f"it raised {type(error).__name__}"}
    return {}


def _backend(ring: Any) -> Any:
    """The first allowed back-end of a key ring or of a chain of them."""
    for each in (ring, *getattr(ring, "backends", ())):
        if f"{type(each).__module__}.{type(each).__name__}" in ALLOWED:
            return each
    return None


def main() -> int:
    from kvasir_console.child import forbid_core_dumps

    forbid_core_dumps()
    try:
        request = json.loads(sys.stdin.buffer.read())
        answer = _serve(request) if isinstance(request, dict) else {"refusal": "it was asked nothing"}
    except ValueError:
        answer = {"refusal": "it was asked nothing"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
