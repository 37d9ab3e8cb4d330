"""A fit in words: lme4's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedpop.mixed.inference import two_sided
from fedpop.mixed.study import SITE

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

METHODS = {"ML": "maximum likelihood", "REML": "restricted maximum likelihood (REML)"}
SATTERTHWAITE = "t-tests use Satterthwaite's method"


def summary(fit: MixedFit) -> str:
    """What lme4 prints, and whether and how it was found."""
    kind = "Linear" if fit.family.gaussian else "Generalized linear"
    lines = [f"{kind} mixed model fit by {METHODS[fit.method]}"]
    if not fit.family.gaussian:
        lines[0] += f" ({fit.outcome.log_likelihood_method})"
        lines.append(f" Family: {fit.family.name} ( {fit.family.link} )")
    if fit.dispersion is not None:
        lines.append(f" {_sentence(fit.family.dispersion)}: {fit.dispersion:.4g}")
    if fit.laws.name == "satterthwaite":
        lines[0] += f"; {SATTERTHWAITE}"
    lines.append(f"Formula: {fit.formula}")
    if fit.weights is not None:
        lines.append(f"Weights: {fit.weights.text}")
    lines += ["", *_criteria(fit), "", "Random effects:", *_random(fit)]
    counts = "; ".join(f"{name}, {count}" for name, count in fit.counts.items())
    lines.append(f"Number of obs: {fit.n_obs}, groups:  {counts}")
    if fit.groups.compared is not None and fit.group != SITE:
        lines.append(apart(fit.groups.compared, fit.n_groups))
    if fit.design.dropped:
        lines.append(rank_deficient(fit.design.dropped))
    if (kinds := fit.groups.kinds).left_out:
        where = ", ".join(f"{name}: {count}" for name, count in kinds.missing.items())
        lines.append(f"{kinds.left_out} row(s) with missing values were left out ({where})")
    for name, basis in fit.design.bases.items():
        if basis.kind == "ns":
            lines.append(f"{name} has {basis.words}")
    for name in fit.design.ordered:
        coding = fit.design.contrasts.get(name, "treatment")
        other = "; R has contrasts={" + repr(name) + ": 'poly'}" if coding == "treatment" else ""
        lines.append(f"{name} is ordered, and coded by {coding} contrasts{other}")
    lines += [
        "",
        "Fixed effects:",
        *_fixed(fit),
        "",
        f"{_sentence(fit.convergence)} ({fit.rounds} rounds, {fit.outcome.engine})",
    ]
    if fit.unusual:
        lines.append(out_of_proportion(fit.unusual))
    if fit.singular:
        lines.append("boundary (singular) fit: a variance is zero or a correlation is one; see fit.singular")
    return "\n".join(lines)


def rank_deficient(dropped: Sequence[str]) -> str:
    """What R says where columns are combinations of others, with their names.

    >>> rank_deficient(["x2"])
    'fixed-effect model matrix is rank deficient, so dropped 1 column / coefficient: x2'
    """
    what = "column / coefficient" if len(dropped) == 1 else "columns / coefficients"
    return (
        f"fixed-effect model matrix is rank deficient, so dropped {len(dropped)} {what}: {', '.join(dropped)}"
    )


def out_of_proportion(groups: Sequence[str]) -> str:
    """Which groups move everyone's estimates.

    >>> out_of_proportion(["site 'b'"])
    "effects out of all proportion to the other groups', which move everyone's estimates: site 'b'"
    """
    named = ", ".join(groups[:5]) + (f", and {len(groups) - 5} more" if len(groups) > 5 else "")
    return f"effects out of all proportion to the other groups', which move everyone's estimates: {named}"


def apart(compared: int, groups: int) -> str:
    """Whether it is known that no group is at two sites.

    >>> apart(18, 18)
    "No group is at two sites: their names were compared under the sites' common key"
    """
    if compared == groups:
        return "No group is at two sites: their names were compared under the sites' common key"
    whose = "Groups were not" if not compared else f"{compared} of {groups} groups were"
    end = "sites have no common key, and equal names at two of them are two groups"
    return f"{whose} compared between sites: " + (end if not compared else f"other {end}")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _criteria(fit: MixedFit) -> list[str]:
    if math.isnan(fit.log_likelihood):
        return [f"logLik {fit.outcome.log_likelihood_method}"]
    if fit.method == "REML":
        return [f"REML criterion at convergence: {-2 * fit.log_likelihood:.1f}"]
    numbers = (fit.aic, fit.bic, fit.log_likelihood, -2 * fit.log_likelihood)
    names = ["AIC", "BIC", "logLik", "-2*log(L)", "df.resid"]
    return _columns([names, [*[f"{v:.1f}" for v in numbers], str(fit.n_obs - fit.df)]])


def _random(fit: MixedFit) -> list[str]:
    sds, cor, blocks, design = list(fit.sd.values()), fit.correlation, fit.units.blocks, fit.design
    rows: list[tuple[str, str, float]] = [
        (fit.factors[at] if at not in design.factor_of[:i] else "", name, sd)
        for i, (name, sd, at) in enumerate(zip(design.random_names, sds, design.factor_of, strict=True))
    ]
    if fit.sigma is not None:
        rows.append(("Residual", "", fit.sigma))
    digits = _digits([sd for _, _, sd in rows])
    wide = max(design.widths) - 1
    table = [["Groups", "Name", "Variance", "Std.Dev.", *["Corr", *[""] * (wide - 1)][:wide]]]
    for i, (group, name, sd) in enumerate(rows):
        start = design.factor_of.index(design.factor_of[i]) if i < len(sds) else i
        beside = [
            _number(float(cor[i, j]), 2) if j < i and i < len(sds) and blocks[i] == blocks[j] else ""
            for j in range(start, start + wide)
        ]
        table.append([group, name, f"{sd * sd:.{digits}f}", f"{sd:.{digits}f}", *beside])
    return [f" {line}" for line in _columns(table, left=2)]


def _fixed(fit: MixedFit) -> list[str]:
    small = all(math.isfinite(v) for v in fit.degrees.values()) and fit.laws.name != "none"
    p_values = small or not fit.family.gaussian
    t = "t" if small else "z"
    table = [["", "Estimate", "Std. Error", *["df"][:small], f"{t} value", *[f"Pr(>|{t}|)"][: int(p_values)]]]
    digits = _digits(list(fit.standard_errors.values()))
    for name, value in fit.coefficients.items():
        se = fit.standard_errors[name]
        z = value / se if se > 0 else math.nan
        row = [name, f"{value:.{digits}f}", f"{se:.{digits}f}", *[f"{fit.degrees[name]:.2f}"][:small]]
        row.append(f"{z:.3f}")
        if p_values:
            tail = two_sided(z, fit.degrees[name])
            row.append(f"{tail:.3g}" if tail >= 2e-16 else "<2e-16")
        table.append(row)
    return _columns(table, left=1)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "NaN"


def _digits(values: Sequence[float]) -> int:
    """Places after the point that show four digits of the smallest."""
    least = min((abs(v) for v in values if v and math.isfinite(v)), default=1.0)
    return min(max(3 - math.floor(math.log10(least)), 0), 6) if least < 1e4 else 0


def _columns(table: list[list[str]], left: int = 0) -> list[str]:
    """Cells under one another; the first ``left`` columns from the left, the others from the right."""
    widths = [max(len(row[j]) for row in table) for j in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            c.ljust(w) if j < left else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(" ".join(cells).rstrip())
    return lines
