"""``mixed_model``: a formula, a table, and the same numbers as lme4's without pooling rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch

from fedpop.checked import OneOf, Seed, Whole, require
from fedpop.errors import DataError, SettingsError, warn_user
from fedpop.federation.participation import Said
from fedpop.message import Choice
from fedpop.mixed import sampled
from fedpop.mixed.design import Design, Wanted
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.formula import Formula, FormulaPart, columns_of, parse, scanned, shown
from fedpop.mixed.gaussian_fit import GaussianEngine
from fedpop.mixed.glm_fit import QuadratureEngine, quadrature
from fedpop.mixed.groups import Coordinates, Groups, coordinates
from fedpop.mixed.outcome import Estimates
from fedpop.mixed.point import Engine, ThetaPoint
from fedpop.mixed.response import Family, family_named, response_of
from fedpop.mixed.search import SearchResult
from fedpop.mixed.summary import rank_deficient
from fedpop.mixed.table import MISSING, Rows, as_frame, pandas, rows_of
from fedpop.questions import Table
from fedpop.questions.schema import MINIMUM
from fedpop.site.sites import asked_of

METHODS = ("ML", "REML")
ENGINES = ("auto", "exact", "sampled")
SITE = "site of rows"
"""The column that names sites where frames were given by site."""


def mixed_model(
    formula: str,
    data: Any,
    family: str = "gaussian",
    *,
    method: str = "ML",
    weights: str | None = None,
    sites: str | Mapping[str, Sequence[str]] | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    min_count: int = MINIMUM,
    missing: str = "drop",
    engine: str = "auto",
    seed: int = 0,
    rounds: int | None = None,
    participation: Said = None,
    compressor: Choice = "identity",
) -> MixedFit:
    """Fit a linear or generalised linear mixed model; each level of the grouping factor is a client.

    Args:
        formula: As lme4 writes it: ``y ~ x + (x | group)``, ``(x || group)`` for independent effects,
            ``cbind(hits, misses)`` for binomials, ``factor()``, ``log()``, ``I(x^2)``, ``offset()``.
        data: A data frame, columns by name, the name of a CSV file, or data frames by site.
        family: "gaussian" (the default), "bernoulli", "binomial" or "poisson", with its canonical link.
        method: "ML" (the default), or "REML" for gaussian models, which needs the exact engine:
            variances then allow for the fixed effects that were estimated, which matters where groups
            are few.
        weights: A column, or an expression of columns, with a positive weight for each row; for
            binomials whose response is a share, the number of trials. None (the default) is one for
            each.
        sites: A column that says at which site a row is, or a mapping from sites to their groups: what
            leaves a site is then the sum over its groups. None has each group by itself; leave it out
            with data frames by site.
        levels: The levels of categorical predictors by column, in order, the baseline first; None finds
            them in the data.
        min_count: Levels with fewer rows, at a site or in all, are not told to others, and a predictor
            that has any is refused; 5 unless told. 1 allows any.
        missing: "drop" (the default) leaves rows with missing values out and counts them; "error"
            refuses.
        engine: "exact" searches on everyone's sums in every round: closed forms for gaussian models,
            quadrature for others (importance sampling with more than four random effects); "sampled" is
            FedSOUL with chains, which partial participation and a compressor need; "auto" (the default) is
            exact where it can be.
        seed: Of all random numbers, 0 unless told.
        rounds: How many rounds of the sampled engine; None (the default) leaves it to the engine, and
            must be so with the exact one, which ends by itself.
        participation: Who takes part in a round, as in ``fp.fit``; None (the default) is everyone.
        compressor: Of what is sent, one of ``fp.compressors`` or its name; "identity" (the default) is
            none.

    >>> import fedpop as fp
    >>> days = [0, 1, 2, 3] * 3
    >>> y = [1.1, 2.0, 3.2, 3.9, 2.0, 3.1, 4.2, 4.8, 0.4, 0.9, 1.7, 2.4]
    >>> table = {"y": y, "day": days, "person": ["anna"] * 4 + ["ben"] * 4 + ["cleo"] * 4}
    >>> fit = fp.mixed_model("y ~ day + (1 | person)", table)
    >>> fit
    MixedFit('y ~ day + (1 | person)', gaussian, 12 rows, 3 groups)
    >>> {name: round(value, 3) for name, value in fit.coefficients.items()}
    {'(Intercept)': 1.18, 'day': 0.863}
    """
    started = time.perf_counter()
    require(Annotated[str, OneOf(*METHODS)], method=method)
    require(Annotated[str, OneOf(*ENGINES)], engine=engine)
    require(Annotated[str, OneOf(*MISSING)], missing=missing)
    require(Whole, min_count=min_count)
    require(Seed, seed=seed)
    read, kind = parse(formula), family_named(family)
    if method == "REML" and not kind.gaussian:
        raise SettingsError(f"REML is for gaussian models; a {family} model is fitted by ML")
    weight = None if weights is None else _weight(weights)
    frame, sites = _with_sites(data, sites)
    table = _rows(frame, read, weight, sites, missing)
    design = _agreed(read, table, levels or {}, min_count)
    response = response_of(read, kind, design, table, weight)
    groups = Groups.of(design, response, table, _sites_of(sites, table))
    _require_groups(groups, design, kind)
    units, sums, design = coordinates(groups, design, kind)
    if design.dropped:
        warn_user(rank_deficient(design.dropped))
    constant, start = _level(sums, kind, read)
    settings = sampled.SampledSettings(seed, rounds, participation, compressor)
    chosen = _chosen(engine, method, settings)
    outcome, used = _fitted(chosen, groups, units, kind, constant, start, method, settings)
    seconds = time.perf_counter() - started
    return MixedFit(design, kind, units, groups, used, outcome, method, table, weight, seed, seconds)


def _weight(text: str) -> FormulaPart:
    tokens = scanned(text)
    return FormulaPart(shown(tokens), tokens)


def _with_sites(data: Any, sites: Any) -> tuple[Any, Any]:
    """One table, and where its rows are: frames by site have a column for that."""
    pd = pandas()
    if isinstance(data, Mapping) and data and all(isinstance(v, pd.DataFrame) for v in data.values()):
        if sites is not None:
            raise SettingsError("frames by site say where rows are; leave sites out")
        return pd.concat([f.assign(**{SITE: name}) for name, f in data.items()], ignore_index=True), SITE
    return as_frame(data), sites


def _rows(frame: Any, read: Formula, weight: FormulaPart | None, sites: Any, missing: str) -> Rows:
    parts = [*read.parts, *(() if weight is None else (weight,))]
    columns = [column for part in parts for column in columns_of(part.tokens)]
    if read.group in columns:
        raise SettingsError(f"the grouping factor {read.group!r} is a predictor or the response too")
    site = sites if isinstance(sites, str) else None
    return rows_of(frame, read, columns=columns, sites=site, missing=missing)


def _agreed(read: Formula, rows: Rows, levels: Mapping[str, Sequence[Any]], minimum: int) -> Design:
    """The short rounds before: what of columns has to be known to all. Without sites the sum over clients
    is formed at once; it is the same."""
    wanted = Wanted.of(read, rows)
    table, tables = wanted.table(rows), dict[str, Table]()
    if rows.sites is None:
        tables = {"here": table}
    else:
        for site in dict.fromkeys(rows.sites.tolist()):
            at = rows.sites == site
            tables[str(site)] = {n: v[at] for n, v in table.items()}
    schema = wanted.schema(minimum, many=rows.sites is not None)
    return Design.agreed(read, schema.asked(asked_of(tables)), levels, minimum)


def _sites_of(sites: Any, rows: Rows) -> Mapping[str, Sequence[str]] | None:
    if rows.sites is None:
        return sites if isinstance(sites, Mapping) else None
    assert rows.groups is not None
    pairs = set(zip(rows.groups.tolist(), rows.sites.tolist(), strict=True))
    out: dict[str, list[str]] = {}
    for group, site in sorted(pairs):
        out.setdefault(str(site), []).append(str(group))
    return out


def _require_groups(groups: Groups, design: Design, family: Family) -> None:
    count, q, n = len(groups.federation), len(design.random_names), groups.examples
    if count < 2:
        raise DataError(f"{design.formula.group!r} has one group only; a population needs two or more")
    if family.gaussian and n <= count * q:
        raise DataError(
            f"there are {n} rows and {count * q} random effects ({count} groups of {q}): their "
            "variances cannot "
            "be told from the residual's; use fewer random effects"
        )
    if not design.fixed_names:
        raise SettingsError(f"{design.formula.text!r} has no fixed effect, not even an intercept")


def _level(sums: torch.Tensor, family: Family, read: Formula) -> tuple[float, float]:
    """Constants of the log-density, and the linear predictor of the mean response."""
    _, y, weight, offset, constant = sums.tolist()
    if family.gaussian:
        return constant, 0.0
    mean = y / weight
    if mean <= 0 or (family.binomial and mean >= 1):
        raise DataError(
            f"the response {read.response.text} is {'all' if mean >= 1 else 'never more than'} "
            f"{'one' if mean >= 1 else 'zero'}: there is nothing to explain"
        )
    return constant, family.linked(mean) - offset / weight


def _chosen(engine: str, method: str, settings: sampled.SampledSettings) -> str:
    """Which engine ``auto`` stands for, or why one cannot be had."""
    partial = settings.partial
    if engine == "exact" and partial:
        raise SettingsError(
            "engine='exact' cannot be used with partial participation or compression; use engine='sampled'"
        )
    chosen = engine if engine != "auto" else "sampled" if partial else "exact"
    if chosen == "sampled" and method == "REML":
        raise SettingsError("REML needs the exact engine: everyone in every round, uncompressed")
    if chosen == "exact" and settings.rounds is not None:
        raise SettingsError("the exact engine ends by itself; rounds are for engine='sampled'")
    return chosen


def _fitted(
    chosen: str,
    groups: Groups,
    units: Coordinates,
    family: Family,
    constant: float,
    start: float,
    method: str,
    settings: sampled.SampledSettings,
) -> tuple[Estimates, Engine]:
    engine: Engine
    found: SearchResult | None
    point: ThetaPoint
    if chosen == "sampled":
        return sampled.fitted(groups, units, family, constant, start, settings)
    if family.gaussian:
        engine = GaussianEngine(groups, units, constant, method == "REML")
        found, point = engine.search()
    else:
        engine, found, point = quadrature(groups, units, family, constant, start)
    likelihood = constant - found.value if isinstance(engine, QuadratureEngine) else -found.value
    outcome = Estimates(
        point,
        found,
        likelihood,
        engine.words,
        engine.covariance(point),
        found.converged,
        found.words,
        groups.rounds,
        "exact engine",
    )
    return outcome, engine
