"""``mixed_model``: a formula, a table, and the same numbers as lme4's without pooling rows."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedpop.checked import OneOf, Seed, Whole, require
from fedpop.errors import DataError, SettingsError, warn_user
from fedpop.federation.participation import Participation, Said
from fedpop.federation.participation import resolve as resolve_participation
from fedpop.federation.table_format import MINIMUM
from fedpop.files import write_json
from fedpop.message import Choice
from fedpop.mixed import private, sampled, scored
from fedpop.mixed.design import Coordinates, Wanted
from fedpop.mixed.engine import Engine, Estimates
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.gaussian import GaussianEngine
from fedpop.mixed.groups import Groups, agreed, columns_in, coordinates
from fedpop.mixed.laplace import LaplaceEngine
from fedpop.mixed.quadrature import quadrature
from fedpop.mixed.study import SITE, ColumnKinds, FormulaStudy
from fedpop.mixed.summary import out_of_proportion, rank_deficient
from fedpop.mixed.table import MISSING, NA, Rows, as_frame, pandas, read_file
from fedpop.privacy.gaussian import Gaussian
from fedpop.run.members import LocalMembers, Members

METHODS = ("ML", "REML")
ENGINES = ("auto", "exact", "sampled")
WEIGHTS = "(weights)"
"""The column of weights that were given as numbers, as R calls it."""
ROWS_SITE = "site of rows"
"""The column that names sites where frames were given by site."""


def mixed_model(
    formula: str,
    data: Any,
    family: str = "gaussian",
    *,
    method: str = "ML",
    weights: str | Sequence[float] | None = None,
    sites: str | Mapping[str, Sequence[str]] | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    contrasts: Mapping[str, str] | None = None,
    min_count: int = MINIMUM,
    missing: str = "drop",
    na: Sequence[str] = NA,
    engine: str = "auto",
    seed: int = 0,
    rounds: int | None = None,
    participation: Said = None,
    compressor: Choice = "identity",
    privacy: Gaussian | None = None,
    **unknown: Any,
) -> MixedFit:
    """Fit a linear or generalised linear mixed model; levels of its outermost factor are clients.

    Args:
        formula: As lme4 writes it: ``y ~ x + (x | group)``, ``(x || group)`` for independent effects,
            ``(1 | hospital/patient)`` for nested groups, ``(1 | site)`` for the sites themselves,
            ``cbind(hits, misses)`` for binomials, ``factor()``, ``log()``, ``I(x^2)``, ``offset()``.
        data: A data frame, columns by name, the name of a CSV or Parquet file, or data frames by site.
        family: "gaussian" (the default), "bernoulli", "binomial" or "poisson", with its canonical link.
        method: "ML" (the default), or "REML" for gaussian models, which needs the exact engine:
            variances then allow for the fixed effects that were estimated, which matters where groups
            are few. ``REML=True`` says the same.
        weights: A column, an expression of columns, or numbers, with a positive weight for each row; for
            binomials whose response is a share, the number of trials. None (the default) is one for
            each.
        sites: A column that says at which site a row is, or a mapping from sites to their groups: what
            leaves a site is then the sum over its groups. None has each group by itself; leave it out
            with data frames by site.
        levels: The levels of categorical predictors by column, in order, the baseline first; None finds
            them in the data, in the order that a pandas categorical gives them, else sorted.
        contrasts: How factors are coded, by column: "treatment" (each level against the baseline, for
            all that are not named), "sum", "helmert" or "poly"; None (the default) names none.
        min_count: Levels with fewer rows, at a site or in all, are suppressed, and a predictor
            that has any is refused; 5 by default. 1 allows any.
        missing: "drop" (the default) leaves rows with missing values out and counts them; "error"
            refuses.
        na: Words of a CSV file that stand for missing values beside empty fields; "NA" by default.
        unknown: REML, as R has it; what else R has is told how it is said here.
        engine: "exact" searches on everyone's sums in every round: closed forms for gaussian models,
            quadrature for others (importance sampling with more than four random effects); "sampled" is
            FedSOUL with chains, which partial participation and a compressor need; "auto" (the default) is
            exact where it can be.
        seed: Of all random numbers, 0 by default.
        rounds: How many rounds of the sampled engine; None (the default) leaves it to the engine, and
            must be so with the exact one, which ends by itself.
        participation: Who takes part in a round, as in ``fp.fit``; None (the default) is everyone.
        compressor: Of what is sent, one of ``fp.compressors`` or its name; "identity" (the default) is
            none.
        privacy: ``fp.privacy.Gaussian(epsilon=4, delta=1e-6)`` has estimates and their errors say little of
            the rows of any one group, by the sampled engine; columns are taken as they are. None (the
            default) for none.

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
    given = {
        "data": data,
        "family": family,
        "method": method,
        "weights": weights,
        "sites": sites,
        "levels": levels,
        "contrasts": contrasts,
        "min_count": min_count,
        "missing": missing,
        "na": na,
        "engine": engine,
        "seed": seed,
        "rounds": rounds,
        "participation": participation,
        "compressor": compressor,
        "privacy": privacy,
        **unknown,
    }
    chains = SampledSettings(seed, rounds, participation, compressor, privacy)
    method = method_of(method, unknown)
    settings = FitSettings(method, levels or {}, min_count, engine, chains, contrasts or {})
    require(Annotated[str, OneOf(*MISSING)], missing=missing)
    if weights is not None and not isinstance(weights, str):
        data, weights = with_weights(data, weights, na), f"`{WEIGHTS}`"
    study = FormulaStudy.from_text(formula, family, weights, missing, na)
    settings.engine_for(study)
    fit = fitted_over(LocalMembers(study, _rows(study, data, sites)), study, settings)
    if fit.unusual:
        warn_user(f"{out_of_proportion(fit.unusual)}; none was left out: look at the rows' units")
    return replace(fit, seconds=time.perf_counter() - started, again=partial(mixed_model, **given))


