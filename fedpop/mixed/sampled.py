"""The same models by FedSOUL's chains: fixed effects that are random as well are the prior's mean, others are
in phi.

Where few take part in a round a run is judged converged, within 0.05 nats, when the chance of who took
part still moves estimates by a third of a standard error, and people compare them with lme4's digits. So
250 rounds with chains are followed by stages of scoring steps (``server.scoring``), in which those who are
there answer with their exact score, and not with one that is averaged over draws.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedpop.errors import FedpopWarning, SettingsError
from fedpop.evaluation.convergence import landing
from fedpop.evaluation.verdict import Distance
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.participation import Participation
from fedpop.keys import Key
from fedpop.methods import FedSOUL
from fedpop.mixed.design import Coordinates
from fedpop.mixed.engine import Engine, Estimates, ThetaPoint, canonical
from fedpop.mixed.families import Family
from fedpop.mixed.gaussian import GaussianEngine
from fedpop.mixed.groups import Groups
from fedpop.mixed.quadrature import QuadratureEngine, nodes_for
from fedpop.models.composition import Composition
from fedpop.models.likelihoods import Normal as NormalNoise
from fedpop.models.modules import blank
from fedpop.models.weighted import Weighted
from fedpop.population import Population
from fedpop.priors import Normal
from fedpop.run.simulate import fit as run
from fedpop.server import scoring

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit
    from fedpop.mixed.model import SampledSettings

ROUNDS_WITH_CHAINS = 250
"""Rounds with chains before scoring steps, where few take part."""
SCORING_STAGES = 20
"""Stages of scoring steps at most."""
SCORED_NATS = 5e-4
"""Nats below the maximum at which they are over: three hundredths of a standard error, in any direction."""
LEAST_CHAIN_SD = 1e-6
"""The smallest standard deviation of a random effect that chains work with, in internal units."""


NESTED = (
    "chains know one grouping factor, and this model has several, nested: fit it with engine='exact', "
    "everyone and no compressor; random_effects() has its groups' posteriors"
)


def other_family(family: Family) -> str:
    """Why there are no chains.

    >>> from fedpop.mixed.families import family_named
    >>> other_family(family_named("gamma")).rpartition(":")[0]
    'chains know gaussian, bernoulli, binomial and poisson models with canonical links, and this is gamma'
    """
    return (
        "chains know gaussian, bernoulli, binomial and poisson models with canonical links, and this is "
        f"{family.text}: fit it with engine='exact', everyone and no compressor; random_effects() has its "
        "groups' posteriors"
    )


class FixedEffects(nn.Module):
    """X w + offset; the last column is the offset."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(columns, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., :-1] @ self.weight + x[..., -1]).unsqueeze(-1)


def _zeros(columns: int) -> nn.Linear:
    """A linear map that starts at zero."""
    return blank(nn.Linear, columns, 1, bias=False, dtype=torch.float64)


