"""kvasir-console: a terminal console that embeds a complete node of the Kvasir network."""

__version__ = "0.1.0"
