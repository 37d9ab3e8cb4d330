"""Rows by their sufficient statistics: the likelihood, derivatives and draws are those of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.evaluation import information
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy
from fedpop.kernels import evidence as evidences
from fedpop.models import condensed, local
from tests.helpers import seeded

SIZES = (90, 3, 0, 61)


def model_of(kind: str, variance: Any = 0.3) -> fp.Composition:
    noise = fp.likelihoods.Normal(variance)
    if kind == "fixed effects":
        return fp.Composition(None, seeded(nn.Linear(2, 1)), noise, fixed=seeded(nn.Linear(3, 1), 2))
    if kind == "no backbone":
        return fp.Composition(None, seeded(nn.Linear(3, 1)), noise)
    if kind == "two outputs":
        return fp.Composition(seeded(nn.Linear(3, 2)), seeded(nn.Linear(2, 2), 2), noise)
    if kind == "network":
        body = nn.Sequential(seeded(nn.Linear(3, 2)), nn.Tanh())
        return fp.Composition(body, seeded(nn.Linear(2, 1), 2), noise)
    return fp.Composition(seeded(nn.Linear(3, 2, bias=False)), seeded(nn.Linear(2, 1, bias=False), 2), noise)


AFFINE = ["linear backbone", "no backbone", "two outputs", "fixed effects"]


def setting(kind: str, variance: Any = 0.3) -> tuple[Hierarchy, Any]:
    g, clients = torch.Generator().manual_seed(3), []
    for n in SIZES:
        x: Any = torch.randn(n, 3, generator=g)
        if kind == "fixed effects":
            x = {"fixed": x, "random": torch.randn(n, 2, generator=g)}
        y = 100 + torch.randn((n, 2) if kind == "two outputs" else (n,), generator=g)
        clients.append((x, y))
    method = fp.FedSOUL(model_of(kind, variance), prior="full").prepared(fp.Federation.of(clients).example)
    return method.hierarchy, method.model.checked(fp.Federation.of(clients))


def theta_of(hierarchy: Hierarchy) -> Tensor:
    phi = hierarchy.model.initial_phi().double()
    d = hierarchy.model.z_layout.size
    beta = hierarchy.prior.init(torch.zeros(d, dtype=torch.float64), 1.0)
    assert len(beta) == hierarchy.prior.size(d)
    return torch.cat((phi, beta + 0.1))


def everyone(federation: Any) -> Cohort:
    cohort: Cohort = federation.cohort(torch.arange(len(SIZES)), torch.device("cpu"))
    return cohort


@contextmanager
def rows_themselves(monkeypatch: pytest.MonkeyPatch, block: int = 2**14) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(condensed, "LEAST_CONDENSED", 10**9)
        patch.setattr(evidences, "ROWS_AT_ONCE", block)
        patch.setattr(local, "ROWS_AT_ONCE", block)
        yield


@pytest.mark.parametrize("kind", AFFINE)
@pytest.mark.parametrize("variance", [0.3, "learned"])
def test_values_gradients_and_curvature_are_those_of_the_rows(
    kind: str, variance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy, federation = setting(kind, variance)
    theta, few = theta_of(hierarchy), everyone(federation)
    assert condensed.Condensed.once(hierarchy.model, few) is not None
    found = evidences.evidence(hierarchy, theta, few, True)
    with rows_themselves(monkeypatch):
        rows = evidences.evidence(hierarchy, theta, everyone(federation), True)
    for name in ("values", "sizes", "gradient", "hessian"):
        torch.testing.assert_close(getattr(found, name), getattr(rows, name), rtol=1e-9, atol=1e-7)


def test_the_value_is_the_density_of_a_normal_vector() -> None:
    """log N(y; F mu, F Sigma F' + s2 I), written by hand."""
    hierarchy, federation = setting("linear backbone")
    theta, cohort = theta_of(hierarchy), everyone(federation)
    phi, beta = hierarchy.split(theta)
    found = evidences.evidence(hierarchy, theta, cohort, False).values
    mu, precision = hierarchy.prior.mu(beta), hierarchy.prior.precision(beta)
    start = 0
    for value, n in zip(found, SIZES, strict=True):
        x, y = cohort.x[start : start + n].double(), cohort.y[start : start + n].double().reshape(n)
        start += n
        features = x @ phi.reshape(2, 3).T
        spread = features @ torch.linalg.inv(precision) @ features.T + 0.3 * torch.eye(n).double()
        exact = MultivariateNormal(features @ mu, (spread + spread.T) / 2).log_prob(y) if n else 0.0
        assert float(value) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


def test_long_networks_are_gone_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy, federation = setting("network")
    theta = theta_of(hierarchy)
    found = evidences.evidence(hierarchy, theta, everyone(federation), True)
    score, own = information.score_and_information(hierarchy, *hierarchy.split(theta), everyone(federation))
    with rows_themselves(monkeypatch, block=16):
        assert evidences.rematerialised(hierarchy, everyone(federation))
        blocks = evidences.evidence(hierarchy, theta, everyone(federation), True)
        again = information.score_and_information(hierarchy, *hierarchy.split(theta), everyone(federation))
    for name in ("values", "sizes", "gradient", "hessian"):
        torch.testing.assert_close(getattr(found, name), getattr(blocks, name))
    torch.testing.assert_close((score, own), again)


@pytest.mark.parametrize("kind", ["linear backbone", "fixed effects"])
def test_draws_are_from_the_posteriors_of_the_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy, federation = setting(kind)
    phi, beta = hierarchy.split(theta_of(hierarchy))
    few = hierarchy.target_at(phi.float(), beta.float(), everyone(federation))
    assert few.likelihood.sizes.tolist() == list(SIZES)
    with rows_themselves(monkeypatch):
        rows = hierarchy.target_at(phi.float(), beta.float(), everyone(federation))
    for found, expected in zip(few.moments(), rows.moments(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_large_mean_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of squares would lose what residuals of a triangular factor have."""
    hierarchy, federation = setting("no backbone")
    far = [(x + 50, y * 1e3) for x, y in ((torch.randn(80, 3), torch.randn(80) + 1e3) for _ in SIZES)]
    federation = hierarchy.model.checked(fp.Federation.of(far))
    theta = theta_of(hierarchy)
    found = evidences.evidence(hierarchy, theta, everyone(federation), False).values
    with rows_themselves(monkeypatch):
        rows = evidences.evidence(hierarchy, theta, everyone(federation), False).values
    torch.testing.assert_close(found, rows, rtol=1e-11, atol=0)


def test_hessians_of_parts_of_a_cohort_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy, federation = setting("linear backbone")
    theta = theta_of(hierarchy)
    whole = evidences.evidence(hierarchy, theta, everyone(federation), True).hessian
    monkeypatch.setattr(evidences, "CLIENTS_AT_ONCE", 3)
    parts = evidences.evidence(hierarchy, theta, everyone(federation), True).hessian
    assert whole is not None
    torch.testing.assert_close(parts, whole)