@dataclass(frozen=True)
class ThetaLayout:
    """How a mixed model is written as a composition: which fixed effects are the mean of random ones."""

    units: Coordinates
    family: Family
    start: float
    """Where the intercept starts, which offsets take on; 0 without one."""

    @property
    def tied(self) -> bool:
        """Every random effect has a fixed one, which is its mean."""
        return all(name in self.units.x_names for name in self.units.z_names)

    @property
    def rest(self) -> list[int]:
        """Fixed effects in phi."""
        names = self.units.x_names
        return [j for j, n in enumerate(names) if not self.tied or n not in self.units.z_names]

    @property
    def offsets(self) -> bool:
        return not self.family.gaussian

    def model(self, weighted: bool) -> Composition:
        q, p = len(self.units.z_names), len(self.rest)
        head = _zeros(q)
        fixed: nn.Module | None = None
        if self.offsets:
            fixed = FixedEffects(p)
        elif p:
            fixed = _zeros(p)
        likelihood = NormalNoise() if self.family.gaussian else self.family.likelihood
        return Composition(None, head, Weighted(likelihood) if weighted else likelihood, fixed=fixed)

    def prior(self, fitting: bool = True) -> Normal:
        blocks = self.units.blocks
        alone = len(set(blocks)) == len(blocks)
        if len(set(blocks)) > 1 and not alone and fitting:
            raise SettingsError(
                "chains know random effects that are all correlated or all independent; this "
                "formula mixes both: "
                "use engine='exact'"
            )
        covariance = "diagonal" if alone and len(blocks) > 1 else "full"
        return Normal(covariance=covariance, learn_mean=self.tied, bounds=(LEAST_CHAIN_SD, 1e6), ball=1e9)

    def federation(self, groups: Groups) -> tuple[Federation, bool]:
        """Rows in internal coordinates, y of gaussian models in units of its own spread; and whether
        rows are weighted."""
        train, units = groups.federation.train, self.units
        assert isinstance(train.x, dict)
        x = ((units.x(train.x["fixed"]) - units.x_centre) / units.x_scale)[:, self.rest]
        z = (train.x["random"] - units.z_centre) / units.z_scale
        offset, weight, _ = train.x["beside"].unbind(1)
        y = train.y.unsqueeze(1)
        weighted = bool((weight != 1).any()) and not self.family.gaussian
        if self.family.gaussian:
            root = weight.sqrt().unsqueeze(1)
            y = (y - offset.unsqueeze(1) - units.y_centre) / units.y_scale * root
            x, z = x * root, z * root
        else:
            x = torch.cat((x, (offset + self.start).unsqueeze(1)), dim=1)
            y = torch.cat((y, weight.unsqueeze(1)), dim=1) if weighted else y
        inputs: Any = {"fixed": x, "random": z} if x.shape[1] else z
        packed = Packed(inputs, y, train.starts, train.sizes)
        return Federation(groups.federation.names, {"train": packed}), weighted

    # --- theta, there and back -------------------------------------------------------------------

    def _shifts(self) -> tuple[list[int], Tensor, Tensor]:
        """Of random effects: the place of their fixed ones, what their mean is multiplied by there, and
        what of it the intercept takes."""
        u = self.units
        at = [u.x_names.index(n) for n in u.z_names]
        return at, u.x_scale[at] / u.z_scale, (u.x_centre[at] - u.z_centre) / u.z_scale

    def point(self, phi: Tensor, mu: Tensor, factor: Tensor) -> ThetaPoint:
        """In internal coordinates, from phi and the prior's mean and factor."""
        scale, p = self.units.y_scale, len(self.rest)
        b = torch.zeros(len(self.units.x_names), dtype=torch.float64)
        b[self.rest] = phi[:p]
        if self.tied:
            at, times, shift = self._shifts()
            b[at] += mu * times
            if self.units.intercept:
                b[0] += mu @ shift
        if self.units.intercept:
            b[0] += self.start
        sigma = math.exp(0.5 * float(phi[-1])) if self.family.gaussian else 1.0
        return ThetaPoint(b * scale, factor / sigma, sigma * scale)

    def published(self, point: ThetaPoint) -> dict[str, Tensor]:
        """phi and beta of a point."""
        scale = self.units.y_scale
        b = point.b / scale
        mu = torch.zeros(len(self.units.z_names), dtype=torch.float64)
        if self.units.intercept:
            b[0] -= self.start
        if self.tied:
            at, times, shift = self._shifts()
            mu = b[at] / times
            if self.units.intercept and 0 in at:
                i = at.index(0)
                mu[i] = b[0] - mu @ shift + mu[i] * shift[i]
            elif self.units.intercept:
                b[0] -= mu @ shift
        phi = b[self.rest]
        sigma = point.sigma / scale
        if self.family.gaussian:
            phi = torch.cat((phi, phi.new_tensor([2 * math.log(sigma)])))
        root = canonical(point.factor @ point.factor.mT, self.units.blocks) * sigma
        root = root + torch.diag((2 * LEAST_CHAIN_SD - root.diagonal()).clamp(min=0))
        prior = self.prior(fitting=False)
        if prior.covariance == "diagonal":
            beta = torch.cat((mu, root.square().sum(1).sqrt().log()))
        else:
            beta = prior.pack(mu, root)
        return {"phi": phi, "beta": beta}


def layout_of(groups: Groups, units: Coordinates, start: float) -> ThetaLayout:
    family = groups.study.family
    if len(units.widths) > 1:
        raise SettingsError(NESTED)
    if not family.canonical:
        raise SettingsError(other_family(family))
    return ThetaLayout(units, family, start if units.intercept and not family.gaussian else 0.0)


