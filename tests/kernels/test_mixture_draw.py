"""Exact draws under a mixture prior, against the closed-form posterior; and jumps between its modes.

The posterior is written out here component by component with torch.distributions. Tolerance: five standard
errors, over independent draws or over chains that never meet.
"""

from dataclasses import replace

import pytest
import torch
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.kernels import HMC, Exponential, JumpHMC, MixtureDraw, Tuning, run
from fedpop.keys import Key
from fedpop.priors.normal import COVARIANCES
from tests.oracles import DOUBLE, assert_mean, gaussian_noise, make_case, sample

covariances = pytest.mark.parametrize("covariance", COVARIANCES)
WEIGHTS = torch.tensor([0.6, 0.4], dtype=DOUBLE)
KEY = Key(3, purpose="test")


def mixture_case(family, covariance, outputs=1, apart=2.0, k=2):
    """The clients of a case (none, three and eight examples) under a mixture prior, and its Normals."""
    case = make_case(family, covariance, outputs=outputs)
    prior, d = fp.priors.Mixture(k, covariance), len(case.mu)
    weights = WEIGHTS[:k] / WEIGHTS[:k].sum()
    betas = []
    for i in range(k):
        own = 0.3 * gaussian_noise(70 + i, prior.component.size(d))
        own[:d] += apart * (1 - 2 * i)
        betas.append(own)
    return replace(case, prior=prior, beta=torch.cat((weights.log(), *betas)))


def exact_posterior(case, i):
    """Weights, means and covariances of client i's posterior, from densities of y and of z."""
    x, y = case.clients[i]
    design = torch.block_diag(*[x] * case.model.outputs)
    flat = y.mT.reshape(-1)
    logs, means, covs = [], [], []
    for part in case.prior.parts(case.beta):
        mu, sigma = part.normal.mu(part.beta), part.normal.sigma(part.beta)
        precision = torch.linalg.inv(sigma)
        q = design.mT @ design + precision
        means.append(torch.linalg.solve(q, design.mT @ flat + precision @ mu))
        covs.append(torch.linalg.inv(q))
        marginal = design @ sigma @ design.mT + torch.eye(len(flat), dtype=DOUBLE)
        evidence = MultivariateNormal(design @ mu, marginal).log_prob(flat) if len(flat) else 0.0
        logs.append(part.log_weight + evidence)
    return torch.stack(logs).softmax(0), torch.stack(means), torch.stack(covs)


@covariances
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_posterior_in_closed_form(covariance, outputs):
    case = mixture_case("normal", covariance, outputs)
    log_weight, means, covs = case.target().mixture()
    overall_mean, overall_cov = case.target().moments()
    for i in range(3):
        w, m, c = exact_posterior(case, i)
        torch.testing.assert_close(log_weight[i].exp(), w)
        torch.testing.assert_close(means[i], m)
        torch.testing.assert_close(covs[i], c)
        mean = w @ m
        second = torch.einsum("k,kij->ij", w, c + m.unsqueeze(-1) * m.unsqueeze(-2))
        torch.testing.assert_close(overall_mean[i], mean)
        torch.testing.assert_close(overall_cov[i], second - torch.outer(mean, mean))


@covariances
@pytest.mark.parametrize("outputs", [1, 2])
def test_draws_have_the_posteriors_law(covariance, outputs):
    case = mixture_case("normal", covariance, outputs, apart=0.5)
    trace = sample(MixtureDraw(), case.target(), chains=4000, warmup=0, draws=1)
    for i in range(3):
        z = trace.draws[i, 0]
        w, m, c = exact_posterior(case, i)
        law = MultivariateNormal(m, c)
        r = (w.log() + law.log_prob(z.unsqueeze(1))).softmax(1)
        # Under the law E[r_k f(z)] = w_k E_k[f]: every component's share, mean and covariance.
        assert_mean(r, w, "weights")
        assert_mean(r.unsqueeze(-1) * z.unsqueeze(1), w.unsqueeze(1) * m, "means")
        outer = (z.unsqueeze(-1) * z.unsqueeze(-2)).unsqueeze(1)
        second = w[:, None, None] * (c + m.unsqueeze(-1) * m.unsqueeze(-2))
        assert_mean(r[..., None, None] * outer, second, "second moments")


