"""A private PostgreSQL for tests: its own data directory, no TCP port, gone when the tests are over."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

_OWNER = "postgres"


def missing() -> str:
    """Why there can be no server here; empty when there can."""
    if _program("initdb") is None:
        return "PostgreSQL's server is not installed (Debian: apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    if os.getuid() == 0 and not _has_user():
        return f"PostgreSQL does not run as root, and there is no user {_OWNER}"
    return ""


class PostgresqlServer:
    """``start`` and ``stop``; ``url`` gives an empty database each time (a schema of its own)."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvasir-pg-"))
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> PostgresqlServer:
        if os.getuid() == 0:
            shutil.chown(self._directory, _OWNER)
        data, log = self._directory / "data", self._directory / "log"
        subprocess.run(
            [*_as_owner(), _program("initdb"), "-D", str(data), "-U", _OWNER, "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True,
            capture_output=True,
        )
        settings = (
            "listen_addresses=",
            f"unix_socket_directories={self._directory}",
            "fsync=off",
            "full_page_writes=off",
            "synchronous_commit=off",
            "autovacuum=off",
            "max_connections=80",
        )
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*_as_owner(), _program("postgres"), "-D", str(data), *(each for s in settings for each in ("-c", s))],
                stdout=stream,
                stderr=stream,
            )
        deadline = time.monotonic() + 180
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def url(self) -> str:
        """The SQLAlchemy URL of an empty schema."""
        import psycopg

        schema = f"test_{next(self._numbers)}"
        with psycopg.connect(host=str(self._directory), user=_OWNER, dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
        return f"postgresql://{_OWNER}@/postgres?host={self._directory}&options=-csearch_path%3D{schema}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # without waiting for whoever is still connected
            self._process.wait(timeout=180)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(host=str(self._directory), user=_OWNER, dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True


def _program(name: str) -> str | None:
    for directory in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (directory / name).exists():
            return str(directory / name)
    return shutil.which(name)


def _as_owner() -> list[str]:
    """Ends with the tests, whatever ends them; as another user when these run as root."""
    if shutil.which("setpriv") is None:
        return ["runuser", "-u", _OWNER, "--"] if os.getuid() == 0 else []
    user = ["--reuid", _OWNER, "--regid", _OWNER, "--init-groups"] if os.getuid() == 0 else []
    return ["setpriv", "--pdeathsig", "TERM", *user]


def _has_user() -> bool:
    try:
        pwd.getpwnam(_OWNER)
    except KeyError:
        return False
    return True
