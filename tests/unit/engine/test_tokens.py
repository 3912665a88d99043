"""The tokenizer against llama.cpp and against what it promises.

``tests/data/tokenizer`` holds llama.cpp's ids, recorded by ``llamacpp_tokens.py record`` beside this file: for the real
SmolLM2 vocabulary, for every way to cut text (a made-up vocabulary of all byte pairs, whose ids change with any cut),
and for merges by score.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import llamacpp_tokens as peer
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine import tokens, vocab
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import ModelError, RequestError

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
CUTS = json.loads((DATA / "pretokenize.json").read_text())
ASCII_CASE_ONLY = ("gpt-4o", "minimax-m2", "tekken")


@functools.cache
def byte_pairs(pre: str = "smollm") -> Tokenizer:
    return Tokenizer.from_metadata(peer.byte_pair_vocabulary(pre))


@functools.cache
def scored() -> Tokenizer:
    return Tokenizer.from_metadata(peer.scored_vocabulary())


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", peer.PRE_RECORDED)
def test_every_cut_gives_the_ids_of_llama_cpp(pre):
    tokenizer = byte_pairs(pre)
    compared = 0
    for text, ids in zip(CUTS["texts"], CUTS[pre], strict=True):
        if pre in ASCII_CASE_ONLY and peer.has_cased_beyond_ascii(text):
            continue
        assert tokenizer.encode(text, add_bos=False) == ids, text
        compared += 1
    assert compared >= 30


@pytest.mark.parametrize(
    "text", ["ÀÉÎÕÜßſ", "ΑΒγδ", "中É文", "ЗДРАВСТВУЙмир", "ǅabc", "Größenmaßstäbe ÜBER", "ªº", "HTTPServerÄÖ x"]
)
def test_upper_and_lower_case_beyond_ascii_is_cut_as_o200k_publishes_it(text):
    pattern = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = byte_pairs("gpt-4o")
    words = [match[0] for match in regex.finditer(pattern, text)]
    assert tokenizer.encode(text) == [i for word in words for i in byte_pairs("gpt-2").encode(word)]


def test_merges_by_score_give_the_ids_of_llama_cpp():
    for case in json.loads((DATA / "scored.json").read_text())["cases"]:
        assert scored().encode(case["text"], parse_special=case["parse_special"]) == case["ids"], case


@pytest.mark.model
def test_smollm2_gives_the_recorded_ids_of_llama_cpp(smollm2_path):
    with Checkpoint.open(smollm2_path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    cases = json.loads((DATA / "smollm2.json").read_text())["cases"]
    assert len(cases) > 100
    for case in cases:
        assert tokenizer.encode(case["text"], parse_special=case["parse_special"]) == case["ids"], case
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {0, 2})


@pytest.mark.model
def test_gemma3_gives_the_recorded_ids_of_llama_cpp(gemma3_path):
    with Checkpoint.open(gemma3_path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    cases = json.loads((DATA / "gemma3.json").read_text())["cases"]
    assert len(cases) > 100
    for case in cases:
        assert tokenizer.encode(case["text"], parse_special=case["parse_special"]) == case["ids"], case
        assert tokenizer.decode(case["ids"][1:]) == case["text"].replace("▁", " ")
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_ids) == (262144, 2, {1, 106})


@pytest.mark.model
def test_smollm2_agrees_with_a_live_llama_cpp(smollm2_path):
    pytest.importorskip("xllamacpp")
    with Checkpoint.open(smollm2_path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    texts = [*peer.SPECIAL_TEXTS, *peer.random_texts(200, seed=random.randrange(1 << 30))]
    answers = peer.ask(Path(smollm2_path), [peer.question(text) for text in texts])
    for text, ids in zip(texts, answers, strict=True):
        assert tokenizer.encode(text) == ids, text


# -- special tokens ----------------------------------------------------------------------------------------------------


def test_control_tokens_are_parsed_only_when_asked():
    tokenizer = byte_pairs()
    a, b = tokenizer.token_id("<|a|>"), tokenizer.token_id("<|b|>")
    assert tokenizer.encode("<|a|><|b|>") == [a, b]
    plain = tokenizer.encode("<|a|><|b|>", parse_special=False)
    assert a not in plain
    assert b not in plain
    assert tokenizer.decode(plain) == "<|a|><|b|>"


def test_user_defined_tokens_are_always_parsed_and_control_text_is_never_merged_into_one():
    tokenizer = scored()
    tool, bos = tokenizer.token_id("[tool]"), tokenizer.token_id("<s>")
    ids = tokenizer.encode("a[tool]<s>", add_bos=False, parse_special=False)
    assert tool in ids
    assert bos not in ids
    assert tokenizer.encode("[tool]<s>", add_bos=False) == [tool, bos]


def test_the_longest_special_token_wins():
    metadata = peer.byte_pair_vocabulary("gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["<|a|>>", "<|c"]
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<|a|>><|a|><|c")] == ["<|a|>>", "<|a|>", "<|c"]


def test_the_beginning_token_is_added_as_the_file_says_and_never_twice():
    metadata = peer.byte_pair_vocabulary("smollm")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert Tokenizer.from_metadata(metadata).encode("x")[0] != bos
    metadata["tokenizer.ggml.add_bos_token"] = True
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("x")[0] == bos
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("x", add_bos=False)[0] != bos
    assert tokenizer.encode("<|a|>x").count(bos) == 1


def test_a_model_without_a_beginning_token_cannot_be_told_to_add_it():
    metadata = peer.byte_pair_vocabulary("smollm")
    del metadata["tokenizer.ggml.bos_token_id"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.bos_id is None
    with pytest.raises(RequestError, match="no beginning-of-sequence"):
        tokenizer.encode("x", add_bos=True)


def test_end_of_turn_texts_end_a_generation_and_count_as_control_tokens():
    metadata = peer.byte_pair_vocabulary("smollm")
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<end_of_turn>"]
    metadata["tokenizer.ggml.token_type"] += [1, 4]
    tokenizer = Tokenizer.from_metadata(metadata)
    im_end, end_of_turn = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<end_of_turn>")
    assert tokenizer.eos_ids == {tokenizer.token_id("<|b|>"), im_end, end_of_turn}
    assert tokenizer.encode("<|im_end|>") == [im_end]
    assert tokenizer.decode([im_end, end_of_turn], skip_special=True) == ""


def test_harmony_messages_end_without_ending_the_turn():
    metadata = peer.byte_pair_vocabulary("gpt-4o")
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_id("<|return|>") in tokenizer.eos_ids
    assert tokenizer.token_id("<|end|>") not in tokenizer.eos_ids


# -- text and back -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=60))
def test_byte_pairs_give_the_text_back(text):
    tokenizer = byte_pairs("llama-bpe")
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False), skip_special=True) == text


@settings(deadline=None)
@given(st.text(max_size=60).filter(lambda text: "▁" not in text and "[tool]" not in text))
def test_scored_merges_give_the_text_back_behind_their_space(text):
    ids = scored().encode(text, parse_special=False)
    assert scored().decode(ids, skip_special=True) == (" " + text if text else "")


@settings(deadline=None)
@given(st.lists(st.integers(0, byte_pairs().n_vocab - 1), max_size=40), st.booleans())
def test_streamed_text_joins_to_the_decoded_text(ids, skip_special):
    stream = byte_pairs().stream(skip_special=skip_special)
    joined = "".join(map(stream.push, ids)) + stream.flush()
    assert joined == byte_pairs().decode(ids, skip_special=skip_special)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=40).filter(lambda text: "\ufffd" not in text))
def test_a_stream_gives_whole_characters_only(text):
    # the first 256 tokens of this vocabulary are the bytes: the worst case for characters of several bytes
    stream = byte_pairs().stream()
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert stream.flush() == ""


def test_an_unfinished_character_shows_when_the_stream_ends():
    tokenizer = byte_pairs()
    stream = tokenizer.stream()
    assert tokenizer.piece(0xF0) == b"\xf0"
    assert stream.push(0xF0) == ""
    assert stream.flush() == "\ufffd"


def test_surrogates_are_joined_or_replaced():
    tokenizer = byte_pairs()
    assert tokenizer.decode(tokenizer.encode("a\ud83d\ude00b")) == "a😀b"
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_unused_tokens_stand_for_nothing_and_byte_tokens_for_their_byte():
    metadata = peer.scored_vocabulary()
    metadata["tokenizer.ggml.tokens"].append("<unused0>")
    metadata["tokenizer.ggml.token_type"].append(5)
    metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.piece(tokenizer.n_vocab - 1) == b""
    assert tokenizer.piece(tokenizer.token_id("<0xC3>")) == b"\xc3"
    assert tokenizer.decode([tokenizer.token_id("<0xC3>"), tokenizer.token_id("<0xA9>")]) == "é"


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(RequestError) as caught:
        byte_pairs().decode([token])
    assert caught.value.code == "bad_token"


def test_text_beyond_the_bound_is_refused():
    with pytest.raises(RequestError) as caught:
        byte_pairs().encode("x" * (tokens.MAX_TEXT_CHARS + 1))
    assert caught.value.code == "text_too_long"


# -- hostile metadata --------------------------------------------------------------------------------------------------


def _scored_with(**changes):
    metadata = peer.scored_vocabulary()
    for key, value in changes.items():
        if value is None:
            metadata.pop(f"tokenizer.ggml.{key}", None)
        else:
            metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


def _pairs_with(**changes):
    metadata = peer.byte_pair_vocabulary("smollm")
    for key, value in changes.items():
        if value is None:
            metadata.pop(f"tokenizer.ggml.{key}", None)
        else:
            metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


N_SCORED = len(peer.scored_vocabulary()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("make", "changes", "key"),
    [
        (_scored_with, {"model": None}, "model"),
        (_scored_with, {"model": 7}, "model"),
        (_scored_with, {"pre": 7}, "pre"),
        (_scored_with, {"tokens": None}, "tokens"),
        (_scored_with, {"tokens": []}, "tokens"),
        (_scored_with, {"tokens": "abc"}, "tokens"),
        (_scored_with, {"tokens": [1] * N_SCORED}, "tokens"),
        (_scored_with, {"tokens": ["x"] * N_SCORED}, "tokens"),
        (_scored_with, {"tokens": ["x" * (vocab.MAX_TOKEN_CHARS + 1)]}, "tokens"),
        (_scored_with, {"token_type": [1]}, "token_type"),
        (_scored_with, {"token_type": [7] * N_SCORED}, "token_type"),
        (_scored_with, {"token_type": [-1] * N_SCORED}, "token_type"),
        (_scored_with, {"token_type": ["1"] * N_SCORED}, "token_type"),
        (_scored_with, {"scores": None}, "scores"),
        (_scored_with, {"scores": [0.0]}, "scores"),
        (_scored_with, {"scores": [float("nan")] * N_SCORED}, "scores"),
        (_scored_with, {"scores": [float("inf")] * N_SCORED}, "scores"),
        (_scored_with, {"scores": ["0"] * N_SCORED}, "scores"),
        (_scored_with, {"bos_token_id": N_SCORED}, "bos_token_id"),
        (_scored_with, {"bos_token_id": -1}, "bos_token_id"),
        (_scored_with, {"bos_token_id": True}, "bos_token_id"),
        (_scored_with, {"bos_token_id": None}, "bos_token_id"),
        (_scored_with, {"eos_token_id": 1 << 32}, "eos_token_id"),
        (_scored_with, {"eot_token_id": "2"}, "eot_token_id"),
        (_scored_with, {"add_bos_token": 1}, "add_bos_token"),
        (_scored_with, {"add_space_prefix": "yes"}, "add_space_prefix"),
        (
            _scored_with,
            {"unknown_token_id": None, "tokens": ["a"], "token_type": [1], "scores": [0.0], "bos_token_id": 0}
            | {"eos_token_id": 0},
            "tokens",
        ),
        (_pairs_with, {"merges": None}, "merges"),
        (_pairs_with, {"merges": ["ab"]}, "merges"),
        (_pairs_with, {"merges": [" b"]}, "merges"),
        (_pairs_with, {"merges": [3]}, "merges"),
        (_pairs_with, {"merges": ["a absent"]}, "merges"),
        (_pairs_with, {"merges": {"a": "b"}}, "merges"),
    ],
)
def test_damaged_metadata_is_refused_by_the_name_of_its_key(make, changes, key):
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_metadata(make(**changes))
    assert caught.value.code == "bad_tokenizer"
    assert f"tokenizer.ggml.{key} " in caught.value.message


def test_more_tokens_than_the_bound_are_refused(monkeypatch):
    monkeypatch.setattr(vocab, "MAX_TOKENS", 100)
    with pytest.raises(ModelError, match="at most 100"):
        Tokenizer.from_metadata(peer.scored_vocabulary())


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"model": "t5"}, "'t5'"), ({"pre": "superbpe\x1b"}, "superbpe\\x1b"), ({"model": "rwkv"}, "rwkv")],
)
def test_unknown_tokenizers_are_refused_by_name(changes, named):
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_metadata(_pairs_with(**changes))
    assert caught.value.code == "unsupported_tokenizer"
    assert named in caught.value.message
    assert "\x1b" not in caught.value.message


def test_no_message_carries_control_characters_of_the_file():
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_metadata(_pairs_with(merges=["\x1b[2J"]))
    assert "\x1b" not in str(caught.value)