def test_draws_are_independent_of_the_start_and_carry_their_gradient():
    case = mixture_case("normal", "diagonal")
    ids = torch.arange(3)
    traces = []
    for start in (0.0, 5.0):
        z = torch.full((3, 2, 2), start, dtype=DOUBLE)
        tuning = Tuning.fresh(3, 0.0, z)
        traces.append(run(MixtureDraw(), case.target(), z, tuning, 6, KEY, ids, adapt=True))
    assert torch.equal(traces[0].draws, traces[1].draws)
    torch.testing.assert_close(traces[0].acceptance, torch.ones(3, dtype=DOUBLE))
    assert traces[0].gradient_evaluations == 7
    for m in range(6):
        torch.testing.assert_close(
            traces[0].grads[:, m], case.target().value_and_grad(traces[0].draws[:, m])[1]
        )


@pytest.mark.parametrize("ids", [[1], [2, 1], [0, 1]], ids=str)
def test_draws_do_not_depend_on_who_else_is_there(ids):
    case = mixture_case("normal", "full", 2)
    everyone = sample(MixtureDraw(), case.target(), chains=3, warmup=0, draws=4)
    target = case.target(ids)
    z = torch.zeros(len(ids), 3, 4, dtype=DOUBLE)
    tuning = Tuning.fresh(len(ids), 0.0, z)
    key = Key(11, purpose="draws")
    some = run(MixtureDraw(), target, z, tuning, 4, key, torch.tensor(ids), adapt=False)
    torch.testing.assert_close(some.draws, everyone.draws[ids], rtol=1e-10, atol=1e-10)


@covariances
def test_one_component_is_the_exponential_step(covariance):
    case = mixture_case("normal", covariance, k=1)
    plain = replace(case, prior=case.prior.component, beta=case.beta[1:])
    mixture = sample(MixtureDraw(), case.target(), chains=3, warmup=0, draws=5)
    single = sample(Exponential(), plain.target(), chains=3, warmup=0, draws=5)
    torch.testing.assert_close(mixture.draws, single.draws)


def test_elsewhere_it_is_refused():
    case = mixture_case("bernoulli", "isotropic")
    with pytest.raises(SettingsError, match="MixtureDraw needs a normal likelihood"):
        sample(MixtureDraw(), case.target(), chains=1, warmup=0, draws=1)
    with pytest.raises(SettingsError, match="MixtureDraw needs"):
        fp.FedSOUL(case.model, prior="mixture", kernel="mixturedraw")
    assert fp.FedSOUL(make_case("normal", "full").model, kernel="mixturedraw").hierarchy.closed_form


# --- jumps -----------------------------------------------------------------------------------


def share_of_first(trace, i):
    """For each chain of client i, the share of its draws on the first component's side, ``[K]``."""
    return (trace.draws[i].sum(-1) > 0).to(DOUBLE).mean(0)


def test_jumps_visit_far_modes_in_their_shares_and_hmc_alone_does_not():
    """Modes at (4, 4) and (-4, -4), weakly informed clients; quadrature is the closed form's weight."""
    case = mixture_case("normal", "isotropic", apart=4.0)
    case = replace(case, clients=[(0.1 * x, 0.1 * y) for x, y in case.clients])
    truth = torch.stack([exact_posterior(case, i)[0][0] for i in range(3)])
    assert ((truth > 0.05) & (truth < 0.95)).all()
    trace = sample(JumpHMC(), case.target(), chains=200, warmup=50, draws=60)
    shares = torch.stack([share_of_first(trace, i) for i in range(3)], 1)
    assert_mean(shares, truth, "share of the first mode")
    assert ((shares > 0) & (shares < 1)).all()  # every chain saw both
    stuck = sample(HMC(), case.target(), chains=200, warmup=50, draws=60)
    alone = torch.stack([share_of_first(stuck, i) for i in range(3)], 1)
    assert ((alone == 0) | (alone == 1)).all()


@pytest.mark.parametrize("covariance", ["isotropic", "full"])
def test_jumps_leave_the_posterior_invariant(covariance):
    """Logistic head, prior with two overlapping components; quadrature on a grid."""
    case = mixture_case("bernoulli", covariance, apart=1.0)
    line = torch.linspace(-9, 9, 181, dtype=DOUBLE)
    grid = torch.cartesian_prod(line, line)
    trace = sample(JumpHMC(), case.target(), chains=300, warmup=60, draws=30)
    for i, (x, y) in enumerate(case.clients):
        log_p = case.prior.log_prob(case.beta, grid)
        w = torch.softmax(log_p + case.log_likelihood(grid, x, y) if len(y) else log_p, 0)
        z = trace.draws[i].movedim(1, 0)
        assert_mean(z.mean(1), w @ grid, "mean")
        assert_mean(z.square().mean(1), w @ grid.square(), "second moments")
