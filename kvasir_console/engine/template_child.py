"""The child process in which chat templates run.

A template is a program that came with a model file. Jinja's sandbox keeps it from reaching anything, but not from
asking for a string of ten gigabytes or looping for a year; only a process of its own can be held to a bound and thrown
away. This file is run by path, imports nothing of this package, and sees no environment, socket or file of its parent.

One JSON object a line each way: ``{"template", "variables", "now", "max_chars"}`` is answered by ``{"text"}`` or by
``{"error", "message"}``, where error is ``refused`` (the template raised on purpose), ``syntax``, ``unsafe``,
``memory``, ``length`` or ``failed``.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
"""Address space of the process, interpreter included."""
CPU_S = 5
"""Processor time of one rendering. The parent's clock bounds what waits, which on a busy machine may be for this."""


class RefusalError(TemplateError):
    """``raise_exception`` was called: the template does not accept this conversation."""


class TooLongError(TemplateError):
    """More text than the caller takes."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (the attribute is jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, variables: dict[str, Any], *, now: datetime, max_chars: int) -> str:
    """Render with the dialect that chat templates are written in: block trimming, loop controls, a plain ``tojson``.

    Raises:
        TemplateError: as ``answer`` tells them apart.
    """
    pieces: list[str] = []
    chars = 0
    for piece in _compiled(template).generate(variables, strftime_now=now.strftime, raise_exception=_refuse):
        chars += len(piece)
        if chars > max_chars:
            raise TooLongError(f"more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Render a request; whatever the template does becomes an answer."""
    try:
        text = render(
            request["template"],
            request["variables"],
            now=datetime.fromisoformat(request["now"]),
            max_chars=request["max_chars"],
        )
    except RefusalError as error:
        return {"error": "refused", "message": str(error.message)}
    except TooLongError as error:
        return {"error": "length", "message": str(error.message)}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"error": "unsafe", "message": str(error.message)}
    except (MemoryError, RecursionError) as error:
        return {"error": "memory", "message": type(error).__name__}
    except OverflowError as error:  # the sandbox's bound on range()
        return {"error": "unsafe", "message": str(error)}
    except Exception as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}
    return {"text": text}


@lru_cache(maxsize=2)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _refuse(message: object) -> None:
    raise RefusalError(str(message)[:1000])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; the parent's clock still holds
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        cpu_limit = int(time.process_time()) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
