"""Small valid GGUFs of every kind that is read, and seeded ways to spoil one: ``mutant(bases, seed)``.

A mutation is a pure function of its seed, so a seed is all it takes to see a failure again. Some mutations tear at
bytes, some lie in one statement of the file, some lie consistently, which only the meaning of the model can show.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType as Quant
from gguf_draft import (
    ARRAY,
    F32,
    I32,
    TEXT,
    U32,
    Draft,
    parsed,
    split,
    write_parts,
)
from gguf_statements import STATEMENTS
from gguf_tears import TEARS

import builders


@dataclass(frozen=True, slots=True)
class Base:
    """A valid file. ``kind`` says how it is loaded: model, stage or shard; ``path`` is where a mutant of it belongs."""

    name: str
    kind: str
    path: Path
    data: bytes
    draft: Draft


@dataclass(frozen=True, slots=True)
class Mutant:
    base: Base
    what: str
    data: bytes


def bases(folder: Path) -> list[Base]:
    """Every kind of file once; ``folder`` is for building them."""
    from kvasir_console.engine.checkpoint.gguf import Checkpoint
    from kvasir_console.engine.checkpoint.shard import write_expert_shard, write_stage

    dense = builders.write_tiny_llama(folder / "dense.gguf", weight_type=(Quant.F32, Quant.Q8_0, Quant.Q4_0), tied=True)
    moe = builders.write_tiny_llama(
        folder / "moe.gguf", n_expert=4, n_expert_used=2, weight_type=(Quant.Q4_1, Quant.F16)
    )
    gemma = builders.write_tiny_gemma3(folder / "gemma3.gguf", n_layer=6, weight_type=(Quant.Q8_0, Quant.Q5_1))
    small = {"n_embd": 256, "n_ff": 256, "n_layer": 1}
    k_quants = (Quant.Q4_K, Quant.Q2_K, Quant.Q3_K, Quant.Q5_K, Quant.Q6_K, Quant.BF16)
    builders.write_tiny_llama(folder / "k.gguf", **small, weight_type=k_quants, tied=True)
    others = (
        Quant.IQ4_NL,
        Quant.IQ2_XXS,
        Quant.IQ3_S,
        Quant.IQ1_M,
        Quant.TQ1_0,
        Quant.MXFP4,
        Quant.NVFP4,
        Quant.IQ4_XS,
    )
    builders.write_tiny_llama(folder / "iq.gguf", **small, weight_type=others, tied=True)
    with Checkpoint.open(moe) as source:
        write_expert_shard(source, folder / "shard.gguf", model="tiny", layer=1, begin=1, end=3)
        write_stage(source, folder / "stage.gguf", model="tiny", begin=1, end=2)
    kinds = {"stage": "stage", "shard": "shard"}
    found = []
    for path in (dense, moe, gemma, *(folder / f"{name}.gguf" for name in ("k", "iq", "stage", "shard"))):
        data = path.read_bytes()
        found.append(Base(path.stem, kinds.get(path.stem, "model"), path, data, parsed(data)))
    scored = _scored(copy.deepcopy(found[0].draft))
    found.append(Base("scored", "model", folder / "scored.gguf", scored.bytes(), scored))
    for number, name in enumerate(("split-first", "split-last")):
        # Two folders, in each of which one part is spoiled and the other is not.
        (folder / name).mkdir()
        parts = split(parsed(moe.read_bytes()), [6, 17])
        path = write_parts(parts, folder / name)[number]
        found.append(Base(name, "model", path, path.read_bytes(), parts[number]))
    for base in found:
        if base.draft.bytes() != base.data:
            raise AssertionError(f"{base.name} is not what it was after taking it apart")
    return found


def _scored(draft: Draft) -> Draft:
    """The same model with a vocabulary of scored merges."""
    pieces = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    pieces += [each.encode() for each in ("▁", "t", "h", "e", "th", "▁th", "▁the", "i", "n", "in")]
    count = draft.tensors[0].dims[1]
    pieces += [f"<unused{i}>".encode() for i in range(count - len(pieces))]
    kinds = [2, 3, 3, *([6] * 256), *([1] * 10), *([5] * (count - 269))]
    draft.put("tokenizer.ggml.model", TEXT, b"llama")
    draft.put("tokenizer.ggml.tokens", ARRAY, (TEXT, pieces))
    draft.put("tokenizer.ggml.token_type", ARRAY, (I32, kinds))
    draft.put("tokenizer.ggml.scores", ARRAY, (F32, [-float(i) for i in range(count)]))
    draft.put("tokenizer.ggml.unknown_token_id", U32, 0)
    draft.entries = [e for e in draft.entries if e.key not in (b"tokenizer.ggml.merges", b"tokenizer.ggml.pre")]
    return draft


def mutant(all_bases: list[Base], seed: int) -> Mutant:
    """One to three mutations of one base."""
    rng = random.Random(seed)
    base = all_bases[seed % len(all_bases)]
    draft = copy.deepcopy(base.draft)
    told = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        told.append(rng.choice(STATEMENTS)(rng, draft))
    data = draft.bytes()
    if rng.random() < 0.25:
        # Half of these are torn and nothing else.
        if rng.random() < 0.5:
            told, draft = [], copy.deepcopy(base.draft)
            data = draft.bytes()
        donor = rng.choice(all_bases).data
        torn = bytearray(data)
        told.append(rng.choice(TEARS)(rng, torn, draft.sections, donor))
        data = bytes(torn)
    return Mutant(base, f"{base.name}: " + "; ".join(told), data)
