"""Why a call is not captured."""

from __future__ import annotations


class CannotCapture(Exception):
    """A call, or what it runs, cannot be captured; ``reason`` is a clause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
