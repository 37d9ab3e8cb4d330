"""Likelihoods written down once more: dense normal densities, and sums over fine grids."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedpop as fp


def dense(fit, frame, x, z, weight=None, offset=0.0):
    """log N(y; X b, Z Sigma Z' + s2 / w), group by group."""
    b, sigma = np.array(list(fit.coefficients.values())), fit.covariance.numpy()
    w = np.ones(len(frame)) if weight is None else weight
    total = 0.0
    for rows in frame.groupby("g").indices.values():
        cov = z[rows] @ sigma @ z[rows].T + np.diag(fit.sigma**2 / w[rows])
        left = (frame.y.to_numpy() - offset - x @ b)[rows]
        total -= 0.5 * (left @ np.linalg.solve(cov, left) + np.linalg.slogdet(2 * np.pi * cov)[1])
    return total


@pytest.mark.parametrize(
    ("formula", "random"),
    [
        ("y ~ x + (1 | g)", "1"),
        ("y ~ x + (x | g)", "x"),
        ("y ~ x + (x || g)", "x"),
        ("y ~ x + (x + w | g)", "xw"),
        ("y ~ x + (0 + w | g)", "w"),
    ],
)
@pytest.mark.parametrize("sizes", [[6] * 12, [120, *[3] * 15]], ids=["even", "one large"])
def test_the_likelihood_is_the_density_and_is_stationary(formula, random, sizes, simulated, fitted):
    frame = simulated(sizes, seed=4)
    fit = fitted(formula, frame).fit
    one = np.ones(len(frame))
    x = np.stack((one, frame.x), 1)
    z = {
        "1": x[:, :1],
        "x": x,
        "xw": np.stack((one, frame.x, frame.w), 1),
        "w": frame.w.to_numpy()[:, None],
    }[random]
    best = dense(fit, frame, x, z)
    assert fit.log_likelihood == pytest.approx(best, abs=1e-8)
    assert fit.converged
    for name, se in fit.standard_errors.items():  # no neighbour is better
        for step in (-0.1, 0.1):
            moved = dict(fit.coefficients) | {name: fit.coefficients[name] + step * se}
            fit.__dict__["coefficients"], kept = moved, fit.coefficients
            assert dense(fit, frame, x, z) < best
            fit.__dict__["coefficients"] = kept
    kept = fit.covariance
    for factor in (0.98, 1.02):
        fit.__dict__["covariance"] = kept * factor
        assert dense(fit, frame, x, z) < best + 1e-9
    fit.__dict__["covariance"] = kept


def test_weights_and_offsets_of_a_normal_response(simulated, fitted):
    frame = simulated([6] * 12)
    fit = fitted("y ~ w + offset(0.3 * x) + (1 | g)", frame, weights="t").fit
    one = np.ones(len(frame))
    x = np.stack((one, frame.w), 1)
    expected = dense(fit, frame, x, x[:, :1], frame.t.to_numpy(), 0.3 * frame.x.to_numpy())
    assert fit.log_likelihood == pytest.approx(expected, abs=1e-8)


def grid(fit, frame, log_density, eta0, width=12.0, points=4001):
    """The likelihood of random intercepts by a sum over a fine grid of u."""
    u = np.linspace(-width, width, points)
    prior = -0.5 * u**2 - 0.5 * math.log(2 * math.pi) + math.log(u[1] - u[0])
    sd = fit.sd["(Intercept)"]
    total = 0.0
    for rows in frame.groupby("g").indices.values():
        joint = prior + sum(log_density(j, eta0[j] + sd * u) for j in rows)
        total += float(torch.logsumexp(torch.from_numpy(joint), 0))
    return total


def test_poisson_with_an_offset_by_a_fine_grid(simulated, fitted):
    frame = simulated([5] * 15)
    fit = fitted("count ~ w + offset(log(t)) + (1 | g)", frame, "poisson").fit
    b = list(fit.coefficients.values())
    eta = b[0] + b[1] * frame.w.to_numpy() + np.log(frame.t.to_numpy())
    y = frame["count"].to_numpy()
    expected = grid(fit, frame, lambda j, e: y[j] * e - np.exp(e) - math.lgamma(y[j] + 1), eta)
    assert fit.log_likelihood == pytest.approx(expected, abs=1e-6)
    assert fit.converged


def test_trials_are_rows_of_yes_and_no(simulated, fitted):
    """cbind(a, b) is a + b rows, but for the ways to choose them; so are weights of a share."""
    frame = simulated([4] * 10)
    frame["a"], frame["b"] = frame["count"] % 4, frame["count"] % 3 + 1
    fit = fitted("cbind(a, b) ~ w + (1 | g)", frame, "binomial").fit
    each = frame.loc[frame.index.repeat(frame.a + frame.b)].copy()
    each["hit"] = (each.groupby(level=0).cumcount() < each.a) * 1
    rows = fitted("hit ~ w + (1 | g)", each, "bernoulli").fit
    ways = sum(math.log(math.comb(a + b, a)) for a, b in zip(frame.a, frame.b, strict=True))
    assert fit.log_likelihood == pytest.approx(rows.log_likelihood + ways, abs=1e-7)
    assert fit.coefficients == pytest.approx(rows.coefficients, abs=1e-6)
    frame["share"], frame["n"] = frame.a / (frame.a + frame.b), frame.a + frame.b
    shares = fitted("share ~ w + (1 | g)", frame, "binomial", weights="n").fit
    assert shares.log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-9)


