"""FedSOUL's limits: FedAvg at prior scale zero, FedRep at infinity and temperature zero, no phi at all.

Oracle: the other methods of the library, run for one round from the same point with one full-batch step,
and gradients of plain sums of log-likelihoods. In a conjugate model FedSOUL's conditional expectations are
closed-form (``rao_blackwell``), so limits are compared exactly and the distance to them must fall at its
known rate; on a logistic model expectations are averages over draws, within five standard errors.
"""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.methods.base import Algorithm
from fedpop.priors.normal import COVARIANCES
from tests.helpers import run_of
from tests.oracles import DOUBLE, assert_mean, gaussian_noise

RATE = 0.05
NOISE = 0.3
WIDE = (1e-9, 1e9)
CLOSED_FORM = fp.chains.Chain(rao_blackwell=True)
SIZES = (4, 6, 9)
TOTAL = sum(SIZES)


def build(likelihood):
    """Four inputs, two features, one output, no biases; y that no single head explains."""
    generator = torch.Generator().manual_seed(1)
    backbone, head = nn.Linear(4, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    for p in (*backbone.parameters(), *head.parameters()):
        nn.init.normal_(p, generator=generator)
    model = fp.Composition(backbone, head, likelihood)
    clients = []
    for i, n in enumerate(SIZES):
        x = gaussian_noise(10 + i, n, 4)
        y = x @ gaussian_noise(20 + i, 4, 1) + 0.3 * gaussian_noise(30 + i, n, 1)
        clients.append((x, y if model.likelihood.name == "normal" else (y > 0).double()))
    return model, clients


def normal():
    return build(fp.likelihoods.Normal(NOISE))


def one_round(method: Algorithm, clients, server=None, k=0):
    """The server before and after one round with everyone."""
    run = run_of(method, clients)
    run.server = run.server | ({} if server is None else server)
    before, run.round = dict(run.server), k
    run.train_round()
    return before, run.server


def fedsoul(model, scale, covariance="isotropic", rate=RATE / TOTAL, form="auto", **settings):
    """Plain gradient steps; ``rate`` makes a step on a sum equal to FedAvg's on a mean. And its theta."""
    step = fp.steps.SGD(rate)
    prior = fp.priors.Normal(covariance, bounds=WIDE)
    defaults = {
        "phi_step": step,
        "beta_step": fp.steps.BetaStep(step, form),
        "start": "random",
        "anneal": fp.steps.Anneal(rounds=0),
        "prior": prior,
    }
    method = fp.FedSOUL(model, **(defaults | settings))
    return method, {"phi": model.initial_phi(), "beta": prior.init(model.initial_z(), scale)}


def gradients(model, clients, phi, z):
    """d/dphi and d/dz of the summed log-likelihood at one head for all, by autograd."""
    phi, z = phi.clone().requires_grad_(), z.clone().requires_grad_()
    total = 0.0
    for x, y in clients:
        eta = x @ phi.reshape(2, 4).mT @ z.unsqueeze(1)
        total = total + model.likelihood.log_prob(eta, y, {}).sum()
    return torch.autograd.grad(total, (phi, z))


# --- prior scale zero: FedAvg ----------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_scale_to_zero_is_fedavg_with_one_full_batch_step(covariance):
    model, clients = normal()
    _, fedavg = one_round(fp.FedAvg(model, local=fp.LocalSGD(rate=RATE)), clients)
    size, distance = model.phi_layout.size, []
    for scale in (1e-2, 1e-3, 1e-4):
        method, server = fedsoul(model, scale, covariance, chain=CLOSED_FORM)
        _, new = one_round(method, clients, server)
        w = torch.cat((new["phi"], method.hierarchy.prior.mu(new["beta"])))
        distance.append(float((w - fedavg["w"]).norm()))
    assert (fedavg["w"][:size] != model.initial_phi()).all()
    # The distance is of order sigma^2.
    assert distance[0] / distance[1] == pytest.approx(100, rel=0.05)
    assert distance[1] / distance[2] == pytest.approx(100, rel=0.05)
    assert distance[2] < 1e-6


def test_fedavg_step_is_the_pooled_gradient():
    model, clients = normal()
    before, after = one_round(fp.FedAvg(model, local=fp.LocalSGD(rate=RATE)), clients)
    pooled = torch.cat(gradients(model, clients, model.initial_phi(), model.initial_z()))
    torch.testing.assert_close(after["w"] - before["w"], RATE / TOTAL * pooled)


def test_scale_to_zero_on_a_logistic_model():
    """Averages over draws: J, and the right form of I_mu, whose noise does not grow like 1/sigma."""
    model, clients = build("bernoulli")
    exact = torch.cat(gradients(model, clients, model.initial_phi(), model.initial_z()))
    method, server = fedsoul(
        model, 1e-3, form="right", chain=fp.chains.Chain(chains=60, burn_in=5), local_steps=2, rate=1.0
    )
    seen = []
    for k in range(50):
        before, new = one_round(method, clients, server, k)
        moved = [new["phi"] - before["phi"], (new["beta"] - before["beta"])[:2]]
        seen.append(torch.cat(moved))
    replicates = torch.stack(seen)
    # What is left of the scale shifts expectations by sigma^2 = 1e-6 of the curvature: below the noise.
    assert (replicates.std(0) / 50**0.5).max() < 1e-3 * exact.norm()
    assert_mean(replicates, exact, "gradient")


def test_a_single_draw_of_the_left_form_is_noise():
    """I_mu of one draw has variance 1/sigma^2 per client: why expectations are compared."""
    model, clients = normal()
    method, server = fedsoul(model, 1e-3, form="left", local_steps=1, rate=1.0)
    i_mu = torch.stack(
        [
            (new["beta"] - old["beta"])[:2]
            for old, new in (one_round(method, clients, server, k) for k in range(200))
        ]
    )
    ratio = i_mu.var(0) / (len(SIZES) / 1e-3**2)
    # A variance of 200 draws has a relative standard error of sqrt(2 / 199) = 0.1.
    assert ((ratio - 1).abs() < 5 * (2 / 199) ** 0.5).all()


# --- prior scale infinite: FedRep ------------------------------------------------------------


def fedrep_gradient(model, clients):
    """The gradient that FedRep with exact heads and one full-batch body step follows."""
    method = fp.FedRep(model, heads="exact", body=fp.LocalSGD(rate=RATE))
    before, after = one_round(method, clients)
    return (after["phi"] - before["phi"]) * TOTAL / RATE


def j_of(model, clients, scale):
    method, server = fedsoul(model, scale, chain=CLOSED_FORM, rate=1.0)
    before, after = one_round(method, clients, server)
    return after["phi"] - before["phi"]


def test_at_temperature_one_j_differs_by_the_posterior_covariance():
    """J - (FedRep's gradient) = -Cov(z) F'X / s2, and Cov(z) = s2 (F'F)^-1 at an infinite scale."""
    model, clients = normal()
    w = model.initial_phi().reshape(2, 4)
    term = torch.zeros_like(w)
    for x, _ in clients:
        f = x @ w.mT
        cov = NOISE * torch.linalg.inv(f.mT @ f)
        term -= cov @ f.mT @ x / NOISE
    difference = j_of(model, clients, 1e6) - fedrep_gradient(model, clients)
    torch.testing.assert_close(difference, term.reshape(-1), rtol=1e-6, atol=1e-6)
    assert difference.norm() > 0.1 * fedrep_gradient(model, clients).norm()  # not a detail


def test_temperature_to_zero_is_fedrep_with_exact_heads():
    """A posterior at temperature T is that of noise variance T s2; J is then in units of 1 / (T s2)."""
    model, clients = normal()
    fedrep = fedrep_gradient(model, clients)
    distance = []
    for temperature in (1e-1, 1e-2, 1e-3):
        cold = fp.Composition(model.backbone, model.head, fp.likelihoods.Normal(NOISE * temperature))
        j = temperature * j_of(cold, clients, 1e6)
        distance.append(float((j - fedrep).norm() / fedrep.norm()))
    assert distance[0] / distance[1] == pytest.approx(10, rel=0.01)
    assert distance[1] / distance[2] == pytest.approx(10, rel=0.01)
    assert distance[2] < 1e-3


def test_one_round_of_the_cold_limit_is_one_round_of_fedrep():
    model, clients = normal()
    _, fedrep = one_round(fp.FedRep(model, heads="exact", body=fp.LocalSGD(rate=RATE)), clients)
    temperature = 1e-9
    cold = fp.Composition(model.backbone, model.head, fp.likelihoods.Normal(NOISE * temperature))
    method, server = fedsoul(cold, 1e6, chain=CLOSED_FORM, rate=temperature * RATE / TOTAL)
    _, new = one_round(method, clients, server)
    torch.testing.assert_close(new["phi"], fedrep["phi"], rtol=1e-7, atol=1e-7)


def test_exact_draws_show_the_same_difference():
    """The same through draws of z, not moments: the default kernel is exact here."""
    model, clients = normal()
    method, server = fedsoul(model, 1e3, chain=fp.chains.Chain(chains=50), local_steps=2, rate=1.0)
    assert method.sampler.kernel == fp.kernels.Exponential()
    seen = [one_round(method, clients, server, k)[1]["phi"] - server["phi"] for k in range(100)]
    assert_mean(torch.stack(seen), j_of(model, clients, 1e3), "J")


# --- no phi ----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [fp.likelihoods.Normal(0.5), "bernoulli"], ids=str)
def test_an_empty_phi_works(likelihood):
    """Only the prior is learned: federated Langevin sampling of a hierarchical model."""
    head = nn.Linear(1, 1, bias=False)
    model = fp.Composition(None, head, likelihood)
    assert model.initial_phi().numel() == 0
    clients = []
    for i in range(40):
        x = gaussian_noise(50 + i, 8, 1).float()
        y = (
            2 * x
            + 0.5 * gaussian_noise(100 + i, 1, 1).float() * x
            + 0.5 * gaussian_noise(150 + i, 8, 1).float()
        )
        clients.append((x, y if model.likelihood.name == "normal" else (y > 0).float()))
    population = fp.FedSOUL(model).fit(clients, rounds=40, participation=0.5, progress=False)
    assert population.published["phi"].numel() == 0
    assert population.published["beta"][0] > 0  # all slopes are positive, and the start was 0
    assert torch.isfinite(population.predict(0, clients[0][0]).mean).all()
    assert population.history[-1]["left_out"] == []


def test_an_empty_phi_reaches_the_exact_optimum():
    """Conjugate, Rao-Blackwellised, one free mean and scale: the EM fixed point is the maximum."""
    from scipy.optimize import minimize

    model = fp.Composition(None, nn.Linear(1, 1, bias=False).double(), fp.likelihoods.Normal(0.5))
    x = gaussian_noise(1, 20, 6, 1)
    y = x * (1 + 0.7 * gaussian_noise(2, 20, 1, 1)) + 0.5**0.5 * gaussian_noise(3, 20, 6, 1)
    method = fp.FedSOUL(
        model, chain=CLOSED_FORM, prior=fp.priors.Normal(scale=1.0), beta_step=fp.steps.EM(final=1.0)
    )
    population = method.fit(list(zip(x, y, strict=True)), rounds=120, progress=False)

    def loss(beta):
        mu, sigma2 = beta[0], torch.tensor(2 * beta[1], dtype=DOUBLE).exp()
        cov = sigma2 * x @ x.mT + 0.5 * torch.eye(6, dtype=DOUBLE)
        density = torch.distributions.MultivariateNormal(mu * x.squeeze(2), cov)
        return -float(density.log_prob(y.squeeze(2)).sum())

    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    torch.testing.assert_close(
        population.published["beta"], torch.tensor(best.x, dtype=DOUBLE), rtol=1e-5, atol=1e-5
    )
