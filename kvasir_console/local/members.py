"""Participants of a network on this machine: a home and a wallet each, and the command lines of their processes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from kvasir_console.errors import KvasirError, SystemResourceError
from kvasir_console.node.admin import AdminClient
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.node.supervisor import ChildProcess, module_argv
from kvasir_console.paths import Paths, private_directory
from kvasir_console.wallet import commands


@dataclass(frozen=True, slots=True)
class Member:
    """One participant's home, wallet and passphrase file."""

    name: str
    paths: Paths
    address: str
    passphrase_file: Path

    @property
    def environment(self) -> dict[str, str]:
        """Kernels are compiled for a machine, so its processes share them; nothing else is shared."""
        return {"KVASIR_HOME": str(self.paths.config.parent), "KVASIR_KERNELS": str(Paths.from_environment().kernels)}

    @property
    def node_socket(self) -> Path:
        return self.paths.runtime / "node.sock"

    def configure(self, config: Mapping[str, Any]) -> None:
        self.paths.config_file.write_text(tomlkit.dumps(config))

    def node(self) -> ChildProcess:
        """A headless node with this member's home."""
        argv = module_argv("kvasir_console", "--headless", "--passphrase-file", str(self.passphrase_file))
        return ChildProcess(f"node {self.name}", argv, self.paths.state / "node.out", env=self.environment)

    def gateway(self) -> ChildProcess:
        """A gateway with this member's home."""
        argv = module_argv("kvasir_console", "gateway")
        return ChildProcess(f"gateway {self.name}", argv, self.paths.state / "gateway.out", env=self.environment)

    async def snapshot(self) -> NodeSnapshot | None:
        """The node's snapshot, ``None`` while it does not answer."""
        client = AdminClient(self.node_socket)
        try:
            return await client.snapshot()
        except KvasirError:
            return None
        finally:
            await client.close()

    def forget(self) -> None:
        """Remove the sockets, which lie outside the home."""
        shutil.rmtree(self.paths.runtime, ignore_errors=True)


def make_member(directory: Path, name: str) -> Member:
    """Make a home under ``directory`` with a new wallet. Blocks for the vault's key derivation."""
    home = private_directory(directory / name)
    paths = Paths.from_environment({"KVASIR_HOME": str(home)}).ensure()
    passphrase_file = home / "passphrase"
    wallet = commands.create_wallet(paths, secret_file(passphrase_file), words=12, kdf="interactive")
    return Member(name, paths, wallet.address, passphrase_file)


def secret_file(file: Path) -> str:
    """Write a new secret to a new file (0600); returns the secret."""
    secret = secrets.token_urlsafe(24)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secret)
    return secret


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Refuse a busy port before anything is started for it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemResourceError(
                "port_busy",
                f"Port {port} cannot be used: {error.strerror}.",
                "Choose another with --port, or stop what uses it.",
            ) from error