def test_weights_of_counts_are_repeated_rows(simulated, fitted):
    frame = simulated([4] * 10)
    frame["k"] = np.arange(len(frame)) % 3 + 1
    fit = fitted("count ~ w + (1 | g)", frame, "poisson", weights="k").fit
    rows = fp.mixed_model("count ~ w + (1 | g)", frame.loc[frame.index.repeat(frame.k)], "poisson")
    assert fit.log_likelihood == pytest.approx(rows.log_likelihood, abs=1e-7)


@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
def test_two_random_effects_do_not_depend_on_more_nodes(family, simulated):
    y = {"poisson": "count", "bernoulli": "yes"}[family]
    fit = fp.mixed_model(f"{y} ~ w + (w | g)", simulated([8] * 30), family)
    assert fit.converged
    finer = fit.engine.refined()
    assert finer.log_likelihood(fit.outcome.point) == pytest.approx(fit.log_likelihood, abs=1e-3)


def test_five_random_effects_are_five_integrals_where_they_do_not_meet(simulated, fitted):
    """Each row belongs to one of five kinds, whose effects are independent: the likelihood is a product of
    integrals over one effect each, by a fine grid."""
    frame = simulated([15] * 8, seed=3)
    frame["kind"] = [f"k{i % 5}" for i in range(len(frame))]
    dummies = " + ".join(f"d{j}" for j in range(5))
    for j in range(5):
        frame[f"d{j}"] = (frame.kind == f"k{j}") * 1.0
    fit = fitted(f"count ~ w + (0 + {dummies} || g)", frame, "poisson").fit
    assert "importance sampling" in str(fit)
    assert fit.converged
    b, y = list(fit.coefficients.values()), frame["count"].to_numpy()
    eta, sds = b[0] + b[1] * frame.w.to_numpy(), list(fit.sd.values())
    u = np.linspace(-10, 10, 2001)
    prior = -0.5 * u**2 - 0.5 * math.log(2 * math.pi) + math.log(u[1] - u[0])
    expected = 0.0
    for (_, kind), rows in frame.groupby(["g", "kind"]).indices.items():
        e = eta[rows][:, None] + sds[int(kind[1])] * u
        lost = np.array([math.lgamma(v + 1) for v in y[rows]]).sum()
        joint = prior + (y[rows][:, None] * e - np.exp(e)).sum(0) - lost
        expected += float(torch.logsumexp(torch.from_numpy(joint), 0))
    assert fit.log_likelihood == pytest.approx(expected, abs=0.05)


def test_chains_agree_that_it_is_an_optimum(simulated):
    """The sampled engine's verdict on the exact engine's theta: coordinates are translated rightly."""
    frame = simulated([8] * 10)
    for formula, family in (
        ("y ~ x + w + s + (w | g)", "gaussian"),
        ("y ~ x + (0 + w | g)", "gaussian"),
        ("y ~ w + (w || g)", "gaussian"),
        ("count ~ x + s + offset(log(t)) + (1 | g)", "poisson"),
    ):
        fit = fp.mixed_model(formula, frame, family)
        verdict = fit.diagnostics().theta.verdict
        assert verdict.converged, (formula, verdict.words)
        mean = fit.random_effects().loc["g3"]
        draws = fit.draws("g3")
        assert draws.mean(0) == pytest.approx(mean["mean"].to_numpy(), abs=0.3 * float(mean["sd"].max()))
        assert draws.std(0) == pytest.approx(mean["sd"].to_numpy(), rel=0.2)