def fitted(
    groups: Groups, units: Coordinates, constant: float, start: float, settings: SampledSettings
) -> tuple[Estimates, Engine]:
    """FedSOUL until it has converged; likelihood and standard errors at its theta by the exact
    engines."""
    layout, family = layout_of(groups, units, start), groups.study.family
    federation, weighted = layout.federation(groups)
    method = FedSOUL(
        layout.model(weighted), prior=layout.prior(), engine="sampled", compressor=settings.compressor
    )
    rule = settings.rule
    alone = (
        settings.rounds is not None or settings.compressor != "identity"
    )  # chains are all that was asked for
    scores = not (alone or rule is None or rule.everyone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FedpopWarning)
        population = run(
            method,
            federation,
            rounds=ROUNDS_WITH_CHAINS if scores else settings.rounds,
            seed=settings.seed,
            participation=settings.participation,
            progress=False,
            sites=groups.by_site,
        )
    words = "; ".join(str(w.message) for w in caught if issubclass(w.category, FedpopWarning))
    prior, beta = method.hierarchy.prior, population.published["beta"]
    assert isinstance(prior, Normal)
    point = layout.point(population.published["phi"], prior.mu(beta), prior.factor(beta))
    engine: Engine = (
        GaussianEngine(groups, units, constant)
        if family.gaussian
        else QuadratureEngine(groups, units, constant, start, nodes_for(len(units.z_names)))
    )
    rounds, verdict = population.rounds, population.convergence
    if scores and rule is not None:
        x, more, verdict = scored(engine, engine.vector(point), rule, Key(settings.seed, purpose="scoring"))
        point, rounds, words = engine.point(x), rounds + more, ""
    likelihood, covariance = engine.log_likelihood(point), engine.covariance(point)
    outcome = Estimates(
        point,
        None,
        likelihood,
        engine.words,
        covariance,
        bool(verdict is not None and verdict.converged),
        words or ("not judged" if verdict is None else verdict.words),
        rounds,
        "FedSOUL with chains, then scoring steps" if scores else "FedSOUL with chains",
        population if rounds == population.rounds else None,
    )
    return outcome, engine


def scored(engine: Engine, x: Tensor, rule: Participation, key: Key) -> tuple[Tensor, int, Distance]:
    """All parameters after stages of scoring steps with this participation, how many rounds these were, and
    how far below a maximum that is. Everyone is asked for score and information where a stage begins."""
    roster = engine.groups.members.roster
    units = len(roster)
    crowd = max(units / rule.expected(roster), 1.0)
    steps, rounds = scoring.long_enough(1 / crowd), 0
    for _ in range(SCORING_STAGES):
        whole, information = engine.score_and_information(x)
        there = landing(whole, information, torch.zeros_like(information), x.new_zeros((len(x), 0)))
        rounds += 1
        if there.inverse is None or there.distance.nats < SCORED_NATS:
            break
        start = x
        for k in range(steps):
            active = rule.draw(roster, key.at(round=rounds))
            times = units / max(len(active.ids), 1) if active.ratio else 1.0
            change = torch.zeros_like(x)
            for weight in active.weights.unique():  # one, unless clients join with different probabilities
                ids = active.ids[active.weights == weight]
                change += times * float(weight) * (engine.score(x, ids) - engine.score(start, ids))
            x = scoring.step(x, whole + change, there.inverse, k, crowd)
            rounds += 1
    return x, rounds, there.distance


def population_at(fit: MixedFit) -> Population:
    """A population of FedSOUL at the fit's theta."""
    layout = layout_of(fit.groups, fit.units, fit.engine.level)
    federation, weighted = layout.federation(fit.groups)
    method = FedSOUL(layout.model(weighted), prior=layout.prior(fitting=False), engine="sampled")
    method = method.prepared(federation.example)
    federation = method.model.checked(federation)
    published = layout.published(fit.outcome.point)
    key = Key(fit.seed, purpose="site")
    return Population(method, published, key, federation, rounds=fit.rounds)


def effect_draws(fit: MixedFit, level: str) -> Tensor:
    """Draws ``[L, q]`` of a group's effects on the user's scale."""
    population = fit.population
    z = population.posterior(level).flat
    mu = population.prior_mean
    return (z - mu) * fit.units.y_scale @ fit.units.random_map.mT
