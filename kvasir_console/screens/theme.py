"""The console's own theme: dark and calm, one accent, colour kept for what needs a look."""

from __future__ import annotations

from textual.theme import Theme

KVASIR = Theme(
    name="kvasir",
    primary="#6fb3c8",
    secondary="#8fa3bf",
    accent="#c9a86a",
    foreground="#d3dae3",
    background="#0f141a",
    surface="#131a21",
    panel="#1b242e",
    success="#86bf8b",
    warning="#d9b26a",
    error="#dd7f83",
    dark=True,
    variables={
        "footer-background": "#131a21",
        "footer-key-foreground": "#c9a86a",
        "footer-description-foreground": "#93a0ae",
        "block-cursor-foreground": "#0f141a",
        "block-cursor-background": "#6fb3c8",
        "button-focus-text-style": "bold",
        "scrollbar": "#2b3845",
        "scrollbar-background": "#131a21",
        "scrollbar-hover": "#3a4a59",
        "scrollbar-active": "#6fb3c8",
    },
)
