"""Reading a ``generate`` request: every field checked, every refusal by name."""

from __future__ import annotations

from typing import Any

from kvasir_console.engine.process.client import MAX_LOGPROBS, GenerateRequest
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_SESSION_CHARACTERS = 128

_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "messages": (list,),
    "prompt_tokens": (list,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "penalty_last_n": (int,),
    "stop": (list,),
    "ignore_eos": (bool,),
    "logprobs": (int,),
    "session": (str,),
    "speculation": (str,),
    "experts": (str,),
    "trace": (bool,),
    "key": (int,),
    "resumed": (list,),
}


def parse_request(message: dict[str, Any]) -> GenerateRequest:
    """Read ``generate`` fields from a control message. Raises ``RequestError`` naming the field."""
    known = set(GenerateRequest.__dataclass_fields__)
    fields = {key: value for key, value in message.items() if key in known and value is not None}
    if unknown := set(message) - known - {"id", "verb"}:
        raise RequestError("unknown_field", f"generate has no field {sorted(unknown)[0]!r}.")
    for key, kinds in _FIELD_TYPES.items():
        if key in fields and (not isinstance(fields[key], kinds) or (bool not in kinds and fields[key] is True)):
            raise RequestError("wrong_type", f"generate: {key} has the wrong type ({type(fields[key]).__name__}).")
    for key in ("messages", "prompt_tokens", "stop", "resumed"):
        if key in fields:
            fields[key] = tuple(fields[key])
    request = GenerateRequest(**fields)
    given = [request.prompt is not None, request.messages is not None, request.prompt_tokens is not None]
    if sum(given) != 1:
        raise RequestError("no_prompt", "A request needs exactly one of prompt, messages and prompt_tokens.")
    if request.prompt_tokens is not None and not all(type(token) is int for token in request.prompt_tokens):
        raise RequestError("wrong_type", "generate: prompt_tokens must be integers.")
    if not all(type(token) is int for token in request.resumed):
        raise RequestError("wrong_type", "generate: resumed must be integers.")
    if not 0 <= request.key < 2**63 or len(request.resumed) > request.max_tokens:
        raise RequestError("bad_key", "generate: key has 63 bits, and resumed at most max_tokens tokens.")
    if request.max_tokens < 1:
        raise RequestError("max_tokens_out_of_range", "max_tokens must be at least 1.")
    if request.experts not in ("network", "local"):
        raise RequestError("unknown_experts_mode", "experts must be 'network' or 'local'.")
    if request.speculation not in ("auto", "on", "off"):
        raise RequestError("unknown_speculation_mode", "speculation must be 'auto', 'on' or 'off'.")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise RequestError("logprobs_out_of_range", f"logprobs must lie from 0 to {MAX_LOGPROBS}.")
    if len(request.session) > MAX_SESSION_CHARACTERS:
        raise RequestError("session_too_long", f"session has at most {MAX_SESSION_CHARACTERS} characters.")
    if len(request.stop) > MAX_STOP_STRINGS or not all(
        isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in request.stop
    ):
        raise RequestError(
            "bad_stop",
            f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters.",
        )
    return request


def sampling_of(request: GenerateRequest) -> SamplingParams:
    """How a request's tokens are chosen. Raises ``RequestError`` (``bad_sampling``)."""
    return SamplingParams(
        temperature=float(request.temperature),
        top_k=request.top_k,
        top_p=float(request.top_p),
        min_p=float(request.min_p),
        seed=request.seed,
        repetition_penalty=float(request.repetition_penalty),
        presence_penalty=float(request.presence_penalty),
        frequency_penalty=float(request.frequency_penalty),
        penalty_last_n=request.penalty_last_n,
    )
