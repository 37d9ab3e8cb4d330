"""The diagonal mass matrix of heads through vmap: its running moments, what it is for, when it is frozen.

Oracles: weighted moments written out, dense matrices, and the closed-form posterior of a head that is linear
in z but hides it (so that it runs through vmap), with coordinates whose widths differ fiftyfold.
"""

import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import final
from fedpop.kernels import HMC, MALA, ULA, Mass, Target, Tuning, run
from fedpop.kernels import mass as mass_module
from fedpop.kernels.mass import LARGEST_DENSE_MASS, LONGEST_MEMORY, PRIOR_DRAWS, geometric_mean
from fedpop.kernels.target import DensePrecision, DiagonalPrecision, RescaledPrecision
from fedpop.keys import Key
from fedpop.models.local import GeneralLikelihood
from tests.helpers import cohort_of, run_of, seeded
from tests.oracles import DOUBLE, SIGMAS, gaussian_noise, make_case

D, ROWS, RATIO = 6, 40, 50.0


class Hidden(nn.Module):
    """z . (x * s): linear in z, but not an nn.Linear, with widths of the posterior from 1/s down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(nn.Linear(D, 1, bias=False))
        self.register_buffer("s", torch.logspace(0, math.log10(RATIO), D))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.s)
        return out


def badly_scaled(clients: int = 3) -> tuple[fp.Composition, list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Model, clients, and the posterior means and covariances under N(0, I)."""
    model = fp.Composition(None, Hidden(), fp.likelihoods.Normal(1.0))
    x = gaussian_noise(1, clients, ROWS, D) / math.sqrt(ROWS)
    rows = x * model.head.s.double()
    z = gaussian_noise(2, clients, D)
    y = torch.einsum("cnd,cd->cn", rows, z) + gaussian_noise(3, clients, ROWS)
    cov = torch.linalg.inv(rows.mT @ rows + torch.eye(D, dtype=DOUBLE))
    mean = (cov @ (rows.mT @ y.unsqueeze(-1))).squeeze(-1)
    return model, [(x[i].float(), y[i].float()) for i in range(clients)], mean, cov


# --- the running moments -----------------------------------------------------------------------


def test_moments_are_those_of_all_passes_with_weights_that_grow():
    passes = [
        (gaussian_noise(k, 2, 4 + k, 3) * (1 + k), gaussian_noise(50 + k, 2, 4 + k, 3)) for k in range(6)
    ]
    mass = Mass.fresh(2, 3, torch.zeros(1, dtype=DOUBLE))
    for k, (z, g) in enumerate(passes):
        mass = mass.after(z, g, torch.full((2,), float(k), dtype=DOUBLE))
    # Pass k counts k + 1 times as much as the first: k/(k+1) survives every time.
    weight = torch.cat(
        [torch.full((z.shape[1],), (k + 1) / 6, dtype=DOUBLE) for k, (z, _) in enumerate(passes)]
    )
    torch.testing.assert_close(mass.weight, weight.sum().expand(2))
    for j in range(2):
        seen = torch.cat([both[j] for both in passes], 1)
        mean = (weight.unsqueeze(-1) * seen).sum(1) / weight.sum()
        square = (weight.unsqueeze(-1) * (seen - mean.unsqueeze(1)).square()).sum(1) / weight.sum()
        torch.testing.assert_close(mass.mean[:, j], mean)
        torch.testing.assert_close(mass.variance[:, j], square)


def test_the_past_fades():
    mass = Mass.fresh(1, 1, torch.zeros(1))
    for k in range(2000):
        mass = mass.after(torch.ones(1, 10, 1), torch.ones(1, 10, 1), torch.full((1,), float(k)))
    assert float(mass.weight) == pytest.approx(10 / (1 - LONGEST_MEMORY), rel=1e-3)


def test_scales_are_exact_for_independent_gaussians_from_two_draws_on():
    """The gradient is linear there, so its spread tells the width wherever the draws are."""
    sd, prior = torch.tensor([1e-3, 1.0, 4.0], dtype=DOUBLE), torch.tensor([1.0, 2.0, 1.0], dtype=DOUBLE)
    z = 7 + 1e-3 * gaussian_noise(1, 1, 2, 3)
    mass = Mass.fresh(1, 3, prior).after(z, -z / sd.square(), torch.zeros(1, dtype=DOUBLE))
    share = 2 / (2 + PRIOR_DRAWS)
    torch.testing.assert_close(mass.sd(prior)[0], sd**share * prior ** (1 - share))


