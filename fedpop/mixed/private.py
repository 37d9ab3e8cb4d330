"""Mixed models under differential privacy: FedSOUL's rounds, then scoring rounds, in one ledger.

After rounds with chains theta is near its optimum. In each round that follows a group adds its exact score
s_i and its expected information I_i (s_i s_i' where that has no closed form), each shortened to a bound, in
coordinates in which the mean information is one, and the server adds Gaussian noise:

    t_k = sum v_i + N(0, (sigma_v C)^2 1),  v_i = W' s_i(x_k),     M_k = sum W' I_i(x_k) W + noise

The estimate is the mean over A rounds of x_k + W M^-1 t_k, M the mean of M_k. It deviates from the truth by
what groups were drawn and by noise that is known, so that its covariance is

    W M^-1 [M + ((1 - q) / q M + (sigma_v C / q)^2 1) / A] M^-1 W',    q the share that takes part in a round.

W is found in rounds before that, in which bounds follow the norms. What bounds take away is in no covariance:
where more than a hundredth of the groups was shortened the fit says so.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from scipy import special
from torch import Tensor

from fedpop.errors import FedpopWarning, PrivacyError, warn_user
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation import Everyone
from fedpop.keys import Key
from fedpop.methods import FedSOUL
from fedpop.mixed.design import Coordinates, Design, coded
from fedpop.mixed.engine import Engine, Estimates, Factor, ThetaPoint
from fedpop.mixed.gaussian import GaussianEngine
from fedpop.mixed.groups import Groups
from fedpop.mixed.quadrature import Local, QuadratureEngine, integrated, nodes_for
from fedpop.mixed.sampled import layout_of, other_family
from fedpop.mixed.study import FormulaStudy
from fedpop.priors import Normal
from fedpop.privacy.gaussian import Gaussian, bounded, system_noise
from fedpop.run.private import PrivateTerms, terms
from fedpop.run.simulate import fit as run

if TYPE_CHECKING:
    from fedpop.mixed.model import SampledSettings

CHAIN_ROUNDS, WARM_ROUNDS, SCORED_ROUNDS = 30, 8, 16
"""Rounds with chains; scoring rounds in which coordinates and bounds are found; scoring rounds after that."""
FOUND_IN = 3
"""Of the rounds in which coordinates are found, the last ones, which these are made of."""
SETTLED_IN = 4
"""Scoring rounds before those whose mean is the estimate."""
SHARES = {"score": 0.8, "information": 0.17, "score bit": 0.015, "information bit": 0.015}
"""Of sigma^-2."""
FIRST_BOUND, BOUND_QUANTILE, WARM_RATE = 5.0, 0.9, 1.0
"""Of both vectors, before norms are known; the share of groups that is to be inside, and how fast bounds move
there."""
SCORE_REACH, INFORMATION_REACH = 2.0, 3.0
"""Bounds after that: times the root of the 0.999 quantile of a normal score's squared norm, and of the root
of the number of parameters."""
LEAST_WHITENED = 0.2
"""In whitened coordinates, of one: noise may make a direction look as if nothing were known of it."""
LONGEST_STEP = 0.5
"""In units in which one group's information is one."""
CLIPPED_SHARE = 0.01
"""Of groups that were shortened, from which on a fit says that no interval covers it."""
NOT_COMPUTED = "not computed: it would be one more look at the data"


@dataclass(frozen=True)
class NoisyGaussian(GaussianEngine):
    """The engine of a gaussian model, whose law of theta is that of the noised estimate."""

    law: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.float64))
    """The covariance of all parameters' estimates."""

    def covariance(self, point: ThetaPoint) -> Tensor:
        return self.law[: len(point.b), : len(point.b)]

    def spread(self, point: ThetaPoint, near: object = None) -> Tensor:
        return self.law[len(point.b) :, len(point.b) :]

    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        return _drawn(self, self.law, point, noise[:count])

    def log_likelihood(self, point: ThetaPoint) -> float:
        return math.nan


