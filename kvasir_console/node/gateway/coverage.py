"""A coverage report as a node posts it (gateway contract 1.6 and 5.1): read, bounded, and nothing of it believed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_console.errors import UsageError
from kvasir_console.relay.direct import check_fingerprint, parse_address
from kvasir_console.relay.wire.preamble import Wire, wires_named

MAX_SEGMENTS = 256
MAX_SESSION_LENGTH = 128
MAX_WORKER_ID_LENGTH = 200
RESERVED_PREFIXES = ("ring-", "bridge-", "operator-", "service-", "kvasir-")
PLATFORM_KEYS = ("os", "device_kind", "accelerator", "backend")
_OS = frozenset({"macos", "ios", "android", "windows", "linux"})
_ACCELERATORS = frozenset({"cpu", "gpu", "npu"})
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Experts [begin, end) of one layer of a model."""

    model: str
    layer: int
    begin: int
    end: int

    def within(self, other: Window) -> bool:
        return (
            self.model == other.model
            and self.layer == other.layer
            and other.begin <= self.begin
            and self.end <= other.end
        )


@dataclass(frozen=True, slots=True)
class Reached:
    """``address`` is ``HOST:PORT``, ``certificate`` the SHA-256 of the listener's in hexadecimal digits."""

    address: str
    certificate: str


@dataclass(frozen=True, slots=True)
class Report:
    """One coverage post, checked."""

    worker_id: str
    model: str
    windows: tuple[Window, ...]
    session: str
    wires: Wire
    platform: Mapping[str, str]
    stands_by: bool = False
    """Our extension: nothing is held, but the windows of the model's ring that this wallet stands by for are here."""
    direct: Reached | None = None
    """Our extension: where a neighbour in a ring reaches this node without the relay."""
    direct_live: bool = False
    """Our extension: an edge of a ring goes past the relay now, so its sessions here may be closed."""


def parse_report(body: Mapping[str, Any], *, service: bool = False) -> Report:
    """Read a coverage post (gateway contract 1.6).

    A segment is an array of three integers; other things among the segments are dropped in silence, as the public
    bridge does, and so are ranges that no layer can have.

    Raises:
        UsageError: ``missing_field``, or ``bad_relay_session`` for a session name that is malformed or reserved.
    """
    worker_id, model = body.get("worker_id"), body.get("model")
    if not isinstance(worker_id, str) or not _PRINTABLE.fullmatch(worker_id) or len(worker_id) > MAX_WORKER_ID_LENGTH:
        raise UsageError("missing_field", "worker_id is needed: 1 to 200 printable characters.")
    if not isinstance(model, str) or not _PRINTABLE.fullmatch(model) or len(model) > MAX_WORKER_ID_LENGTH:
        raise UsageError("missing_field", "model is needed.")
    model = short_model_name(model)
    segments = body.get("segments")
    windows = [
        window
        for segment in (segments if isinstance(segments, list) else ())
        if (window := _window(model, segment)) is not None
    ]
    wires = body.get("wires")
    return Report(
        worker_id=worker_id,
        model=model,
        windows=tuple(dict.fromkeys(windows[:MAX_SEGMENTS])),
        session=session_name(worker_id, body.get("url"), service=service),
        wires=(wires_named(wires[:16]) if isinstance(wires, list) else Wire(0)) or Wire.V2,
        platform=_platform(body),
        stands_by=body.get("stands_by") is True,
        direct=_reached(body.get("direct")),
        direct_live=body.get("direct_live") is True,
    )


def session_name(worker_id: str, url: object = None, *, service: bool = False) -> str:
    """The relay session a worker dials: the one ``url`` names as ``relay:<session>``, else ``expert-<worker id>``.

    Raises:
        UsageError: ``bad_relay_session``.
    """
    if isinstance(url, str) and url.startswith("relay:"):
        name = url.removeprefix("relay:")
        if not _SESSION.fullmatch(name):
            raise UsageError(
                "bad_relay_session",
                "A session name has 1 to 128 letters, digits, dots, dashes, underscores; a letter or digit first.",
            )
    else:
        name = "expert-" + re.sub(r"[^A-Za-z0-9._-]", "-", worker_id)
        if len(name) > MAX_SESSION_LENGTH:
            name = f"{name[: MAX_SESSION_LENGTH - 9]}-{hashlib.sha256(worker_id.encode()).hexdigest()[:8]}"
    if not service and name.lower().startswith(RESERVED_PREFIXES):
        raise UsageError("bad_relay_session", f"Session names that begin like {name[:16]} are the operator's.")
    return name


def short_model_name(model: str) -> str:
    """The last path component, as the public bridge reads a model's name."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _reached(data: object) -> Reached | None:
    """What cannot be dialled is left out: the edge then goes through the relay."""
    if not isinstance(data, dict):
        return None
    address, certificate = data.get("address"), data.get("certificate")
    if not isinstance(address, str) or not isinstance(certificate, str):
        return None
    try:
        parse_address(address)
        check_fingerprint(certificate)
    except ValueError:
        return None
    return Reached(address, certificate)


def _window(model: str, segment: object) -> Window | None:
    if not isinstance(segment, list) or len(segment) != 3:
        return None
    layer, begin, end = (_whole(number) for number in segment)
    if layer is None or begin is None or end is None or begin >= end:
        return None
    return Window(model, layer, begin, end)


def _whole(number: object) -> int | None:
    """A whole number in [0, 2**31), also when JSON wrote it as ``3.0``."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 2**31:
        return None
    return int(number) if number == int(number) else None


def _platform(body: Mapping[str, Any]) -> dict[str, str]:
    """Self-declared facts about the machine, bounded; they are shown, never believed."""
    texts = {key: value[:64] for key in PLATFORM_KEYS if isinstance(value := body.get(key), str)}
    return {
        "os": texts.get("os", "") if texts.get("os") in _OS else "unknown",
        "device_kind": texts.get("device_kind", ""),
        "accelerator": texts.get("accelerator", "") if texts.get("accelerator") in _ACCELERATORS else "cpu",
        "backend": texts.get("backend", ""),
    }
