"""A fit to look at: effects of groups with their intervals, fitted lines, the way of the search; and a NetCDF
file with the groups that ArviZ knows (posterior, observed data)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from fedpop.errors import SettingsError
from fedpop.extras import library
from fedpop.mixed.table import pandas
from fedpop.report.style import METHODS, new_axes, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedpop.mixed.fit import MixedFit

KINDS = ("effects", "lines", "trace", "residuals")
MOST_GROUPS_SHOWN = 60
"""Groups whose names are written, and whose lines are drawn."""
MOST_SLICES, ROWS_OF_A_SLICE = 20, 10
"""Means of residuals that are drawn along fitted values, and rows that each of them has at least, about."""
BLUE = METHODS["FedSOUL"][0]
GREY = METHODS["FedAvg"][0]


def drawn(fit: MixedFit, kind: str, level: float = 0.9) -> Figure:
    """A figure of this kind."""
    if kind not in KINDS:
        raise SettingsError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    with styled():
        if kind == "effects":
            return _effects(fit, level)
        return {"lines": _lines, "trace": _trace, "residuals": _residuals}[kind](fit)


def _effects(fit: MixedFit, level: float) -> Figure:
    """The caterpillar: groups of each factor in the order of their first effect."""
    count, most = len(fit.design.random_names), max(fit.counts.values())
    figure = new_figure(2.6 * count + 1.2, min(max(2.4, 0.14 * most), 9.0))
    axes = iter(figure.subplots(1, count, squeeze=False)[0])
    for factor in fit.factors:
        table = fit.random_effects(level, factor)
        names = list(dict.fromkeys(table.index.get_level_values(1)))
        first = table.xs(names[0], level=1)
        order = np.argsort(first["mean"].to_numpy())
        place = np.arange(len(order))
        for name in names:
            axis, rows = next(axes), table.xs(name, level=1).iloc[order]
            axis.hlines(place, rows["lower"], rows["upper"], color=BLUE, linewidth=1.0)
            axis.plot(rows["mean"], place, "o", color=BLUE, markersize=3)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_xlabel(name)
            axis.set_yticks([])
            if name == names[0]:
                axis.set_ylabel(factor)
                if len(order) <= MOST_GROUPS_SHOWN:
                    axis.set_yticks(place, [first.index[i] for i in order], fontsize=6)
    return figure


def _slope(fit: MixedFit) -> str:
    """The numeric column that lines are drawn along."""
    for part in [
        p for block in fit.design.formula.blocks for p in block.parts
    ] + fit.design.formula.fixed.parts:
        column = part.column
        if column is not None and column not in fit.design.levels:
            return column
    raise SettingsError("there is no numeric predictor to draw lines along")


def _lines(fit: MixedFit) -> Figure:
    """Observed rows, and each group's fitted mean along one predictor; others at their mean or
    baseline."""
    pd, column = pandas(), _slope(fit)
    columns = fit.rows.columns
    ends = np.linspace(float(columns[column].min()), float(columns[column].max()), 30)
    typical: dict[str, Any] = {}
    for name in fit.design.predictors:
        values = columns[name]
        typical[name] = fit.design.levels[name][0] if hasattr(values, "cat") else float(values.mean())
        if name in fit.design.levels and not hasattr(values, "cat"):
            typical[name] = float(fit.design.levels[name][0])
    figure, axes = new_axes(5.2, 3.4)
    outer = fit.design.formula.factors[-1].columns
    shown = fit.levels[:: max(1, -(-fit.n_groups // MOST_GROUPS_SHOWN))]
    for level in shown:
        parts = [level] if len(outer) == 1 else level.split(":")
        rows = pd.DataFrame({**typical, column: ends, **dict(zip(outer, parts, strict=True))})
        found = fit.predict(rows, "known", theta_uncertainty=False, of="mean")
        axes.plot(ends, found["mean"], color=BLUE, linewidth=0.7, alpha=0.6)
    rows = pd.DataFrame({**typical, column: ends})
    middle = fit.predict(rows, "population", theta_uncertainty=False, of="mean")
    axes.plot(ends, middle["mean"], color="#000000", linewidth=1.8, label="population")
    response = fit.design.formula.response.column
    if response is not None and not hasattr(columns[response], "cat"):
        axes.plot(columns[column], columns[response], ".", color=GREY, markersize=2, zorder=0)
    axes.set_xlabel(column)
    axes.set_ylabel(fit.response)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _residuals(fit: MixedFit) -> Figure:
    """Residuals along fitted values with the means of slices of them, and their quantiles beside a normal
    law's; Pearson's, whose spread is the same everywhere where the family is right."""
    fitted, left = fit.fitted().to_numpy(), fit.residuals("pearson").to_numpy()
    figure = new_figure(6.2, 2.9)
    beside, ranked = figure.subplots(1, 2)
    beside.plot(fitted, left, ".", color=GREY, markersize=2)
    order = np.argsort(fitted)
    slices = np.array_split(order, max(2, min(MOST_SLICES, len(order) // ROWS_OF_A_SLICE)))
    beside.plot([fitted[s].mean() for s in slices], [left[s].mean() for s in slices], color=BLUE)
    beside.axhline(0, color="#000000", linewidth=0.8)
    beside.set_xlabel("fitted")
    beside.set_ylabel("Pearson residual")
    normal = special.ndtri((np.arange(len(left)) + 0.5) / len(left))
    ranked.plot(normal, np.sort(left), ".", color=BLUE, markersize=2)
    ranked.axline((0, float(left.mean())), slope=float(left.std()), color=GREY, linewidth=0.8)
    ranked.set_xlabel("normal quantile")
    return figure


def _trace(fit: MixedFit) -> Figure:
    """How far below its best value the log-likelihood was, round by round."""
    found = fit.outcome.found
    if found is not None:
        values = -np.asarray(found.trace)
        label = "nats below the maximum"
        values = np.maximum(values.max() - values, 1e-10)
    else:
        history = fit.population.history
        values = np.asarray([r["loss"] for r in history if r.get("loss") is not None], dtype=float)
        label = "loss per row"
    figure, axes = new_axes(4.6, 2.9)
    axes.plot(np.arange(1, len(values) + 1), values, color=BLUE, linewidth=1.4)
    if found is not None:
        axes.set_yscale("log")
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    return figure


def to_netcdf(fit: MixedFit, path: Path) -> Path:
    """Draws of groups' effects with theta fixed, beside the estimates that they go by."""
    h5py, h5netcdf = (library(name, "formula", "NetCDF files") for name in ("h5py", "h5netcdf"))
    names, levels = fit.design.random_names, fit.levels
    population = fit.population.sample_all()
    to = fit.units.random_map.mT
    each = [(population.posterior(n).draws - population.prior_mean) * fit.units.y_scale @ to for n in levels]
    effects = np.stack([e.numpy() for e in each], axis=2)
    chains, draws = effects.shape[:2]
    with h5netcdf.File(path, "w") as file:
        file.attrs["created_by"] = "fedpop"
        file.attrs["formula"] = fit.formula
        file.attrs["family"] = fit.family.name
        file.attrs["log_likelihood"] = fit.log_likelihood
        posterior = file.create_group("posterior")
        posterior.dimensions = {
            "chain": chains,
            "draw": draws,
            fit.group: len(levels),
            "effect": len(names),
        }
        posterior.create_variable("chain", ("chain",), data=np.arange(chains))
        posterior.create_variable("draw", ("draw",), data=np.arange(draws))
        for dimension, labels in ((fit.group, levels), ("effect", names)):
            values = np.array(labels, dtype=object)
            posterior.create_variable(dimension, (dimension,), data=values, dtype=h5py.string_dtype())
        posterior.create_variable("random_effects", ("chain", "draw", fit.group, "effect"), data=effects)
        observed = file.create_group("observed_data")
        y = fit.groups.federation.train.y.numpy()
        observed.dimensions = {"row": len(y)}
        observed.create_variable("row", ("row",), data=np.arange(len(y)))
        observed.create_variable("y", ("row",), data=y)
    return path