@dataclass(frozen=True)
class NoisyQuadrature(QuadratureEngine):
    """The same of other families."""

    law: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.float64))

    def covariance(self, point: ThetaPoint) -> Tensor:
        return self.law[: len(point.b), : len(point.b)]

    def spread(self, point: ThetaPoint) -> Tensor:
        return self.law[len(point.b) :, len(point.b) :]

    def theta_draws(self, point: ThetaPoint, noise: Tensor, wide: Tensor, count: int) -> list[ThetaPoint]:
        return _drawn(self, self.law, point, noise[:count])

    def log_likelihood(self, point: ThetaPoint) -> float:
        return math.nan


def _drawn(engine: Engine, law: Tensor, point: ThetaPoint, noise: Tensor) -> list[ThetaPoint]:
    values, vectors = torch.linalg.eigh(law)
    root, x = vectors * values.clamp(min=0).sqrt(), engine.vector(point)
    return [engine.point(x + step) for step in noise[:, : len(x)] @ root.mT]


# --- what is refused ---------------------------------------------------------------------------------


def check_private(study: FormulaStudy, engine: str, method: str, settings: SampledSettings) -> None:
    """Raise where a formula, or how it is to be fitted, looks at data beside the noised sums."""
    if engine == "exact":
        raise PrivacyError(
            "engine='exact' has sums of products without a bound; under privacy= the engine is 'sampled'"
        )
    if method == "REML":
        raise PrivacyError("REML needs the exact engine's sums, which have no bound; use method='ML'")
    if settings.compressor != "identity":
        raise PrivacyError("privacy bounds what each group adds: leave out compressor")
    if study.weights is not None:
        raise PrivacyError("weights of rows enter sums that no budget covers; leave them out under privacy")
    if not study.family.canonical:
        raise PrivacyError(f"{other_family(study.family)} (privacy= has no other engine)")
    if len(study.formula.factors) > 1:
        raise PrivacyError("a unit of privacy is a group, and nested factors have several kinds of them")


def check_columns(categorical: tuple[str, ...], scaled: tuple[str, ...], given: frozenset[str]) -> None:
    """Raise where levels, or moments, of a column would be found in the data."""
    for column in categorical:
        if column not in given:
            raise PrivacyError(
                f"levels of {column!r} would be found in the data, which no budget covers: give them, as in "
                f"levels={{{column!r}: [...]}}"
            )
    if scaled:
        raise PrivacyError(
            f"{scaled[0]} is made by moments of the data, or by their places, which no budget covers: "
            "use constants, as in I((x - 40) / 10)"
        )


def plain_coordinates(groups: Groups, design: Design) -> tuple[Coordinates, Design]:
    """Columns as they are: means and deviations would be looks at the data. Numbers are best brought to a
    size of about one by constants in the formula."""
    p, q = len(design.fixed_names), len(design.random_names)
    one, zero = torch.ones, torch.zeros
    kind = torch.float64
    found = Coordinates(
        zero(p, dtype=kind), one(p, dtype=kind), zero(q, dtype=kind), one(q, dtype=kind), 0.0, 1.0,
        tuple(design.fixed_names), tuple(design.random_names), tuple(design.blocks), design.widths,
    )  # fmt: skip
    groups.update_study(replace(groups.study, coordinates=found))
    groups.count(int(groups.federation.train.sizes.sum()), (len(groups),))
    return found, design


# --- what a group adds -------------------------------------------------------------------------------


