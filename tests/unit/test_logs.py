"""The log: private, rotated, and without secrets whoever wrote the line."""

from __future__ import annotations

import json
import logging
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey
from solders.keypair import Keypair

from kvasir_console import logs
from kvasir_console.errors import SystemResourceError

TOKEN = "bm9kZXxIQWdr.MTIzNDU2-_~Nzg5MA=="


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if handler not in handlers:
            handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.raiseExceptions = raising


@pytest.mark.parametrize(
    "line",
    [
        "GET /api/expert-relay?session=expert-x&token={}",
        "GET /api/x?token={}&session=expert-x",
        "wss://host/p?node_token={} refused",
        "Authorization: Bearer {}",
        "{{'authorization': 'Bearer {}'}}",
        "authorization: basic {}",
        "[(b'authorization', b'Basic {}')]",
        "X-Kvasir-Service-Token: {}",
        "{{'x-kvasir-service-token': '{}'}}",
        '{{"node_token": "{}", "expires_in": 5}}',
        '{{"passphrase": "{}"}}',
        "unlock(passphrase='{}')",
        "api_key = '{}'",
    ],
)
def test_a_token_is_masked_wherever_it_stands(line):
    masked = logs.mask(line.format(TOKEN))
    assert TOKEN not in masked
    assert "***" in masked


def test_what_is_around_a_token_stays_readable():
    masked = logs.mask(f"GET /api/expert-relay?token={TOKEN}&session=expert-a 4401")
    assert masked == "GET /api/expert-relay?token=***&session=expert-a 4401"


@pytest.mark.parametrize(
    "line",
    [
        "served 12 tokens in 3.5 s",
        "max_tokens: 256, tokens=9",
        "wallet HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk holds 5",
        "the key is pressed",
        "basic questions",
        "sha256 a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ],
)
def test_ordinary_lines_are_left_alone(line):
    assert logs.mask(line) == line


@given(st.binary(min_size=32, max_size=32))
def test_a_secret_key_in_base58_never_gets_through(seed):
    secret = str(Keypair.from_seed(seed))
    for line in (f"key {secret}", f"key_{secret}.", f'"{secret}"'):
        assert secret not in logs.mask(line)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_file_never_gets_through(seed):
    numbers = list(seed + bytes(SigningKey(seed).verify_key))
    assert logs.mask(f"read {json.dumps(numbers)} from id.json") == "read *** from id.json"


def test_a_traceback_is_masked_too(tmp_path):
    file = tmp_path / "log" / "console.log"
    logs.configure(file)
    secret = str(Keypair())
    try:
        raise ValueError(f"bad key {secret} at https://host/x?token={TOKEN}")
    except ValueError:
        logging.getLogger("some.library").exception("failed with Bearer %s", TOKEN)
    text = file.read_text()
    assert "Traceback" in text
    assert "ValueError: bad key ***" in text
    assert secret not in text
    assert TOKEN not in text


def test_only_the_owner_can_read_the_log(tmp_path):
    file = tmp_path / "new" / "console.log"
    logs.configure(file)
    logging.getLogger("x").warning("hello")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_nothing_reaches_the_terminal(tmp_path, capfd):
    logs.configure(tmp_path / "a.log")
    logging.getLogger("x").error("loud %s", "news")
    logging.getLogger("x").error("%d numbers of Bearer %s", "many", TOKEN)  # cannot be formatted
    assert capfd.readouterr() == ("", "")
    logs.configure()
    logging.getLogger("x").error("loud")
    assert capfd.readouterr() == ("", "")


def test_stderr_is_masked_when_asked_for(tmp_path, capfd):
    logs.configure(to_stderr=True)
    logging.getLogger("x").error("Bearer %s", TOKEN)
    assert "Bearer ***" in capfd.readouterr().err


def test_configuring_twice_writes_once(tmp_path):
    logs.configure(tmp_path / "a.log")
    logs.configure(tmp_path / "b.log")
    mark = secrets.token_hex(4)
    logging.getLogger("x").info(mark)
    assert mark not in (tmp_path / "a.log").read_text()
    assert (tmp_path / "b.log").read_text().count(mark) == 1


def test_libraries_that_print_urls_are_quiet(tmp_path):
    logs.configure(tmp_path / "a.log")
    logging.getLogger("httpx").info("HTTP Request: GET https://host/")
    assert (tmp_path / "a.log").read_text() == ""


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemResourceError, match="log"):
        logs.configure(Path(tmp_path / "file" / "console.log"))


def test_the_log_is_rotated_and_the_copies_are_private_too(tmp_path):
    file = tmp_path / "a.log"
    logs.configure(file)
    logger = logging.getLogger("x")
    for _ in range(5):
        logger.info("y" * 2**20)
    assert (tmp_path / "a.log.1").exists()
    for each in (file, tmp_path / "a.log.1"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
