"""Where files live: one object that owns every directory.

``KVASIR_HOME`` moves all of them under one folder; without it they follow the platform's conventions.
The runtime directory holds Unix sockets, whose paths may have at most 107 bytes (``sockaddr_un``), so it is kept
short: it never lies under ``KVASIR_HOME`` itself.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvasir_console.errors import SystemResourceError

_APP = "kvasir-console"
UNIX_PATH_MAX_BYTES = 107


@dataclass(frozen=True, slots=True)
class Paths:
    """Every directory of one installation. Nothing is created until ``ensure`` is called."""

    config: Path
    data: Path
    state: Path
    cache: Path
    runtime: Path
    kernels: Path
    """Kernels compiled for this machine and measurements of them; installations may share it (``KVASIR_KERNELS``)."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Paths:
        env = os.environ if env is None else env
        home = env.get("KVASIR_HOME", "").strip()
        cache = env.get("KVASIR_CACHE", "").strip()
        kernels = env.get("KVASIR_KERNELS", "").strip()
        if home:
            root = _absolute(home)
            caches = _absolute(cache) if cache else root / "cache"
            return cls(
                config=root / "config",
                data=root / "data",
                state=root / "state",
                cache=caches,
                runtime=_runtime_directory(str(root), env),
                kernels=_absolute(kernels) if kernels else caches / "kernels",
            )
        data = Path(platformdirs.user_data_dir(_APP))
        caches = _absolute(cache) if cache else Path(platformdirs.user_cache_dir(_APP))
        return cls(
            config=Path(platformdirs.user_config_dir(_APP)),
            data=data,
            state=Path(platformdirs.user_state_dir(_APP)),
            cache=caches,
            runtime=_runtime_directory(str(data), env),
            kernels=_absolute(kernels) if kernels else caches / "kernels",
        )

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def vault_file(self) -> Path:
        return self.data / "vault.json"

    @property
    def models(self) -> Path:
        """Whole checkpoints pulled or made by ``kvasir-console models``."""
        return self.cache / "models"

    @property
    def shards(self) -> Path:
        """Windows and expert shards a node fetched."""
        return self.cache / "shards"

    @property
    def log_file(self) -> Path:
        return self.state / "console.log"

    def ensure(self) -> Paths:
        """Create every directory, private to this user (0700). Raises ``SystemResourceError``."""
        for directory in (self.config, self.data, self.state, self.cache, self.runtime):
            private_directory(directory)
        return self


def private_directory(directory: Path) -> Path:
    """Create ``directory`` as 0700 and refuse one that belongs to someone else.

    A symbolic link is followed only if it is this user's own: in a shared folder anybody could have put one there.

    Raises:
        SystemResourceError: it cannot be made, is not a directory, or another user owns it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, status = directory.lstat(), directory.stat()
    except OSError as error:
        raise SystemResourceError(
            "directory_unavailable",
            f"The directory {directory} cannot be created: {error.strerror or error}.",
            "Check the permissions of its parent, or set KVASIR_HOME to a folder you own.",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or {link.st_uid, status.st_uid} != {os.getuid()}:
        raise SystemResourceError(
            "directory_not_ours",
            f"{directory} is not a directory owned by this user.",
            "Remove it, or set KVASIR_HOME to a folder you own.",
        )
    if status.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def _absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _runtime_directory(identity: str, env: Mapping[str, str]) -> Path:
    """A short per-installation directory: two installations never share sockets, two names of one always do."""
    tag = hashlib.sha256(os.fsencode(os.path.realpath(identity))).hexdigest()[:10]
    base = env.get("XDG_RUNTIME_DIR", "")
    name = f"kvasir-{tag}"
    if base and os.path.isdir(base) and len(os.fsencode(os.path.join(base, name))) <= 60:
        return Path(base) / name
    return Path(tempfile.gettempdir()) / f"kvasir-{os.getuid()}-{tag}"


def check_socket_path(path: Path) -> Path:
    """Refuse a Unix socket path the kernel would refuse, before anything listens on it."""
    if len(os.fsencode(path)) > UNIX_PATH_MAX_BYTES:
        raise SystemResourceError(
            "socket_path_too_long",
            f"The socket path {path} has more than {UNIX_PATH_MAX_BYTES} bytes.",
            "Set XDG_RUNTIME_DIR or TMPDIR to a shorter folder.",
        )
    return path
