"""lme4's numbers: every entry of the reference within a small part of what it is known to."""

from __future__ import annotations

import numpy as np
import pytest

import fedpop as fp

SLEEP = "Reaction ~ Days + (Days | Subject)"
GAUSSIAN = [
    ("sleepstudy", "random_slope", SLEEP),
    ("radon", "random_intercept", "log_radon ~ floor + (1 | county)"),
]


def listed(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(("name", "model", "formula"), GAUSSIAN)
def test_gaussian_models_agree_with_lme4(name, model, formula, table, reference, fitted):
    """Tolerances of a tenth of a standard error and less would be enough; these are what the reference's own
    tightened tolerances leave."""
    placed, truth = fitted(formula, table(name)), reference(name, model)
    fit = placed.fit
    assert fit.converged
    assert not fit.singular
    for term, value in truth["fixed"].items():
        se = truth["fixed_se"][term]
        assert abs(fit.coefficients[term] - value) < 1e-4 * se
        assert fit.standard_errors[term] == pytest.approx(se, rel=1e-4)
    assert fit.vcov.numpy() == pytest.approx(np.array(truth["fixed_vcov"]["matrix"]), rel=1e-3)
    random = truth["random"][fit.group]
    assert fit.sd == pytest.approx(random["sd"], rel=1e-4)
    if len(fit.sd) > 1:
        assert float(fit.correlation[0, 1]) == pytest.approx(random["cor"]["matrix"][0][1], abs=1e-4)
    assert fit.sigma == pytest.approx(truth["sigma"], rel=1e-5)
    assert fit.log_likelihood == pytest.approx(truth["logLik"], abs=1e-5)
    assert fit.df == truth["df"]
    modes = truth["conditional_modes"][fit.group]
    found = placed.effects()
    for level, values in zip(modes["levels"], modes["mode"], strict=True):
        for effect, value in zip(listed(modes["names"]), listed(values), strict=True):
            row = found.loc[(level, effect)]
            assert abs(row["mean"] - value) < 1e-3 * row["sd"]


def test_binomial_agrees_with_adaptive_quadrature(table, reference, fitted):
    formula = "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)"
    fit, truth = fitted(formula, table("cbpp"), "binomial", min_count=1).fit, reference("cbpp", "agq25")
    assert fit.converged
    for term, value in truth["fixed"].items():
        name = term.replace("period", "factor(period)")
        assert abs(fit.coefficients[name] - value) < 1e-3 * truth["fixed_se"][term]
        assert fit.standard_errors[name] == pytest.approx(truth["fixed_se"][term], rel=1e-3)
    assert fit.sd == pytest.approx(truth["random"]["herd"]["sd"], rel=1e-4)
    assert fit.log_likelihood == pytest.approx(truth["logLik_exact"], abs=1e-5)
    assert fit.sigma is None


@pytest.mark.parametrize("change", [lambda d: d, lambda d: d - 4.5, lambda d: 24 * d, lambda d: d + 1e5])
def test_other_coordinates_are_the_same_model(change, table):
    frame = table("sleepstudy")
    frame["Days"] = change(frame["Days"])
    fit = fp.mixed_model(SLEEP, frame)
    assert fit.log_likelihood == pytest.approx(-875.969672, abs=1e-5)


def test_centring_is_another_model_where_effects_are_independent(table):
    """(Days || Subject) of centred days has another likelihood: nothing may be centred on the way."""
    frame = table("sleepstudy")
    raw = fp.mixed_model("Reaction ~ Days + (Days || Subject)", frame)
    frame["Days"] = frame["Days"] - 4.5
    centred = fp.mixed_model("Reaction ~ Days + (Days || Subject)", frame)
    assert raw.log_likelihood == pytest.approx(-876.001628, abs=1e-4)
    assert centred.log_likelihood < raw.log_likelihood - 1


def test_reml_is_lmers_default(table, fitted):
    fit = fitted(SLEEP, table("sleepstudy"), method="REML").fit
    assert list(fit.sd.values()) == pytest.approx([24.74, 5.92], abs=0.005)
    assert fit.sigma == pytest.approx(25.59, abs=0.005)
    assert list(fit.standard_errors.values()) == pytest.approx([6.825, 1.546], abs=0.0005)
    assert -2 * fit.log_likelihood == pytest.approx(1743.63, abs=0.005)
    assert "REML criterion at convergence: 1743.6" in str(fit)


def test_the_summary_is_lme4s(table, fitted):
    text = str(fitted(SLEEP, table("sleepstudy")).fit)
    for line in (
        "Linear mixed model fit by maximum likelihood",
        " Subject  (Intercept)  565.515   23.781",
        " Residual              654.941   25.592",
        "Number of obs: 180, groups:  Subject, 18",
        "Days          10.467      1.502   6.968",
    ):
        assert line in text
    assert "1763.9 1783.1 -876.0    1751.9      174" in text


def test_the_likelihood_does_not_depend_on_who_holds_which_groups(table):
    frame = table("radon")
    frame["clinic"] = frame["county"] % 4
    alone = fp.mixed_model("log_radon ~ floor + (1 | county)", frame)
    together = fp.mixed_model("log_radon ~ floor + (1 | county)", frame, sites="clinic")
    assert together.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-9)
    assert together.coefficients == pytest.approx(alone.coefficients, rel=1e-8)
    assert together.groups.bytes_up < alone.groups.bytes_up / 10
    frames = dict(list(frame.groupby("clinic")))
    by_site = fp.mixed_model("log_radon ~ floor + (1 | county)", frames)
    assert by_site.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-9)
