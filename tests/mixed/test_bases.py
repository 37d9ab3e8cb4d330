"""``poly()`` and ``ns()``: R 4.2.2's columns (``poly``, ``splines::ns``) and lme4 1.1.31's fits with them.

``sim`` is ``simulated([6] * 15, seed=1)``, written as CSV.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.mixed.bases import KNOT_BINS, merged, natural_spline, polynomial
from fedpop.mixed.contrasts import marginal_means
from tests.mixed.conftest import need, pd

GIVEN = "ns(x, knots = c(18, 20.5), Boundary.knots = c(13, 26))"


@pytest.fixture
def sim(simulated):
    return simulated([6] * 15, seed=1)


def test_splines_are_rs(sim):
    """``ns(d$x, knots = c(18, 20.5), Boundary.knots = c(13, 26))``: rows 1 (beyond the boundary), 7 and
    66."""
    found = natural_spline(sim.x.to_numpy(), (18, 20.5), (13, 26))
    assert found[0] == pytest.approx([-0.24159782677171, 0.40018579381066, 0.84141203296105], abs=1e-13)
    assert found[6] == pytest.approx([0.10198560601781, 0.56507970107085, -0.33450626773256], abs=1e-13)
    assert found[65] == pytest.approx([-0.018190229975832, 0.044725022900350, -0.026503717274281], abs=1e-13)


def test_fits_with_splines_are_rs(sim):
    fit = fp.mixed_model(f"y ~ {GIVEN} + w + (1 | g)", sim)
    expected = [1.9201931575, 1.2499986569, 1.6084556958, 2.0221880847, 0.8838488803]
    assert list(fit.coefficients.values()) == pytest.approx(expected, abs=1e-7)
    assert list(fit.coefficients)[1] == f"{GIVEN}1"
    assert fit.log_likelihood == pytest.approx(-163.80910034, abs=1e-8)
    exact = fp.mixed_model("y ~ ns(x, df = 4, knots = 'exact') + w + (1 | g)", sim)
    basis = next(iter(exact.design.bases.values()))
    assert basis.knots == pytest.approx([18.054435197571, 20.070124531404, 21.900392795294], abs=1e-11)
    assert basis.boundary == pytest.approx([13.247437174764, 26.353516265153], abs=1e-11)
    assert exact.log_likelihood == pytest.approx(-163.770124932, abs=1e-8)


def test_knots_lie_on_the_grid_and_are_said(sim):
    """Within a bin of the quantiles, the boundary at the median of the outermost five rows; and given to
    ``knots =`` they are the same model."""
    fit = fp.mixed_model("y ~ ns(x, 4, range = c(10, 30)) + (1 | g)", sim)
    (basis,) = fit.design.bases.values()
    width, x = 20 / KNOT_BINS, np.sort(sim.x)
    for knot in (*basis.knots, *basis.boundary):
        assert (knot - 10) / width % 1 == pytest.approx(0.5, abs=1e-9)
    assert basis.boundary == pytest.approx([x[2], x[-3]], abs=width)
    for knot, share in zip(basis.knots, (0.25, 0.5, 0.75), strict=True):
        assert share - 0.06 < (x < knot).mean() < share + 0.06
    assert basis.words in str(fit)
    assert fit.plain()["knots"] == {"ns(x, 4, range = c(10, 30))": basis.words}
    again = fp.mixed_model(f"y ~ ns(x, {basis.words}) + (1 | g)", sim)
    assert again.log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_polynomials_are_rs(shift, sim):
    """``poly(d$x + 1e4, 4)``, first row, and ``predict`` of it at 10031."""
    fit = fp.mixed_model("y ~ poly(x, 4) + (1 | g)", sim.assign(x=sim.x + shift))
    (basis,) = fit.design.bases.values()
    row = [0.26829934342592, 0.43202229857225, 0.39164831264858, 0.28837297744686]
    there = [0.46026474878352, 1.40279699710750, 3.32772830095259, 9.36236599027825]
    assert basis.columns(np.array([sim.x[0] + shift]))[0] == pytest.approx(row, abs=1e-8)
    assert basis.columns(np.array([31.0 + shift]))[0] == pytest.approx(there, rel=1e-8)


def test_fits_with_polynomials_are_rs(sim):
    fit = fp.mixed_model("Reaction ~ poly(Days, 3) + (Days | Subject)", need("sleepstudy.csv"))
    expected = [298.507891667, 403.364167855, 32.855787976, -2.991059413]
    assert list(fit.coefficients.values()) == pytest.approx(expected, abs=1e-7)
    assert fit.standard_errors["poly(Days, 3)2"] == pytest.approx(25.4436976, rel=2e-6)
    assert fit.log_likelihood == pytest.approx(-875.13388791, abs=1e-8)
    fit = fp.mixed_model("y ~ poly(x, 5) + (1 | g)", sim)
    assert fit.log_likelihood == pytest.approx(-181.085511541, abs=1e-8)
    raw = fp.mixed_model("y ~ poly(x, 2, raw = TRUE) + (1 | g)", sim)
    powers = fp.mixed_model("y ~ x + I(x^2) + (1 | g)", sim)
    assert list(raw.coefficients.values()) == pytest.approx(list(powers.coefficients.values()), rel=1e-9)
    assert list(raw.coefficients)[2] == "poly(x, 2, raw = TRUE)2"
    alone = fp.mixed_model("y ~ poly(x, 1) + (1 | g)", sim)
    assert list(alone.coefficients) == ["(Intercept)", "poly(x, 1)"]


def test_tests_means_and_predictions_know_them(sim, tmp_path):
    fit = fp.mixed_model("y ~ poly(x, 2) * s + (poly(x, 1) | g)", sim, REML=True)
    table = fit.anova()
    assert table.loc["poly(x, 2)", "num_df"] == 2
    assert table.loc["poly(x, 2):s", "num_df"] == 4
    means = marginal_means(fit, "s", {}, 0.95, "none", None)
    assert means.at["x"] == pytest.approx(sim.x.mean())
    rows = sim.head(3).assign(x=[5.0, 20.0, 40.0])
    whole = fp.mixed_model("y ~ (x + I(x^2)) * s + (x | g)", sim, REML=True)
    found = fit.predict(rows, theta_uncertainty=False)["mean"]
    assert found.to_numpy() == pytest.approx(whole.predict(rows, theta_uncertainty=False)["mean"], rel=1e-5)
    fit.save(tmp_path / "fit")
    back = fp.load(tmp_path / "fit").predict(rows, "population", theta_uncertainty=False)
    pd.testing.assert_frame_equal(back, fit.predict(rows, "population", theta_uncertainty=False))


def test_sites_send_power_sums(simulated, fitted):
    assert fitted("y ~ poly(w, 3) + (1 | g)", simulated([20] * 9, seed=4)).fit.converged


@pytest.mark.parametrize("term", ["ns(x, 3)", "ns(log(x), 3, range = c(2, 4))"])
def test_sites_send_counts_of_bins(term, simulated, tmp_path):
    """Bins are merged at each site; knots are as near to those of one machine as that."""
    pytest.importorskip("flwr", reason="the Grid needs the extra 'flower'")
    from tests.flower.formulas import by_site, grid_of, over

    frame = simulated([20] * 9, seed=4)
    frames, formula = by_site(frame, "g", 3), f"y ~ {term} + (1 | g)"
    fit = over(grid_of(tmp_path, frames), formula, "gaussian")
    (over_sites,) = fit.design.bases.values()
    (apart,) = fp.mixed_model(formula, frames).design.bases.values()
    (here,) = fp.mixed_model(formula, frame).design.bases.values()
    assert over_sites.knots == pytest.approx(apart.knots, abs=1e-9)
    assert over_sites.boundary == pytest.approx(apart.boundary, abs=1e-9)
    x = np.sort(frame.x if "log" not in term else np.log(frame.x))
    ranks = np.searchsorted(x, [over_sites.knots, here.knots])
    assert np.abs(ranks[0] - ranks[1]).max() <= 10  # of 180 rows; a cell has five at each site


def test_few_rows_do_not_leave_a_site_alone():
    counts = np.zeros(50, dtype=int)
    counts[[3, 9, 10, 11, 12, 20, 21, 30, 40]] = [1, 2, 3, 9, 4, 1, 2, 7, 1]
    found = merged(counts, 5)
    assert found.sum() == counts.sum()
    assert found[found > 0].min() >= 5
    assert merged(counts, 40).sum() == 0
    assert (merged(counts, 1) == counts).all()


@pytest.mark.parametrize(
    ("term", "error", "words"),
    [
        ("poly(x)", None, ""),
        ("poly(x, 0)", SettingsError, "say how many columns"),
        ("poly(s, 2)", DataError, "categories, not numbers"),
        ("poly(x, 12)", DataError, "do not determine a polynomial of degree 12"),
        ("poly(scale(x), 2)", SettingsError, "scales by itself"),
        ("I(poly(x, 2))", SettingsError, "a term of its own"),
        ("poly(x, w, 2)", SettingsError, "takes a column or an expression, and degree, raw"),
        ("ns(x)", SettingsError, "say how many columns"),
        ("ns(x, 3, knots = c(1, 2))", SettingsError, "give df or knots"),
        ("ns(x, 3, range = c(5, 1))", SettingsError, "the smaller first"),
        ("ns(x, 3, range = c(100, 200))", DataError, "one bin of the grid"),
        ("ns(x, knots = c(18, 50), Boundary.knots = c(13, 26))", DataError, "fall together or outside"),
        ("ns(x, 30)", DataError, "fall together"),
        ("bs(x, 3)", SettingsError, "needs all rows in one place"),
    ],
)
def test_what_cannot_be_made_is_said(term, error, words, sim):
    if error is None:
        assert fp.mixed_model(f"y ~ {term} + (1 | g)", sim).converged
        return
    with pytest.raises(error, match=words):
        fp.mixed_model(f"y ~ {term} + (1 | g)", sim)


def test_power_sums_of_no_rows_are_no_polynomial():
    from fedpop.mixed.bases import BasisCall
    from fedpop.mixed.formula import FormulaPart, scanned, shown
    from fedpop.questions.schema import Moments

    tokens = scanned("poly(x, 2)")
    call = BasisCall.of(FormulaPart(shown(tokens), tokens))
    with pytest.raises(DataError, match="do not determine"):
        polynomial(call, Moments(0, 0.0, 1.0), torch.zeros(5, dtype=torch.float64))
