"""Fitted values and residuals, where the rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpop.errors import SettingsError
from fedpop.mixed.nesting import RowOrder, Tree, spans
from fedpop.mixed.table import pandas

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

RESIDUALS = ("response", "pearson", "deviance")


def fitted_values(fit: MixedFit) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means at the modes of groups' effects, as R has them, y, weights, and rows' places; in the order of the
    rows."""
    rows, federation = fit.rows, fit.groups.federation
    everyone = federation.cohort(torch.arange(len(federation)), torch.device("cpu"))
    x, tree = everyone.x, Tree.of(everyone)
    assert isinstance(x, dict)
    b = torch.tensor(list(fit.coefficients.values()), dtype=torch.float64)
    offset, weight, _ = x["beside"].unbind(1)
    eta = fit.units.x(x["fixed"]) @ b + offset
    for level, span in enumerate(spans(fit.units.widths)):
        modes = fit.modes[fit.factors[level]]
        eta = eta + (x["random"][:, span] * modes[tree.at[level]]).sum(1)
    mean = eta if fit.family.gaussian else fit.family.mean(eta)
    back = np.argsort(RowOrder.of(rows).rows)
    return mean.numpy()[back], everyone.y.numpy()[back], weight.numpy()[back], rows.numbers


def fitted(fit: MixedFit) -> Any:
    mean, _, _, places = fitted_values(fit)
    return pandas().Series(mean, index=places, name="fitted")


def residuals(fit: MixedFit, kind: str | None) -> Any:
    """By R's kinds."""
    usual = {"gaussian": "response", "beta-binomial": "pearson"}.get(fit.family.name, "deviance")
    kind = usual if kind is None else kind
    if kind not in RESIDUALS:
        raise SettingsError(f"kind is one of {', '.join(RESIDUALS)}, not {kind!r}")
    mean, y, weight, places = fitted_values(fit)
    left = y - mean
    if kind == "pearson":
        left = left * np.sqrt(weight / fit.family_here.variance(mean, weight))
    elif kind == "deviance":
        left = np.sign(left) * np.sqrt(np.maximum(weight * fit.family_here.deviance(y, mean), 0.0))
    return pandas().Series(left, index=places, name=kind)
