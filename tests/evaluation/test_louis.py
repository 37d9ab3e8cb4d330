"""Information from draws, against the second derivative of a likelihood that quadrature gives exactly."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import EstimateError
from fedpop.evaluation.convergence import landing
from fedpop.evaluation.louis import louis
from fedpop.priors.normal import Normal
from tests.helpers import cohort_of, generator

WIDE = torch.float64
CLIENTS = 30
NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(120))


def counts(n: int, sd: float) -> list[tuple[Tensor, Tensor]]:
    """Clients with a random intercept each, and n counts."""
    g = generator(4)
    z = 0.4 + sd * torch.randn(CLIENTS, generator=g)
    return [(torch.ones(n, 1), torch.poisson(v.exp().expand(n), generator=g)) for v in z]


def marginal(theta: Tensor, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """log p(D | mu, log sigma) by Gauss-Hermite quadrature about each posterior's mode."""
    total = theta.new_zeros(())
    for mode, width, y in posteriors(theta.detach(), data):
        z = mode + width * NODES
        prior = torch.distributions.Normal(theta[0], theta[1].exp()).log_prob(z)
        log = torch.distributions.Poisson(z.exp()).log_prob(y[:, None]).sum(0) + prior
        total = total + (log + 0.5 * NODES.square() + WEIGHTS.log()).logsumexp(0) + width.log()
    return total


def posteriors(theta: Tensor, data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    out = []
    for _, y in data:
        mode, precision = theta[0].clone(), torch.exp(-2 * theta[1])
        for _ in range(50):
            h = len(y) * mode.exp() + precision
            mode = mode + (y.sum() - len(y) * mode.exp() - precision * (mode - theta[0])) / h
        out.append((mode, (len(y) * mode.exp() + precision).rsqrt(), y.double()))
    return out


def draws_at(theta: Tensor, data: list[tuple[Tensor, Tensor]], chains: int = 4, each: int = 100) -> Tensor:
    """Independent draws of every posterior, by its distribution function on a grid."""
    g, out = generator(9), []
    for mode, width, y in posteriors(theta, data):
        z = mode + width * torch.linspace(-9, 9, 4001, dtype=WIDE)
        log = torch.distributions.Poisson(z.exp()).log_prob(y[:, None]).sum(0)
        log = log - 0.5 * ((z - theta[0]) / theta[1].exp()).square()
        cdf = torch.softmax(log, 0).cumsum(0)
        u = torch.rand(chains, each, 1, generator=g, dtype=WIDE)
        spot = torch.searchsorted(cdf, u).clamp(1, 4000)
        share = (u - cdf[spot - 1]) / (cdf[spot] - cdf[spot - 1])
        out.append(z[spot - 1] + share * (z[spot] - z[spot - 1]))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("n", "sd"), [(1, 0.5), (2, 1e-3), (2, 0.02), (2, 0.7), (60, 0.02), (60, 0.7), (60, 5.0)]
)
def test_information_is_right_however_much_data_say_of_z(n: int, sd: float) -> None:
    """A scale near zero and one that data know well: within 2 % of the curvature that quadrature gives, with
    400 draws of each client."""
    data = counts(n, min(sd, 0.7))
    theta = torch.tensor([0.4, np.log(sd)], dtype=WIDE)
    exact = -torch.func.hessian(lambda t: marginal(t, data))(theta)
    slope = torch.func.grad(lambda t: marginal(t, data))(theta)
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "poisson")
    hierarchy = fp.FedSOUL(model, prior=Normal()).hierarchy
    phi = torch.zeros(0, dtype=WIDE)
    found = louis(hierarchy, phi, theta, cohort_of(model, data), draws_at(theta, data))
    unit = exact.diagonal().abs().clamp(min=1e-9).sqrt()
    assert float(((found.information - exact) / unit / unit[:, None]).abs().max()) < 0.02
    torch.testing.assert_close(found.score, slope, atol=0.01 * float(unit.max()), rtol=0.02)


def test_curvature_within_its_noise_bends_neither_way() -> None:
    one, none = torch.eye(2, dtype=WIDE), torch.zeros(2, 0, dtype=WIDE)
    curvature, slope = torch.diag(torch.tensor([9.0, -0.2], dtype=WIDE)), torch.tensor([0.1, 1e-4]).double()
    errors = torch.zeros(8, 2, 2, dtype=WIDE)
    errors[:, 1, 1] = 0.3 * torch.tensor([1.0, -1.0] * 4)
    certain = landing(slope, curvature, 1e-9 * one, none).distance
    open_ = landing(slope, curvature, 1e-9 * one, none, errors).distance
    assert certain.upwards == 1
    assert open_.upwards == 0
    assert open_.converged
    assert landing(slope, curvature, 1e-9 * one, none, errors / 10).distance.upwards == 1


def test_one_draw_of_each_chain_tells_nothing_of_noise() -> None:
    data = counts(3, 0.5)
    theta = torch.tensor([0.4, -1.0], dtype=WIDE)
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "poisson")
    hierarchy = fp.FedSOUL(model, prior=Normal()).hierarchy
    with pytest.raises(EstimateError, match=r"one draw per chain: final=Final\(draws"):
        louis(hierarchy, theta[:0], theta, cohort_of(model, data), draws_at(theta, data, each=1))
