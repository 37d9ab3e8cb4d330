"""Which engine finds theta: chains and steps, as in Algorithm 1, or the exact one where it applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from fedpop.checked import OneOf
from fedpop.errors import SettingsError
from fedpop.federation.participation import Participation
from fedpop.message import Tensors
from fedpop.methods.exact import ExactEngine, obstacle
from fedpop.methods.hierarchical import Hierarchical

CHOSEN = "auto: "
"""How a run marks what it took ``auto`` for: a copy with other settings chooses anew."""
ENGINES = ("auto", "sampled", "exact", CHOSEN + "sampled", CHOSEN + "exact")
LARGEST = 500
"""Parameters up to which ``auto`` takes the exact engine: its messages hold their square, twice or so."""


@dataclass(frozen=True, kw_only=True)
class WithEngine(Hierarchical):
    """A method that may run by the exact engine: ``auto`` takes it where everyone takes part in all rounds,
    messages arrive as they were sent, theta is small, and all settings of chains and steps are the usual."""

    engine: Annotated[str, OneOf(*ENGINES)] = "auto"

    sampling: ClassVar[tuple[str, ...]] = ("kernel", "chain", "anneal", "phi_step", "beta_step", "average")
    """Settings of the sampled engine: where one is given it is obeyed."""

    @cached_property
    def exact(self) -> ExactEngine | None:
        """What makes the rounds in the place of chains, once a run has chosen it."""
        return ExactEngine(self.hierarchy) if self.engine.endswith("exact") else None

    @property
    def needs_everyone(self) -> bool:
        return super().needs_everyone or self.exact is not None

    def for_rule(self, rule: Participation) -> Self:
        """The engine that ``auto`` stands for."""
        whole = rule.everyone and self.channel.transparent
        why = obstacle(self.hierarchy)
        if not whole:
            why = "it needs everyone's sums as they are: participation=None, neither compressor nor clip"
        if self.engine == "exact" and why is not None:
            raise SettingsError(f"engine='exact' cannot be used here: {why}; use engine='sampled'")
        if not self.engine.startswith("auto"):
            return self
        size = self.model.phi_layout.size + self.hierarchy.prior.size(self.model.z_layout.size)
        able = why is None and size <= LARGEST and not self._told_how
        return replace(self, engine=CHOSEN + ("exact" if able else "sampled"))

    def replace(self, **changes: Any) -> Self:
        return super().replace(
            **{"engine": "auto" if self.engine.startswith(CHOSEN) else self.engine} | changes
        )

    def without_waiting(self) -> Self:
        return self if self.exact is None else replace(self, engine="sampled")

    @property
    def wants_information(self) -> bool:
        """Scoring steps in further stages, where nothing was said of steps. A backbone's likelihood is too
        far from a quadratic: there they left the optimum that they began at."""
        settled = self.exact is None and not self.model.learns_features
        return settled and self.phi_step is None and self.beta_step is None

    @property
    def _told_how(self) -> bool:
        usual = type(self)(self.model, prior=self.prior)
        return any(getattr(self, name) != getattr(usual, name) for name in self.sampling)

    def warm_up(self, rounds: int) -> int:
        return super().warm_up(rounds) if self.exact is None else 0

    def over(self, server: Tensors) -> bool:
        return self.exact is not None and self.exact.over(server)

    def drift(self, server: Tensors) -> float | None:
        return super().drift(server) if self.exact is None else None

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        usual = super().metrics(server, cost)
        return usual if self.exact is None else usual | self.exact.metrics(server)

    def lines(self, published: Tensors) -> list[tuple[str, str]]:
        how = {
            "exact": "exact: quasi-Newton steps on the marginal likelihood",
            "sampled": "sampled: each client runs a Markov chain"
            + (", then scoring steps on theta" if self.wants_information else ""),
        }
        engine = self.engine.removeprefix(CHOSEN)
        return [*super().lines(published), *[("engine", how[e]) for e in (engine,) if e in how]]
