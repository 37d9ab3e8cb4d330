"""What is said of rows, and drawn for them: by R 4.2.2 with lme4 1.1.31, and by the model itself."""

from __future__ import annotations

import numpy as np
import pytest

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.mixed.model import fitted_over
from tests.mixed.conftest import need, pd


def test_residuals_are_rs(table):
    """``residuals`` of ``lmer(Reaction ~ Days + (Days | Subject))``, of Pastes and of cbpp by
    ``glmer(nAGQ = 25)``, deviance and Pearson."""
    fit = fp.mixed_model("Reaction ~ Days + (Days | Subject)", table("sleepstudy"), REML=True)
    assert fit.residuals().head(3).tolist() == pytest.approx([-4.103656, -14.625218, -42.195579], abs=2e-5)
    assert (fit.fitted() + fit.residuals()).to_numpy() == pytest.approx(table("sleepstudy").Reaction)
    nested = fp.mixed_model("strength ~ 1 + (1 | batch/cask)", need("nested/pastes.csv"), REML=True)
    assert nested.residuals().head(3).tolist() == pytest.approx(
        [0.17133536, -0.02866464, -1.08662877], abs=1e-6
    )
    formula = "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)"
    fit = fp.mixed_model(formula, table("cbpp"), "binomial", min_count=1)
    assert fit.residuals().head(3).tolist() == pytest.approx([-1.44175027, 0.98449387, 2.35313937], abs=2e-5)
    pearson = fit.residuals("pearson").head(3).tolist()
    assert pearson == pytest.approx([-1.3432591, 1.0699754, 2.8730454], abs=5e-5)
    with pytest.raises(SettingsError, match="kind is one of"):
        fit.residuals("working")


def test_residuals_have_the_places_of_their_rows(simulated):
    frame = simulated([5] * 8).sample(frac=1, random_state=1, ignore_index=True)
    frame.loc[3, "w"] = np.nan
    fit = fp.mixed_model("y ~ w + (1 | g)", frame)
    assert 3 not in fit.residuals().index
    again = fit.predict(frame.dropna(), theta_uncertainty=False)["mean"]
    assert fit.fitted()[again.index].to_numpy() == pytest.approx(again.to_numpy())


def test_draws_have_the_models_moments(simulated):
    """Means, variances within and covariances between rows of a group, over many draws."""
    frame = simulated([3] * 40)
    fit = fp.mixed_model("y ~ w + (1 | g)", frame)
    drawn = fit.simulate(400, seed=1).to_numpy()
    mean = fit.coefficients["(Intercept)"] + fit.coefficients["w"] * frame.w.to_numpy()
    left = (drawn - mean[:, None]).reshape(40, 3, 400)
    variance = float(fit.covariance[0, 0])
    assert (left**2).mean() == pytest.approx(variance + fit.sigma**2, rel=0.05)
    assert (left[:, 0] * left[:, 1]).mean() == pytest.approx(variance, rel=0.08)
    assert np.array_equal(drawn, fit.simulate(400, seed=1).to_numpy())
    counts = fp.mixed_model("count ~ w + (1 | g)", frame, "poisson").simulate(50, seed=2).to_numpy()
    assert (counts >= 0).all()
    assert (counts == counts.round()).all()
    assert counts.mean() == pytest.approx(frame["count"].mean(), rel=0.3)


def test_a_group_draws_the_same_wherever_it_is(simulated):
    frame = simulated([4] * 6)
    fit = fp.mixed_model("y ~ w + (1 | g)", frame)
    study = fit.groups.study
    from dataclasses import replace

    from fedpop.mixed.simulated import drawing

    drawn = replace(study, drawing=drawing(fit, 3, 0))
    whole = drawn.response_of(fit.rows).y
    part = drawn.response_of(drawn.rows(frame[frame.g == "g4"])).y
    assert np.array_equal(whole[(frame.g == "g4").to_numpy()], part)
    again = type(study).from_description(*drawn.description())
    assert np.array_equal(again.response_of(fit.rows).y, whole)


def test_the_bootstrap_refits_its_draws(simulated):
    """A replicate is the fit of the column that ``simulate`` draws."""
    frame = simulated([5] * 8)
    fit = fp.mixed_model("y ~ w + (1 | g)", frame, REML=True)
    found = fit.bootstrap(3, seed=4)
    drawn = fit.simulate(3, seed=4)
    for k in range(3):
        other = fp.mixed_model("y ~ w + (1 | g)", frame.assign(y=drawn[f"sim_{k + 1}"]), REML=True)
        assert found.table["w"][k] == pytest.approx(other.coefficients["w"], rel=1e-6)
        assert found.table["sigma"][k] == pytest.approx(other.sigma, rel=1e-6)
    assert list(found.confint().index) == ["sd_(Intercept)|g", "sigma", "(Intercept)", "w"]
    assert "3 parametric replicates" in str(found)
    assert fit.random_effects().shape == (8, 4)  # the fit is as it was


def test_sites_draw_their_own_rows(simulated, tmp_path):
    """Over the Grid replicates are those of one machine; then the sites have the fit's responses again."""
    pytest.importorskip("flwr", reason="the Grid needs the extra 'flower'")
    from fedpop.mixed.study import FormulaStudy
    from tests.flower.formulas import by_site, grid_of, members_on

    frame = simulated([5] * 9)
    study = FormulaStudy.from_text("y ~ w + (1 | g)")
    fit = fitted_over(members_on(grid_of(tmp_path, by_site(frame, "g", 3)), study), study)
    here = fp.mixed_model("y ~ w + (1 | g)", frame)
    found, expected = fit.bootstrap(2, seed=1).table, here.bootstrap(2, seed=1).table
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)
    assert fit.engine.log_likelihood(fit.outcome.point) == pytest.approx(here.log_likelihood, abs=1e-8)
