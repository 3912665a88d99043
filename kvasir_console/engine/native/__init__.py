"""Products with packed weights and the operations between them, compiled for this machine if it has a compiler.

    build.py       the C++ under ``src`` to a shared library in the cache directory
    library.py     that library, loaded
    linear.py      a matrix that stays packed
    ops.py         norms, gates, rotary positions, routing
    attention.py   attention over the blocks of KV caches
    experts.py     banks of gated networks
    layers.py      whole decoder layers in one call
    src/           the kernels, and kernels.cpp, what Python calls

Nothing here is required: ``load`` answers ``None`` where there is no compiler, and says why in the log. The results of
everything depend on the row alone: not on the rows it comes with, nor on threads.
"""

from kvasir_console.engine.native.attention import Batch
from kvasir_console.engine.native.experts import NativeExperts
from kvasir_console.engine.native.layers import DecoderLayer, Dense, Layers, Mixed
from kvasir_console.engine.native.library import Library, load
from kvasir_console.engine.native.linear import NativeLinear

__all__ = ["Batch", "DecoderLayer", "Dense", "Layers", "Library", "Mixed", "NativeExperts", "NativeLinear", "load"]
