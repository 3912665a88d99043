"""The passphrase in a real key ring: gnome-keyring's Secret Service on a message bus of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

NEEDED = ("dbus-run-session", "gnome-keyring-daemon")
missing = [name for name in NEEDED if shutil.which(name) is None]
missing += [name for name in ("keyring", "secretstorage") if importlib.util.find_spec(name) is None]

SCRIPT = """
    import sys
    import secretstorage
    from kvasir_console.errors import SystemResourceError
    from kvasir_console.wallet import passphrase_cache as cache

    cache.TIMEOUT_S = 60.0  # a busy machine needs more than a second for the child alone
    wallet, secret = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk", "correct horse battery"
    assert cache.recall(wallet) is None
    cache.remember(wallet, secret)
    assert cache.recall(wallet) == secret
    (item,) = secretstorage.search_items(secretstorage.dbus_init(), {"service": "kvasir-console"})
    assert item.get_secret() == secret.encode()
    # Locked, the ring would show a dialog that nobody sees.
    secretstorage.get_default_collection(secretstorage.dbus_init()).lock()
    cache.TIMEOUT_S = 3.0
    assert cache.recall(wallet) is None
    try:
        cache.remember(wallet, secret)
    except SystemResourceError as error:
        assert error.code == "keyring_unavailable" and secret not in str(error)
    else:
        raise AssertionError("a locked ring took it")
    print("done")
"""


@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
def test_a_real_secret_service_keeps_a_passphrase_and_a_locked_one_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o700)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    session = f"""
        printf 'the ring' | gnome-keyring-daemon --foreground --unlock --components=secrets >/dev/null &
        for attempt in $(seq 600); do
            dbus-send --session --print-reply --dest=org.freedesktop.secrets /org/freedesktop/secrets/aliases/default \\
                org.freedesktop.DBus.Peer.Ping >/dev/null 2>&1 && break
            sleep 0.1
        done
        '{sys.executable}' '{script}'
        code=$?
        kill %1
        exit $code
    """
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("XDG_DATA_HOME", None)
    done = subprocess.run(
        ["dbus-run-session", "--", "bash", "-c", session], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.stdout.strip() == "done", done.stderr
    assert "correct horse" not in "".join(
        file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file() and file != script
    )