def test_nothing_seen_nothing_moved_or_overflow_leave_the_priors_scale():
    prior = torch.tensor([0.3, 2.0])
    fresh = Mass.fresh(1, 2, prior)
    stuck = fresh.after(torch.ones(1, 9, 2), torch.ones(1, 9, 2), torch.zeros(1))
    far = torch.tensor([[[1e30, 0.0], [-1e30, 1.0]]])  # its square is beyond float32
    lost = fresh.after(far, far, torch.zeros(1))
    for mass in (fresh, stuck, lost):
        torch.testing.assert_close(mass.sd(prior), prior.unsqueeze(0))
    assert float(lost.weight) == 0


def test_tuning_survives_the_trip_through_a_clients_state():
    tuning = HMC().first_tuning(2, torch.zeros(1), 3)
    assert tuning.mass is not None
    moved = gaussian_noise(1, 2, 5, 3).float()
    tuning = Tuning(torch.rand(2), torch.ones(2), tuning.mass.after(moved, -moved, tuning.updates))
    local = tuning.to_local()
    again = Tuning.from_local(local | {"z": torch.zeros(2, 1, 3)})
    assert again.to_local().keys() == local.keys()
    assert all(torch.equal(again.to_local()[n], local[n]) for n in local)


def test_newcomers_beside_known_clients_change_nothing_of_theirs():
    """A round with both: the runtime writes what it holds into the newcomers' fresh tensors."""
    model, clients, _, _ = badly_scaled(4)
    going = run_of(fp.FedSOUL(model, local_steps=2, prior=fp.priors.Normal(scale=1.0)), clients)
    method, units = going.algorithm, going.federation.units
    broadcast, known = method.broadcast(going.server), torch.tensor([0, 2])
    state = method.enter(units[known], broadcast, Key(1))
    state = {name: torch.full_like(value, k + 1.0) for k, (name, value) in enumerate(state.items())}
    going.sites.store.put(known, state)
    fresh = method.enter(units[1:2], broadcast, Key(2))
    both = going.sites.states(method, torch.arange(3), broadcast, Key(2))
    for name, value in both.items():
        assert torch.equal(value[known], state[name])
        assert torch.equal(value[1:2], fresh[name])


def test_memory_is_paid_only_where_the_kernel_needs_a_mass():
    broadcast = {"beta": torch.zeros(4)}
    curved = fp.FedSOUL(fp.Composition(None, nn.Sequential(nn.Linear(2, 1), nn.Tanh()), "bernoulli"))
    linear = fp.FedSOUL(fp.Composition(None, nn.Linear(2, 1), "bernoulli"))
    plain = curved.replace(kernel=ULA())
    local = {m: set(m.enter(torch.arange(2), broadcast, Key(0))) for m in (curved, linear, plain)}
    moments = {"mass_mean", "mass_variance", "mass_weight", "mass_covariance"}
    assert local[curved] == {"z", "log_step", "updates"} | moments
    plain_state = {"z", "log_step", "updates"}
    assert local[plain] == plain_state
    assert local[linear] == plain_state | {"mode", "width"}  # which it follows


# --- the matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
def test_the_preconditioner_has_the_clients_widths_and_the_priors_correlations(covariance):
    case = make_case("bernoulli", covariance, features=1, head="curved")
    target, sd = case.target(), gaussian_noise(1, 3, 2).exp()
    v = gaussian_noise(2, 3, 4, 2)
    wide = case.sigma.diagonal().sqrt()
    correlation = case.sigma / torch.outer(wide, wide)
    inverse = sd.unsqueeze(-1) * correlation * sd.unsqueeze(-2)  # Q^-1
    precision = target.precision(sd)
    assert isinstance(precision, RescaledPrecision)
    torch.testing.assert_close(precision.solve(v), v @ inverse)
    # Noise gets the covariance Q^-1, and root is the transpose of what makes it.
    identity = torch.eye(2, dtype=DOUBLE).expand(3, 2, 2)
    coloured, white = precision.root_transposed(identity), precision.root(identity)
    torch.testing.assert_close(coloured.mT @ coloured, inverse)
    torch.testing.assert_close(white, coloured.mT)


def test_before_anything_was_seen_it_is_the_priors_precision():
    case = make_case("bernoulli", "diagonal", features=1, head="curved")
    tuning = HMC().first_tuning(3, case.beta, 2)
    v = gaussian_noise(2, 3, 4, 2)
    found = HMC().preconditioner(case.target(), tuning)
    torch.testing.assert_close(found.root(v), DiagonalPrecision(case.sigma.diagonal().sqrt()).root(v))


# --- what it is for ----------------------------------------------------------------------------


