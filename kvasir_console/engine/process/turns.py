"""Whose turn it is: decoding streams and waiting prompts share the time of the steps evenly.

A step with prompt rows is long, and everybody who decodes waits for it. So after one, steps without prompt rows come
until they have had as much time, as long as anybody decodes.
"""

from __future__ import annotations


class Turns:
    """Seconds that prompts are ahead of decoding."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def prompts_may(self, decoding: bool) -> bool:
        """Whether a step may hold rows of prompts; ``decoding`` says if any sequence is past its prompt."""
        return not decoding or self._ahead_s <= 0

    def spent(self, seconds: float, *, prompts: bool, decoding: bool) -> None:
        """A step is over. ``prompts`` and ``decoding`` say what it held."""
        if not decoding:
            return  # nobody waited
        self._ahead_s = self._ahead_s + seconds if prompts else max(0.0, self._ahead_s - seconds)
