"""A fitted mixed model: estimates on the user's scale, groups' posteriors, predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN
from fedpop.mixed import contrasts, figures, refits, residuals, sampled, saved, simulated
from fedpop.mixed.degrees import Laws, laws_of
from fedpop.mixed.design import Coordinates, Design
from fedpop.mixed.engine import SINGULAR_FACTOR, Engine, Estimates, ThetaPoint, canonical
from fedpop.mixed.families import Family
from fedpop.mixed.formula import FormulaPart
from fedpop.mixed.gaussian import GaussianEngine, Taylor
from fedpop.mixed.groups import Groups
from fedpop.mixed.inference import LikelihoodRatio, compared, intervals, normal_quantile, two_sided
from fedpop.mixed.nesting import CELLS, RowOrder, Tree, spans
from fedpop.mixed.predictions import GROUPS, NewRows, Predictor
from fedpop.mixed.quadrature import Local, QuadratureEngine
from fedpop.mixed.response import response_columns, response_of
from fedpop.mixed.study import packed
from fedpop.mixed.summary import summary
from fedpop.mixed.table import Rows, as_frame, labels, pandas, rows_of
from fedpop.population import Population
from fedpop.run.members import LocalMembers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL_THETAS = 200
"""Draws of theta behind intervals that include its uncertainty."""
THETA_PROPOSALS = 400
"""Values that these are chosen from, where they are."""
UNUSUAL_TIMES = 300.0
"""Times the median at which a group is named. Of a million groups with one normal effect the largest is
about 60."""
LEAST_SHARE_LEFT = 1e-9
"""Of the largest, below which a direction of the effects says nothing."""
EFFECT_BYTES = 512.0
"""Bytes that a row takes, about, while posteriors of nested groups are found."""
EFFECT_DRAWS_PER_THETA = 10
"""Draws of a group's effects for each of them, where these are drawn; a plug-in interval has as many in
all."""


IN_R = {
    **dict.fromkeys(("fixef", "fixed_effects", "params", "fe_params", "coef_"), "fit.coefficients"),
    "coef": "fit.coefficients for fixed effects, and add fit.random_effects() for each group's",
    **dict.fromkeys(("ranef", "random", "BLUP"), "fit.random_effects() for means, fit.modes for modes"),
    "VarCorr": "fit.sd, fit.correlation or fit.covariance",
    **dict.fromkeys(("logLik", "llf", "loglik"), "fit.log_likelihood"),
    **dict.fromkeys(("AIC", "BIC"), "fit.aic or fit.bic"),
    **dict.fromkeys(("bse", "se", "std_errors"), "fit.standard_errors"),
    **dict.fromkeys(("conf_int", "confidence_intervals"), "fit.confint()"),
    "isSingular": "fit.singular",
    "nobs": "fit.n_obs",
    "ngrps": "fit.n_groups",
    "cov_params": "fit.vcov",
    "cov_re": "fit.covariance",
    "deviance": "-2 * fit.log_likelihood",
    "scale": "fit.sigma",
    "resid": "fit.residuals()",
    **dict.fromkeys(("emmeans", "emtrends"), "fit.marginal_means('x')"),
    **dict.fromkeys(("contest", "linearHypothesis"), "fit.test('x = 0')"),
    "getME": "fit.units, fit.outcome",
}
"""What a fit's numbers are called in lme4 and statsmodels, and here."""


