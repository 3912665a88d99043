"""The compiled kernels, loaded into this process.

One library, one pool of threads: a computation holds the pool from its first to its last operation, so calls from
several Python threads follow one another. ``ctypes`` releases the interpreter's lock while one runs.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

from kvasir_console.engine.native.build import build
from kvasir_console.errors import EngineError
from kvasir_console.paths import Paths

__all__ = ["Library", "load"]

log = logging.getLogger(__name__)

_VERSION = 2
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class SegmentView(ctypes.Structure):
    """``Segment`` of linear.h."""

    _fields_ = (("format", _N), ("n_out", _N), ("column", _N), ("data", _P))


class MatrixView(ctypes.Structure):
    """``Matrix`` of linear.h."""

    _fields_ = (("n_in", _N), ("n_out", _N), ("n_segments", _N), ("segments", ctypes.POINTER(SegmentView)))


class NetworkView(ctypes.Structure):
    """``Network`` of experts.h."""

    _fields_ = (("gate_up", _P), ("down", _P), ("activation", _N))


class SpanView(ctypes.Structure):
    """``Span`` of attention.h."""

    _fields_ = (("position", _N), ("rows", _N), ("blocks", ctypes.POINTER(_P)), ("scales", ctypes.POINTER(_P)))


class BatchView(ctypes.Structure):
    """``Batch`` of attention.h, its ``KVShape`` first."""

    _fields_ = (
        ("kv_type", _N),
        ("n_layer", _N),
        ("n_head_kv", _N),
        ("head_dim", _N),
        ("rows", _N),
        ("n_spans", _N),
        ("spans", ctypes.POINTER(SpanView)),
    )


class MixtureView(ctypes.Structure):
    """``Mixture`` of layers.h."""

    _fields_ = (
        ("router", _P),
        ("experts", ctypes.POINTER(NetworkView)),
        ("n_used", _N),
        ("normalised", _N),
        ("scale", _F),
        ("pairs", _P),
    )


class LayerView(ctypes.Structure):
    """``Layer`` of layers.h."""

    _fields_ = (
        ("index", _N),
        ("n_head", _N),
        ("window", _N),
        ("rope_dim", _N),
        ("rope_halves", _N),
        ("rope_table", _N),
        ("eps", _F),
        ("attention_scale", _F),
        ("attn_norm", _P),
        ("qkv_bias", _P),
        ("qk_norm", _P),
        ("post_attention_norm", _P),
        ("ffn_norm", _P),
        ("post_ffn_norm", _P),
        ("qkv", _P),
        ("attn_output", _P),
        ("attn_output_bias", _P),
        ("network", NetworkView),
        ("mixture", ctypes.POINTER(MixtureView)),
    )


_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "kv_version": (ctypes.c_int32, ()),
    "kv_isa": (ctypes.c_char_p, ()),
    "kv_set_threads": (ctypes.c_int32, (ctypes.c_int32,)),
    "kv_threads": (ctypes.c_int32, ()),
    "kv_panel_bytes": (_N, (_N, _N)),
    "kv_row_bytes": (_N, (_N, _N)),
    "kv_pack": (ctypes.c_int32, (_N, _P, _N, _N, _P)),
    "kv_linear": (ctypes.c_int32, (_P, _P, _N, _N, _P, _N)),
    "kv_rows": (ctypes.c_int32, (_P, _P, _N, _P)),
    "kv_block_rows": (ctypes.c_int32, (_N, _P, _N, _P, _N, _P)),
    "kv_large_pages": (ctypes.c_int32, (_P, _N)),
    "kv_rms_norm": (ctypes.c_int32, (_P, _N, _N, _P, _N, _F, _P, _N)),
    "kv_gated": (ctypes.c_int32, (_N, _P, _N, _N, _N, _P)),
    "kv_rotate": (ctypes.c_int32, (_P, _N, _N, _N, _N, _P, _N, _N)),
    "kv_write": (ctypes.c_int32, (_P, _N, _P, _P, _N)),
    "kv_attend": (ctypes.c_int32, (_P, _N, _N, _N, _F, _P, _N, _P)),
    "kv_route": (ctypes.c_int32, (_P, _N, _N, _N, _N, _F, _P, _P)),
    "kv_expert_outputs": (ctypes.c_int32, (_P, _P, _N, _P, _P, _N, _P)),
    "kv_weighted_sum": (ctypes.c_int32, (_P, _P, _P, _N, _N, _N, _P)),
    "kv_layers": (ctypes.c_int32, (_P, _N, _P, _P, _P, _N)),
    "kv_attention_half": (ctypes.c_int32, (_P, _P, _P, _P, _N, _P)),
}


class Library:
    """The functions of kernels.cpp. They check nothing; whoever calls them does.

    Raises:
        OSError: the file is no shared library, or lacks a function.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise OSError(f"{path} has no {name}") from error
            function.restype, function.argtypes = result, arguments
        if self._library.kv_version() != _VERSION:
            raise OSError(f"{path} is of another version")
        self.panel_bytes = self._library.kv_panel_bytes
        self.row_bytes = self._library.kv_row_bytes

    @property
    def isa(self) -> str:
        """Which vector instructions it was compiled to: ``avx512``, ``avx2`` or ``portable``."""
        name: bytes = self._library.kv_isa()
        return name.decode()

    @property
    def threads(self) -> int:
        """How many threads share a computation, the caller among them."""
        return int(self._library.kv_threads())

    def set_threads(self, count: int) -> None:
        """Change ``threads``, for every user of the library in this process. Results do not change."""
        if not 1 <= count <= 1024:
            raise EngineError("bad_thread_count", f"The kernels cannot run on {count} threads.")
        self.call("kv_set_threads", count)

    def call(self, name: str, *arguments: object) -> None:
        """Run a function that computes.

        Raises:
            EngineError: ``out_of_memory``; its scratch memory could not be had.
        """
        if not getattr(self._library, name)(*arguments):
            raise EngineError("out_of_memory", f"{name} could not allocate its scratch memory.")


def load(cache_dir: Path | None = None) -> Library | None:
    """The kernels compiled for this machine; ``None``, with the reason in the log, where that cannot be had.

    Args:
        cache_dir: where libraries are kept; the program's own directory for them (``Paths.kernels``) if ``None``.
    """
    directory = Paths.from_environment().kernels if cache_dir is None else cache_dir
    for _ in range(2):
        path = build(directory)
        if path is None:
            return None
        try:
            return Library(path)
        except OSError as error:
            log.warning("the compiled kernels cannot be loaded: %s", error)
            path.unlink(missing_ok=True)  # a damaged file: built again, once
    return None
