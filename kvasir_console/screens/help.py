"""The lines of the help, made from the bindings that are active: they cannot be out of date."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import App
from textual.binding import ActiveBinding

from kvasir_console.screens.line import Line, Role, Span, fit, line

_KEYS, _NAME = 12, 26


def key_lines(app: App[int], bindings: Iterable[ActiveBinding]) -> list[Line]:
    """One line for each of our actions: its keys, what it does, and the id by which a keymap can move it."""
    keys: dict[str, list[str]] = {}
    first: dict[str, ActiveBinding] = {}
    for active in bindings:
        name = active.binding.description
        if active.binding.id or active.binding.show or name in first:
            keys.setdefault(name, []).append(app.get_key_display(active.binding))
            first.setdefault(name, active)
    return [
        line(
            Span(fit(_run(keys[name]), _KEYS), Role.ACCENT),
            Span(fit(name, _NAME), Role.TEXT if active.enabled else Role.FAINT),
            Span(active.binding.id or "", Role.FAINT),
        )
        for name, active in first.items()
    ]


def _run(keys: list[str]) -> str:
    """``1 2 3 4`` as ``1-4``."""
    if len(keys) > 2 and all(key.isdigit() for key in keys):
        return f"{keys[0]}-{keys[-1]}"
    return " ".join(keys)
