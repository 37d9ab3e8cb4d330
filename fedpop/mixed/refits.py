"""Other formulas on a fit's table: ``update``, ``drop1``, and tables of several fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedpop.errors import SettingsError
from fedpop.mixed.formula import scanned, shown
from fedpop.mixed.inference import chi_square_tail
from fedpop.mixed.simulated import parameters
from fedpop.mixed.table import pandas

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit


def changed(old: str, new: str) -> str:
    """A formula with dots for the sides of an older one, as R's ``update`` takes it.

    >>> changed("y ~ x + (1 | g)", ". ~ . + w - x")
    'y ~ x + (1 | g) + w - x'
    """
    if "~" not in new:
        raise SettingsError(f"a formula has one ~, as in '. ~ . + x'; this is {new!r}")
    sides = zip(new.split("~", 1), old.split("~", 1), strict=True)
    return " ~ ".join(_filled(one.strip(), of.strip()) for one, of in sides)


def _filled(new: str, old: str) -> str:
    return shown([old if token == "." else token for token in scanned(new)]) if "." in new else new


def updated(fit: MixedFit, formula: str, settings: Mapping[str, Any]) -> MixedFit:
    """The same call with another formula or other settings."""
    if fit.again is None:
        raise SettingsError(
            "this fit does not have its table on this machine: over sites a further formula is fitted by "
            "fedpop server fit DIR FORMULA"
        )
    return fit.again(changed(fit.formula, formula), **settings)


def dropped(fit: MixedFit) -> Any:
    """Likelihood ratios of the model without each term that no other contains, by maximum likelihood."""
    terms = fit.design.formula.fixed.terms
    alone = [t for t in terms if not any(set(t) < set(other) for other in terms)]
    if not alone:
        raise SettingsError("there is no term to drop")
    whole = fit if fit.method == "ML" else updated(fit, ". ~ .", {"method": "ML", "REML": False})
    rows = {"<none>": {"df": 0, "aic": whole.aic, "chisq": float("nan"), "p": float("nan")}}
    for term in alone:
        name = ":".join(part.text for part in term)
        small = updated(whole, f". ~ . - {name}", {})
        degrees, chisq = whole.df - small.df, max(2 * (whole.log_likelihood - small.log_likelihood), 0.0)
        rows[name] = {"df": degrees, "aic": small.aic, "chisq": chisq, "p": chi_square_tail(chisq, degrees)}
    return pandas().DataFrame.from_dict(rows, orient="index")


def compared_table(fits: Sequence[MixedFit] | Mapping[str, MixedFit]) -> Any:
    """Fits side by side: estimates with standard errors in brackets, spreads, and criteria."""
    named = fits if isinstance(fits, Mapping) else {f"({i + 1})": fit for i, fit in enumerate(fits)}
    columns = {}
    for name, fit in named.items():
        errors = fit.standard_errors
        cells = {n: f"{v:.4g} ({errors[n]:.3g})" for n, v in fit.coefficients.items()}
        cells |= {n: f"{v:.4g}" for n, v in parameters(fit).items() if n not in errors}
        cells |= {"log-likelihood": f"{fit.log_likelihood:.2f}", "AIC": f"{fit.aic:.1f}"}
        cells |= {"BIC": f"{fit.bic:.1f}", "rows": str(fit.n_obs), "method": fit.method}
        columns[name] = cells
    last = ["log-likelihood", "AIC", "BIC", "rows", "method"]
    index = list(dict.fromkeys(n for cells in columns.values() for n in cells if n not in last))
    table = {name: [cells.get(n, "") for n in index + last] for name, cells in columns.items()}
    return pandas().DataFrame(table, index=index + last)