IN_R = {
    "nAGQ": "integrals take as many nodes as they need; leave nAGQ out",
    "control": "there is no optimiser to control; leave control out",
    "subset": "give the rows themselves: data[data.x > 0]",
    "offset": "an offset is part of the formula: y ~ x + offset(log(t)) + (1 | g)",
    "na_action": "missing='drop' (the default) or 'error'",
    "na": "na=('NA', '-') names the words that stand for missing values",
    "start": "the search finds where to start; leave start out",
    "verbose": "print(fit) says how the search went; leave verbose out",
    "groups": "groups are part of the formula: y ~ x + (1 | group)",
    "re_formula": "random effects are part of the formula: y ~ x + (x | group)",
}
"""What people type who know lme4 or statsmodels, and what to type here."""


def method_of(method: str, unknown: Mapping[str, Any]) -> str:
    """ML or REML, by its name or as ``REML=True``; other settings that are not there end here."""
    for name in unknown:
        if name != "REML":
            known = ", ".join(inspect.signature(mixed_model).parameters)
            raise SettingsError(
                f"mixed_model has no setting {name!r}: {IN_R.get(name, f'there are {known}')}"
            )
    if "REML" not in unknown:
        return method
    if method == "REML" and not unknown["REML"]:
        raise SettingsError("REML=False and method='REML' contradict each other")
    return "REML" if unknown["REML"] else "ML"


def with_weights(data: Any, weights: Any, na: Sequence[str]) -> Any:
    """A table with these weights of its rows as a column."""
    pd = pandas()
    if isinstance(data, Mapping) and data and all(isinstance(v, pd.DataFrame) for v in data.values()):
        raise SettingsError("weights of tables by site are a column of them: weights='name'")
    frame, values = as_frame(data, na), np.asarray(weights)
    if values.shape != (len(frame),):
        raise SettingsError(
            f"weights have the shape {values.shape}, and there are {len(frame)} rows: give each row its own, "
            "or name a column"
        )
    return frame.assign(**{WEIGHTS: values})


@dataclass(frozen=True)
class SampledSettings:
    """Settings of a run with chains."""

    seed: int = 0
    rounds: int | None = None
    participation: Said = None
    compressor: Choice = "identity"
    privacy: Gaussian | None = None

    @property
    def rule(self) -> Participation | None:
        return None if self.participation is None else resolve_participation(self.participation)

    @property
    def partial(self) -> bool:
        """Not everyone takes part in every round, or messages are compressed."""
        whole = self.rule is None or self.rule.everyone
        return not whole or self.compressor != "identity"


