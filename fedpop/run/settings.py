"""How a run is carried out, apart from the method itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fedpop.checked import Bytes, Checked, Count, OneOf, Seed
from fedpop.federation.participation import Participation
from fedpop.message.fixed_point import FixedPoint
from fedpop.precision import PRECISIONS
from fedpop.privacy.gaussian import Gaussian
from fedpop.server.robust import Robust


@dataclass(frozen=True)
class Settings(Checked):
    """Rounds, seed, participation, and what a run may take of the machine."""

    rounds: Count | None
    """None: until it has converged."""
    seed: Seed
    participation: Participation
    memory: str | Bytes = "1GiB"
    checkpoint_every: Count = 50
    threads: Count | None = None
    """Of torch; None: as many as suit the work."""
    precision: Annotated[str, OneOf(*PRECISIONS)] = "auto"
    sites: Mapping[str, Sequence[str]] | None = None
    weigh: Annotated[str, OneOf("server", "site")] = "server"
    """Where participation weights act: when messages are decoded, or before they are compressed (a server
    that sees nothing but sums cannot weight them)."""
    secure: FixedPoint | None = None
    """Messages are added up as whole numbers of this form, as secure sums have them; None: as they are."""

    privacy: Gaussian | None = None
    """What each unit adds to a round is bounded, and totals are noised; None: neither."""

    aggregate: Robust | None = None
    """What stands for the sum over a round's messages; None: the sum."""

    @property
    def weigh_at_site(self) -> bool:
        return self.weigh == "site" or self.secure is not None
