"""The Textual side of panels: what a builder returns is painted, and only what changed."""
