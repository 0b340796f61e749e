"""How a comparison can fail: what is wrong, and what to do about it."""

from __future__ import annotations


class CompareError(Exception):
    """Ends the comparison; the command prints both lines."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint
