"""U_i, its gradients on all examples and on mini-batches, and its curvature, on every path there is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd, potential
from fedpop.client.potential import Potential
from fedpop.models.base import Model
from tests.helpers import cohort_of, generator, ragged, seeded, train_key

WIDE = torch.float64


def head() -> fp.Composition:
    return fp.Composition(None, seeded(nn.Linear(3, 1).to(WIDE), 1), fp.likelihoods.Normal(0.5))


def network() -> fp.Composition:
    backbone = seeded(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).to(WIDE), 2)
    return fp.Composition(backbone, seeded(nn.Linear(2, 1).to(WIDE), 3), fp.likelihoods.Normal("learned"))


def split() -> fp.Split:
    net = seeded(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).to(WIDE), 2)
    return fp.Split(net, "0.bias", fp.likelihoods.Normal(0.5))


MODELS: dict[str, Any] = {"head": head, "network": network, "split": split}
SIZES = (4, 0, 7, 1)
CLIENTS = [(x.to(WIDE), y.to(WIDE)) for x, y in ragged(SIZES)]


def energy(model: Model, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """U at w ``[D]`` without any of the machinery."""
    size = model.phi_layout.size
    eta = model.head_at(w[:size], w[size:], model.embed(w[:size], x))
    variance = model.params(w[:size]).get("log_variance", torch.tensor(0.5, dtype=WIDE).log()).exp()
    return -torch.distributions.Normal(eta[:, 0], variance.sqrt()).log_prob(y).sum()


def points(model: Model) -> Tensor:
    start = torch.cat((model.initial_phi(), model.initial_z()))
    return start + 0.3 * torch.randn(len(SIZES), len(start), generator=generator(5), dtype=WIDE)


@pytest.fixture(params=["side by side", "one by one"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one by one":
        monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", 0)


@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_curvature(name: str, path: None) -> None:
    model = MODELS[name]()
    w = points(model)
    u = Potential(model, cohort_of(model, CLIENTS))
    value, grad = u(w, train_key())
    hessian, diagonal, largest = u.hessian(w), u.diagonal(w, train_key()), u.largest(w, train_key())
    for c, (x, y) in enumerate(CLIENTS):
        at = lambda v, x=x, y=y: energy(model, v, x, y)  # noqa: E731
        exact = torch.autograd.functional.hessian(at, w[c])
        torch.testing.assert_close(value[c], at(w[c]))
        torch.testing.assert_close(grad[c], torch.autograd.functional.jacobian(at, w[c]))
        torch.testing.assert_close(hessian[c], exact)
        torch.testing.assert_close(diagonal[c], exact.diagonal())
        # Power iteration is a lower bound; thirty steps come within a few per cent.
        top = float(torch.linalg.eigvalsh(exact).abs().max())
        assert 0.9 * top <= float(largest[c]) <= top * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_mini_batches_are_unbiased(name: str, path: None) -> None:
    """Batches of two of up to seven, 300 of them: five standard errors; clients of two or fewer are exact."""
    model = MODELS[name]()
    w = points(model)
    cohort = cohort_of(model, CLIENTS)
    exact = Potential(model, cohort)(w, train_key())
    u = Potential(model, cohort, batch=2)
    assert u.examples == 2 + 0 + 2 + 1
    draws = [u(w, train_key(k)) for k in range(300)]
    for j in (0, 1):
        seen = torch.stack([d[j].reshape(len(SIZES), -1) for d in draws])
        off, error = seen.mean(0) - exact[j].reshape(len(SIZES), -1), seen.std(0) / 300**0.5
        torch.testing.assert_close(off[[1, 3]], torch.zeros_like(off[[1, 3]]))
        assert float((off[[0, 2]] / error[[0, 2]]).abs().max()) < 5
    again = u(w, train_key(0))
    assert torch.equal(again[1], draws[0][1])  # the same key, the same examples


def test_random_signs_have_the_diagonal_of_a_diagonal_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fp.Composition(None, nn.Linear(3, 1, bias=False).to(WIDE), fp.likelihoods.Normal(1.0))
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=WIDE)
    cohort = cohort_of(model, [(torch.diag(scale), torch.zeros(3, dtype=WIDE))])
    monkeypatch.setattr(potential, "LARGEST_HESSIAN_BY_COLUMNS", 0)
    found = Potential(model, cohort).diagonal(torch.zeros(1, 3, dtype=WIDE), train_key())
    torch.testing.assert_close(found[0], scale.square())


def test_dropout_is_off() -> None:
    backbone = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    model = fp.Composition(seeded(backbone, 2), seeded(nn.Linear(8, 1), 3), fp.likelihoods.Normal(0.5))
    cohort = cohort_of(model, ragged((5,)))
    w = torch.cat((model.initial_phi(), model.initial_z())).unsqueeze(0)
    one, other = (Potential(model, cohort)(w, train_key(k))[1] for k in (0, 1))
    assert torch.equal(one, other)
