"""Intervals against the curvature of the likelihood, written down as a function of the user's parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedpop as fp

Z = 1.959963984540054


def curvature(frame, reml):
    """log N(y; X b, Z Sigma Z' + s2) in (b, log sd, log sd, atanh correlation, log sigma); of REML without
    b, which is integrated out."""
    x = torch.tensor(np.stack((np.ones(len(frame)), frame.w), 1))
    y = torch.tensor(frame.y.to_numpy())
    groups = [torch.tensor(rows) for rows in frame.groupby("g").indices.values()]

    def value(at):
        b, sd, correlation, sigma = at[:-4], at[-4:-2].exp(), at[-2].tanh(), at[-1].exp()
        both = torch.stack((torch.ones(()), correlation, correlation, torch.ones(()))).reshape(2, 2)
        total, inner, cross, square = 0.0, 0.0, 0.0, 0.0
        for rows in groups:
            cov = x[rows] @ (sd * both * sd.unsqueeze(1)) @ x[rows].mT + sigma**2 * torch.eye(len(rows))
            inverse = torch.linalg.inv(cov)
            total = total - 0.5 * torch.linalg.slogdet(cov)[1]
            inner = inner + x[rows].mT @ inverse @ x[rows]
            cross = cross + x[rows].mT @ inverse @ y[rows]
            square = square + y[rows] @ inverse @ y[rows]
        if reml:
            best = torch.linalg.solve(inner, cross)
            return total - 0.5 * (square - cross @ best + torch.linalg.slogdet(inner)[1])
        return total - 0.5 * (square - 2 * b @ cross + b @ inner @ b)

    return value


@pytest.mark.parametrize("method", ["ML", "REML"])
def test_intervals_are_walds_on_scales_without_bounds(method, simulated):
    frame, reml = simulated([8] * 15, seed=2), method == "REML"
    fit = fp.mixed_model("y ~ w + (w | g)", frame, method=method)
    sds, correlation = list(fit.sd.values()), float(fit.correlation[0, 1])
    spreads = [math.log(sds[0]), math.log(sds[1]), math.atanh(correlation), math.log(fit.sigma)]
    at = torch.tensor([*([] if reml else fit.coefficients.values()), *spreads], dtype=torch.float64)
    information = -torch.autograd.functional.hessian(curvature(frame, reml), at)
    error = torch.linalg.inv(information).diagonal().sqrt()[-4:].tolist()
    found = fit.confint()
    for name, middle, se, back in zip(
        ("sd_(Intercept)|g", "sd_w|g", "cor_w.(Intercept)|g", "sigma"),
        spreads,
        error,
        (math.exp, math.exp, math.tanh, math.exp),
        strict=True,
    ):
        expected = [back(middle - Z * se), back(middle + Z * se)]
        assert found.loc[name].to_list() == pytest.approx(expected, rel=1e-5), name


def test_there_is_none_where_a_variance_is_zero(simulated):
    frame = simulated([10] * 10)
    noise = np.random.default_rng(0).normal(size=100).reshape(10, 10)
    frame["y"] = (noise - noise.mean(1, keepdims=True)).flatten()
    found = fp.mixed_model("y ~ w + (1 | g)", frame).confint()
    assert found.loc["sd_(Intercept)|g"].isna().all()
    assert found.loc[["sigma", "w"]].notna().all().all()


def test_counts_have_them_too(simulated):
    """The sd of random intercepts, by differences of the score."""
    frame = simulated([6] * 15)
    fit = fp.mixed_model("count ~ w + (1 | g)", frame, "poisson")
    engine, x = fit.engine, fit.engine.vector(fit.outcome.point)
    step = 1e-3 * abs(float(x[-1]))
    slopes = []
    for j in range(len(x)):
        move = torch.zeros_like(x)
        move[j] = step
        up, down = (engine.score_and_information(x + s * move)[0] for s in (1, -1))
        slopes.append((down - up) / (2 * step))
    se = float(torch.linalg.inv(torch.stack(slopes))[-1, -1].sqrt()) / abs(float(x[-1]))
    middle = math.log(fit.sd["(Intercept)"])
    expected = [math.exp(middle - Z * se), math.exp(middle + Z * se)]
    assert fit.confint().loc["sd_(Intercept)|g"].to_list() == pytest.approx(expected, rel=1e-4)
    assert "sigma" not in fit.confint().index
