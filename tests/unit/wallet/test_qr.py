"""A QR code in half-blocks: module for module what the encoder made, within a quiet zone, in colours of its own."""

from __future__ import annotations

import re

import pytest
import segno

from kvasir_console.wallet import qr, twofactor

URI = twofactor.otpauth_uri("kvasir-console", "HAgk14Jp", bytes(range(20)))
HALVES = {" ": (0, 0), "\u2580": (1, 0), "\u2584": (0, 1), "\u2588": (1, 1)}


def modules(lines: tuple[str, ...]) -> list[list[int]]:
    rows: list[list[int]] = []
    for line in lines:
        inner = re.fullmatch("\x1b\\[30;47m([ \u2580\u2584\u2588]+)\x1b\\[0m", line)
        assert inner
        rows += [[HALVES[each][half] for each in inner[1]] for half in (0, 1)]
    return rows


@pytest.mark.parametrize("text", [URI, twofactor.short_uri(URI), "x"])
def test_every_module_stands_where_it_should(text):
    rows = modules(qr.qr_lines(text))
    code = segno.make(text, error="l", boost_error=False, micro=False)
    expected = [[int(module) for module in row] for row in code.matrix]
    size, quiet = len(expected), qr.QUIET_MODULES
    assert [row[quiet : quiet + size] for row in rows[quiet : quiet + size]] == expected
    assert sum(map(sum, rows)) == sum(map(sum, expected))  # and nothing else is dark
    assert len(rows[0]) == size + 2 * quiet == qr.columns(qr.qr_lines(text))


def test_the_short_link_says_the_same_and_fits_a_terminal_of_24_lines():
    short = twofactor.short_uri(URI)
    assert short + "&algorithm=SHA1&digits=6&period=30" == URI  # Key Uri Format: these are the defaults
    assert len(qr.qr_lines(short)) == 23
    assert qr.columns(qr.qr_lines(short)) == 45
