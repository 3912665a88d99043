"""llama.cpp as the other tokenizer: texts to try, small vocabularies that show every cut, and its answers.

Run as a program it is a child process that keeps llama.cpp (the xllamacpp package) and its output away from the tests:

    python llamacpp_tokens.py ask MODEL.gguf < requests.json > replies.json
        a list of [route, body] for its HTTP server; the last line of output is the list of replies
    python llamacpp_tokens.py record SMOLLM2.gguf GEMMA3.gguf DIRECTORY
        writes the vectors that tests/data/tokenizer holds
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

TEXTS = (
    "",
    " ",
    "Hello",
    " Hello world",
    "Hello, World! How's it going?",
    "I'm you're he'll they'd we've it's don't I'M YOU'RE HE'LL O'Brien's 'quoted' ''x''",
    "1 12 123 1234567890 3.14159265 1,000,000.00 -42 1e-10 0xDEADBEEF a1b2c3",
    "2024-12-31T23:59:59Z １２３ ٣٤٥ ½ ¾ ² Ⅷ",
    "\n\n\n\n",
    " \n \t\n\t ",
    "a  b   c    d\t\te",
    "   leading and trailing   ",
    "line one\nline two\r\nline three\r\n\r\n",
    "x \n\n y\n  \n  z",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n-1) + fib(n-2)\n",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); } // end',
    '<html><body class="a">&nbsp;</body></html> {"key": [1, null]} https://example.org/a?b=c&d#e',
    "a_b-c.d/e\\f|g~h`i^j $100 €50 £20 ¥7 !!!???...---===+++ (((a)))[[b]]{{c}}",
    "naïve café résumé Ångström e\u0301 a\u0308\u0323",
    "Привет, мир! Γειά σου Κόσμε შენ ÀÉÎÕÜ ßſ",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界！こんにちは世界 カタカナ 안녕하세요 세계 12時34分",
    "😀😃 a😀b 👨‍👩‍👧‍👦 🇫🇷🇩🇪 👍🏽 ❤️ 𝔘𝔫𝔦 𐍈",
    "\u00a0nbsp\u00a0x a\u3000b \u2003em zero\u200bwidth a\u0085b soft\u00adhyphen \ufeffbom \u2028line",
    "\x1b[31mred\x7f \uf8ff \U0010ffff",
    "iPhoneXsMax HTTPServer camelCase snake_case SCREAMING_CASE McDonald's",
    "ǅabc ªº x²+y²=z² ΑΒγδ",
    'a/b/c //\n/ a.\n\nB end.)"\n',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababab --------------------------------",
    " " * 40 + "x" + "\n" * 20 + "\t" * 10 + "0" * 30,
    "‘single’ “double” „low“ «guillemets» …—– ±×÷≤≥≠∞∑∫√ →←↑↓⇒ ☃☀★♥♪",
    "Once upon a time, in a land far, far away, there lived a girl named Ada. She liked 7, 11 and 13.",
    "Größenmaßstäbe über Straßenbahnhaltestellen, zażółć gęślą jaźń, İstanbul, Việt Nam",
)
"""Numbers, code, scripts, emoji, runs of blanks, odd characters: what tokenizers disagree about."""

SPECIAL_TEXTS = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_start|>y <|im_end|> z",
    "<|im_start|><|im_start|>>",
    "<|im_start <|im_end|",
    "<|endoftext|> <repo_name><file_sep><issue_comment>a",
)

_ALPHABETS = (
    "ab ",
    "aA'sStT ",
    "012 9.,",
    " \n\t\r",
    "éÉ ñ中文 ",
    "😀 👍a",
    "<>|_im",
    "'\"`. !?",
    "\u00a0\u3000 a",
    "あア漢1",
)


def random_texts(count: int, seed: int) -> list[str]:
    """Short texts over small alphabets, which meet more cases than prose does; the same for the same seed."""
    rng = random.Random(seed)
    alphabets = ["".join(rng.sample(_ALPHABETS, 2)) for _ in range(count)]
    return ["".join(rng.choice(a) for _ in range(rng.randint(1, 24))) for a in alphabets]


def has_cased_beyond_ascii(text: str) -> bool:
    """llama.cpp knows upper from lower case only in ASCII where a pattern asks for it."""
    return any(ord(char) > 127 and char.isalpha() for char in text)


def byte_pair_vocabulary(pre: str) -> dict[str, Any]:
    """Every byte and every pair of bytes, merged in a scrambled order: any change of a cut changes the ids."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = [chr(byte) if byte in plain else "" for byte in range(256)]
    for n, byte in enumerate(byte for byte in range(256) if byte not in plain):
        chars[byte] = chr(0x100 + n)
    # an odd factor permutes the numbers below 2^16
    pairs = [divmod(rank * 40503 % 65536, 256) for rank in range(65536)]
    tokens = chars + [chars[a] + chars[b] for a, b in pairs] + ["<|a|>", "<|b|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": [f"{chars[a]} {chars[b]}" for a, b in pairs],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def scored_vocabulary() -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback, a user-defined token, and scores that tie on purpose."""
    prose = "the_cat_sat_on_the_mat_and_the_hat_that_it_ate_aaaa_ababab_12_123_été_où_中文".replace("_", "▁")
    found: dict[str, int] = {}
    for length in range(1, 6):
        for at in range(len(prose) - length + 1):
            found[prose[at : at + length]] = found.get(prose[at : at + length], 0) + length - 1
    pieces = [piece for piece, count in found.items() if count or len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[tool]", *pieces]
    types = [2, 3, 3, *[6] * 256, 4, *[1] * len(pieces)]
    scores = [0.0] * 260 + [-10.0 + found[piece] for piece in pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SCORED_TEXTS = (
    "the cat sat on the mat",
    "thethethe aaaaa aaaaaaaaa abababa bababab",
    " two  spaces",
    "12 123 1231 été où 中文 日本 😀",
    "the<s></s>that",
    "a[tool]the [tool][tool]",
    "\n\tthe\n",
    "▁the▁▁",
)

PRE_RECORDED = (
    "default",
    "gpt-2",
    "smollm",
    "llama-bpe",
    "glm4",
    "qwen2",
    "qwen35",
    "gpt-4o",
    "minimax-m2",
    "tekken",
    "deepseek-v3",
    "falcon",
    "bailingmoe",
)


def ask(model: Path, questions: list[dict[str, Any]]) -> list[list[int]]:
    """llama.cpp's ids for each question, by a child process."""
    return [reply["tokens"] for reply in _ask(model, [["/tokenize", question] for question in questions])]


def apply_template(model: Path, conversations: list[list[dict[str, Any]]]) -> list[str]:
    """llama.cpp's prompt for each conversation, by a child process."""
    return [r["prompt"] for r in _ask(model, [["/apply-template", {"messages": c}] for c in conversations])]


def _ask(model: Path, requests: list[list[Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, "ask", str(model)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    replies: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return replies


def question(text: str, *, add_special: bool = False, parse_special: bool = True) -> dict[str, Any]:
    return {"content": text, "add_special": add_special, "parse_special": parse_special}


def _answer(model: str, requests: list[list[Any]]) -> list[dict[str, Any]]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 64
    params.n_parallel = 1
    params.warmup = False
    params.use_jinja = True
    params.port = 0
    server = xllamacpp.Server(params)
    replies = []
    for route, body in requests:
        request = urllib.request.Request(
            server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            replies.append(json.load(reply))
    return replies


def _write_tiny_model(path: Path, metadata: dict[str, Any]) -> None:
    """A one-block model of 32 dimensions with this vocabulary, which llama.cpp will open."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((n_vocab, 32), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def record(smollm2: Path, gemma3: Path, directory: Path) -> None:
    """Write the vectors: two real vocabularies, every recorded cut, and scored merges."""
    texts = [*TEXTS, *SPECIAL_TEXTS, *random_texts(40, seed=1)]
    _save(directory / "smollm2.json", _cases(smollm2, "SmolLM2-135M-Instruct", texts, add_special=False))
    texts += ["<start_of_turn>user\nhi<end_of_turn>\n", "<table><tr>x</tr>", "▁▁a▁b", "<0x0A>"]
    _save(directory / "gemma3.json", _cases(gemma3, "gemma-3-270m", texts, add_special=True))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny.gguf"
        texts = [*TEXTS, *random_texts(40, seed=2)]
        cuts = {}
        for pre in PRE_RECORDED:
            _write_tiny_model(model, byte_pair_vocabulary(pre))
            cuts[pre] = ask(model, [question(text) for text in texts])
        _save(directory / "pretokenize.json", {"about": "llama.cpp's ids for all byte pairs.", "texts": texts, **cuts})
        _write_tiny_model(model, scored_vocabulary())
        _save(directory / "scored.json", _cases(model, "scored_vocabulary()", list(SCORED_TEXTS), add_special=True))


def _cases(model: Path, name: str, texts: list[str], *, add_special: bool) -> dict[str, Any]:
    asked = [question(text, add_special=add_special, parse_special=parse) for text in texts for parse in (True, False)]
    cases = [
        {"text": q["content"], "parse_special": q["parse_special"], "ids": ids}
        for q, ids in zip(asked, ask(model, asked), strict=True)
    ]
    return {"about": f"llama.cpp's ids for {name}; add_special was {add_special}.", "cases": cases}


def _save(path: Path, content: dict[str, Any]) -> None:
    lines = [f" {json.dumps(k)}: {_compact(v)}" for k, v in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _compact(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join("  " + json.dumps(item, separators=(",", ":")) for item in value) + "\n ]"
    return json.dumps(value)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        # llama.cpp logs to both streams; the answer alone goes to the real stdout
        stdout = os.dup(1)
        os.dup2(2, 1)
        answer = json.dumps(_answer(sys.argv[2], json.load(sys.stdin)))
        with os.fdopen(stdout, "w") as out:
            out.write("\n" + answer + "\n")
        os._exit(0)  # llama.cpp's threads need no farewell
    record(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