@dataclass(frozen=True)
class FitSettings:
    """How a formula is fitted, wherever its groups are; as ``mixed_model`` has these words."""

    method: str = "ML"
    levels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    min_count: int = MINIMUM
    engine: str = "auto"
    chains: SampledSettings = field(default_factory=SampledSettings)
    contrasts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(Annotated[str, OneOf(*METHODS)], method=self.method)
        require(Annotated[str, OneOf(*ENGINES)], engine=self.engine)
        require(Whole, min_count=self.min_count)
        require(Seed, seed=self.chains.seed)

    def engine_for(self, study: FormulaStudy) -> str:
        """Which engine ``auto`` stands for, or why this formula cannot be fitted so."""
        partial = self.chains.partial
        if self.chains.privacy is not None:
            private.check_private(study, self.engine, self.method, self.chains)
            return "sampled"
        if self.method == "REML" and not study.family.gaussian:
            raise SettingsError(f"REML is for gaussian models; a {study.family.name} model is fitted by ML")
        if self.engine == "exact" and partial:
            raise SettingsError(
                "engine='exact' cannot be used with partial participation or compression; use "
                "engine='sampled'"
            )
        chosen = self.engine if self.engine != "auto" else "sampled" if partial else "exact"
        if chosen == "sampled" and self.method == "REML":
            raise SettingsError("REML needs the exact engine: everyone in every round, uncompressed")
        if chosen == "sampled" and len(study.formula.factors) > 1:
            raise SettingsError(sampled.NESTED)
        if chosen == "sampled" and not study.family.canonical:
            raise SettingsError(sampled.other_family(study.family))
        if chosen == "exact" and self.chains.rounds is not None:
            raise SettingsError("the exact engine ends by itself; rounds are for engine='sampled'")
        return chosen


def fitted_over(members: Members, study: FormulaStudy, settings: FitSettings | None = None) -> MixedFit:
    """The fit of a formula over members who have its study, be they on this machine or at sites.

    What all have to know is agreed on first; then everyone answers questions, and nothing else leaves a
    site. Where members are at sites their groups' posteriors stay there, and the fit has what can be said
    without them.
    """
    started = time.perf_counter()
    settings = FitSettings() if settings is None else settings
    chosen = settings.engine_for(study)
    if chosen == "sampled" and members.federation is None:
        raise SettingsError(
            "chains of mixed models run where all rows are on one machine; over sites fit with "
            "engine='exact', everyone and no compressor"
        )
    groups = Groups(members, study)
    if settings.chains.privacy is not None:
        return _private(groups, settings, started)
    units, sums, design = coordinates(
        groups, agreed(groups, settings.levels, settings.min_count, settings.contrasts)
    )
    if design.dropped:
        warn_user(rank_deficient(design.dropped))
    if (apart := design.factors_of_double_bars) is not None:
        warn_user(
            f"({apart} || {design.formula.group}): the levels of a factor stay correlated with each other, "
            "as in lme4; for independent effects make a column of zeros and ones for each level"
        )
    constant, start = _level(sums, groups.study)
    if chosen == "sampled":
        outcome, engine = sampled.fitted(groups, units, constant, start, settings.chains)
    elif members.waits:
        outcome, engine = _exact(groups, units, constant, start, settings.method == "REML")
    elif settings.method == "REML":
        raise SettingsError("REML needs everyone in every round: [sites] quorum = 1.0")
    else:
        outcome, engine = scored.fitted(groups, units, constant, start, members.quorum)
    if members.federation is None:
        engine.effects(outcome.point)  # sites keep their groups' posteriors, for whoever is there
    seconds = time.perf_counter() - started
    method, seed = settings.method, settings.chains.seed
    fit = MixedFit(design, units, groups, engine, outcome, method, seed, seconds, refit=refitted)
    if members.federation is None and fit.laws.name != "none":
        _ = fit.near  # what degrees of freedom are made of, while everyone is there to be asked
    return fit


def _private(groups: Groups, settings: FitSettings, started: float) -> MixedFit:
    """The fit under differential privacy, where nothing is asked beside noised sums."""
    formula, given = groups.study.formula, frozenset(settings.levels)
    names = groups.members.asks(ColumnKinds(columns_in(formula)), {})
    wanted = Wanted.of(formula, names.named)
    scaled = (*(part.text for part in wanted.scaled), *(call.text for call in wanted.bases))
    private.check_columns(wanted.categorical, scaled, given)
    design = agreed(groups, settings.levels, 1, settings.contrasts)
    units, design = private.plain_coordinates(groups, design)
    outcome, engine = private.fitted(groups, units, settings.chains)
    seconds = time.perf_counter() - started
    return MixedFit(design, units, groups, engine, outcome, settings.method, settings.chains.seed, seconds)


