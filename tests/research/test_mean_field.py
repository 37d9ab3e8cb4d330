"""The averaged dynamics in closed form: Fisher's identity, the chain's stationary law, and roots."""

import pytest
import torch

import fedpop as fp
from fedpop.evaluation.oracle import everyone, log_likelihood
from fedpop.keys import Key
from research.theory import run as theory
from research.theory.mean_field import MeanField, stationary
from tests.helpers import answers, cohort_of, federation_of, linear_model, population_data
from tests.oracles import assert_mean, gaussian_noise


def case(prior=None, d=2):
    clients, _, _ = population_data(b=12, n=6, k=3, d=d, variance=1.0)
    method = fp.FedSOUL.paper(linear_model(3, d, 1.0), rate=1e-3, prior=prior or fp.priors.Normal(scale=1.0))
    cohort = everyone(method, federation_of(method.model, clients))
    theta = torch.cat((gaussian_noise(1, 3 * d), 0.3 * gaussian_noise(2, d + 1)))
    return MeanField(method, cohort), theta, clients


def test_without_a_step_it_is_the_gradient_of_the_marginal_likelihood():
    field, theta, _ = case()
    theta.requires_grad_()
    value = log_likelihood(field.method, field.cohort, theta[: field.size], theta[field.size :])
    (exact,) = torch.autograd.grad(value, theta)
    assert torch.allclose(field(theta.detach(), 0.0), exact, rtol=1e-9, atol=1e-9)


def test_hyperpriors_are_part_of_it():
    hyper = fp.priors.Hyperprior(phi_scale=0.5, mean_scale=2.0, log_scale=(0.1, 0.3))
    field, theta, _ = case()
    with_hyper = MeanField(field.method.replace(hyperprior=hyper), field.cohort)
    d = field.method.hierarchy.prior.dimension(theta[field.size :])
    phi, mu, log_sd = theta[: field.size], theta[field.size :][:d], theta[-1:]
    pull = torch.cat((-phi / 0.25, -mu / 4, (0.1 - log_sd) / 0.09))
    assert torch.allclose(with_hyper(theta, 0.4) - field(theta, 0.4), pull)


@pytest.mark.parametrize("c", [0.1, 1.5])
def test_the_stationary_law_is_left_unchanged_by_a_step(c):
    """z' = z + gamma Q (m - z) + sqrt(2 gamma) xi: S = (1 - gamma Q) S (1 - gamma Q)' + 2 gamma."""
    field, theta, _ = case()
    target = field._target(theta[: field.size], theta[field.size :])
    mean, cov = stationary(target, c)
    q = target.block_precision.matrix[:, 0]
    gamma = (c / torch.linalg.eigvalsh(q)[:, -1])[:, None, None]
    eye = torch.eye(2, dtype=torch.float64)
    step = eye - gamma * q
    assert torch.allclose(step @ cov @ step.mT + 2 * gamma * eye, cov, rtol=1e-9)
    assert torch.allclose(
        target.value_and_grad(mean.unsqueeze(1))[1], torch.zeros(12, 1, 2).double(), atol=1e-9
    )


@pytest.mark.slow
def test_what_clients_send_has_this_mean():
    """Messages of a second round, after a first one has brought the chains to their stationary law."""
    field, theta, clients = case()
    chain = fp.chains.Chain(chains=10)
    method = field.method.replace(kernel=fp.kernels.ULA(0.8), local_steps=40, chain=chain)
    phi, beta = theta[: field.size].float(), theta[field.size :].float()
    cohort = cohort_of(method.model, clients)
    broadcast = {"phi": phi, "beta": beta}
    sent = []
    for seed in range(60):
        key = Key(seed, purpose="train")
        local = method.enter(cohort.units, broadcast, key)
        for k in range(2):
            done = answers(method, cohort, local, broadcast, key.at(round=k))
            local = done.local
        sums = (done.total.plain_sum(name, like) for name, like in (("J", phi), ("I", beta)))
        sent.append(torch.cat(tuple(sums)).double())
    assert_mean(torch.stack(sent), field(theta, 0.8), "the mean of (J, I)")


@pytest.mark.parametrize("c", [0.05, 0.8])
def test_a_root_is_one(c):
    task = theory.problem(0, b=30)
    method = fp.FedSOUL.paper(task.model)
    best = task.optimum(method)
    field = MeanField(method, task.cohort)
    root = field.root(torch.cat((best.phi, best.beta)), c)
    scale = float(field.jacobian(root, c).abs().max())
    assert float(field(root, c).abs().max()) < 1e-8 * scale
    assert root[-1] > best.beta[-1], "wider draws make a wider population"


def test_what_is_fixed_stays_at_a_root():
    fixed = fp.priors.Normal(mean=0.5, scale=1.0, learn_mean=False, learn_scale=False)
    task = theory.problem(0, b=30)
    method = fp.FedSOUL.paper(task.model, prior=fixed)
    best = task.optimum(method)
    assert best.beta.tolist() == [0.5, 0.5, 0.0]
    start = torch.cat((best.phi, best.beta))
    root = MeanField(method, task.cohort).root(start, 0.8)
    assert torch.equal(root[-3:], best.beta)
    assert float(MeanField(method, task.cohort)(root, 0.8)[:-3].abs().max()) < 1e-6


def test_the_bias_grows_about_linearly():
    """The exact roots alone: a power of c between .9 and 1.1 over a factor of sixteen."""
    task = theory.problem(1)
    method = fp.FedSOUL.paper(task.model)
    best = task.optimum(method)
    start = torch.cat((best.phi, best.beta))
    field = MeanField(method, task.cohort)
    shifts = [float((field.root(start, c) - start)[-1]) for c in (0.05, 0.8)]
    power = torch.tensor(shifts[1] / shifts[0]).log() / torch.tensor(16.0).log()
    assert 0.9 < float(power) < 1.1


def test_without_an_intercept_constant_steps_push_the_scale_up_for_ever():
    """Along (phi, -mu, -1), which changes no prediction, the exact gradient is zero; with step gamma it is
    the sum over clients and eigenvalues of -(gamma lambda / 2) / (1 - gamma lambda / 2)."""
    field, theta, _ = case()
    phi, mu = theta[: field.size], theta[field.size : -1]
    direction = torch.cat((phi, -mu, -torch.ones(1).double()))
    target = field._target(phi, theta[field.size :])
    eigenvalues = torch.linalg.eigvalsh(target.block_precision.matrix[:, 0])
    half = 0.5 * 0.8 * eigenvalues / eigenvalues[:, -1:]
    assert abs(float(field(theta, 0.0) @ direction)) < 1e-9
    assert float(field(theta, 0.8) @ direction) == pytest.approx(-float((half / (1 - half)).sum()))