@dataclass(repr=False)
class MixedFit:
    """What ``mixed_model`` returns. ``print(fit)`` looks like lme4's summary.

    Names of effects are R's. Numbers of groups (``random_effects``, ``draws``, predictions for known
    groups) are at their sites; on one machine all of them are here.
    """

    design: Design
    units: Coordinates
    groups: Groups
    engine: Engine
    outcome: Estimates
    method: str
    seed: int
    seconds: float = 0.0
    points: Sequence[ThetaPoint] | None = None
    """Points of the law of theta given the data, where they were found already."""
    again: Callable[..., MixedFit] | None = None
    """Fits a formula to the same table, with the same settings or others; None where that is at sites."""
    refit: Callable[[MixedFit, Groups], MixedFit] | None = None
    """Fits the same formula to other responses of the same rows."""

    def __repr__(self) -> str:
        return f"MixedFit({self.formula!r}, {self.family.name}, {self.n_obs} rows, {self.n_groups} groups)"

    def __str__(self) -> str:
        return summary(self)

    def summary(self) -> str:
        """What ``print`` shows."""
        return summary(self)

    def __getattr__(self, name: str) -> Any:
        if name in IN_R:
            raise AttributeError(f"a fit has no {name}: type {IN_R[name]}")
        raise AttributeError(f"'MixedFit' object has no attribute {name!r}")

    # --- what was fitted ---------------------------------------------------------------------------

    @property
    def family(self) -> Family:
        return self.groups.study.family

    @property
    def family_here(self) -> Family:
        """The family at its dispersion, where it has one."""
        return self.family.at(self.outcome.point.dispersion)

    @property
    def dispersion(self) -> float | None:
        """The size of a negative binomial, the shape of a gamma, the precision of a beta-binomial."""
        return self.outcome.point.dispersion if self.family.dispersed else None

    @property
    def weights(self) -> FormulaPart | None:
        return self.groups.study.weights

    @property
    def rows(self) -> Rows:
        """The rows it was fitted to, where they are on this machine."""
        return self.groups.rows

    @property
    def formula(self) -> str:
        return self.design.formula.text

    @property
    def response(self) -> str:
        return self.design.formula.response.text

    @property
    def group(self) -> str:
        """The grouping factor; of nested ones the outermost."""
        return self.design.formula.group

    @property
    def factors(self) -> list[str]:
        """All grouping factors, the innermost first, by lme4's names: ``cask:batch``, ``batch``."""
        return [factor.name for factor in self.design.formula.factors]

    @property
    def levels(self) -> list[str]:
        """Names of the groups; of nested ones those of the outermost factor."""
        return list(self.groups.federation.names)

    @property
    def n_obs(self) -> int:
        return self.groups.examples

    @property
    def n_groups(self) -> int:
        return len(self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """How many groups each factor has."""
        return dict(zip(self.factors, self.groups.counts, strict=True))

    @property
    def converged(self) -> bool:
        return self.outcome.converged

    @property
    def convergence(self) -> str:
        """Whether, and why not."""
        return self.outcome.words

    @property
    def rounds(self) -> int:
        """Questions and rounds that everyone was asked in."""
        return self.outcome.rounds

    # --- fixed effects -----------------------------------------------------------------------------

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """Fixed effects."""
        values = self.units.fixed(self.outcome.point.b).tolist()
        return dict(zip(self.design.fixed_names, values, strict=True))

    @cached_property
    def vcov(self) -> Tensor:
        """The covariance of the fixed effects' estimates, ``[p, p]``."""
        to = self.units.fixed_map
        return to @ self.outcome.covariance @ to.mT

    @cached_property
    def standard_errors(self) -> dict[str, float]:
        values = self.vcov.diagonal().clamp(min=0).sqrt().tolist()
        return dict(zip(self.design.fixed_names, values, strict=True))

    @cached_property
    def near(self) -> Taylor:
        """The sums of a gaussian model about its estimate: what degrees of freedom are made of."""
        assert isinstance(self.engine, GaussianEngine)
        return self.engine.near(self.outcome.point)

    @cached_property
    def laws(self) -> Laws:
        """The law of the fixed effects' estimates: t with Satterthwaite's degrees of freedom for gaussian
        models by REML, else normal."""
        return laws_of(self)

    @cached_property
    def degrees(self) -> dict[str, float]:
        """Degrees of freedom of each fixed effect's t; infinite where its law is normal."""
        rows = torch.eye(len(self.coefficients), dtype=torch.float64)
        return {n: self.laws.degrees(row) for n, row in zip(self.coefficients, rows, strict=True)}

    def confint(self, level: float = 0.95, method: str = "wald") -> Any:
        """Intervals of all parameters as a data frame, under the names that lme4 gives them, as
        ``sd_(Intercept)|Subject``.

        Those of fixed effects are by t with Satterthwaite's degrees of freedom where a gaussian model was
        fitted by REML. Else they are Wald's: of fixed effects as they are, of standard deviations on the
        scale of their logarithms, of correlations on that of their inverse hyperbolic tangents. Where a
        variance is zero or a correlation one that law does not hold, and there is none (NaN); a
        ``likelihood_ratio`` says whether the variance is needed.

        Args:
            level: The probability that they hold, 0.95 by default.
            method: "wald" (the default), or "profile": all end where the profile of the likelihood has
                fallen far enough, as R's ``confint`` has them, or at zero or one. It is for fits by maximum
                likelihood, and each end takes some twenty rounds of questions to everyone.
        """
        return intervals(self, level, method)

    def test(self, hypothesis: str | Sequence[str], degrees: str | None = None) -> contrasts.Hypothesis:
        """The test of a linear hypothesis about fixed effects, or of several at once.

        Args:
            hypothesis: An equation in names of coefficients, as ``"Days = 0"`` or ``"2 * a - b = 1"``; a list
                of them is tested together, by F.
            degrees: "satterthwaite" (the default for gaussian models by REML), "kenward-roger", or "none"
                (the default for others), which is z and chi-square.
        """
        return contrasts.hypothesis(self, hypothesis, degrees)

    def contrast(self, weights: Mapping[str, Any], level: float = 0.95, degrees: str | None = None) -> Any:
        """Combinations of fixed effects with intervals and tests, as a data frame.

        Args:
            weights: Weights by coefficients, ``{"a": 1, "b": -1}``, or several such by name.
            level: Of the intervals, 0.95 by default.
            degrees: As for ``test``; None (the default) likewise.
        """
        return contrasts.contrasts(self, weights, level, degrees)

    def anova(self, other: MixedFit | None = None, *, type: int | str = 3, degrees: str | None = None) -> Any:
        """A test of each term of the fixed part, as a data frame; with another fit the likelihood ratio.

        Args:
            other: A fit to compare with, as ``anova(m1, m2)`` does in R; None (the default) for terms.
            type: Of the hypotheses: 3 (the default), each term beside all others, factors summing to zero; or
                2, each beside those that do not contain it.
            degrees: As for ``test``; None (the default) likewise.
        """
        return contrasts.anova(self, type, degrees) if other is None else self.likelihood_ratio(other)

    def marginal_means(
        self,
        of: str | Sequence[str],
        *,
        at: Mapping[str, float] | None = None,
        level: float = 0.95,
        adjust: str = "none",
        degrees: str | None = None,
    ) -> contrasts.MarginalMeans:
        """Means by levels of a factor, and their pairwise differences, as emmeans has them.

        Averages of the linear predictor over all combinations of other factors, at the means of numbers.

        Args:
            of: The factor, or several for their combinations.
            at: Where numbers are to be instead of at their means; None (the default) moves none.
            level: Of the intervals, 0.95 by default.
            adjust: How p-values of differences allow for there being several: "none" (the default), "tukey",
                "bonferroni" or "holm".
            degrees: As for ``test``; None (the default) likewise.
        """
        return contrasts.marginal_means(self, of, at or {}, level, adjust, degrees)

    # --- random effects ----------------------------------------------------------------------------

    @cached_property
    def covariance(self) -> Tensor:
        """Of the random effects, ``[q, q]``."""
        return self.outcome.point.sigma_matrix(self.units)

    @property
    def sd(self) -> dict[str, float]:
        """Standard deviations of the random effects, under ``"Days"``, or of several factors under
        ``"Days|Subject"``."""
        values = self.covariance.diagonal().clamp(min=0).sqrt().tolist()
        return dict(zip(self.design.effect_names, values, strict=True))

    @property
    def correlation(self) -> Tensor:
        """Of the random effects, ``[q, q]``; NaN beside a standard deviation of zero."""
        sd = self.covariance.diagonal().sqrt()
        out = self.covariance / sd / sd.unsqueeze(1)
        return out.fill_diagonal_(1.0)

    @property
    def sigma(self) -> float | None:
        """The residual standard deviation, where the family has one."""
        return self.outcome.point.sigma if self.family.gaussian else None

    @property
    def singular(self) -> bool:
        """The covariance of random effects is singular: a variance of zero, or a correlation of one."""
        factor = self.outcome.point.factor
        return bool((canonical(factor @ factor.mT, self.units.blocks).diagonal() < SINGULAR_FACTOR).any())

    @cached_property
    def _level_names(self) -> list[list[str]]:
        """Names of the groups of each factor, the innermost first."""
        return [*RowOrder.of(self.rows).names[:-1], self.levels]

    @cached_property
    def modes(self) -> dict[str, Tensor]:
        """Where the posterior of each group's effects is highest, ``[K, q]`` for each factor: what lme4 calls
        conditional modes. Of gaussian models, and by Laplace's approximation, they are the means."""
        if not isinstance(self.engine, QuadratureEngine):
            return {name: mean for name, (mean, _) in zip(self.factors, self._level_effects, strict=True)}
        federation, point = self.groups.federation, self.outcome.point
        everyone = federation.cohort(torch.arange(len(federation)), torch.device("cpu"))
        local = Local.of(everyone, self.units, self.family_here)
        u, _ = local.modes((local.x @ point.b).unsqueeze(1) + local.offset, local.z @ point.factor)
        return {self.group: u @ point.factor.mT @ self.units.random_map.mT}

    @cached_property
    def unusual(self) -> list[str]:
        """Groups whose effects are out of all proportion to the others', hundreds of times the median in
        squares: none was left out. At sites nobody but they can tell."""
        return unusual_groups(self) if isinstance(self.groups.members, LocalMembers) else []

    @cached_property
    def _level_effects(self) -> list[tuple[Tensor, Tensor]]:
        """For each factor means ``[K, q]`` and covariances ``[K, q, q]`` on the user's scale."""
        members, point, spans_of = self.groups.local_members, self.outcome.point, spans(self.units.widths)
        maps = [self.units.random_map[span, span] for span in spans_of]
        if len(maps) == 1:
            self.engine.effects(point)
            states = members.store.get(torch.arange(members.units), members.device)
            return [(states["mean"] @ maps[0].mT, maps[0] @ states["cov"] @ maps[0].mT)]
        every, ids = list[list[tuple[Tensor, Tensor]]](), torch.arange(members.units)
        for some in members.plan.taking((EFFECT_BYTES, 0.0)).cut(ids, members.federation.train.sizes):
            found = self.engine.paths(members.federation.cohort(some, members.device, self._split), point)
            pairs = zip(maps, found.mean, found.covariance, strict=True)
            every.append(
                [(m[:, : len(to)] @ to.mT, to @ c[:, : len(to), : len(to)] @ to.mT) for to, m, c in pairs]
            )
        return [
            (torch.cat([m for m, _ in f]), torch.cat([c for _, c in f])) for f in zip(*every, strict=True)
        ]

    @property
    def _effects(self) -> tuple[Tensor, Tensor]:
        """Those of the outermost factor."""
        return self._level_effects[-1]

    def random_effects(self, level: float = 0.95, factor: str | None = None) -> Any:
        """Posterior mean, standard deviation and interval of each group's effects.

        A data frame with a row for each group and effect; of several factors all below one another.

        Args:
            level: Of the intervals, 0.95 by default.
            factor: One of ``fit.factors``, where there are several; None (the default) is all of them.
        """
        if factor is not None and factor not in self.factors:
            raise SettingsError(f"factor is one of {', '.join(self.factors)}, not {factor!r}")
        tables = {
            name: self._effect_table(i, normal_quantile(level))
            for i, name in enumerate(self.factors)
            if factor in (None, name)
        }
        if len(tables) == 1:
            return next(iter(tables.values()))
        renamed = {name: table.rename_axis(["group", "effect"]) for name, table in tables.items()}
        return pandas().concat(renamed, names=["factor"])

    def _effect_table(self, at: int, z: float) -> Any:
        mean, cov = self._level_effects[at]
        sd, span = cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt(), spans(self.units.widths)[at]
        pd, names = pandas(), self.design.random_names[span]
        index = pd.MultiIndex.from_product([self._level_names[at], names], names=[self.factors[at], "effect"])
        table = {"mean": mean, "sd": sd, "lower": mean - z * sd, "upper": mean + z * sd}
        return pd.DataFrame({n: v.flatten().numpy() for n, v in table.items()}, index=index)

    def draws(self, level: str | int) -> np.ndarray:
        """Draws of one group's effects given its data, theta fixed.

        By the kernel of the model, ``[L, q]``.

        Args:
            level: The group's name.
        """
        found: np.ndarray = sampled.effect_draws(self, str(level)).numpy()
        return found

    # --- the likelihood ----------------------------------------------------------------------------

    @property
    def log_likelihood(self) -> float:
        return self.outcome.log_likelihood

    @property
    def df(self) -> int:
        """Parameters: fixed effects, those of the covariance, and the residual's or the dispersion."""
        last = self.family.gaussian or self.family.dispersed
        return len(self.coefficients) + self.engine.factor.size + last

    @property
    def aic(self) -> float:
        return -2 * self.log_likelihood + 2 * self.df

    @property
    def bic(self) -> float:
        return -2 * self.log_likelihood + math.log(self.n_obs) * self.df

    def likelihood_ratio(self, other: MixedFit) -> LikelihoodRatio:
        """The test against a model that is nested in this one, or that this one is nested in.

        Args:
            other: A fit of the same rows.
        """
        return compared(self, other)

    def to_frame(self) -> Any:
        """All estimates in one data frame: fixed effects, then standard deviations and correlations."""
        rows: list[dict[str, Any]] = []
        for name, value in self.coefficients.items():
            se = self.standard_errors[name]
            rows.append(
                {
                    "effect": "fixed",
                    "group": "",
                    "term": name,
                    "estimate": value,
                    "se": se,
                    "t" if math.isfinite(self.degrees[name]) else "z": value / se,
                    "df": self.degrees[name],
                    "p": two_sided(value / se, self.degrees[name]),
                }
            )
        names, sds = self.design.random_names, list(self.sd.values())
        for i, j in self.engine.factor.places:
            value = sds[i] if i == j else float(self.correlation[i, j])
            term = f"sd {names[i]}" if i == j else f"cor {names[j]}, {names[i]}"
            group = self.factors[self.design.factor_of[i]]
            rows.append({"effect": "random", "group": group, "term": term, "estimate": value})
        if self.sigma is not None:
            rows.append({"effect": "random", "group": "Residual", "term": "sd", "estimate": self.sigma})
        if self.dispersion is not None:
            last = {"group": "", "term": self.family.dispersion, "estimate": self.dispersion}
            rows.append({"effect": "dispersion", **last})
        return pandas().DataFrame(rows)

    def plain(self) -> dict[str, Any]:
        """Plain values, as ``fedpop fit --json`` writes them; groups' where these are on this machine."""
        here, random, modes = self.groups.members.federation is not None, dict[str, Any](), dict[str, Any]()
        for i, (factor, span) in enumerate(zip(self.factors, spans(self.units.widths), strict=True)):
            names, cor = self.design.random_names[span], self.correlation[span, span].tolist()
            random[factor] = {
                "sd": dict(zip(names, list(self.sd.values())[span], strict=True)),
                "cor": [[v if math.isfinite(v) else None for v in row] for row in cor],
            }
            modes[factor] = {}
            if here:
                mean, cov = self._level_effects[i]
                sd = cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
                every = torch.stack((self.modes[factor], mean, sd), dim=2).tolist()
                modes[factor] = {
                    level: {
                        n: dict(zip(("mode", "mean", "sd"), v, strict=True))
                        for n, v in zip(names, of, strict=True)
                    }
                    for level, of in zip(self._level_names[i], every, strict=True)
                }
        return {
            "converged": self.converged,
            "fixed": {
                n: {"estimate": v, "se": self.standard_errors[n]}
                | ({"df": self.degrees[n]} if math.isfinite(self.degrees[n]) else {})
                for n, v in self.coefficients.items()
            },
            "random": random,
            "sigma": self.sigma,
            "dispersion": self.dispersion,
            "log_likelihood": self.log_likelihood,
            "modes": modes,
            "knots": {n: b.words for n, b in self.design.bases.items() if b.kind == "ns"},
            "rounds": self.rounds,
            "seconds": self.seconds,
        }

    # --- predictions -------------------------------------------------------------------------------

    def predict(
        self,
        new_rows: Any,
        groups: str = "known",
        *,
        level: float = 0.9,
        of: str | None = None,
        observed: Any = None,
        theta_uncertainty: bool = True,
        average: bool = False,
    ) -> Any:
        """Mean and interval of each row, as a data frame.

        The mean is that at the estimates, as in R; of a known or a new group the mean over what its effects
        may be, by quadrature.

        Args:
            new_rows: A table with the formula's columns; the response may be missing.
            groups: ``"known"`` (the default) are those of training; ``"new"`` groups that were never there,
                drawn from the population; ``"population"`` is a group whose effects are zero. Of nested
                factors a row whose inner group is missing, or its column, belongs to a new one within the
                known group around it.
            level: Of the intervals, 0.9 by default.
            of: ``"mean"`` for intervals of the mean; by default, of a new observation (of the probability,
                for yes or no).
            observed: Rows of new groups with their response, which update their posterior without
                refitting; None (the default) where there are none.
            theta_uncertainty: Intervals include the uncertainty about theta; they do by default.
            average: The mean is averaged over draws of theta, with its standard error beside it
                (``error``); by default it is not.
        """
        if average and not theta_uncertainty:
            raise SettingsError("average=True is over draws of theta: leave theta_uncertainty=False out")
        if groups not in GROUPS:
            raise SettingsError(f"groups is one of {', '.join(GROUPS)}, not {groups!r}")
        if not 0 < level < 1:
            raise SettingsError(f"a level lies between 0 and 1, not {level}")
        frame = as_frame(new_rows)
        rows = rows_of(
            frame, self.design.formula, columns=self.design.predictors, missing="error", group=False
        )
        owner, cohort = self._owners(frame, groups, observed)
        units = self.units
        asked = NewRows(
            (torch.from_numpy(self.design.fixed(rows)) - units.x_centre) / units.x_scale,
            (torch.from_numpy(self.design.random(rows)) - units.z_centre) / units.z_scale,
            torch.from_numpy(self.design.offset(rows)),
            owner,
            cohort,
        )
        each = EFFECT_DRAWS_PER_THETA if theta_uncertainty else EFFECT_DRAWS_PER_THETA * INTERVAL_THETAS
        key = self._key.at(purpose="predict")
        nodes = getattr(self.engine, "nodes", 1)
        predictor = Predictor(units, self.family, groups != "population", of, each, key, nodes)
        points = self.theta_points if theta_uncertainty else [self.outcome.point]
        found = predictor.predicted(asked, self.outcome.point, points, level, average)
        table = {"mean": found.mean, "lower": found.low, "upper": found.high}
        if found.error is not None:
            table["error"] = found.error
        return pandas().DataFrame({n: v.numpy() for n, v in table.items()}, index=frame.index)

    def _owners(self, frame: Any, groups: str, observed: Any) -> tuple[Tensor, Any]:
        """For each row the position of its group among those with data, and these."""
        if observed is not None and groups != "new":
            raise SettingsError("observed are rows of new groups: groups='new'")
        nobody = torch.full((len(frame),), -1)
        if groups == "population" or (groups == "new" and observed is None):
            return nobody, None
        if groups == "known":
            federation = self.groups.federation
            ids, positions = self._known(frame)
            return positions, federation.cohort(ids, torch.device("cpu"), self._split)
        known = response_columns(self.design.formula, self.weights)
        columns = list(dict.fromkeys([*known, *self.design.predictors]))
        rows = rows_of(as_frame(observed), self.design.formula, columns=columns)
        design = self.groups.study.design
        assert design is not None
        response = response_of(design.formula, self.family, design, rows, self.weights)
        federation = packed(design, response, rows, self.family.gaussian)
        cohort = federation.cohort(torch.arange(len(federation)), torch.device("cpu"), self._split)
        return self._positions(frame, RowOrder.of(rows).names), cohort

    def _known(self, frame: Any) -> tuple[Tensor, Tensor]:
        """Units that rows belong to, and rows' positions among the groups of these; raises where a group was
        not there in training."""
        federation = self.groups.federation
        everyone = federation.cohort(torch.arange(len(federation)), torch.device("cpu"), self._split)
        tree, wanted = Tree.of(everyone), self._named(frame)
        place = {name: i for i, name in enumerate(federation.names)}
        used = sorted({place[n] for n in wanted[-1] if n in place})
        inside = torch.zeros(len(federation), dtype=torch.bool)
        inside[used] = True
        names = [
            [found[i] for i in inside[units].nonzero().squeeze(1).tolist()]
            for found, units in zip(self._level_names, tree.units, strict=True)
        ]
        for found, asked in zip(reversed(names), reversed(wanted), strict=True):
            there = set(found)
            unknown = [n for n in asked if n is not None and n not in there]
            if unknown:
                raise DataError(
                    f"group {unknown[0]!r} was not there in training; groups='new' draws it from "
                    "the population"
                    + ("; a new one within a known group has no name" if found is not names[-1] else "")
                )
        return torch.tensor(used), self._positions(frame, names)

    def _positions(self, frame: Any, names: Sequence[Sequence[str]]) -> Tensor:
        """For each row the position of its innermost group that is among these, counted over all levels."""
        owner, start = torch.full((len(frame),), -1), 0
        for found, asked in zip(names, self._named(frame), strict=True):
            place = {name: start + i for i, name in enumerate(found)}
            mine = torch.tensor([-1 if n is None else place.get(n, -1) for n in asked])
            owner = torch.where(owner < 0, mine, owner)
            start += len(found)
        return owner

    def _named(self, frame: Any) -> list[list[str | None]]:
        """Of each row its group of each factor, the innermost first; None where that is not said."""
        formula = self.design.formula
        for column in formula.factors[-1].columns:
            if column not in frame.columns or bool(frame[column].isna().any()):
                raise DataError(f"every row to predict for needs its group: column {column!r}")
        out: list[list[str | None]] = []
        for factor in formula.factors:
            if any(column not in frame.columns for column in factor.columns):
                out.append([None] * len(frame))
                continue
            parts = zip(*(labels(frame[column]) for column in factor.columns), strict=True)
            out.append([None if None in part else ":".join(part) for part in parts])
        return out

    @property
    def _split(self) -> str:
        """What posteriors are made of."""
        return CELLS if self.family.gaussian else "train"

    @property
    def _key(self) -> Key:
        return Key(self.seed, purpose="mixed")

    @cached_property
    def theta_points(self) -> list[ThetaPoint]:
        """Points of the law of theta given the data, of which intervals are made."""
        if self.points is not None:
            return list(self.points)
        size = self.engine.factor.size + len(self.coefficients) + self.family.dispersed
        ids = torch.arange(THETA_PROPOSALS)
        noise = self._key.at(purpose="theta").normal(ids, (size + 1,), torch.float64)
        return self.engine.theta_draws(self.outcome.point, noise[:, :-1], noise[:, -1], INTERVAL_THETAS)

    def update(self, formula: str = ". ~ .", **settings: Any) -> MixedFit:
        """The fit of another formula to the same table, or with other settings.

        Args:
            formula: As R's ``update`` takes it, dots for what was there: ``". ~ . + x"``.
            settings: Of ``mixed_model``, in place of those that it was called with.
        """
        return refits.updated(self, formula, settings)

    def drop1(self) -> Any:
        """AIC and likelihood ratio of the model without each term that no other contains, by maximum
        likelihood, as a data frame."""
        return refits.dropped(self)

    def beside(self, *others: MixedFit) -> Any:
        """This fit and others in one table: a column for each.

        Args:
            others: Further fits.
        """
        return refits.compared_table([self, *others])

    # --- rows, and draws of them ---------------------------------------------------------------------

    def fitted(self) -> Any:
        """The mean of each row at the modes of its groups' effects, as in R, where the rows are."""
        return residuals.fitted(self)

    def residuals(self, kind: str | None = None) -> Any:
        """What is left of each row's response, where the rows are.

        Args:
            kind: "response", "pearson" or "deviance"; None (the default) is the first for gaussian models,
                else the last, as in R.
        """
        return residuals.residuals(self, kind)

    def simulate(self, count: int = 1, seed: int = 0) -> Any:
        """Responses drawn anew from the model, random effects too, where the rows are: a column for each.

        Args:
            count: How many draws, 1 by default.
            seed: Of the numbers, 0 by default.
        """
        return simulated.simulated(self, count, seed)

    def bootstrap(self, count: int = 200, seed: int = 0) -> simulated.Bootstrap:
        """A parametric bootstrap: the formula refitted to responses drawn from the fit.

        Across machines each site draws those of its own rows, and what leaves it is what leaves it in a fit.

        Args:
            count: Replicates, 200 by default.
            seed: Of the numbers, 0 by default.
        """
        return simulated.bootstrapped(self, count, seed)

    # --- for people --------------------------------------------------------------------------------

    @cached_property
    def population(self) -> Population:
        """The same theta as a population of FedSOUL: chains, posteriors and diagnostics of any model."""
        return self.outcome.population or sampled.population_at(self)

    def diagnostics(self) -> Any:
        """Whether theta has converged, and groups' chains have mixed."""
        return self.population.diagnostics()

    def plot(self, kind: str = "effects", level: float = 0.9) -> Figure:
        """A figure of the fit.

        Args:
            kind: ``"effects"`` (the default, a caterpillar), ``"lines"`` (fitted lines by group),
                ``"trace"``, or ``"residuals"`` (along fitted values, and by quantiles), where the rows are.
            level: Of the caterpillar's intervals, 0.9 by default.
        """
        return figures.drawn(self, kind, level)

    def save(self, path: str | Path) -> Path:
        """Write the fit to a folder, for ``fedpop.load``; rows and groups' posteriors stay where they are.

        Args:
            path: The folder.
        """
        return saved.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> MixedFit:
        """Read a fit back: estimates, tests, predictions for new groups and the population.

        Args:
            path: The folder that ``save`` was given.
        """
        return cls(**saved.read_fit(Path(path)))

    def to_netcdf(self, path: str | Path) -> Path:
        """Posterior draws of groups' effects and the estimates, in a file that ArviZ reads.

        Args:
            path: The file to write.
        """
        return figures.to_netcdf(self, Path(path))


def unusual_groups(fit: MixedFit) -> list[str]:
    """Names of the groups whose effects are out of all proportion, by factor, the innermost first.

    One group whose response is in another unit moves everyone's estimates, and a fit to it converges like any
    other. So the squared length of each group's effects, in units of what they vary by over groups, is held
    against the median group's: rather the ratio than the length, since the estimates are made with the
    culprit. Whether such a group is an error only its owner knows.
    """
    found = []
    pairs = zip(fit.factors, spans(fit.units.widths), fit._level_effects, fit._level_names, strict=True)
    for factor, span, (mean, cov), names in pairs:
        length = standardised(mean, cov, fit.covariance[span, span])
        some = length[length > 0]
        if len(some) >= MESSAGES_FOR_A_MEDIAN:
            out = (length > UNUSUAL_TIMES * some.median()).nonzero().squeeze(1).tolist()
            found += [f"{factor} {names[i]!r}" for i in out]
    return found


def standardised(mean: Tensor, cov: Tensor, total: Tensor) -> Tensor:
    """u' (Sigma - V)^+ u, ``[K]``, of posterior means u ``[K, q]`` and covariances V: the variance of a mean
    over groups is what is left of Sigma."""
    values, vectors = torch.linalg.eigh(total - cov)
    most = float(total.diagonal().max())
    turned = (vectors.mT @ mean.unsqueeze(-1)).squeeze(-1)
    return torch.where(values > LEAST_SHARE_LEFT * most, turned.square() / values.clamp(min=1e-300), 0.0).sum(
        1
    )
