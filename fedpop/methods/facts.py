"""What a method is told of a run and of a round, and what is told of a method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.server.schedules import Stage


@dataclass(frozen=True)
class Facts:
    """What the server knows of the federation, and of the stage of the run that a round belongs to."""

    clients: int
    rounds: int
    """The end of this stage, counted from the start of the run."""
    restart: int = 0
    start: int = 0
    """Rounds in earlier stages: above 0 in a run that was extended, or that runs until it has converged."""
    opening: int | None = None
    """The end of the first stage; None: this is the first."""
    active: float | None = None
    """How many of them a round has on average; None: all."""
    examples: float = math.inf
    """Training examples that they have together."""

    @property
    def stage(self) -> Stage:
        """What schedules go by."""
        return Stage(self.start, self.rounds)

    @property
    def first_stage(self) -> int:
        """Rounds of the first stage, which a warm-up goes by."""
        return self.rounds if self.opening is None else self.opening

    @property
    def heard(self) -> float:
        return float(self.clients) if self.active is None else self.active


@dataclass(frozen=True)
class Round:
    """One round as a site sees it."""

    number: int
    broadcast: Tensors
    key: Key
    """The site's own, for what must be secret: the noise of chains, the order of examples."""
    shared: Key
    """The server's, for what everyone is to draw alike."""
    coefficients: Tensor | None = None
    """Where only sums are wanted, what each unit's vector counts, ``[C]``: the answer may be one sum."""
    omega: Callable[[Tensor, int], Tensor] | None = None
    """The relative variance that the channel adds to vectors of a length, for each unit."""
    weigh: bool = False
    """Participation weights act at the site, before a message is compressed; else when it is decoded."""

    @property
    def pace(self) -> float:
        """What rates of local steps are multiplied by in this round (``Paced``)."""
        return float(self.broadcast["pace"]) if "pace" in self.broadcast else 1.0


@dataclass(frozen=True)
class About:
    """What cannot be read off a method's code, for the table of ``fedpop methods``."""

    reference: str
    personalised: bool
    local_steps: bool = True
    """Clients take several steps between messages."""
    bounds: bool = True
    """Guarantees of convergence are known, as the paper's table has it."""
    memory: str = "d + d_phi"
    """Numbers that a client's predictions read, M draws where there are draws."""
    instance: str = ""
    """Of which choices in FedPop it is the case or the limit, if of any."""