def worst(draws: Tensor) -> tuple[float, float]:
    """The largest R-hat and the smallest ESS over clients and coordinates; draws ``[C, M, K, d]``."""
    chains = draws.transpose(1, 2).double().numpy()
    rhat = array_stats.rhat(chains, chain_axis=1, draw_axis=2)
    return float(np.max(rhat)), float(np.min(array_stats.ess(chains, chain_axis=1, draw_axis=2)))


def chains_of(kernel, target: Target, mass: bool, steps: int) -> tuple[Tensor, float]:
    ids, key = torch.arange(3), Key(1, purpose="mass")
    z = target.prior.sample(target.beta, key.normal(ids, (4, D)))
    tuning = kernel.first_tuning(3, z, D if mass else None)
    for part in range(steps // 10):
        trace = run(kernel, target, z, tuning, 10, key.at(purpose=f"warm-{part}"), ids, adapt=True)
        z, tuning = trace.state.z, trace.tuning
    trace = run(kernel, target, z, tuning, steps, key.at(purpose="draws"), ids, adapt=False)
    return trace.draws, float(trace.acceptance.mean())


@pytest.mark.parametrize("kernel", [HMC(), pytest.param(MALA(), marks=pytest.mark.slow)], ids=repr)
def test_badly_scaled_coordinates_mix_with_it_and_do_not_without(kernel):
    model, clients, _, _ = badly_scaled()
    cohort = cohort_of(model, clients)
    prior = fp.priors.Normal(scale=1.0)
    local = model.bind(model.initial_phi(), cohort.x, cohort)
    assert isinstance(local, GeneralLikelihood)
    target = Target(local, prior, prior.init(torch.zeros(D), 1.0))
    steps = 500 // kernel.gradients_per_step
    (with_mass, acceptance), (without, _) = (chains_of(kernel, target, m, steps) for m in (True, False))
    (rhat, ess), (poor_rhat, poor_ess) = worst(with_mass), worst(without)
    assert rhat < 1.1 < 1.5 < poor_rhat
    assert ess > 5 * poor_ess
    assert acceptance > kernel.target_acceptance - 0.1


# --- the draws that users see ------------------------------------------------------------------


@pytest.fixture(scope="module")
def newcomer():
    """A client's draws with theta fixed at the truth, and the tuning of every pass behind them."""
    model, clients, _, _ = badly_scaled()
    prior = fp.priors.Normal(scale=1.0, learn_mean=False, learn_scale=False)
    population = fp.FedSOUL(model, prior=prior).fit(clients, rounds=2)
    passes = []

    def spy(kernel, target, z, tuning, steps, key, ids, *, adapt):
        trace = run(kernel, target, z, tuning, steps, key, ids, adapt=adapt)
        passes.append((adapt, tuning, trace.tuning))
        return trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final, "run", spy)
        return population.new_client(*clients[0]).posterior.draws.double(), passes


def test_draws_for_users_have_the_exact_law(newcomer):
    """Mean and variance of every coordinate, to five Monte-Carlo errors."""
    draws, _ = newcomer
    assert draws.shape == (4, 250, D)
    rhat, _ = worst(draws.unsqueeze(0).transpose(1, 2))
    assert rhat < 1.05
    _, _, mean, cov = badly_scaled()
    variance = cov[0].diagonal()
    square = (draws - mean[0]).square()
    for what, exact, spread in ((draws, mean[0], variance), (square, variance, 2 * variance**2)):
        ess = torch.tensor(array_stats.ess(what.numpy(), chain_axis=0, draw_axis=1))
        assert ((what.mean((0, 1)) - exact).abs() < SIGMAS * (spread / ess).sqrt()).all()


def test_step_and_mass_adapt_in_burn_in_and_are_frozen_afterwards(newcomer):
    *burn_in, (adapt, before, after) = newcomer[1]
    assert all(a for a, _, _ in burn_in)
    assert len(burn_in) == 30
    # What the draws are made with is what burn-in ended with, and it has not moved since.
    assert not adapt
    assert before is burn_in[-1][2]
    assert after is before
    assert float(before.updates) == 30
    assert before.mass is not None
    assert float(before.log_step) != HMC.initial_log_step
    exact = badly_scaled()[3][0]
    # Where coordinates are correlated it is the geometric mean of marginal and conditional width.
    wanted = (exact.diagonal() / torch.linalg.inv(exact).diagonal()).pow(0.25)
    torch.testing.assert_close(before.mass.sd(torch.ones(D))[0].double(), wanted, rtol=0.25, atol=0.0)


# --- a dense matrix for a small z --------------------------------------------------------------


def collinear() -> tuple[Tensor, Tensor]:
    """Precision and covariance of an intercept and a slope whose covariate runs from 8 to 14."""
    x = torch.stack((torch.ones(7, dtype=DOUBLE), torch.linspace(8, 14, 7, dtype=DOUBLE)), 1)
    precision = x.mT @ x / 0.09 + torch.diag(torch.tensor([1.0, 4.0], dtype=DOUBLE))
    return precision, torch.linalg.inv(precision)


