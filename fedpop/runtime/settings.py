"""How a run is carried out, apart from the method itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpop.errors import SettingsError
from fedpop.federation.participation import Participation
from fedpop.settings import require_whole


@dataclass(frozen=True)
class Settings:
    """Rounds, seed, participation, and what a run may take of the machine."""

    rounds: int | None
    """None: until it has converged."""
    seed: int
    participation: Participation
    memory: str = "1GiB"
    checkpoint_every: int = 50
    precision: str = "auto"
    sites: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        require_whole(1, checkpoint_every=self.checkpoint_every)
        if self.rounds is not None:
            require_whole(1, rounds=self.rounds)
        require_whole(seed=self.seed)
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"a seed is a whole number from 0 to 2^64 - 1, not {self.seed}")
