"""What a GGUF says, made false: one statement at a time, or several that agree with each other. Seeded."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Quant
from gguf_draft import (
    ARRAY,
    BOOL,
    F32,
    FORMS,
    I32,
    TEXT,
    U32,
    U64,
    Draft,
    Entry,
    Tensor,
    encoded,
    u64,
)

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 48, 63, 64, 65, 96, 128, 255, 256, 1000, 4096, 65_535, 65_536,
         2**20, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1)  # fmt: skip
HUGE = (2**32, 2**40, 2**42 + 1, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e-5, 0.5, 2.0, 1e4, 1e30, 3.4e38, float("inf"), float("-inf"),
         float("nan"))  # fmt: skip
TEXTS = (b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"a" * 5000, b"\x1b[2J\x07", "▁".encode(), b"llama", b"gemma3",
         b"gpt2", b"none", b"yarn", b"blk.0.attn_q.weight", b"{{ 9**9**9 }}", b"%s%n", b"../../etc", b" ", b"a b",
         b"{% for i in range(10**9) %}{% endfor %}", "𝕏".encode())  # fmt: skip

Statement = Callable[[random.Random, Draft], str]


def _count(rng: random.Random, draft: Draft) -> str:
    which = rng.choice(("n_tensors", "n_entries", "version"))
    true = {"n_tensors": len(draft.tensors), "n_entries": len(draft.entries), "version": 3}[which]
    value = rng.choice((true - 1, true + 1, *SIZES, *HUGE))
    setattr(draft, which, value)
    return f"{which} = {value}"


def _entry(rng: random.Random, draft: Draft) -> str:
    entry = rng.choice(draft.entries)
    name = repr(entry.key)[:60]
    match rng.randrange(8):
        case 0:
            draft.entries.remove(entry)
            return f"without {name}"
        case 1:
            draft.entries.append(copy.copy(entry))
            return f"{name} twice"
        case 2:
            entry.key = rng.choice((*TEXTS, rng.choice(draft.entries).key, entry.key[:-1]))
            return f"{name} is now {entry.key!r:.40}"
        case 3:
            entry.type = rng.choice((*range(14), 99, 2**32 - 1))
            return f"{name} has the type {entry.type}, its bytes as before"
        case 4:
            return _other_value(rng, entry)
        case 5:
            entry.value = entry.value[: rng.randrange(len(entry.value) + 1)]
            return f"{name} is cut short"
        case 6:
            rng.shuffle(draft.entries)
            return "metadata in another order"
        case _:
            draft.put(f"extra.{rng.randrange(9)}", U64, rng.choice(HUGE))
            return "one more entry"


def _other_value(rng: random.Random, entry: Entry) -> str:
    kind = rng.choice((*FORMS, TEXT, ARRAY, entry.type, entry.type))
    if kind in (F32, 12):
        value: object = rng.choice(REALS)
        if kind == F32 and abs(value) > 3.4e38 and value not in (float("inf"), float("-inf")):  # type: ignore[arg-type]
            value = 1.0
    elif kind in FORMS:
        value = rng.choice((*SIZES, *HUGE, -1))
    elif kind == TEXT:
        value = rng.choice(TEXTS)
    else:
        item = rng.choice((U32, F32, TEXT, BOOL, ARRAY))
        inner = {U32: SIZES, F32: (0.0, 1.0), TEXT: TEXTS, BOOL: (0, 1), ARRAY: [(U32, [1, 2])] * 3}[item]
        value = (item, rng.choices(inner, k=rng.choice((0, 1, 2, 300))))
    entry.type, entry.value = kind, encoded(kind, value)
    return f"{entry.key!r:.60} = {value!r:.60} of type {kind}"


def _array(rng: random.Random, draft: Draft) -> str:
    """A length or an item type of an array that is not what follows."""
    arrays = [entry for entry in draft.entries if entry.type == ARRAY]
    if not arrays:
        return _entry(rng, draft)
    entry = rng.choice(arrays)
    item, count = struct.unpack_from("<IQ", entry.value)
    body = entry.value[12:]
    match rng.randrange(4):
        case 0:
            count = rng.choice((count - 1, count + 1, *SIZES, *HUGE))
        case 1:
            item = rng.choice((*range(14), 2**31))
        case 2 if item == TEXT:
            at = 0
            for _ in range(rng.randrange(max(1, count))):
                at += 8 + struct.unpack_from("<Q", body, at)[0]
            body = body[:at] + u64(rng.choice((*SIZES, *HUGE))) + body[at + 8 :]
        case _:
            depth = rng.choice((1, 3, 4, 5, 200))
            body, item, count = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0), ARRAY, 1
    entry.value = struct.pack("<IQ", item & 0xFFFFFFFF, count & (2**64 - 1)) + body
    return f"the array {entry.key!r} of {count} items of type {item}"


def _directory(rng: random.Random, draft: Draft) -> str:
    tensor = rng.choice(draft.tensors)
    name = tensor.name.decode()
    match rng.randrange(10):
        case 0:
            draft.tensors.remove(tensor)
            return f"without {name}"
        case 1:
            draft.tensors.append(Tensor(tensor.name, tensor.dims, tensor.type, tensor.data))
            return f"{name} twice"
        case 2:
            other = rng.choice(draft.tensors)
            tensor.name, other.name = other.name, tensor.name
            return f"{name} and {tensor.name.decode()} change names"
        case 3:
            tensor.name = rng.choice((*TEXTS, b"rope_freqs.weight", b"blk.99.attn_q.weight", b"blk.0.attn_q.bias",
                                      b"blk.0.ffn_gate.weight", b"output.weight", b"blk.0.ffn_gate_inp.weight",
                                      name.replace("weight", "bias").encode(), b"x" * 64))  # fmt: skip
            return f"{name} is now {tensor.name!r:.40}"
        case 4:
            tensor.dims = list(reversed(tensor.dims))
            return f"{name} transposed"
        case 5:
            axis = rng.randrange(len(tensor.dims))
            tensor.dims[axis] = rng.choice((tensor.dims[axis] * 2, tensor.dims[axis] - 1, *SIZES, *HUGE))
            return f"{name} has the dimensions {tensor.dims}"
        case 6:
            tensor.dims = rng.choice(([*tensor.dims, 1], tensor.dims[:-1], [*tensor.dims, *([1] * 5)],
                                      [tensor.dims[0] * 2, *[max(1, d // 2) for d in tensor.dims[1:]]]))  # fmt: skip
            return f"{name} has the dimensions {tensor.dims}"
        case 7:
            tensor.type = rng.choice((*(int(q) for q in Quant), 4, 5, 31, 41, 99, 2**32 - 1))
            return f"{name} has the type {tensor.type}, its bytes as before"
        case 8:
            tensor.offset = rng.choice((0, 1, 16, 32, 64, len(draft.bytes()), *SIZES, *HUGE))
            return f"{name} lies at {tensor.offset}"
        case _:
            return _retyped(rng, tensor)


def _retyped(rng: random.Random, tensor: Tensor) -> str:
    """Another type, with as many random bytes as it needs: legal, though its values are anything."""
    kind = rng.choice([each for each in GGML_QUANT_SIZES if tensor.dims[0] % GGML_QUANT_SIZES[each][0] == 0])
    values, size = GGML_QUANT_SIZES[kind]
    count = 1
    for n in tensor.dims:
        count *= n
    tensor.type, tensor.data = int(kind), rng.randbytes(min(count // values * size, 2**22))
    return f"{tensor.name.decode()} is {kind.name} of random bytes"


def _values(rng: random.Random, draft: Draft) -> str:
    """Weights that are not numbers, or not small ones."""
    tensor = rng.choice(draft.tensors)
    pattern = rng.choice((b"\xff\xff", b"\x00\x7c", b"\x00\x7e", b"\x00\xfc", b"\xff\x7f", b"\x80\x7f", b"\x00\x00",
                          struct.pack("<f", 3e38), struct.pack("<f", 1e-40)))  # fmt: skip
    data = bytearray(tensor.data)
    if rng.random() < 0.5:
        data[:] = (pattern * len(data))[: len(data)]
    else:
        for _ in range(rng.randrange(1, 20)):
            at = rng.randrange(max(1, len(data) - 4)) & ~1
            data[at : at + len(pattern)] = pattern
    tensor.data = bytes(data[: len(tensor.data)])
    return f"values {pattern.hex()} in {tensor.name.decode()}"


def _alignment(rng: random.Random, draft: Draft) -> str:
    value = rng.choice((0, 1, 2, 4, 8, 16, 33, 64, 128, 4096, 2**20, 2**31, 2**32 - 1))
    draft.put("general.alignment", rng.choice((U32, U32, U32, I32, U64, F32, TEXT)), 0)
    entry = draft.find("general.alignment")
    if entry is not None and entry.type in (U32, I32, U64):
        entry.value = encoded(entry.type, value)
    if 0 < value <= 4096 and rng.random() < 0.6:
        draft.alignment = value
    return f"general.alignment = {value}, laid out at {draft.alignment}"


# Sizes of the model that contradict its tensors, or, harder to see, do not.

_NAMES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
          "attention.key_length", "attention.value_length", "expert_count", "expert_used_count", "vocab_size",
          "expert_feed_forward_length", "context_length", "rope.dimension_count",
          "attention.sliding_window")  # fmt: skip


_REAL_NAMES = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "expert_weights_scale", "rope.scaling.factor",
               "rope.scale_linear", "attention.clamp_kqv", "rope.scaling.attn_factor")  # fmt: skip


def _size(rng: random.Random, draft: Draft) -> str:
    name = f"{draft.architecture}.{rng.choice(_NAMES)}"
    value = rng.choice((*SIZES, -1, *HUGE))
    draft.put(name, rng.choice((U32, U32, U32, I32, U64)), value)
    return f"{name} = {value}"


def _real(rng: random.Random, draft: Draft) -> str:
    name = f"{draft.architecture}.{rng.choice(_REAL_NAMES)}"
    value = rng.choice(REALS)
    draft.put(name, F32, value)
    return f"{name} = {value}"


def _rope(rng: random.Random, draft: Draft) -> str:
    if rng.random() < 0.5:
        kind = rng.choice((b"linear", b"yarn", b"none", b"longrope", b"", b"\xff"))
        draft.put(f"{draft.architecture}.rope.scaling.type", TEXT, kind)
        draft.put(f"{draft.architecture}.rope.scaling.factor", F32, rng.choice(REALS))
        return f"rope scaling {kind!r}"
    count = rng.choice((1, 2, 7, 8, 9, 16, 32, 64))
    rows = rng.choice(([count], [count, 1], [1, count], [count, 2], [4, count]))
    values = 1
    for n in rows:
        values *= n
    draft.tensors.append(
        Tensor(b"rope_freqs.weight", rows, 0, struct.pack(f"<{values}f", *[rng.choice(REALS)] * values))
    )
    return f"rope_freqs of {rows}"


def _heads(rng: random.Random, draft: Draft) -> str:
    """Heads of another width, with the key length that goes with them: the matrices fit as before."""
    name = draft.architecture
    entry, query, key = (
        draft.find(f"{name}.attention.head_count"),
        *(draft.tensor(f"blk.0.attn_{part}.weight") for part in "qk"),
    )
    if entry is None or query is None or key is None or len(query.dims) < 2 or len(key.dims) < 2:
        return _size(rng, draft)
    head = rng.choice((1, 2, 4, 8, 16, 32, 64))
    n_head, n_head_kv = max(1, query.dims[1] // head), max(1, key.dims[1] // head)
    draft.put(f"{name}.attention.head_count", U32, n_head)
    draft.put(f"{name}.attention.head_count_kv", U32, n_head_kv)
    draft.put(f"{name}.attention.key_length", U32, head)
    draft.put(f"{name}.attention.value_length", U32, head)
    draft.put(f"{name}.rope.dimension_count", U32, rng.choice((head, head // 2, head * 2, 2)))
    return f"{n_head} and {n_head_kv} heads of {head}"


def _experts(rng: random.Random, draft: Draft) -> str:
    """More or fewer experts, of widths that come to the same bytes."""
    banks = [tensor for tensor in draft.tensors if b"_exps." in tensor.name and len(tensor.dims) == 3]
    if not banks:
        draft.put(f"{draft.architecture}.expert_count", U32, rng.choice((1, 2, 8, 65_536)))
        draft.put(f"{draft.architecture}.expert_used_count", U32, rng.choice((1, 2, 8)))
        return "experts without any"
    factor = rng.choice((2, 3, 4, 8))
    for tensor in banks:
        axis = 0 if b"down" in tensor.name else 1
        if tensor.dims[axis] % factor == 0:
            tensor.dims = list(tensor.dims)
            tensor.dims[axis] //= factor
            tensor.dims[2] *= factor
    ff = banks[0].dims[1]
    draft.put(f"{draft.architecture}.feed_forward_length", U32, ff)
    draft.put(f"{draft.architecture}.expert_count", U32, banks[0].dims[2])
    draft.put(f"{draft.architecture}.expert_used_count", U32, rng.choice((1, 2, banks[0].dims[2])))
    for tensor in draft.tensors:
        if tensor.name.endswith(b"ffn_gate_inp.weight") and rng.random() < 0.9:
            tensor.dims, tensor.data = [tensor.dims[0], banks[0].dims[2]], tensor.data * factor
    return f"{banks[0].dims[2]} experts of width {ff}"


def _other_architecture(rng: random.Random, draft: Draft) -> str:
    """All keys of one architecture under the name of another."""
    old = draft.architecture
    new = rng.choice(("llama", "gemma3", "qwen2moe", "mamba", "x" * 300, ""))
    for entry in draft.entries:
        if entry.key.startswith(old.encode() + b"."):
            entry.key = new.encode() + entry.key[len(old) :]
    draft.put("general.architecture", TEXT, new)
    if rng.random() < 0.5:
        for name in ("post_attention_norm", "post_ffw_norm"):
            norm = draft.tensor("blk.0.ffn_norm.weight")
            for layer in range(2):
                if norm is not None and draft.tensor(f"blk.{layer}.{name}.weight") is None:
                    draft.tensors.append(Tensor(f"blk.{layer}.{name}.weight".encode(), norm.dims, norm.type, norm.data))
                for part in "qk":
                    width, at = 16, f"blk.{layer}.attn_{part}_norm.weight"
                    if draft.tensor(at) is None:
                        draft.tensors.append(Tensor(at.encode(), [width], 0, struct.pack(f"<{width}f", *[1.0] * width)))
    return f"{old} is called {new:.20}"


def _vocabulary(rng: random.Random, draft: Draft) -> str:
    """Lists of the vocabulary that do not fit each other, or the table."""
    lists = {
        "tokens": (TEXT, (*TEXTS, b"<|im_end|>", b"<0x41>")),
        "token_type": (I32, (-1, 0, 1, 2, 3, 4, 5, 6, 7, 255, 256)),
        "scores": (F32, REALS),
        "merges": (TEXT, (b"t h", b"x y", b"th", b" ", b"  ", b"a  b", "Ġ Ġ".encode(), b"zz zz")),
    }
    name = rng.choice((*lists, "ids", "flags", "names"))
    prefix = "tokenizer.ggml."
    if name == "ids":
        key = rng.choice(("bos", "eos", "unknown", "padding", "eot", "eom")) + "_token_id"
        draft.put(prefix + key, rng.choice((U32, I32, U64, F32)), rng.choice((*SIZES, 287, 288, -1)))
        return f"{key} elsewhere"
    if name == "flags":
        key = rng.choice(("add_bos_token", "add_space_prefix", "add_eos_token"))
        kind = rng.choice((BOOL, U32, TEXT))
        draft.put(prefix + key, kind, b"yes" if kind == TEXT else rng.choice((0, 1)))
        return f"{key} otherwise"
    if name == "names":
        key = rng.choice(("model", "pre"))
        draft.put(prefix + key, TEXT, rng.choice((*TEXTS, b"llama-bpe", b"qwen2", b"gpt-2", b"default", b"smollm")))
        return f"another {key}"
    kind, choices = lists[name]
    entry = draft.find(prefix + name)
    if entry is None or entry.type != ARRAY or rng.random() < 0.3:
        items = rng.choices(choices, k=rng.choice((0, 1, 5, 287, 288, 289, 2000)))
        draft.put(prefix + name, ARRAY, (kind, items))
        return f"{len(items)} {name} of anything"
    item, count = struct.unpack_from("<IQ", entry.value)
    body, new = entry.value[12:], encoded(kind, rng.choice(choices))
    if rng.random() < 0.5 or item != kind:
        entry.value = struct.pack("<IQ", item, count + 1) + body + new
        return f"one more of {name}"
    first = 8 + struct.unpack_from("<Q", body)[0] if kind == TEXT else 4
    entry.value = struct.pack("<IQ", item, count) + new + body[first:]
    return f"another first of {name}"


def _template(rng: random.Random, draft: Draft) -> str:
    kind = rng.choice((TEXT, TEXT, U32, ARRAY))
    value = {TEXT: rng.choice((*TEXTS, b"{{" * 1000, b"x" * 300_000)), U32: 3, ARRAY: (TEXT, [b"a"])}[kind]
    draft.put("tokenizer.chat_template", kind, value)
    return "another chat template"


def _own_keys(rng: random.Random, draft: Draft) -> str:
    """What a stage or shard says of itself."""
    own = [entry for entry in draft.entries if entry.key.startswith(b"kvasir.")]
    if own and rng.random() < 0.7:
        entry = rng.choice(own)
        if entry.type == U32:
            entry.value = encoded(U32, rng.choice(SIZES))
            return f"{entry.key!r} otherwise"
        return _other_value(rng, entry)
    key = rng.choice(("kvasir.stage.layer_begin", "kvasir.stage.layer_end", "kvasir.stage.tied_output",
                      "kvasir.expert_shard.expert_begin", "linkcpp.expert_shard.expert_begin", "kvasir.model_digest",
                      "split.no", "split.count", "split.tensors.count"))  # fmt: skip
    kind = rng.choice((U32, I32, BOOL, 2, TEXT))
    draft.put(key, kind, rng.choice(TEXTS) if kind == TEXT else rng.choice(SIZES))
    return f"{key} added"


STATEMENTS: tuple[Statement, ...] = (
    _count, _entry, _entry, _array, _directory, _directory, _directory, _values, _values, _alignment, _size, _size,
    _size, _real, _rope, _heads, _experts, _other_architecture, _other_architecture, _vocabulary, _vocabulary,
    _template, _own_keys,
)  # fmt: skip
