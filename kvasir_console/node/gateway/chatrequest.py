"""Reading a chat completion request: what OpenAI's API takes, what of it has an effect here, what is refused.

A parameter that would change the answer and that this gateway cannot honour is refused by name; it is never ignored.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_console.engine.process.client import MAX_LOGPROBS, GenerateRequest
from kvasir_console.errors import RequestError

DEFAULT_MAX_TOKENS = 1024
MAX_MESSAGES = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_SESSION_CHARACTERS = 1024
_SEED_MODULUS = 2**63
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "penalty_last_n": -1}
"""And what they are where nobody asks for any."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ParameterError(RequestError):
    """A field of the request is missing, malformed or not supported. ``param`` names it."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(code, message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    stream: bool
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1
    """How many of the last tokens, prompt included, the penalties look at; -1 for all of them."""
    logprobs: int | None = None
    """Alternatives to report beside each token's log probability; ``None`` for neither."""
    session: str = ""
    """The caller's name for what belongs together: ``prompt_cache_key``, or ``user``."""
    ignore_eos: bool = False
    """Generate past an end-of-text token, up to the limit; as other inference servers name it."""
    experts: str = "network"
    trace: bool = False
    extended: bool = False
    """The body has the ``kvasir`` extension, which is for the operator's own machines."""

    def to_engine(self, max_tokens: int, caller: str = "") -> GenerateRequest:
        """The request as the engine takes it.

        A session is known to the engine, which may be another's machine, by a digest of its name and ``caller``: two
        callers that choose the same name share nothing.
        """
        penalties: dict[str, Any] = {name: getattr(self, name) for name in _PENALTIES}
        if all(penalties[name] == neutral for name, neutral in _PENALTIES.items() if name != "penalty_last_n"):
            penalties = {}
        session = hashlib.sha256(f"{caller}\0{self.session}".encode()).hexdigest() if self.session else ""
        return GenerateRequest(
            prompt=self.prompt,
            messages=self.messages,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            top_k=self.top_k,
            min_p=self.min_p,
            **penalties,
            logprobs=self.logprobs,
            session=session,
            ignore_eos=self.ignore_eos,
            experts=self.experts,
            trace=self.trace,
        )


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ``ParameterError`` naming the first field that cannot be served."""
    _refuse_unsupported(body)
    prompt = body.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise ParameterError("prompt", "prompt must be text.")
    experts, trace, extended = _extension(body.get("kvasir"))
    limits = [key for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    return ChatRequest(
        model=_text(body, "model"),
        stream=_flag(body, "stream"),
        prompt=prompt,
        messages=_messages(body.get("messages")) if prompt is None else None,
        max_tokens=_integer(body, limits[0], 1, 2**31 - 1, 1) if limits else None,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        seed=_seed(body.get("seed")),
        stop=_stop(body.get("stop")),
        top_k=_top_k(body),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, 0.01, 10.0),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        penalty_last_n=_integer(body, "penalty_last_n", -1, 2**31 - 1, -1),
        logprobs=_logprobs(body),
        session=_session(body),
        ignore_eos=_flag(body, "ignore_eos"),
        experts=experts,
        trace=trace,
        extended=extended,
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise _unsupported("n", "One answer a request is given here.")
    if body.get("tools") and body.get("tool_choice") != "none":
        raise _unsupported("tools", "Tool calls are not served here; leave tools out or set tool_choice to none.")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise _unsupported("response_format", "Only the text format is served here.")
    if body.get("logit_bias"):
        raise _unsupported("logit_bias", "logit_bias is not served here.")


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise ParameterError("messages", f"messages is needed: 1 to {MAX_MESSAGES} messages.")
    return tuple(_message(message, f"messages.{index}") for index, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(where, f"{where} must be an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ParameterError(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(_ROLES))}.")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content") for part in content)
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ParameterError(f"{where}.content", f"{where}.content must be text, or an array of text parts.")
    return {"role": _ROLES[role], "content": content}


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _unsupported(where, f"{where} may hold text parts only; images and sound are not interpreted here.")


def _extension(value: Any) -> tuple[str, bool, bool]:
    if value is None:
        return "network", False, False
    if not isinstance(value, Mapping) or set(value) - {"experts", "trace"}:
        raise ParameterError("kvasir", "kvasir takes experts (network or local) and trace (true or false).")
    experts, trace = value.get("experts", "network"), value.get("trace", False)
    if experts not in ("network", "local") or not isinstance(trace, bool):
        raise ParameterError("kvasir", "kvasir takes experts (network or local) and trace (true or false).")
    return str(experts), trace, True


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOP_STRINGS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    ):
        raise ParameterError(
            "stop", f"stop takes at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters."
        )
    return tuple(stops)


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbelow(_SEED_MODULUS)
    if type(value) is not int or abs(value) >= 2**64:
        raise ParameterError("seed", "seed must be a whole number of 64 bits.")
    return value % _SEED_MODULUS


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        raise ParameterError(key, f"{key} is needed.")
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ParameterError(key, f"{key} must be true or false.")
    return bool(value)


def _integer(body: Mapping[str, Any], key: str, low: int, high: int, default: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ParameterError(key, f"{key} must be a whole number from {low} to {high}.")
    return value


def _top_k(body: Mapping[str, Any]) -> int:
    """0, and as other inference servers have it -1, keep every token."""
    return max(0, _integer(body, "top_k", -1, 2**31 - 1, 0))


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = _integer(body, "top_logprobs", 0, MAX_LOGPROBS, 0)
    if _flag(body, "logprobs"):
        return top
    if top:
        raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true.")
    return None


def _session(body: Mapping[str, Any]) -> str:
    for key in ("prompt_cache_key", "user"):
        value = body.get(key)
        if value is not None and (not isinstance(value, str) or len(value) > MAX_SESSION_CHARACTERS):
            raise ParameterError(key, f"{key} must be a text of at most {MAX_SESSION_CHARACTERS} characters.")
        if value:
            return f"{key}:{value}"
    return ""


def _number(body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(key, f"{key} must be a number.")
    if not math.isfinite(value) or not low <= value <= high:
        raise ParameterError(key, f"{key} must lie from {low:g} to {high:g}.")
    return float(value)


def _unsupported(param: str, message: str) -> ParameterError:
    return ParameterError(param, message, "unsupported_parameter")