def gaussian_parts(
    cohort: Cohort, units: Coordinates, factor: Factor, point: ThetaPoint
) -> tuple[Tensor, Tensor]:
    """Scores ``[C, P]`` and expected information ``[C, P, P]`` of each group in (b, entries of the relative
    factor L, log sigma). With r = y - X b, G = Z'Z, A = 1 + L'GL, T = G - G L A^-1 L'G and u the effects'
    posterior mean in units of sigma L:

        b: X'(r - Z L sigma u) / sigma^2      L: Z'r u' / sigma - G L (A^-1 + u u')
        log sigma: r'r / sigma^2 - r'Z L u / sigma - n
    """
    x, z, y, offset, _ = coded(cohort, units)
    owner, count, (p, q) = cohort.owner, len(cohort), (x.shape[1], z.shape[1])

    def by_group(values: Tensor) -> Tensor:
        return values.new_zeros((count, *values.shape[1:])).index_add(0, owner, values)

    lam, sigma = point.factor, point.sigma
    r = y - offset - units.y_centre - x @ point.b
    g, zx = by_group(z.unsqueeze(2) * z.unsqueeze(1)), by_group(z.unsqueeze(2) * x.unsqueeze(1))
    zr, xr, rr = by_group(z * r.unsqueeze(1)), by_group(x * r.unsqueeze(1)), by_group(r * r)
    n = cohort.sizes.to(r)
    inverse = torch.linalg.inv(torch.eye(q, dtype=r.dtype) + lam.mT @ g @ lam)
    u = torch.einsum("kij,jl,kl->ki", inverse, lam.mT, zr) / sigma
    score_b = (xr - sigma * torch.einsum("kij,il,kl->kj", zx, lam, u)) / sigma**2
    moved = inverse + u.unsqueeze(2) * u.unsqueeze(1)
    turned = zr.unsqueeze(2) * u.unsqueeze(1) / sigma - g @ lam @ moved
    rows, cols = (torch.tensor(v) for v in zip(*factor.places, strict=True))
    score_s = rr / sigma**2 - torch.einsum("ki,ij,kj->k", zr, lam, u) / sigma - n
    score = torch.cat((score_b, turned[:, rows, cols], score_s.unsqueeze(1)), dim=1)

    t = g - g @ lam @ inverse @ lam.mT @ g
    xx = by_group(x.unsqueeze(2) * x.unsqueeze(1))
    inside = torch.einsum("kip,ij,kjl,ml,kmr->kpr", zx, lam, inverse, lam, zx)
    basis = torch.stack([factor.matrix(row) for row in torch.eye(factor.size, dtype=r.dtype)])
    d = basis @ lam.mT + lam @ basis.mT
    td = torch.einsum("kij,ajl->kail", t, d)
    size, k = score.shape[1], factor.size
    information = score.new_zeros((count, size, size))
    information[:, :p, :p] = (xx - inside) / sigma**2
    information[:, p : p + k, p : p + k] = 0.5 * torch.einsum("kaij,kbji->kab", td, td)
    across = td.diagonal(dim1=2, dim2=3).sum(2)
    information[:, p : p + k, -1], information[:, -1, p : p + k] = across, across
    information[:, -1, -1] = 2 * n
    return score, information


def marginal_parts(cohort: Cohort, engine: QuadratureEngine, point: ThetaPoint) -> tuple[Tensor, Tensor]:
    """Scores of each group in (b, entries of L) by quadrature, and their outer products."""
    local = Local.of(cohort, engine.units, engine.family)
    found = integrated(local, point.b, point.factor, engine.marginal.rule)
    owner = cohort.owner
    rows, cols = (torch.tensor(v) for v in zip(*engine.factor.places, strict=True))
    weighted = found.share[owner] * found.slope
    in_b = local.by_group(local.x * weighted.sum(1, keepdim=True))
    turned = torch.einsum("nk,nq,nkr->nqr", weighted, local.z, found.nodes[owner])
    score = torch.cat((in_b, local.by_group(turned)[:, rows, cols]), dim=1)
    return score, score.unsqueeze(2) * score.unsqueeze(1)


# --- the rounds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a scoring round is about: where, in which coordinates, and the bounds."""

    x: Tensor
    white: Tensor
    """W ``[P, P]``."""
    score: float
    information: float


@dataclass(frozen=True)
class Answered:
    """Noised sums of a round over the units, as if all had taken part."""

    score: Tensor
    information: Tensor
    score_inside: float
    information_inside: float


