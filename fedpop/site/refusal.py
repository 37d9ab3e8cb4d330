"""Why a site does not do what it is asked: by code, for what the server does about it, and in words."""

from __future__ import annotations

from enum import StrEnum

from fedpop.errors import FedpopError


class Code(StrEnum):
    """Why a site does not do what it is asked; what the server does about it goes by this, not by words."""

    VERSION = "version"
    STRANGER = "stranger"
    """The site does not know the experiment, or its units: it has to be greeted first."""
    DAMAGED = "damaged"
    """What was sent did not arrive as it was sent."""
    STUDY = "study"
    MODEL = "model"
    QUESTION = "question"
    FEW_ROWS = "few-rows"
    DISK = "disk"
    DATA = "data"
    SCALE = "scale"
    """A column is out of all proportion to what most sites have; which one, the site alone knows."""
    TRUST = "trust"
    """Nobody has confirmed the list of sites there."""
    SECURE = "secure"
    """The site refuses its part in a secure sum."""
    FAILED = "failed"
    """Anything else; the site's log says what."""
    UNREADABLE = "unreadable"
    GONE = "gone"
    """The site's node went away."""

    @property
    def greet(self) -> bool:
        """The site is to be greeted again before it is asked for anything else."""
        return self in (Code.STRANGER, Code.GONE)


class Refusal(FedpopError):
    """A site cannot do what it is asked, for a reason that the server may know: it holds nothing of the
    site's data. Any other error stays at the site, in its log."""

    def __init__(self, words: str, code: Code = Code.FAILED) -> None:
        super().__init__(words)
        self.code = code
