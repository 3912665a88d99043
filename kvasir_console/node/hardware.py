"""What this machine is and how much of a model fits it. A reading that cannot be had is ``None``, never zero."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass

import psutil

from kvasir_console.node.snapshot import MachineView

MIB = 2**20
_KNOWN_SYSTEMS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """The fields a gateway's coverage report takes, and the sizes that bound a slice."""

    os: str
    device_kind: str
    accelerator: str
    backend: str
    cores: int
    memory_bytes: int
    memory_free_bytes: int


def probe(device: str = "cpu") -> Hardware:
    """Read this machine. ``device`` is the engine's (``cpu`` or ``cuda``)."""
    memory = psutil.virtual_memory()
    return Hardware(
        os=_KNOWN_SYSTEMS.get(platform.system(), "unknown"),
        device_kind="server",
        accelerator="cpu" if device == "cpu" else "gpu",
        backend=device,
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
    )


def budget_bytes(hardware: Hardware, configured_mib: int) -> int:
    """Most bytes of weights to hold: what the owner set, else half of what is free now."""
    return configured_mib * MIB if configured_mib > 0 else hardware.memory_free_bytes // 2


def view(device: str, engine_rss_bytes: int | None) -> MachineView:
    """How busy this machine is since the last look, and what its engine takes of it."""
    memory = psutil.virtual_memory()
    return MachineView(
        cpu_percent=psutil.cpu_percent(interval=None),
        memory_used_bytes=memory.total - memory.available,
        memory_total_bytes=memory.total,
        engine_rss_bytes=engine_rss_bytes,
        accelerator=device,
    )


def host_name() -> str:
    return socket.gethostname() or "node"
