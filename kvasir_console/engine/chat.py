"""Messages to a prompt, by the chat template of the model's own file.

The template is hostile until shown otherwise, so it runs in a child process (``template_child``) with little memory and
little time. What it can do is to give this model a bad prompt.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from kvasir_console.engine.tokens import MAX_TEXT_CHARS, Tokenizer
from kvasir_console.errors import EngineError, KvasirError, ModelError, RequestError

__all__ = ["MAX_TEMPLATE_CHARS", "ChatTemplate"]

MAX_TEMPLATE_CHARS = 1 << 18
"""Longest template accepted; the longest in use have about 20,000 characters."""
MAX_REQUEST_CHARS = 4 * MAX_TEXT_CHARS
"""Longest messages and tools, as JSON."""
RENDER_TIMEOUT_S = 60.0
"""Of the clock, which on a busy machine says nothing about a template; its processor time is bounded in the child."""

_KEY = "tokenizer.chat_template"
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


class ChatTemplate:
    """The chat template of one checkpoint. ``render`` may be called from any thread, one call at a time runs."""

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        *,
        tool_source: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._source = source
        self._tool_source = tool_source
        self._variables = dict(variables)
        self._clock = clock
        self._renderer = _Renderer(timeout_s)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Self:
        """The template of ``tokenizer.chat_template``.

        A file without one gets ChatML if its vocabulary has the two tokens of ChatML; otherwise ``render`` refuses.
        Nothing is compiled yet: that happens in the child, with the first messages.

        Raises:
            ModelError: ``bad_template`` for a template that is not text or too long.
        """
        source = _source(metadata, _KEY)
        if source is None and all(tokenizer.token_id(text) is not None for text in _CHATML_TOKENS):
            source = _CHATML
        variables = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            token = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(token, int) and 0 <= token < tokenizer.n_vocab:
                variables[f"{name}_token"] = tokenizer.token_text(token)
        return cls(source, variables, tool_source=_source(metadata, f"{_KEY}.tool_use"))

    @property
    def supports_tools(self) -> bool:
        """Does the template do anything with tools; without it they would be dropped in silence."""
        return any("tools" in source for source in (self._source, self._tool_source) if source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for ``messages``, to be tokenized with ``parse_special=True``.

        Args:
            messages: OpenAI's shape: ``role``, ``content`` (text, or a list of text parts, which are joined by a line
                feed), and what else the template understands (``tool_calls``, ``name``).
            tools: function descriptions in OpenAI's shape.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            RequestError: ``bad_messages`` for messages out of shape or ones that the template refuses;
                ``no_chat_template``; ``prompt_too_long``.
            ModelError: ``bad_template`` when the template is at fault: its syntax, what it reaches for, the memory or
                time it takes.
        """
        source = (self._tool_source if tools else None) or self._source
        if source is None:
            raise RequestError(
                "no_chat_template",
                "this model has no chat template, and its vocabulary is not that of ChatML.",
                "Send a raw prompt, or use an instruction-tuned model.",
            )
        variables = {
            **self._variables,
            "messages": [_message(message) for message in _checked_messages(messages)],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        line = _line(
            {
                "template": source,
                "variables": variables,
                "now": self._clock().isoformat(),
                "max_chars": MAX_TEXT_CHARS,
            }
        )
        answer = self._renderer.ask(line)
        if "text" in answer:
            return str(answer["text"])
        raise _refusal(str(answer.get("error")), str(answer.get("message")), long_request=len(line) > MAX_TEXT_CHARS)

    def close(self) -> None:
        """End the child process; the next ``render`` starts another."""
        self._renderer.close()


class _Renderer:
    """The child process: started when first needed, killed when it takes too long, and started again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, line: bytes) -> dict[str, Any]:
        with self._lock:
            process = self._running()
            late = threading.Event()
            timer = threading.Timer(self._timeout_s, _kill_late, (process, late))
            timer.start()
            reply = b""
            with contextlib.suppress(BrokenPipeError):
                reply = _exchange(process, line)
            timer.cancel()
            timer.join()  # from here on it has killed or never will
            if late.is_set() or not reply.endswith(b"\n"):
                self._stop()
            if reply.endswith(b"\n"):
                answer: dict[str, Any] = json.loads(reply)
                return answer
            if late.is_set():
                return {"error": "late", "message": f"it was stopped after {self._timeout_s:g} seconds"}
            if process.returncode == -signal.SIGXCPU:
                return {"error": "late", "message": "it was stopped after seconds of processor time"}
            return {"error": "died", "message": f"it ended with status {process.returncode}"}

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            # isolated (-I), with nothing of our environment but what the interpreter may need to start
            environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
            child = Path(__file__).with_name("template_child.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(child)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise EngineError("template_child", "the chat template's process has no pipes.", "Report this.")
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def _kill_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def _source(metadata: Mapping[str, Any], key: str) -> str | None:
    source = metadata.get(key)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError("bad_template", f"{key} of this file is not text.", "Fetch the file again.")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(
            "bad_template",
            f"{key} of this file has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are accepted.",
            "Use another conversion of this model.",
        )
    return source


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not messages:
        raise _bad_messages("there are no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _bad_messages(f"message {i} has no role")
    return messages


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with plain text for content: hardly a template takes parts, and every one takes text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise _bad_messages("the content of a message is neither text nor a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                "unsupported_content", "a message holds a part that is not text.", "This engine reads text only."
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _line(request: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(request, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad_messages("the messages or tools are not JSON") from error
    if len(text) > MAX_REQUEST_CHARS:
        raise RequestError(
            "prompt_too_long", f"messages and tools take more than {MAX_REQUEST_CHARS} characters.", "Send fewer."
        )
    return text.encode() + b"\n"


def _bad_messages(what: str) -> RequestError:
    return RequestError("bad_messages", f"{what}.", "Send messages as the chat completions API has them.")


def _refusal(error: str, message: str, *, long_request: bool) -> KvasirError:
    """The child's refusal as one of ours, its text fit for a terminal."""
    shown = "".join(char if char.isprintable() else " " for char in message)[:300]
    if error == "refused":
        return RequestError(
            "bad_messages", f"the model's chat template refuses these messages: {shown}", "Change them."
        )
    if error == "length" and long_request:
        return RequestError("prompt_too_long", f"the rendered prompt has {shown}.", "Send fewer or shorter messages.")
    if error == "failed":
        return RequestError(
            "bad_messages",
            f"the model's chat template cannot render these messages: {shown}",
            "Check that each has the role and content this model expects.",
        )
    what = {
        "syntax": "has a syntax error",
        "unsafe": "does what it may not",
        "memory": "takes too much memory",
        "length": "does not come to an end",
        "late": "does not come to an end",
    }
    return ModelError(
        "bad_template",
        f"the chat template of this file {what.get(error, 'brings down its process')}: {shown}.",
        "Use another conversion of this model, or send raw prompts.",
    )
