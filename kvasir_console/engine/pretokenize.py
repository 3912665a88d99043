"""How byte-pair tokenizers cut text into words before they merge: the patterns behind ``tokenizer.ggml.pre``.

The names are llama.cpp's; the patterns are those of the models' own tokenizers. Several patterns are applied one after
the other, each to the pieces the one before left: what matches becomes a piece, and so does what lies between.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = rf"(?:{_CONTRACTION})|{_MARKED}|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(suffix: str, numbers: str) -> str:
    """Words cut where lower case turns to upper, as o200k and Tekken do."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}|{_CASED_SYMBOLS}|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """A way to cut text into words, and what goes with it unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is itself a token is taken whole, whatever the merges say."""
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The pre-tokenizer of the ``tokenizers`` library: the cuts, then bytes written as printable characters."""
        cuts: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


_DEFAULT = PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_DIGITS = PreTokenization((r"\p{N}", _GPT2))
_PLAIN = PreTokenization((_GPT2,))
_LLAMA = PreTokenization((_LLAMA3,), whole_words=True, add_bos=True)
_GLM = PreTokenization((_LLAMA3,))
_QWEN = PreTokenization((_QWEN2,))
_QWEN3_5 = PreTokenization((_QWEN35,))
_BAILING = PreTokenization(
    (rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_O200K = PreTokenization((_cased(rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}"),))
_TEKKEN = PreTokenization((_cased("", r"\p{N}"),), whole_words=True, add_bos=True)
_DEEPSEEK3 = PreTokenization(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _SPACES,
    )
)
_FALCON = PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "": _DEFAULT,
    "default": _DEFAULT,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "trillion": _PLAIN,
    "granite-docling": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "falcon3": _LLAMA,
    "pixtral": _LLAMA,
    "dbrx": _GLM,
    "smaug-bpe": _GLM,
    "glm4": _GLM,
    "chatglm-bpe": _GLM,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "megrez": _QWEN,
    "hunyuan": _QWEN,
    "solar-open": _QWEN,
    "grok-2": _QWEN,
    "qwen35": _QWEN3_5,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "llada-moe": _BAILING,
    "gpt-4o": _O200K,
    "minimax-m2": _O200K,
    "llama4": _O200K,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "falcon": _FALCON,
}