class Rounds:
    """Scoring rounds under a ledger's terms."""

    def __init__(self, engine: Engine, given: PrivateTerms, rule: object, settings: Gaussian) -> None:
        self.engine, self.given, self.rule = engine, given, rule
        self.sigma = {name: given.sigma / math.sqrt(share) for name, share in SHARES.items()}
        self.q = given.expected / given.units
        seed = settings.insecure_seed
        self.key = Key(int.from_bytes(os.urandom(7), "little") if seed is None else seed, purpose="scoring")
        self.seeded, self.done = seed is not None, 0

    def ask(self, asked: Asked) -> Answered:
        """One round; each group's part is bounded before anything is added up."""
        engine, members = self.engine, self.engine.groups.local_members
        key = self.key.at(round=self.done)
        self.done += 1
        ids = self.rule.draw(members.roster, key).ids  # type: ignore[attr-defined]
        size, point = len(asked.x), engine.point(asked.x)
        sums = {name: torch.zeros(1, dtype=torch.float64) for name in SHARES}
        for some in members.plan.cut(ids, members.federation.train.sizes):
            cohort = members.federation.cohort(some, members.device)
            if isinstance(engine, GaussianEngine):
                score, information = gaussian_parts(cohort, engine.units, engine.factor, point)
            else:
                assert isinstance(engine, QuadratureEngine)
                score, information = marginal_parts(cohort, engine, point)
            for name, value in bounded_parts(score, information, asked).items():
                sums[name] = sums[name] + value
        noise = self._normal(key)
        widths = {"score": asked.score, "information": asked.information}
        for name, value in sums.items():
            wide = self.sigma[name] * widths.get(name, 0.5)
            full = value if len(value) > 1 or name.endswith("bit") else value.expand(_length(name, size))
            sums[name] = (full + wide * noise(len(full))) / self.q
        units = self.given.units
        return Answered(
            sums["score"],
            _unpacked(sums["information"], size),
            0.5 + float(sums["score bit"]) / units,
            0.5 + float(sums["information bit"]) / units,
        )

    def _normal(self, key: Key) -> Callable[[int], Tensor]:
        if not self.seeded:
            return system_noise
        calls = [0]

        def draw(count: int) -> Tensor:
            calls[0] += 1
            at = key.at(purpose=f"noise/{calls[0]}")
            return at.normal(at.server(), (count,), torch.float64)[0]

        return draw


def bounded_parts(score: Tensor, information: Tensor, asked: Asked) -> dict[str, Tensor]:
    """Sums over groups of what each adds, none of it longer than its bound."""
    v = score @ asked.white
    packed = _packed(asked.white.mT @ information @ asked.white)
    good = torch.isfinite(v).all(1) & torch.isfinite(packed).all(1)
    v, packed = (torch.where(good.unsqueeze(1), t, torch.zeros_like(t)) for t in (v, packed))
    v, near = bounded(v, asked.score)
    packed, small = bounded(packed, asked.information)
    return {
        "score": v.sum(0),
        "information": packed.sum(0),
        "score bit": (near.double() - 0.5).sum().reshape(1),
        "information bit": (small.double() - 0.5).sum().reshape(1),
    }


def _packed(matrix: Tensor) -> Tensor:
    """Lower triangles, whose norm is the matrix's."""
    size = matrix.shape[-1]
    rows, cols = torch.tril_indices(size, size)
    return matrix[..., rows, cols] * torch.where(rows == cols, 1.0, math.sqrt(2))


def _unpacked(flat: Tensor, size: int) -> Tensor:
    rows, cols = torch.tril_indices(size, size)
    out = flat.new_zeros((size, size))
    out[rows, cols] = flat / torch.where(rows == cols, 1.0, math.sqrt(2))
    return out + out.tril(-1).mT


def _length(name: str, size: int) -> int:
    return size if name == "score" else size * (size + 1) // 2


