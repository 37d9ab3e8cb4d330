"""A run that ends in the middle."""

from __future__ import annotations

from typing import Any

import fedpop as fp


class Crash(BaseException):
    """What a test throws in place of a power cut: nothing in fedpop catches it."""


class CrashAt(fp.callbacks.Callback):
    """The power fails after so many rounds; or the user stops the run, or an error does."""

    def __init__(self, round: int, error: type[BaseException] = Crash) -> None:
        self.round, self.error = round, error

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        if run.round == self.round:
            raise self.error
        return False
