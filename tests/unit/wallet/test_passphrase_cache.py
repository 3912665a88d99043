"""The key ring as a cache: a package of that name on a path of its own, in the real child process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvasir_console.errors import SystemResourceError
from kvasir_console.wallet import passphrase_cache

WALLET, PASSPHRASE = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk", "correct horse battery"
USUAL_S = 3.0
BACKEND = """
    import json, os, pathlib
    STORE = pathlib.Path(os.environ["TEST_KEYRING"])
    class Keyring:
        def _all(self):
            return json.loads(STORE.read_text()) if STORE.exists() else {}
        def get_password(self, service, user):
            return self._all().get(f"{service}/{user}")
        def set_password(self, service, user, password):
            STORE.write_text(json.dumps(self._all() | {f"{service}/{user}": password}))
        def delete_password(self, service, user):
            entries = self._all()
            del entries[f"{service}/{user}"]
            STORE.write_text(json.dumps(entries))
"""


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a ``keyring`` package whose ``get_keyring`` is given as source."""
    package = tmp_path / "site" / "keyring"

    def make(get_keyring: str, module: str = "SecretService", backend: str = BACKEND) -> Path:
        (package / "backends").mkdir(parents=True)
        (package / "backends" / "__init__.py").write_text("")
        (package / "backends" / f"{module}.py").write_text(textwrap.dedent(backend))
        (package / "__init__.py").write_text(textwrap.dedent(get_keyring))
        store = tmp_path / "store.json"
        if passphrase_cache.TIMEOUT_S == USUAL_S:
            monkeypatch.setattr(passphrase_cache, "TIMEOUT_S", 120.0)  # a busy machine starts a process in no second
        root = Path(__file__).parents[3]
        monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{root}")
        monkeypatch.setenv("TEST_KEYRING", str(store))
        return store

    return make


DESKTOP = """
    from keyring.backends.SecretService import Keyring
    def get_keyring():
        return Keyring()
"""


def refused() -> str:
    with pytest.raises(SystemResourceError) as caught:
        passphrase_cache.remember(WALLET, PASSPHRASE)
    assert caught.value.code == "keyring_unavailable"
    assert PASSPHRASE not in str(caught.value)
    assert passphrase_cache.recall(WALLET) is None
    return caught.value.message


def test_a_passphrase_is_kept_recalled_and_forgotten(ring):
    store = ring(DESKTOP)
    assert passphrase_cache.recall(WALLET) is None
    passphrase_cache.remember(WALLET, PASSPHRASE)
    assert json.loads(store.read_text()) == {f"kvasir-console/{WALLET}": PASSPHRASE}
    assert passphrase_cache.recall(WALLET) == PASSPHRASE
    assert passphrase_cache.recall("another wallet") is None
    passphrase_cache.forget(WALLET)
    assert passphrase_cache.recall(WALLET) is None
    passphrase_cache.forget(WALLET)  # what is not there needs no forgetting


def test_a_backend_of_a_desktop_is_found_in_a_chain(ring):
    ring(
        """
        from keyring.backends.SecretService import Keyring
        class PlaintextKeyring(Keyring):
            def set_password(self, *_):
                raise AssertionError("a file in clear")
        class ChainerBackend:
            backends = [PlaintextKeyring(), Keyring()]
        def get_keyring():
            return ChainerBackend()
        """
    )
    passphrase_cache.remember(WALLET, PASSPHRASE)
    assert passphrase_cache.recall(WALLET) == PASSPHRASE


@pytest.mark.parametrize("module", ["fail", "null", "file"])
def test_other_backends_are_not_used(ring, module):
    store = ring(f"from keyring.backends.{module} import Keyring\ndef get_keyring():\n    return Keyring()", module)
    assert "no back-end" in refused()
    assert not store.exists()


def test_a_key_ring_that_hangs_is_given_up(ring, monkeypatch):
    monkeypatch.setattr(passphrase_cache, "TIMEOUT_S", 0.5)
    ring("import time\ndef get_keyring():\n    time.sleep(600)")
    assert "did not answer within 0.5 seconds" in refused()


def test_a_key_ring_has_three_seconds():
    assert passphrase_cache.TIMEOUT_S == USUAL_S


def test_what_a_failing_key_ring_says_is_not_repeated(ring):
    ring(DESKTOP, backend="class Keyring:\n    def __getattr__(self, name):\n        raise RuntimeError(open)")
    assert "RuntimeError" in refused()


def test_a_key_ring_that_talks_on_standard_output_is_given_up(ring):
    ring("print('unlock?')\n" + textwrap.dedent(DESKTOP))
    assert "failed" in refused()


def test_without_the_package_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert "not installed" in passphrase_cache._serve({"verb": "recall", "wallet": WALLET})["refusal"]


def test_nothing_of_the_key_ring_is_loaded_by_the_wallet():
    script = (
        "import sys, kvasir_console.headless, kvasir_console.wallet.command, kvasir_console.wallet.passphrase_cache\n"
        "print('keyring' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == "False\n"
