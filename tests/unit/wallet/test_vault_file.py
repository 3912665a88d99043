"""The vault as a file: who may read it, what it replaces, and what an interrupted change leaves."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from vault_parts import CHEAP, PASSPHRASE, PHRASE, left_beside, refusal

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.wallet import keys, vault


def test_files_are_private(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [each.name for each in file.parent.iterdir()] == ["vault.json"]


@pytest.mark.parametrize(("name", "mode"), [("vault.json", 0o640), ("vault.json", 0o604), (".", 0o750), (".", 0o701)])
def test_looser_modes_are_refused_with_the_command_that_helps(file, name, mode):
    loose = file.parent / name
    loose.chmod(mode)
    error = refusal(file)
    assert error.code == "vault_mode"
    assert str(loose) in error.message
    subprocess.run(["sh", "-c", error.hint.rpartition("with: ")[2]], check=True)
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_a_file_of_another_user_is_refused(file, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert refusal(file).code == "vault_mode"


def test_a_directory_may_be_reached_by_a_link_of_ones_own_but_not_by_anothers(file, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    with vault.open_vault(link / file.name, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
    real = os.lstat

    def foreign(path, **options):
        status = list(real(path, **options))
        status[4] = 65534 if str(path) == str(link) else status[4]
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", foreign)
    error = refusal(link / file.name)
    assert (error.code, "link" in error.message) == ("vault_mode", True)


def test_a_vault_that_is_a_link_is_not_followed(file, tmp_path):
    moved = tmp_path / "elsewhere.json"
    file.rename(moved)
    file.symlink_to(moved)
    assert refusal(file).code == "file_unavailable"


def test_a_second_name_of_the_file_keeps_the_old_vault_and_not_the_new_one(file, tmp_path):
    """A hard link made before a change of passphrase shows what a copy would: the old file, under the old one."""
    other = tmp_path / "other"
    other.mkdir(0o700)
    os.link(file, other / "vault.json")
    vault.change_passphrase(file, PASSPHRASE, "another passphrase", cost=CHEAP)
    assert refusal(other / "vault.json", "another passphrase").code == "wrong_passphrase"
    with vault.open_vault(other / "vault.json", PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_what_is_no_regular_file_is_refused(file):
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert refusal(file).code == "vault_malformed"
    file.unlink()
    file.mkdir()
    assert refusal(file).code == "file_unavailable"
    file.rmdir()
    (file.parent / "real.json").write_bytes(content)
    file.symlink_to("real.json")
    assert refusal(file).code == "file_unavailable"


def test_no_vault_is_told_with_the_next_step(tmp_path):
    for missing in (tmp_path / "vault.json", tmp_path / "nowhere" / "vault.json"):
        error = refusal(missing)
        assert error.code == "vault_missing"
        assert "wallet create" in error.hint


def test_a_vault_is_never_overwritten_unasked(file):
    before = file.read_bytes()
    with pytest.raises(WalletError) as caught:
        vault.create_vault(file, PHRASE, "another passphrase", cost=CHEAP)
    assert caught.value.code == "vault_exists"
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == ["vault.json"]


def test_a_vault_that_appears_meanwhile_is_not_overwritten_either(tmp_path, monkeypatch):
    file = tmp_path / "v" / "vault.json"
    seal = vault._seal

    def meanwhile(*arguments):
        file.parent.mkdir(mode=0o700)
        file.write_text("the other one")
        return seal(*arguments)

    monkeypatch.setattr(vault, "_seal", meanwhile)
    with pytest.raises(WalletError) as caught:
        vault.create_vault(file, PHRASE, PASSPHRASE, cost=CHEAP)
    assert caught.value.code == "vault_exists"
    assert file.read_text() == "the other one"


def test_forced_replacement_keeps_the_old_vault(file):
    old = file.read_bytes()
    vault.create_vault(file, PHRASE, "another passphrase", cost=CHEAP, force=True)
    assert refusal(file).code == "wrong_passphrase"
    (kept,) = (each for each in file.parent.iterdir() if each.name != "vault.json")
    assert kept.suffix == ".bak"
    assert kept.read_bytes() == old
    with vault.open_vault(kept, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_a_passphrase_is_changed_with_everything_fresh(file):
    before = json.loads(file.read_text())
    cost = vault.KdfCost(3, 20 * 1024)
    vault.change_passphrase(file, PASSPHRASE, "a new passphrase", cost=cost)
    assert refusal(file).code == "wrong_passphrase"
    with vault.open_vault(file, "a new passphrase") as opened:
        assert opened.phrase == PHRASE
    after = json.loads(file.read_text())
    assert (after["kdf"]["ops"], after["kdf"]["mem_kib"]) == (3, 20 * 1024)
    assert after["kdf"]["salt"] != before["kdf"]["salt"]
    assert after["aead"]["nonce"] != before["aead"]["nonce"]
    assert (after["created"], after["accounts"]) == (before["created"], before["accounts"])
    assert left_beside(file) == set()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_change_leaves_the_old_vault(file, monkeypatch, step):
    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fails)
        with pytest.raises(SystemResourceError) as caught:
            vault.change_passphrase(file, PASSPHRASE, "a new passphrase", cost=CHEAP)
    assert caught.value.code == "file_unavailable"
    assert left_beside(file) == set()
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_nothing_is_written_into_a_directory_others_may_change(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    with pytest.raises(WalletError) as caught:
        vault.create_vault(shared / "vault.json", PHRASE, PASSPHRASE, cost=CHEAP)
    assert caught.value.code == "vault_mode"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777
    assert list(shared.iterdir()) == []


def test_changes_of_two_processes_are_both_kept(file):
    """Each reads, derives and writes; without a lock one would undo the other."""
    script = (
        "import sys, pathlib\nfrom kvasir_console.wallet import accounts, vault\n"
        f"vault.update(pathlib.Path(sys.argv[1]), {PASSPHRASE!r}, lambda c: accounts.add_derived(c, sys.argv[2]))"
    )
    paths = [f"m/44'/501'/{index}'" for index in range(3)]
    children = [subprocess.Popen([sys.executable, "-c", script, str(file), path]) for path in paths]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    assert {each.path for each in vault.public_accounts(file)} == {keys.KVASIR_PATH, *paths}
