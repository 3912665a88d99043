"""Logging: one private file per process, never the terminal; secrets are masked before they are written."""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import re
import sys
from pathlib import Path

from kvasir_console.errors import SystemResourceError

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_DATE = "%Y-%m-%dT%H:%M:%S%z"
# Tokens, passphrases, authorization headers and secret keys have no place in a log, whoever wrote the line.
_SECRETS = (
    re.compile(r"(?i)([?&][a-z_-]*(?:token|key|secret|passphrase)=)[^&\s\"']+"),
    re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]+"),
    re.compile(r"(?i)((?:token|secret|passphrase|api[_-]?key)[\"']?\s*[:=]\s*b?[\"'])[^\"']+"),
    re.compile(r"(?i)((?:[a-z]-|_)token[\"']?\s*[:=]\s*)[^\s\"',}]+"),
    re.compile(r"(?i)(authorization[\"']?\s*[:=,]\s*(?:b?[\"'])?(?:(?:bearer|basic)\s+)?)[^\s\"',})]+"),
)
_LONG_BASE58 = re.compile(r"(?<![1-9A-HJ-NP-Za-km-z])[1-9A-HJ-NP-Za-km-z]{65,88}(?![1-9A-HJ-NP-Za-km-z])")
_KEY_FILE = re.compile(r"\[\s*(?:\d{1,3}\s*,\s*){63}\d{1,3}\s*\]")


def mask(text: str) -> str:
    """``text`` with tokens, passphrases, authorization values and 64-byte keys (base58 or a key file's list of
    numbers) replaced by ``***``.

    A Solana transaction signature has the same length and alphabet as a secret key; both are masked here, and code
    that reports a signature shortens it first.
    """
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return _KEY_FILE.sub("***", _LONG_BASE58.sub("***", text))


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))


class _PrivateFile(logging.handlers.RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


def configure(log_file: Path | None = None, level: str = "INFO", *, to_stderr: bool = False) -> None:
    """Send this process's log records to ``log_file`` (0600, rotated at 4 MiB, 3 kept) and, if asked, to stderr.

    Raises:
        SystemResourceError: the file cannot be written.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    # Without this, a record that cannot be formatted or written is dumped on stderr, with its arguments unmasked.
    logging.raiseExceptions = False
    formatter = _MaskingFormatter(_FORMAT, _DATE)
    handlers: list[logging.Handler] = []
    if log_file is not None:
        try:
            log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handlers.append(_PrivateFile(log_file, maxBytes=4 * 2**20, backupCount=3, encoding="utf-8"))
        except OSError as error:
            raise SystemResourceError(
                "log_unavailable",
                f"The log {log_file} cannot be written: {error.strerror or error}.",
                "Check its permissions, or set KVASIR_HOME to a folder you own.",
            ) from error
    if to_stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    for chatty in ("httpx", "httpcore", "httpx2", "httpcore2", "websockets", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
