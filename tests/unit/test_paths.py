"""Directories: private, movable, and never somebody else's."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from kvasir_console import paths
from kvasir_console.errors import SystemResourceError
from kvasir_console.paths import Paths


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_one_variable_moves_everything(tmp_path):
    home = tmp_path / "h"
    found = Paths.from_environment({"KVASIR_HOME": str(home)})
    for directory in (found.config, found.data, found.state, found.cache):
        assert directory.parent == home
    assert found.config_file == home / "config" / "config.toml"
    assert found.vault_file == home / "data" / "vault.json"
    assert not home.exists()  # asking is not making


def test_the_cache_can_live_elsewhere(tmp_path):
    environment = {"KVASIR_HOME": str(tmp_path / "h"), "KVASIR_CACHE": str(tmp_path / "disk")}
    found = Paths.from_environment(environment)
    assert found.models == tmp_path / "disk" / "models"
    assert found.shards == tmp_path / "disk" / "shards"
    assert found.data == tmp_path / "h" / "data"


def test_a_tilde_means_the_users_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Paths.from_environment({"KVASIR_HOME": "~/k", "KVASIR_CACHE": "~/c"})
    assert found.state == tmp_path / "k" / "state"
    assert found.cache == tmp_path / "c"


def test_without_a_home_the_platform_decides(monkeypatch, tmp_path):
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    found = Paths.from_environment({})
    assert found.config == tmp_path / "CONFIG" / "kvasir-console"
    assert found.cache == tmp_path / "CACHE" / "kvasir-console"


def test_all_directories_are_made_private(tmp_path):
    old = os.umask(0o022)
    try:
        found = Paths.from_environment({"KVASIR_HOME": str(tmp_path / "h")}).ensure()
    finally:
        os.umask(old)
    for directory in (found.config, found.data, found.state, found.cache, found.runtime):
        assert mode(directory) == 0o700


def test_an_open_directory_of_ours_is_closed(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir(mode=0o755)
    directory.chmod(0o777)
    paths.private_directory(directory)
    assert mode(directory) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    directory = tmp_path / "theirs"
    directory.mkdir()
    os.chown(directory, 12345, -1)
    with pytest.raises(SystemResourceError) as caught:
        paths.private_directory(directory)
    assert caught.value.code == "directory_not_ours"
    assert "KVASIR_HOME" in caught.value.hint


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_link_that_another_user_put_there_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(SystemResourceError, match="not a directory owned by this user"):
        paths.private_directory(link)


def test_a_link_of_our_own_is_followed(tmp_path):
    (tmp_path / "big-disk").mkdir(mode=0o755)
    link = tmp_path / "cache"
    link.symlink_to(tmp_path / "big-disk")
    assert paths.private_directory(link) == link
    assert mode(tmp_path / "big-disk") == 0o700


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "config").write_text("")
    with pytest.raises(SystemResourceError, match=str(tmp_path / "config")):
        paths.private_directory(tmp_path / "config")


def test_sockets_of_a_deep_home_still_have_short_paths(tmp_path):
    deep = tmp_path / ("x" * 120)
    for environment in ({}, {"XDG_RUNTIME_DIR": str(tmp_path)}, {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}):
        found = Paths.from_environment({"KVASIR_HOME": str(deep), **environment})
        paths.check_socket_path(found.runtime / "a-name-of-a-socket.sock")
        assert not found.runtime.is_relative_to(deep)


def test_a_runtime_directory_of_the_session_is_used():
    with tempfile.TemporaryDirectory(prefix="xdg", dir="/tmp") as short:
        found = Paths.from_environment({"KVASIR_HOME": "/h", "XDG_RUNTIME_DIR": short})
        assert found.runtime.parent == Path(short)


def test_two_homes_never_share_sockets_and_two_names_of_one_home_do(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "a")

    def runtime(home: str) -> Path:
        return Paths.from_environment({"KVASIR_HOME": home}).runtime

    assert runtime(f"{tmp_path}/a") != runtime(f"{tmp_path}/b")
    assert runtime(f"{tmp_path}/a") == runtime(f"{tmp_path}/alias") == runtime(f"{tmp_path}/b/../a/")


def test_the_limit_of_a_socket_path_is_the_kernels():
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
        longest = Path(folder) / ("s" * (paths.UNIX_PATH_MAX_BYTES - len(folder) - 1))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(paths.check_socket_path(longest)))
        too_long = Path(f"{longest}s")
        with pytest.raises(SystemResourceError, match="107"):
            paths.check_socket_path(too_long)
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="too long"):
            listener.bind(str(too_long))


def test_bytes_count_not_characters(tmp_path):
    with pytest.raises(SystemResourceError):
        paths.check_socket_path(Path("/tmp") / ("é" * 60))
