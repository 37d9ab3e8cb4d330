"""Profile intervals, beside R 4.2.2's ``confint(lmer(..., REML = FALSE), oldNames = FALSE)`` with lme4 1.1.31
(which interpolates: four digits), and beside a profile that is written down here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar

import fedpop as fp
from fedpop.errors import SettingsError
from tests.mixed.conftest import need, pd

DYESTUFF = [
    *(1545, 1440, 1440, 1520, 1580, 1540, 1555, 1490, 1560, 1495, 1595, 1550, 1605, 1510, 1560),
    *(1445, 1440, 1595, 1465, 1545, 1595, 1630, 1515, 1635, 1625, 1520, 1455, 1450, 1480, 1445),
]
DYESTUFF2 = [7.298, 3.846, 2.434, 9.566, 7.99, 5.22, 6.556, 0.608, 11.788, -0.892, 0.11, 10.386, 13.434, 5.51,
             8.166, 2.212, 4.852, 7.092, 9.288, 4.98, 0.282, 9.014, 4.458, 9.446, 7.198, 1.722, 4.782, 8.106,
             0.758, 3.758]  # fmt: skip


def batches(values):
    return pd.DataFrame({"Yield": values, "Batch": [b for b in "ABCDEF" for _ in range(5)]})


def profiled(fit, level=0.95):
    return fit.confint(level, method="profile")


def test_variances_and_a_correlation_are_lme4s():
    fit = fp.mixed_model("Reaction ~ Days + (Days | Subject)", need("sleepstudy.csv"))
    expected = {
        "sd_(Intercept)|Subject": [14.38148, 37.71602],
        "cor_Days.(Intercept)|Subject": [-0.48150, 0.68499],
        "sd_Days|Subject": [3.80116, 8.75339],
        "sigma": [22.89827, 28.85800],
        "(Intercept)": [237.68070, 265.12951],
        "Days": [7.35865, 13.57592],
    }
    found = profiled(fit)
    assert list(found.index) == list(expected)
    for name, ends in expected.items():
        assert found.loc[name].tolist() == pytest.approx(ends, rel=1e-4), name


def test_a_binomial_has_them_too():
    """``glmer(..., nAGQ = 25)``."""
    formula = "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)"
    found = profiled(fp.mixed_model(formula, need("cbpp.csv"), "binomial", min_count=1))
    assert found.loc["sd_(Intercept)|herd"].tolist() == pytest.approx([0.34880174, 1.11129747], rel=1e-4)
    assert found.loc["factor(period)4"].tolist() == pytest.approx([-2.50019192, -0.79959202], rel=1e-4)


def test_one_way_layouts_are_lme4s():
    found = profiled(fp.mixed_model("Yield ~ 1 + (1 | Batch)", batches(DYESTUFF)))
    assert found.loc["sd_(Intercept)|Batch"].tolist() == pytest.approx([12.198535, 84.063047], rel=3e-4)
    assert found.loc["sigma"].tolist() == pytest.approx([38.229985, 67.657696], rel=1e-4)


def test_a_variance_of_zero_has_an_upper_end_and_may_rise_on_the_way():
    """Away from its estimate the mean of Dyestuff2 calls for a variance of batches that is zero at the
    estimate."""
    y = np.array(DYESTUFF2).reshape(6, 5)
    means, within, n = y.mean(1), ((y - y.mean(1, keepdims=True)) ** 2).sum(), 30

    def deviance(b, ratio):
        lam = 1 + 5 * ratio
        return n * math.log((within + 5 * ((means - b) ** 2).sum() / lam) / n) + 6 * math.log(lam)

    def least(b):
        found = minimize_scalar(lambda r: deviance(b, r), bounds=(0, 1), method="bounded")
        return min(found.fun, deviance(b, 0))

    def far(b):
        return least(b) - least(y.mean()) - 1.959963984540054**2

    found = profiled(fp.mixed_model("Yield ~ 1 + (1 | Batch)", batches(DYESTUFF2)))
    ends = [brentq(far, 3, y.mean()), brentq(far, y.mean(), 9)]
    assert found.loc["(Intercept)"].tolist() == pytest.approx(ends, abs=1e-4)
    assert found.loc["sd_(Intercept)|Batch"].tolist() == pytest.approx([0, 2.0840435], rel=1e-4)


def test_the_dispersion_of_counts(simulated):
    fit = fp.mixed_model("count ~ w + (1 | g)", simulated([6] * 12, seed=1), "negative-binomial")
    low, high = profiled(fit, 0.8).loc["dispersion"]
    assert low < fit.dispersion < high
    wald = fit.confint(0.8).loc["dispersion"]
    assert [low, high] == pytest.approx(wald.tolist(), rel=0.35)


def test_what_has_none_is_said(simulated):
    frame = simulated([5] * 8)
    with pytest.raises(SettingsError, match="this fit is by REML"):
        profiled(fp.mixed_model("y ~ w + (1 | g)", frame, REML=True))
    with pytest.raises(SettingsError, match="method is one of wald, profile"):
        fp.mixed_model("y ~ w + (1 | g)", frame).confint(method="boot")


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_residuals_are_drawn(family, simulated, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra 'report'")
    frame = simulated([5] * 8)
    fit = fp.mixed_model(f"{'y' if family == 'gaussian' else 'count'} ~ w + (1 | g)", frame, family)
    beside, ranked = fit.plot("residuals").axes
    assert sorted(beside.lines[0].get_ydata()) == pytest.approx(sorted(fit.residuals("pearson")))
    assert list(ranked.lines[0].get_ydata()) == pytest.approx(sorted(fit.residuals("pearson")))
