"""Families with a dispersion, and links: against R, an integral on a fine grid, and sites.

R 4.2.2 with lme4 1.1.31 (``glmer(..., family = binomial(link), nAGQ = 25)``) and glmmTMB 1.1.5
(``glmmTMB(..., family = nbinom2 | Gamma("log") | betabinomial | binomial(link))``, which is Laplace's
approximation by observed curvatures). ``sim`` is ``simulated([6] * 15, seed=1)``, written as CSV.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import fedpop as fp
from fedpop.errors import EstimateError, SettingsError
from fedpop.mixed.families import (
    LOG_DISPERSION,
    DispersedLikelihood,
    Family,
    Gamma,
    NegativeBinomial,
    family_named,
)
from fedpop.mixed.laplace import LaplaceEngine
from tests.mixed.conftest import need, pd

DISPERSED = ["negative-binomial", "gamma", "beta-binomial"]
OTHERS = ["binomial(probit)", "binomial(cloglog)", *DISPERSED]
COUNTS = "count ~ w + s + offset(log(t)) + (1 | g)"
CBPP = "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)"


@pytest.fixture
def sim(simulated):
    frame = simulated([6] * 15, seed=1)
    return frame.assign(h=[f"h{int(name[1:]) // 3}" for name in frame.g])


def rows_for(family: Family) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(3)
    eta = torch.tensor(rng.normal(size=(40, 3)) * 2)
    weight = torch.tensor(rng.integers(1, 9, (40, 1)).astype(float))
    y = torch.tensor(rng.poisson(3.0, (40, 1)).astype(float))
    if family.binomial:
        y = torch.tensor(rng.integers(0, weight.numpy() + 1).astype(float)) / weight
    return eta, y + 0.3 if family.name == "gamma" else y, weight


@pytest.mark.parametrize("name", OTHERS)
def test_derivatives_are_those_of_the_density(name):
    family = family_named(name)
    eta, y, weight = rows_for(family)
    psi = torch.full((40, 3), 0.7, dtype=torch.float64).requires_grad_()
    at = eta.clone().requires_grad_()
    here = family if not family.dispersed else Family(**{**vars(family), "params": {"log_dispersion": psi}})
    value, slope, bend = here.terms(at, y, weight)
    (first,) = torch.autograd.grad(value.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), at, retain_graph=True)
    assert torch.allclose(slope, first, rtol=1e-9, atol=1e-9)
    assert torch.allclose(bend, -second, rtol=1e-7, atol=1e-8)
    if family.dispersed:
        (by_psi,) = torch.autograd.grad(value.sum(), psi, create_graph=True)
        (across,) = torch.autograd.grad(by_psi.sum(), at, retain_graph=True)
        (twice,) = torch.autograd.grad(by_psi.sum(), psi)
        for found, expected in zip(
            here.dispersion_terms(at, y, weight), (by_psi, across, twice), strict=True
        ):
            assert torch.allclose(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", OTHERS)
def test_densities_have_their_means_and_variances(name):
    family, eta = family_named(name).at(2.5), torch.tensor([[0.4]], dtype=torch.float64)
    trials = torch.full((1, 1), 6.0 if family.binomial else 1.0, dtype=torch.float64)
    if family.binomial:
        y = torch.arange(7.0, dtype=torch.float64)
        ways = torch.tensor([math.log(math.comb(6, k)) for k in range(7)], dtype=torch.float64)
        values = y / 6
    else:
        values = torch.arange(0.0, 400.0, 1.0 if family.name == "negative-binomial" else 5e-3).double()
        values = values + (0.0025 if family.name == "gamma" else 0)
        ways = torch.full_like(values, math.log(float(values[1] - values[0])))
    each = family.terms(eta.expand(len(values), 1), values.unsqueeze(1), trials)[0].squeeze(1)
    share = (each + ways).exp()
    mean = float((share * values).sum())
    assert float(share.sum()) == pytest.approx(1, abs=1e-5)
    assert mean == pytest.approx(float(family.mean(eta)), abs=1e-5)
    variance = float((share * values.square()).sum()) - mean**2
    expected = family.variance(np.array([mean]), trials.numpy().ravel())[0] / float(trials)
    assert variance == pytest.approx(expected / (2.5 if family.name == "gamma" else 1), rel=1e-4)


@pytest.mark.parametrize(
    ("data", "family", "formula", "fixed", "errors", "sd"),
    [
        (
            "cbpp",
            "probit",
            CBPP,
            [-0.83201444, -0.52627901, -0.61478116, -0.79753173],
            0.12617438,
            0.33964814,
        ),
        (
            "cbpp",
            "cloglog",
            CBPP,
            [-1.53282219, -0.91209514, -1.03015323, -1.47837335],
            0.21155199,
            0.59030604,
        ),
        ("sim", "probit", "yes ~ w + (1 | g)", [0.22367304, 0.30533349], 0.22407242, 0.65385978),
        ("sim", "cloglog", "yes ~ w + (1 | g)", [-0.18835990, 0.32601468], 0.24617322, 0.72041764),
    ],
)
def test_links_are_glmers(data, family, formula, fixed, errors, sd, sim):
    frame = sim if data == "sim" else pd.read_csv(need("cbpp.csv"))
    fit = fp.mixed_model(formula, frame, f"binomial({family})", min_count=1)
    assert list(fit.coefficients.values()) == pytest.approx(fixed, abs=1e-4 * errors)
    assert fit.standard_errors["(Intercept)"] == pytest.approx(errors, rel=1e-4)
    assert fit.sd["(Intercept)"] == pytest.approx(sd, rel=1e-5)
    assert f" Family: binomial ( {family} )" in str(fit)


GLMMTMB = [
    (
        COUNTS,
        "nbinom2",
        [0.19076752, 0.61586109, 0.54059514, 0.18660370],
        [0.76952078],
        11.64523921,
        -216.1320105,
    ),
    (
        "count ~ w + offset(log(t)) + (w | g)",
        "nbinom2",
        [0.42286601, 0.53764106],
        [0.74305478, 0.22807842],
        10.84065452,
        -220.1118042,
    ),
    (
        "count ~ w + offset(log(t)) + (1 | h/g)",
        "nbinom2",
        [0.43047579, 0.62485556],
        [0.75147890, 0.18102967],
        6.43979526,
        -221.9011425,
    ),
    (
        "Reaction ~ Days + (1 | Subject)",
        "Gamma(log)",
        [5.53394471, 0.03384509],
        [0.12458658],
        0.09664165**-2,
        -883.5783367,
    ),
    (
        "Reaction ~ Days + (Days | Subject)",
        "Gamma(log)",
        [5.53251792, 0.03384996],
        [0.10085787, 0.01750840],
        0.08085279**-2,
        -866.0183431,
    ),
    (
        CBPP,
        "betabinomial",
        [-1.31877316, -0.96888532, -1.25092925, -1.47252066],
        [0.0],
        10.84265881,
        -88.0416468,
    ),
    (
        "yes ~ w + (1 | h/g)",
        "binomial(probit)",
        [0.22334555, 0.30512666],
        [0.64575415, 0.0],
        None,
        -56.5517601,
    ),
    (
        "yes ~ w + (1 | h/g)",
        "binomial(cloglog)",
        [-0.18786211, 0.32381812],
        [0.70095494, 0.0],
        None,
        -56.6789716,
    ),
]


@pytest.mark.parametrize(("formula", "family", "fixed", "sds", "dispersion", "likelihood"), GLMMTMB)
def test_laplace_is_glmmtmbs(formula, family, fixed, sds, dispersion, likelihood, sim):
    frame = {"R": need("sleepstudy.csv"), "c": sim, "y": sim}[formula[0]]
    frame = need("cbpp.csv") if formula == CBPP else frame
    fit = fp.mixed_model(formula, frame, family, min_count=1)
    engine, value = fit.engine, fit.log_likelihood
    point, units = fit.outcome.point, fit.units
    if not isinstance(engine, LaplaceEngine):
        engine = LaplaceEngine(fit.groups, units, engine.constant, engine.start, 1)
        found, point = engine.search(engine.vector(point))
        assert found.converged
        value = engine.constant - found.value
    # glmmTMB's own search ends within these of where the last digits are.
    assert units.fixed(point.b).tolist() == pytest.approx(fixed, abs=2e-5)
    assert point.sigma_matrix(units).diagonal().sqrt().tolist() == pytest.approx(sds, abs=2e-5)
    assert value == pytest.approx(likelihood, abs=2e-6)
    if dispersion is not None:
        assert point.dispersion == pytest.approx(dispersion, rel=2e-4)


def on_a_grid(frame, eta, sd, density):
    """The log-likelihood of random intercepts, by the trapezoid rule."""
    u = np.linspace(-9, 9, 3001)
    total = 0.0
    for rows in frame.groupby("g").indices.values():
        joint = density(rows, eta[rows, None] + sd * u).sum(0) + stats.norm.logpdf(u)
        total += math.log(np.exp(joint - joint.max()).sum() * (u[1] - u[0])) + joint.max()
    return total


@pytest.mark.parametrize("name", DISPERSED)
def test_likelihoods_are_those_of_an_integral_on_a_fine_grid(name, sim):
    """At the estimate, and less beside it in every direction."""
    rng = np.random.default_rng(5)
    noise = rng.gamma(2.0, 0.5, len(sim))
    frame = sim.assign(cost=np.exp(0.4 * sim.w) * noise * sim.t, hits=rng.binomial(8, noise / (1 + noise)))
    formula = {
        "negative-binomial": "count ~ w",
        "gamma": "cost ~ w",
        "beta-binomial": "cbind(hits, 8 - hits) ~ w",
    }
    fit = fp.mixed_model(f"{formula[name]} + (1 | g)", frame, name, min_count=1)
    x, mu, p = frame.w.to_numpy(), np.exp, stats.logistic.cdf

    def likelihood(b, sd, k):
        def density(rows, eta):
            if name == "gamma":
                return stats.gamma.logpdf(frame.cost.to_numpy()[rows, None], k, scale=mu(eta) / k)
            if name == "beta-binomial":
                hits = frame.hits.to_numpy()[rows, None]
                return stats.betabinom.logpmf(hits, 8, p(eta) * k, p(-eta) * k)
            return stats.nbinom.logpmf(frame["count"].to_numpy()[rows, None], k, k / (k + mu(eta)))

        return on_a_grid(frame, b[0] + b[1] * x, sd, density)

    b, sd, k = np.array(list(fit.coefficients.values())), fit.sd["(Intercept)"], fit.dispersion
    best = likelihood(b, sd, k)
    assert best == pytest.approx(fit.log_likelihood, abs=1e-3)  # what more nodes may change
    for move in ([0.02, 0], [-0.02, 0], [0, 0.02], [0, -0.02]):
        assert likelihood(b + move, sd, k) < best
    assert max(likelihood(b, sd * f, k) for f in (0.97, 1.03)) < best
    assert max(likelihood(b, sd, k * f) for f in (0.97, 1.03)) < best


@pytest.mark.parametrize("family", ["negative-binomial", "binomial(probit)", "gamma", "beta-binomial"])
def test_sites_answer_with_sums_of_these_too(family, sim, fitted):
    formula = {
        "negative-binomial": COUNTS,
        "binomial(probit)": "yes ~ w + (1 | g)",
        "gamma": "t ~ w + (1 | g)",
        "beta-binomial": "cbind(count, 40 - count) ~ w + (1 | g)",
    }
    sim["count"] = sim["count"].clip(upper=40)
    placed = fitted(formula[family], sim, family)
    assert placed.fit.converged
    assert len(placed.effects()) == 15


def test_rows_and_draws_of_counts(sim):
    """Pearson's residuals by glmmTMB; moments of draws; and the mean of a new group, which has a closed
    form."""
    fit = fp.mixed_model(COUNTS, sim, "negative-binomial")
    assert fit.residuals("pearson").head(3).tolist() == pytest.approx(
        [0.149207425, -0.937399163, -0.367172087], abs=2e-3
    )  # at modes by Laplace's estimate; ours is exact
    again = fit.family_here.deviance(np.array([0.0, 4.0]), np.array([2.0, 4.0]))
    k = fit.dispersion
    assert again == pytest.approx([2 * k * math.log(1 + 2 / k), 0.0])
    drawn = fit.simulate(300, seed=2).to_numpy()
    row = sim.head(1)
    new = fit.predict(row, "new", theta_uncertainty=False)
    eta = math.log(fit.predict(row, "population", theta_uncertainty=False)["mean"].iloc[0])
    mean = math.exp(eta + fit.sd["(Intercept)"] ** 2 / 2)
    assert new["mean"].iloc[0] == pytest.approx(mean, rel=1e-6)
    assert drawn[0].mean() == pytest.approx(mean, rel=0.15)
    low, high = np.quantile(drawn[0], [0.05, 0.95])
    assert new[["lower", "upper"]].iloc[0].tolist() == pytest.approx([low, high], rel=0.35, abs=1.5)
    assert {"sd_(Intercept)|g", "dispersion"} <= set(fit.confint().index)
    assert fit.df == 6
    assert "Size: " in str(fit)


def test_gammas_predict_and_repeat(sim, tmp_path):
    fit = fp.mixed_model("t ~ w + (1 | g)", sim, "gamma")
    assert fit.residuals("deviance").notna().all()
    found = fit.predict(sim, theta_uncertainty=False, level=0.8)
    inside = (sim.t > found.lower) & (sim.t < found.upper)
    assert 0.65 < inside.mean() < 0.95
    fit.save(tmp_path / "fit")
    back = fp.load(tmp_path / "fit")
    assert back.dispersion == fit.dispersion
    rows = sim.head(4)
    pd.testing.assert_frame_equal(back.predict(rows, "new"), fit.predict(rows, "new"))
    assert fit.bootstrap(2, seed=1).table["dispersion"].gt(0).all()


def test_more_variance_than_poissons_is_tested_at_its_edge(sim):
    small, large = (fp.mixed_model("count ~ w + (1 | g)", sim, f) for f in ("poisson", "nbinom2"))
    found = large.likelihood_ratio(small)
    assert found.degrees == 1
    assert found.statistic == pytest.approx(2 * (large.log_likelihood - small.log_likelihood))
    assert found.p_value == pytest.approx(found.p_chi_square / 2)
    with pytest.raises(SettingsError, match="one family"):
        large.likelihood_ratio(fp.mixed_model("count ~ w + (1 | g)", sim.assign(count=sim.t), "gamma"))


def test_no_dispersion_is_one_clear_error(sim):
    even = sim.assign(count=np.tile([3, 4, 3, 4, 3, 4], 15))
    with pytest.raises(EstimateError, match="fit it with family='poisson'"):
        fp.mixed_model("count ~ w + (1 | g)", even, "negative-binomial")
    with pytest.raises(EstimateError, match=r"do not determine the precision.*rows of one trial"):
        fp.mixed_model("yes ~ w + (1 | g)", sim, "beta-binomial")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("Gamma(inverse)", "the link of a gamma model is one of log, not 'inverse'"),
        ("binomial(cauchit)", "is one of logit, probit, cloglog"),
        ("tweedie", "family is one of gaussian, bernoulli, binomial, poisson, negative-binomial"),
    ],
)
def test_families_that_there_are_not(family, words, sim):
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        fp.mixed_model("count ~ w + (1 | g)", sim, family)


def test_responses_and_engines_that_do_not_fit(sim):
    with pytest.raises(fp.errors.DataError, match="must be positive"):
        fp.mixed_model("y ~ w + (1 | g)", sim.assign(y=-1.0), "gamma")
    with pytest.raises(SettingsError, match="canonical links, and this is binomial\\(probit\\)"):
        fp.mixed_model("yes ~ w + (1 | g)", sim, "binomial(probit)", participation=0.5)
    with pytest.raises(SettingsError, match="canonical links"):
        fp.mixed_model("yes ~ w + (1 | g)", sim, "binomial(probit)").draws("g1")
    assert issubclass(type(family_named("gamma").likelihood), DispersedLikelihood)


@pytest.mark.parametrize("log_k", range(-7, 12, 3))
def test_quantiles_lie_where_they_are_searched(log_k):
    """What the bracket leaves out is nothing in double precision, whatever the law."""
    k, params = math.exp(log_k), {LOG_DISPERSION: torch.tensor(float(log_k), dtype=torch.float64)}
    for eta in range(-7, 8, 2):
        at, mu = torch.tensor([[float(eta)]], dtype=torch.float64), math.exp(eta)
        high = [float(law.bracket(at, params)[1]) for law in (Gamma(), NegativeBinomial())]
        assert stats.gamma.sf(high[0], k, scale=mu / k) < 1e-16
        assert stats.nbinom.sf(high[1], k, k / (k + mu)) < 1e-16
