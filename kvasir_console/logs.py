"""Logging: one file per process, never the terminal; secrets are masked before they are written."""

from __future__ import annotations

import logging
import logging.handlers
import re
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_DATE = "%Y-%m-%dT%H:%M:%S%z"
# Tokens in URLs, bearer headers and 64-byte base58 keys have no place in a log, whoever wrote the line.
_SECRETS = (
    re.compile(r"(?i)([?&](?:token|key|secret|passphrase)=)[^&\s\"']+"),
    re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]+"),
    re.compile(r"(?i)(service-token[\"']?\s*[:=]\s*[\"']?)[^\s\"',}]+"),
)
_LONG_BASE58 = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{86,88}\b")


def mask(text: str) -> str:
    """``text`` with tokens, bearer values and 64-byte base58 secrets replaced by ``***``.

    A Solana transaction signature has the same length and alphabet as a secret key; both are masked here, and code
    that reports a signature shortens it first.
    """
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return _LONG_BASE58.sub("***", text)


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))


def configure(log_file: Path | None = None, level: str = "INFO", *, to_stderr: bool = False) -> None:
    """Send this process's log records to ``log_file`` (rotated at 4 MiB, 3 kept) and, if asked, to stderr."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    formatter = _MaskingFormatter(_FORMAT, _DATE)
    handlers: list[logging.Handler] = []
    if log_file is not None:
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handlers.append(
            logging.handlers.RotatingFileHandler(log_file, maxBytes=4 * 2**20, backupCount=3, encoding="utf-8")
        )
    if to_stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    for chatty in ("httpx", "httpcore", "httpx2", "httpcore2", "websockets", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
