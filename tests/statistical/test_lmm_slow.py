"""Random intercepts and slopes that are all but collinear, through vmap, against exact maximum likelihood.

With the same design for everyone the mixed model has a closed form: least-squares coefficients of groups are
independent N(mu, Sigma + s2 (X'X)^-1), and their residuals have variance s2.
"""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import FedpopWarning

pytestmark = pytest.mark.slow

X = np.stack([np.ones(4), np.linspace(8, 14, 4)], 1)
"""Far from zero: intercept and slope of a group have a correlation of -.98."""


def groups(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sd, correlation = np.array([2.3, 0.226]), np.array([[1, -0.6], [-0.6, 1]])
    z = rng.multivariate_normal([16.8, 0.66], np.outer(sd, sd) * correlation, size=27)
    return z @ X.T + 1.31 * rng.normal(size=(27, 4))


def log_likelihood(y: np.ndarray, mu: np.ndarray, sigma: np.ndarray, s2: float) -> float:
    v = X @ sigma @ X.T + s2 * np.eye(4)
    away = y - mu @ X.T
    sign, log_det = np.linalg.slogdet(2 * np.pi * v)
    assert sign > 0
    return float(-0.5 * (len(y) * log_det + np.einsum("bi,ij,bj->", away, np.linalg.inv(v), away)))


def maximum(y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    inverse = np.linalg.inv(X.T @ X)
    own = y @ X @ inverse
    s2 = float(((y - own @ X.T) ** 2).sum() / (len(y) * 2))
    return own.mean(0), np.cov(own.T, bias=True) - s2 * inverse, s2


def line(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
    return z["a"] + z["b"] * x[:, 0]


@pytest.mark.parametrize("seed", [3])
def test_correlated_random_slopes_with_a_covariate_far_from_zero(seed: int) -> None:
    y = groups(seed)
    mu, sigma, s2 = maximum(y)
    assert np.linalg.eigvalsh(sigma).min() > 0  # else the maximum is on an edge
    x = torch.tensor(X[:, 1:], dtype=torch.float32)
    clients = [(x, torch.tensor(row, dtype=torch.float32)) for row in y]
    model = fp.CustomModel(
        outputs=line, likelihood=fp.likelihoods.Normal("learned"), phi={}, z={"a": 0.0, "b": 0.0}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedpopWarning)
        population = fp.FedSOUL(model, prior=fp.priors.Normal("full")).fit(clients, rounds=300)
    prior = population.algorithm.hierarchy.prior
    found = prior.sigma(population.published["beta"]).numpy()
    noise = float(population.phi["likelihood.log_variance"].exp())
    mean = population.prior_mean.numpy()
    missing = log_likelihood(y, mu, sigma, s2) - log_likelihood(y, mean, found, noise)
    assert 0 <= missing < 0.1
    wide, exact = np.sqrt(np.diag(found)), np.sqrt(np.diag(sigma))
    assert wide == pytest.approx(exact, rel=0.1)
    assert found[0, 1] / wide.prod() == pytest.approx(sigma[0, 1] / exact.prod(), abs=0.06)
    assert population.convergence.nats == pytest.approx(missing, abs=0.05)