def refitted(fit: MixedFit, groups: Groups) -> MixedFit:
    """The fit of the same formula to other responses, where all else is agreed on."""
    design = replace(fit.design, dropped=())
    units, sums, design = coordinates(groups, design)
    constant, start = _level(sums, groups.study)
    outcome, engine = _exact(groups, units, constant, start, fit.method == "REML")
    return MixedFit(design, units, groups, engine, outcome, fit.method, fit.seed)


def _rows(study: FormulaStudy, data: Any, sites: Any) -> Rows:
    """One table, and where its rows are: frames by site have a column for that."""
    pd = pandas()
    if isinstance(data, Mapping) and data and all(isinstance(v, pd.DataFrame) for v in data.values()):
        if sites is not None:
            raise SettingsError("frames by site say where rows are; leave sites out")
        data = pd.concat([f.assign(**{ROWS_SITE: name}) for name, f in data.items()], ignore_index=True)
        sites = ROWS_SITE
    frame, outer = as_frame(data, study.na), study.formula.factors[-1].columns
    if len(outer) == 1 and outer[0] in study.columns:
        raise SettingsError(f"the grouping factor {outer[0]!r} is a predictor or the response too")
    if SITE in study.formula.group_columns and SITE not in frame.columns:
        if not isinstance(sites, str) or sites not in frame.columns:
            raise SettingsError(
                f"(1 | {SITE}) stands for the sites that rows are at, and nothing says which these are: give "
                f"frames by site, sites='a column', or the table a column {SITE!r}"
            )
        frame = frame.assign(**{SITE: frame[sites]})
    rows = study.rows(frame, sites if isinstance(sites, str) else None)
    return replace(rows, by_site=sites) if isinstance(sites, Mapping) else rows


def _level(sums: torch.Tensor, study: FormulaStudy) -> tuple[float, float]:
    """Constants of the log-density, and the linear predictor of the mean response."""
    _, y, weight, offset, constant = sums.tolist()
    if study.family.gaussian:
        return constant, 0.0
    mean = y / weight
    if mean <= 0 or (study.family.binomial and mean >= 1):
        raise DataError(
            f"the response {study.formula.response.text} is {'all' if mean >= 1 else 'never more than'} "
            f"{'one' if mean >= 1 else 'zero'}: there is nothing to explain"
        )
    return constant, study.family.linked(mean) - offset / weight


def _exact(
    groups: Groups, units: Coordinates, constant: float, start: float, reml: bool
) -> tuple[Estimates, Engine]:
    """On everyone's sums, in every round."""
    engine: Engine
    if groups.study.family.gaussian:
        engine = GaussianEngine(groups, units, constant, reml)
        found, point = engine.search()
        likelihood = -found.value
    else:
        if len(units.widths) > 1:
            engine = LaplaceEngine(groups, units, constant, start, 1)
            found, point = engine.search()
        else:
            engine, found, point = quadrature(groups, units, constant, start)
        likelihood = constant - found.value
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


def pairs(setting: str, texts: Sequence[str]) -> dict[str, str]:
    """Of ``COLUMN=...`` on the command line.

    >>> pairs("levels", ["arm=placebo,drug"])
    {'arm': 'placebo,drug'}
    """
    for text in texts:
        if not all(text.partition("=")):
            raise SettingsError(f"--{setting} takes COLUMN=..., as arm=placebo,drug; this is {text!r}")
    return {column: rest for column, _, rest in (text.partition("=") for text in texts)}


def fit_file(
    data: Path, formula: str, family: str = "gaussian", json: Path | None = None, **settings: Any
) -> str:
    """``fedpop fit``: the summary of the fit of a CSV or Parquet file; estimates go to ``json``."""
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise SettingsError(f"cannot write {json}: it is a folder, or the folder it is to be in is not there")
    fit = mixed_model(formula, read_file(data, settings.get("na", NA)), family, **settings)
    if json is not None:
        write_json(json, fit.plain())
    return f"{fit}\n"
