"""Responses drawn from a fit, and the parametric bootstrap: the formula refitted to such draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedpop.errors import EstimateError, SettingsError
from fedpop.mixed.drawing import Drawing
from fedpop.mixed.groups import Groups
from fedpop.mixed.table import pandas
from fedpop.run.members import LocalMembers

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

LEAST_REPLICATES = 2
"""Replicates that have a standard deviation."""


def drawing(fit: MixedFit, seed: int, replicate: int) -> Drawing:
    """At the fit's estimates."""
    point = fit.outcome.point
    b = torch.tensor(list(fit.coefficients.values()), dtype=torch.float64)
    whole = torch.zeros(len(fit.design.fixed_terms), dtype=torch.float64)
    whole[list(fit.units.kept or range(len(whole)))] = b
    root = fit.units.random_map @ point.factor * point.sigma
    return Drawing(whole, root, point.sigma, point.dispersion, seed, replicate, tuple(fit.units.widths))


def simulated(fit: MixedFit, count: int, seed: int) -> Any:
    """A column for each draw, rows as the fit has them."""
    study, rows = fit.groups.study, fit.rows
    out = {
        f"sim_{k + 1}": replace(study, drawing=drawing(fit, seed, k)).response_of(rows).y
        for k in range(count)
    }
    return pandas().DataFrame(out, index=rows.numbers)


@dataclass(frozen=True)
class Bootstrap:
    """Estimates of parametric replicates."""

    table: Any
    """A data frame: a row for each replicate that converged, a column for each parameter."""
    estimates: Mapping[str, float]
    failed: int
    """Replicates without an estimate."""

    def confint(self, level: float = 0.95) -> Any:
        """Percentile intervals of all parameters.

        Args:
            level: The probability that they hold, 0.95 by default.
        """
        if not 0 < level < 1:
            raise SettingsError(f"a level lies between 0 and 1, not {level}")
        ends = self.table.quantile([(1 - level) / 2, (1 + level) / 2]).T
        ends.columns = ["lower", "upper"]
        return ends

    def __str__(self) -> str:
        pd = pandas()
        found = pd.Series(self.estimates)
        shown = pd.DataFrame({"estimate": found, "bias": self.table.mean() - found})
        shown["se"] = self.table.std()
        tail = f"; {self.failed} had no estimate" if self.failed else ""
        return f"{len(self.table)} parametric replicates{tail}\n{shown.join(self.confint()).to_string()}"


def parameters(fit: MixedFit) -> dict[str, float]:
    """By the names that intervals have."""
    out, names = {}, fit.design.random_names
    for i, j in fit.engine.factor.places:
        group = fit.factors[fit.design.factor_of[i]]
        if i == j:
            out[f"sd_{names[i]}|{group}"] = float(fit.covariance[i, i].clamp(min=0).sqrt())
        else:
            out[f"cor_{names[i]}.{names[j]}|{group}"] = float(fit.correlation[i, j])
    beside = {"sigma": fit.sigma, "dispersion": fit.dispersion}
    return out | {n: v for n, v in beside.items() if v is not None} | fit.coefficients


def bootstrapped(fit: MixedFit, count: int, seed: int) -> Bootstrap:
    """The fit of so many draws. Members who are at sites have the study of the fit again at the end."""
    if count < LEAST_REPLICATES:
        raise SettingsError(f"a bootstrap takes {LEAST_REPLICATES} replicates or more, not {count}")
    if fit.refit is None:
        raise SettingsError(
            "this fit was read from a file, and refits need all who answered: where they are sites, "
            "fedpop server fit DIR FORMULA --bootstrap N; else fit it anew"
        )
    members, study, found, failed = fit.groups.members, fit.groups.study, [], 0
    try:
        for k in range(count):
            about = replace(study, drawing=drawing(fit, seed, k), coordinates=None)
            if isinstance(members, LocalMembers):
                asked = LocalMembers(about, members.data, sites=members._given)
                groups = Groups(asked, about, fit.groups.kinds)
            else:
                groups = Groups(members, study, fit.groups.kinds)
                groups.update_study(about)
            try:
                found.append(parameters(fit.refit(fit, groups)))
            except EstimateError:
                failed += 1
    finally:
        if not isinstance(members, LocalMembers):
            members.update_study(study)
    return Bootstrap(pandas().DataFrame(found), parameters(fit), failed)
