"""Three digests that name a model, a file's contents and a checkpoint.

* ``model_digest``: SHA-256 of the canonical header. Two files with the same metadata and the same tensor directory,
  wherever the tensors lie in them, are the same model.
* ``shard_digest``: SHA-256 over the tensors' own digests, so it covers every byte of weights.
* ``source_digest``: the public network's identity of a checkpoint file. It reads only both ends of the data, so it
  proves nothing about the weights.
"""

from __future__ import annotations

import hashlib
import struct

from kvasir_console.engine.checkpoint.gguf import Checkpoint, Part, TensorInfo
from kvasir_console.engine.checkpoint.shape import refuse, stage_window
from kvasir_console.engine.checkpoint.shard_info import is_expert_shard
from kvasir_console.engine.checkpoint.window import expert_ranges

MODEL_DIGEST_KEY = "kvasir.model_digest"
_SAMPLE_BYTES = 2**20
_STEP_BYTES = 4 * 2**20


def model_digest(checkpoint: Checkpoint) -> bytes:
    """The 32-byte digest of the model; a stage file or expert shard gives that of the model it was cut from.

    The canonical header is: metadata count u64; the metadata entries as stored (key, type, value), sorted by the bytes
    of their keys; tensor count u64; for each tensor, sorted by the bytes of its name, its directory entry without the
    offset (name with u64 length, dimension count u32, dimensions u64, type u32). ``general.alignment`` and
    ``split.*`` are left out, as they only say where the tensors lie: a model in several files has the digest of the
    same model in one.

    Raises:
        ModelError: a stage file or shard without a digest of 64 hexadecimal digits.
    """
    if stage_window(checkpoint) or is_expert_shard(checkpoint):
        return _carried(checkpoint)
    keys = sorted((key for key in checkpoint.metadata if key != "general.alignment"), key=str.encode)
    digest = hashlib.sha256(struct.pack("<Q", len(keys)))
    for key in keys:
        digest.update(checkpoint.metadata_bytes(key))
    digest.update(struct.pack("<Q", len(checkpoint.tensors)))
    for tensor in sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.name.encode()):
        name = tensor.name.encode()
        digest.update(struct.pack("<Q", len(name)) + name)
        digest.update(struct.pack(f"<I{len(tensor.dims)}QI", len(tensor.dims), *tensor.dims, tensor.type))
    return digest.digest()


def _carried(checkpoint: Checkpoint) -> bytes:
    text = checkpoint.metadata.get(MODEL_DIGEST_KEY)
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != 32:
        refuse(checkpoint, f"{MODEL_DIGEST_KEY} is absent or not a SHA-256 in hexadecimal")
    return digest


def tensor_digest(checkpoint: Checkpoint, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> bytes:
    """SHA-256 of the stored bytes ``[begin, end)`` of one tensor (all of them by default)."""
    digest = hashlib.sha256()
    end = tensor.n_bytes if end is None else end
    for at in range(begin, end, _STEP_BYTES):
        digest.update(checkpoint.raw(tensor, at, min(at + _STEP_BYTES, end)))
    return digest.digest()


def shard_digest(checkpoint: Checkpoint) -> bytes:
    """SHA-256 over every tensor, sorted by the bytes of its name: the name, a zero byte, SHA-256 of its bytes."""
    digest = hashlib.sha256()
    for tensor in sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.name.encode()):
        digest.update(tensor.name.encode() + b"\0" + tensor_digest(checkpoint, tensor))
    return digest.digest()


def slice_digest(checkpoint: Checkpoint, layer: int, begin: int, end: int) -> bytes:
    """``shard_digest`` of the shard with the experts ``[begin, end)`` of ``layer``, without cutting it.

    Raises:
        ModelError: the file does not hold these experts.
    """
    digest = hashlib.sha256()
    for tensor, first, last in sorted(expert_ranges(checkpoint, layer, begin, end), key=lambda part: part[0].name):
        digest.update(tensor.name.encode() + b"\0" + tensor_digest(checkpoint, tensor, first, last))
    return digest.digest()


def source_digest(checkpoint: Checkpoint) -> str:
    """The public contract's identity of a checkpoint file (node contract, section 5), in hexadecimal.

    SHA-256 over the file's size in decimal, its header with the padding, and the first and the last MiB of its data;
    where the data is shorter than that, the two overlap. A stage file gives the identity of the file it was cut from. A
    model in several files, of which the contract knows nothing, gives SHA-256 over the identities of its parts (ASCII).
    """
    carried = checkpoint.metadata.get("kvasir.stage.source_digest")
    if isinstance(carried, str) and stage_window(checkpoint):
        return carried
    parts = [_part_digest(part) for part in checkpoint.parts]
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def _part_digest(part: Part) -> str:
    size, start = part.n_bytes, part.header.data_start
    digest = hashlib.sha256(str(size).encode())
    digest.update(part.header_bytes)
    digest.update(part.view[start : start + _SAMPLE_BYTES])
    digest.update(part.view[max(size - _SAMPLE_BYTES, 0) :])
    return digest.hexdigest()