def test_the_geometric_mean_solves_its_equation():
    half = gaussian_noise(1, 5, 4, 4)
    a, b = half[:3] @ half[:3].mT, half[2:] @ half[2:].mT
    x = geometric_mean(a, b)
    torch.testing.assert_close(x, x.mT)
    assert float(torch.linalg.eigvalsh(x).min()) > 0
    torch.testing.assert_close(x @ b @ x, a)


def test_covariances_are_those_of_all_passes():
    passes = [(gaussian_noise(k, 2, 5, 3) * (1 + k), gaussian_noise(9 + k, 2, 5, 3)) for k in range(4)]
    mass = Mass.fresh(2, 3, torch.zeros(1, dtype=DOUBLE))
    for k, (z, g) in enumerate(passes):
        mass = mass.after(z, g, torch.full((2,), float(k), dtype=DOUBLE))
    weight = torch.cat([torch.full((5,), k + 1.0, dtype=DOUBLE) for k in range(4)])
    for j in range(2):
        seen = torch.cat([both[j] for both in passes], 1)
        for c in range(2):
            exact = torch.cov(seen[c].mT, correction=0, aweights=weight)
            torch.testing.assert_close(mass.covariance[c, j], exact)
    torch.testing.assert_close(mass.covariance.diagonal(dim1=-2, dim2=-1), mass.variance)
    assert Mass.fresh(2, LARGEST_DENSE_MASS + 1, torch.zeros(1)).covariance is None


def test_it_is_exact_for_a_gaussian_however_little_of_it_was_seen():
    """Draws from a hundredth of its width, far from the mean: their covariance alone would be that much too
    small. What is left is the pull towards the prior."""
    precision, cov = collinear()
    z = 3 + 1e-2 * gaussian_noise(1, 1, 2000, 2) @ torch.linalg.cholesky(cov).mT
    mass = Mass.fresh(1, 2, torch.zeros(1, dtype=DOUBLE))
    mass = mass.after(z, -z @ precision, torch.zeros(1, dtype=DOUBLE))
    factor = mass.factor(torch.ones(2, dtype=DOUBLE), None)[0]
    white = torch.linalg.solve_triangular(factor, torch.linalg.cholesky(cov), upper=False)
    values = torch.linalg.svdvals(white)
    assert 0.8 < float(values.min()) < float(values.max()) < 1.25
    scaled = cov / torch.outer(cov.diagonal().sqrt(), cov.diagonal().sqrt())
    assert float(torch.linalg.cond(scaled)) ** 0.5 > 7


def test_before_anything_was_seen_a_dense_one_is_the_priors_too():
    case = make_case("bernoulli", "full", features=1, head="curved")
    found = HMC().preconditioner(case.target(), HMC().first_tuning(3, case.beta, 2))
    assert isinstance(found, DensePrecision)
    v = gaussian_noise(2, 3, 4, 2)
    torch.testing.assert_close(found.solve(v), v @ case.sigma)


class Line(nn.Module):
    """An intercept and a slope, through vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(nn.Linear(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.slow
def test_collinear_coordinates_mix_with_a_dense_matrix_and_not_with_a_diagonal(monkeypatch):
    model = fp.Composition(None, Line(), fp.likelihoods.Normal(0.09))
    x = torch.linspace(8, 14, 7).unsqueeze(1)
    clients = [(x, 2 + 0.5 * x[:, 0] + 0.3 * gaussian_noise(i, 7).float()) for i in range(3)]
    cohort = cohort_of(model, clients)
    prior = fp.priors.Normal(scale=1.0)
    target = Target(model.bind(model.initial_phi(), cohort.x, cohort), prior, prior.init(torch.zeros(2), 1.0))
    ids, key = torch.arange(3), Key(1, purpose="mass")

    def smallest_ess() -> float:
        z = target.prior.sample(target.beta, key.normal(ids, (4, 2)))
        tuning = HMC().first_tuning(3, z, 2)
        for part in range(30):
            trace = run(HMC(), target, z, tuning, 10, key.at(purpose=f"warm-{part}"), ids, adapt=True)
            z, tuning = trace.state.z, trace.tuning
        return worst(run(HMC(), target, z, tuning, 200, key.at(purpose="draws"), ids, adapt=False).draws)[1]

    dense = smallest_ess()
    monkeypatch.setattr(mass_module, "LARGEST_DENSE_MASS", 0)
    assert dense > 200
    assert dense > 4 * smallest_ess()