def _at_least(matrix: Tensor, least: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    out: Tensor = (vectors * values.clamp(min=least)) @ vectors.mT
    return out


def scored(rounds: Rounds, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """The estimate, its covariance, and the share of groups whose score was shortened."""
    units, size = rounds.given.units, len(x)
    asked = Asked(x, torch.eye(size, dtype=x.dtype), FIRST_BOUND, FIRST_BOUND)
    found = torch.zeros((size, size), dtype=x.dtype)
    for k in range(WARM_ROUNDS):
        answer = rounds.ask(asked)
        if k >= WARM_ROUNDS - FOUND_IN:
            found = found + answer.information / FOUND_IN
            continue
        inside = (answer.score_inside, answer.information_inside)
        grown = [math.exp(WARM_RATE * (BOUND_QUANTILE - min(1.0, max(0.0, share)))) for share in inside]
        asked = replace(asked, score=asked.score * grown[0], information=asked.information * grown[1])
    noise = rounds.sigma["information"] * asked.information / rounds.q / math.sqrt(FOUND_IN)
    values, vectors = torch.linalg.eigh(found / units)
    white = vectors * values.clamp(min=max(2 * noise / units, 1e-9)).rsqrt()
    reach = SCORE_REACH * math.sqrt(special.chdtri(size, 0.001))
    asked = Asked(x, white, reach, INFORMATION_REACH * math.sqrt(size))
    total, scores, at, inside_sum = torch.zeros_like(found), list[Tensor](), list[Tensor](), 0.0
    for k in range(SCORED_ROUNDS):
        answer = rounds.ask(asked)
        total, inside_sum = total + answer.information, inside_sum + answer.score_inside
        if k >= SETTLED_IN:
            scores.append(answer.score)
            at.append(asked.x)
        mean = _at_least(total / (k + 1), LEAST_WHITENED * units)
        step = torch.linalg.solve(mean, answer.score)
        step = step * min(1.0, LONGEST_STEP / float(step.norm()))
        moved = asked.x + white @ step
        if len(scores) > 1:  # where they have come to, on average
            steps = torch.linalg.solve(mean, torch.stack(scores).mean(0))
            moved = torch.stack(at).mean(0) + white @ steps
        asked = replace(asked, x=moved)
    mean = _at_least(total / SCORED_ROUNDS, LEAST_WHITENED * units)
    estimate = torch.stack(at).mean(0) + white @ torch.linalg.solve(mean, torch.stack(scores).mean(0))
    added = rounds.sigma["score"] * asked.score / rounds.q
    drawn = (1 - rounds.q) / rounds.q * mean + added**2 * torch.eye(size, dtype=x.dtype)
    bread = white @ torch.linalg.inv(mean)
    covariance = bread @ (mean + drawn / len(scores)) @ bread.mT
    return estimate, covariance, 1 - inside_sum / SCORED_ROUNDS


def fitted(groups: Groups, units: Coordinates, settings: SampledSettings) -> tuple[Estimates, Engine]:
    """FedSOUL with chains, then scoring rounds, all in the ledger of ``settings.privacy``."""
    privacy = settings.privacy
    assert privacy is not None
    if privacy.against == "server":
        raise PrivacyError("against='server' needs secure sums, which mixed models on one machine have not")
    family, layout = groups.study.family, layout_of(groups, units, 0.0)
    federation, weighted = layout.federation(groups)
    chains = CHAIN_ROUNDS if settings.rounds is None else settings.rounds
    rule, roster = settings.rule or Everyone(), groups.members.roster
    given = terms(privacy, rule, roster, chains + WARM_ROUNDS + SCORED_ROUNDS)
    if given.rounds < given.planned:
        raise PrivacyError(
            f"{given.planned} rounds at noise {given.sigma:g} spend more than epsilon = {privacy.epsilon:g}: "
            "leave noise out, and it is found"
        )
    method = FedSOUL(layout.model(weighted), prior=layout.prior(), engine="sampled")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)  # terms() has said it
        population = run(
            method,
            federation,
            rounds=chains,
            seed=settings.seed,
            participation=settings.participation,
            progress=False,
            sites=groups.by_site,
            privacy=replace(privacy, epsilon=None, noise=given.sigma),
        )
    prior, beta = method.hierarchy.prior, population.published["beta"]
    assert isinstance(prior, Normal)
    start = layout.point(population.published["phi"], prior.mu(beta), prior.factor(beta))
    engine: NoisyGaussian | NoisyQuadrature = (
        NoisyGaussian(groups, units, 0.0)
        if family.gaussian
        else NoisyQuadrature(groups, units, 0.0, 0.0, nodes_for(len(units.z_names)))
    )
    rounds = Rounds(engine, given, rule, privacy)
    x, law, clipped = scored(rounds, engine.vector(start))
    engine, point = replace(engine, law=law), engine.point(x)
    spent = given.spent(given.planned)
    words = (
        f"epsilon {spent:.3g} at delta {privacy.delta:g} against readers of the estimates and their errors "
        f"({given.planned} rounds at noise {given.sigma:.3g}); standard errors have the noise in them"
    )
    if clipped > CLIPPED_SHARE:
        words += (
            f"; about {100 * clipped:.1f} % of groups had scores that were shortened, and no interval covers "
            "the bias of that"
        )
        warn_user(words)
    outcome = Estimates(
        point, None, math.nan, NOT_COMPUTED, engine.covariance(point), bool(torch.isfinite(x).all()), words,
        given.planned, "FedSOUL with chains, then noised scoring steps", None,
    )  # fmt: skip
    return outcome, engine
