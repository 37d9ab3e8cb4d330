"""How far below a local optimum theta is: against the exact optimum, in closed form and from draws."""

import math

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.evaluation.convergence import ToTheOptimum, directions_at_bounds, landing, small
from fedpop.evaluation.diagnostics import gradient_ratio
from fedpop.evaluation.information import gauge_directions, score_and_information
from fedpop.evaluation.louis import batches, louis, monte_carlo, zero_variance
from fedpop.evaluation.oracle import exact_optimum
from fedpop.evaluation.verdict import Distance, LossTrend, loss_trend, verdict_of
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.message import Channel
from fedpop.questions import Units
from tests.helpers import cohort_of, federation_of, generator, linear_model, population_data, ragged
from tests.tally import Tally

WIDE = torch.float64


def readme(rounds: int) -> fp.Population:
    """README's model."""
    rng = generator(0)
    shared = torch.randn(20, 2, generator=rng)
    clients = {}
    for i in range(100):
        x, z = torch.randn(5, 20, generator=rng), torch.randn(2, generator=rng)
        clients[f"client-{i:02d}"] = (x, x @ shared @ z + 0.3 * torch.randn(5, generator=rng))
    model = linear_model(20, 2, 0.09)
    return fp.FedSOUL(model, prior="normal").fit(clients, rounds=rounds, seed=0)


def gap(population: fp.Population) -> float:
    """What L-BFGS on all data at once still gains from the returned theta."""
    start = (population.published["phi"], population.published["beta"])
    best = exact_optimum(population.algorithm, population.federation, [start])
    return best.log_likelihood - population.log_likelihood().value


@pytest.mark.parametrize(("rounds", "rel"), [(60, 0.15), (300, 0.05)])
def test_nats_are_those_that_an_exact_optimiser_gains(rounds: int, rel: float) -> None:
    population = readme(rounds)
    verdict = population.diagnostics().theta.verdict
    assert isinstance(verdict, Distance)
    assert verdict.exact
    assert verdict.nats == pytest.approx(gap(population), rel=rel)
    assert verdict.converged == (verdict.nats < 0.05)


def at(population: fp.Population, phi: Tensor, beta: Tensor) -> fp.Population:
    published = {"phi": phi.float(), "beta": beta.float()}
    return fp.Population(population.algorithm, published, Key(0), population.federation)


def test_a_hundredth_of_a_nat_does_not_warn_however_well_draws_tell_it() -> None:
    """A step from the optimum in the steepest direction; its gradient is many Monte-Carlo errors long."""
    population = readme(60)
    start = (population.published["phi"], population.published["beta"])
    best = exact_optimum(population.algorithm, population.federation, [start])
    cohort = population.federation.cohort(torch.arange(100), population.device)
    _, info = score_and_information(population.algorithm.hierarchy, best.phi, best.beta, cohort)
    values, vectors = torch.linalg.eigh(info[40:, 40:])
    beta = best.beta + (2 * 0.01 / values[-1]).sqrt() * vectors[:, -1]
    near = at(population, best.phi, beta).diagnostics()
    assert near.theta.verdict.nats == pytest.approx(0.01, abs=0.003)
    assert near.theta.verdict.converged is True
    assert near.theta.beta_gradient > 5
    assert near.warnings == []


def test_a_gradient_within_its_noise_may_be_nats_short() -> None:
    """A flat direction: 0.4 of gradient over .01 of information is 8 nats, and less than the noise of the
    other directions' gradients."""
    g, p = generator(4), 60
    info = torch.full((p,), 100.0, dtype=WIDE)
    info[0] = 0.01
    batches = torch.randn(8, p, generator=g, dtype=WIDE) * info.sqrt() * 0.1
    batches = batches - batches.mean(0)
    batches[:, 0] += 0.4
    assert gradient_ratio(batches) < 1
    noise = torch.cov(batches.T) / 8
    told = landing(batches.mean(0), torch.diag(info), noise, torch.zeros(p, 0, dtype=WIDE)).distance
    assert told.nats == pytest.approx(8 - 0.5 * float((noise.diagonal() / info).sum()), rel=1e-9)
    assert told.converged is False


def test_a_saddle_has_not_converged() -> None:
    """Heads that agree on nothing, features at zero: no gradient at all, and no maximum."""
    model = linear_model(3, 2, 0.3)
    clients, _, _ = population_data(15, 6, 3, 2, 0.3)
    population = fp.FedSOUL(model, prior=fp.priors.Normal(scale=1.0)).fit(clients, rounds=1)
    there = at(population, 1e-4 * torch.ones(6), torch.zeros(3))
    verdict = there.diagnostics().theta.verdict
    assert verdict.upwards > 0
    assert verdict.converged is False
    assert "curves upwards" in verdict.words


# --- from draws ------------------------------------------------------------------------------------


def setting() -> tuple[fp.FedSOUL, Tensor, Tensor, Cohort]:
    clients, _, _ = population_data(25, 8, 3, 2, 0.3)
    method = fp.FedSOUL(linear_model(3, 2, 0.3), prior=fp.priors.Normal(scale=1.0))
    best = exact_optimum(
        method, federation_of(method.model, clients), [(method.model.initial_phi(), torch.zeros(3))]
    )
    return method, best.phi.float(), best.beta.float(), cohort_of(method.model, clients)


def correlated(method: fp.FedSOUL, phi: Tensor, beta: Tensor, cohort: Cohort, rho: float, n: int) -> Tensor:
    """Draws of chains with this autocorrelation from each exact posterior."""
    mean, cov = method.hierarchy.target_at(phi, beta, cohort).moments()
    root = torch.linalg.cholesky(cov)
    g, z = generator(5), []
    now = torch.randn(len(cohort), 4, mean.shape[1], generator=g)
    for _ in range(n):
        now = rho * now + math.sqrt(1 - rho**2) * torch.randn(now.shape, generator=g)
        z.append(now)
    return mean[:, None, None] + torch.stack(z, 2) @ root.mT.unsqueeze(1)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_draws_tell_the_same_distance_as_the_closed_form(shift: float) -> None:
    method, phi, beta, cohort = setting()
    beta = beta + torch.tensor([shift, 0.0, -shift])
    held = gauge_directions(method.hierarchy, phi, beta)
    score, info = score_and_information(method.hierarchy, phi, beta, cohort)
    exact = landing(score, info, torch.zeros_like(info), held).distance
    found = louis(method.hierarchy, phi, beta, cohort, correlated(method, phi, beta, cohort, 0.7, 250))
    told = landing(found.score, found.information, found.noise, held).distance
    assert told.nats == pytest.approx(exact.nats, abs=0.02 + 0.1 * exact.nats)
    assert told.error < 0.02 + 0.1 * exact.nats
    assert told.converged == exact.converged == (shift == 0)


def test_the_noise_of_the_score_is_subtracted() -> None:
    """Scores at a maximum, with the noise of few draws: s' I^-1 s / 2 alone is what the noise makes of it."""
    g, p = generator(0), 20
    half = torch.randn(p, p, generator=g, dtype=WIDE)
    info = half @ half.T + torch.eye(p, dtype=WIDE)
    noise = 0.1 * info
    root = torch.linalg.cholesky(noise)
    none = torch.zeros(p, 0, dtype=WIDE)
    told = [
        landing(root @ torch.randn(p, generator=g, dtype=WIDE), info, noise, none).distance
        for _ in range(400)
    ]
    raw = [
        landing(root @ torch.randn(p, generator=g, dtype=WIDE), info, 0 * noise, none).distance
        for _ in range(400)
    ]
    assert sum(d.nats for d in raw) / 400 == pytest.approx(0.5 * 20 * 0.1, rel=0.05)
    # half of chi-square(20) / 10 less its mean, where that is positive: sd sqrt(.5 * 20) / 10 = .316
    assert sum(d.nats for d in told) / 400 == pytest.approx(0.316 / math.sqrt(2 * math.pi), rel=0.25)
    assert not any(d.converged for d in told)  # an error of .3 nats certifies nothing
    assert sum(d.converged is None for d in told) > 300


def test_gradients_explain_all_of_a_quadratic_under_a_gaussian() -> None:
    g = generator(1)
    precision = torch.tensor([[2.0, 0.7], [0.7, 1.0]], dtype=WIDE)
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    z = torch.randn(200, 2, generator=g, dtype=WIDE) @ root.T
    values = torch.stack((z[:, 0] * z[:, 1], z[:, 0] + 3), dim=1)
    weight = zero_variance(z, -z @ precision)
    mean, noise = weight @ values, monte_carlo(batches(weight, z, -z @ precision, chains=2), values)
    exact = torch.tensor([float(torch.linalg.inv(precision)[0, 1]), 3.0], dtype=WIDE)
    torch.testing.assert_close(mean, exact, atol=1e-8, rtol=0)
    assert float(noise.abs().max()) < 1e-12


def test_where_gradients_explain_nothing_the_error_is_that_of_correlated_draws() -> None:
    """A fast cosine: over many repetitions the estimate's spread is what it says."""
    g, errors, told = generator(2), [], []
    for _ in range(200):
        z = torch.randn(4, 1, 1, generator=g, dtype=WIDE)
        chain = []
        for _ in range(200):
            z = 0.6 * z + 0.8 * torch.randn(4, 1, 1, generator=g, dtype=WIDE)
            chain.append(z)
        draws = torch.cat(chain, 1).flatten(0, 1)
        values = (4 * draws).cos()
        weight = zero_variance(draws, -draws)
        errors.append(float(weight @ values) - math.exp(-8))
        told.append(float(monte_carlo(batches(weight, draws, -draws, chains=4), values)))
    actual = sum(e * e for e in errors) / 200
    assert sum(told) / 200 == pytest.approx(actual, rel=0.35)


def test_a_prior_without_width_leaves_some_information_of_the_mean() -> None:
    """Almost all of the complete data's information is missing: b / sigma^2 less almost as much. An average
    over draws alone would be all noise."""
    method, phi, beta, cohort = setting()
    beta = torch.tensor([0.3, -0.2, math.log(0.01)])
    _, info = score_and_information(method.hierarchy, phi, beta, cohort)
    found = louis(method.hierarchy, phi, beta, cohort, correlated(method, phi, beta, cohort, 0.7, 50))
    assert float(info[6, 6]) < 1e-2 * len(cohort) / 0.01**2
    torch.testing.assert_close(found.information[6:8, 6:8], info[6:8, 6:8], rtol=0.02, atol=0.0)


def test_a_slope_on_a_plateau_is_not_an_optimum() -> None:
    """Nothing curves along it, so no distance can be told, but it gains at least this."""
    curvature, slope = torch.diag(torch.tensor([0.0, 1.0])).double(), torch.tensor([-48.0, 0.0]).double()
    found = landing(slope, curvature, torch.zeros(2, 2).double(), torch.zeros(2, 0).double()).distance
    assert found.nats == pytest.approx(0.5 * 48**2)
    assert found.converged is False
    rounding = landing(1e-6 * slope, curvature, torch.zeros(2, 2).double(), torch.zeros(2, 0).double())
    assert rounding.distance.converged


# --- bounds, fixed parameters, sizes -----------------------------------------------------------------


def test_a_scale_at_its_bound_is_not_held_against_theta() -> None:
    """Clients that are all alike: the scale would go to zero, and sits at its bound with a gradient."""
    same = ragged((6,))[0]
    prior = fp.priors.Normal(scale=0.3, bounds=(0.2, 5.0))
    # The exact engine leaves for a larger mean and a smaller phi, where no scale matters.
    population = fp.FedSOUL(linear_model(), prior=prior, engine="sampled").fit([same] * 6, rounds=60)
    hierarchy, known = population.algorithm.hierarchy, population.published
    question = ToTheOptimum(hierarchy)
    cohort = population.federation.cohort(torch.arange(6), population.device)
    score, _ = score_and_information(hierarchy, known["phi"], known["beta"], cohort)
    held = directions_at_bounds(hierarchy.prior, known["phi"].double(), known["beta"].double(), score, 1e6)
    assert held.shape == (9, 1)
    assert float(held[8, 0].abs()) == 1.0
    assert float(score[8]) < -0.2
    inside = {"phi": known["phi"], "beta": known["beta"] + torch.tensor([0.0, 0.0, 0.1])}
    free = directions_at_bounds(hierarchy.prior, inside["phi"].double(), inside["beta"].double(), score, 1e6)
    assert free.shape == (9, 0)
    held_out = population.ask(question).distance
    assert held_out.upwards == 0


def test_a_flat_direction_curves_upwards_only_where_that_would_gain_something() -> None:
    """Rounding bends a direction on which nothing depends; a saddle bends more, or has a slope along it."""
    none = torch.zeros((2, 2), dtype=torch.float64)
    diagonal = torch.ones(2, dtype=torch.float64)
    for share, slope, upwards in ((1 + 1e-5, 1e-8, 0), (1 + 1e-5, 0.1, 1), (1.01, 0.0, 1)):
        curvature = torch.diag(diagonal) + share * (1 - torch.eye(2, dtype=torch.float64))
        score = slope * torch.tensor([1.0, -1.0], dtype=torch.float64)  # along what curves upwards
        found = landing(score, curvature, none, none[:, :0]).distance
        assert found.upwards == upwards
        assert found.converged is (upwards == 0)


def test_phi_on_its_ball_may_not_leave_it() -> None:
    method, phi, beta, _ = setting()
    score = torch.cat((3 * phi, torch.zeros(3))).double()
    theta = (phi.double(), beta.double())
    assert directions_at_bounds(method.hierarchy.prior, *theta, score, float(phi.norm())).shape[1] == 1
    assert directions_at_bounds(method.hierarchy.prior, *theta, -score, float(phi.norm())).shape[1] == 0
    assert directions_at_bounds(method.hierarchy.prior, *theta, score, 10 * float(phi.norm())).shape[1] == 0


def test_a_hyperprior_is_part_of_the_objective() -> None:
    """A fixed theta, with and without: the score moves by its slope, the information by its curvature."""
    clients, _, _ = population_data(15, 6, 3, 2, 0.3)
    hyper = fp.priors.Hyperprior(phi_scale=0.7, mean_scale=0.5, log_scale=(0.2, 0.4))
    method = fp.FedSOUL(linear_model(3, 2, 0.3), hyperprior=hyper)
    cohort = cohort_of(method.model, clients)
    phi, beta = method.model.initial_phi(), torch.tensor([0.3, -0.2, 0.1])
    question = ToTheOptimum(method.hierarchy)
    units = Units(cohort, {}, dict, lambda split: cohort)
    tally = Tally(Channel(), Key(0))
    known = {"phi": phi, "beta": beta}
    tally.add(question.answer(known, units, Key(0)), cohort.units, torch.ones(15))
    told = question.finish(known, tally.total(15, ratio=False)).distance
    score, info = score_and_information(method.hierarchy, phi, beta, cohort)
    slope = torch.cat((-phi / 0.49, -beta[:2] / 0.25, (0.2 - beta[2:]) / 0.16)).double()
    bend = torch.tensor([1 / 0.49] * 6 + [1 / 0.25] * 2 + [1 / 0.16], dtype=WIDE)
    held = gauge_directions(method.hierarchy, phi, beta)
    by_hand = landing(score + slope, info + torch.diag(bend), torch.zeros_like(info), held).distance
    assert told.nats == pytest.approx(by_hand.nats, rel=1e-6)
    assert told.upwards == by_hand.upwards


def test_networks_and_energies_are_not_small() -> None:
    network = fp.Composition(nn.Sequential(nn.Linear(30, 30), nn.ReLU()), nn.Linear(30, 2), "categorical")
    for method, answer in (
        (fp.FedSOUL(network), False),
        (fp.FedSOUL(linear_model()), True),
        (fp.FedSOUL(linear_model(), prior=fp.priors.Energy(nn.Linear(2, 1))), False),
    ):
        phi = method.model.initial_phi()
        beta = method.hierarchy.prior.init(method.model.prior_centre(), 1.0, Key(0))
        assert small(method.hierarchy, phi, beta) is answer


# --- the proxy -----------------------------------------------------------------------------------------


def losses(fall: float, noise: float, rounds: int = 400) -> list[dict[str, float]]:
    g = generator(3)
    wobble = (noise * torch.randn(rounds, generator=g)).tolist()
    return [{"round": k + 1, "loss": 1 - fall * k + wobble[k]} for k in range(rounds)]


def test_a_falling_loss_is_told_with_its_error() -> None:
    """Between the halves of the last quarter, 48 rounds apart."""
    found = loss_trend(losses(1e-3, 0.01))
    assert found.fall == pytest.approx(0.048, abs=4 * found.error)
    assert found.error == pytest.approx(0.01 * math.sqrt(2 / 48), rel=0.8)
    assert found.converged is False
    assert loss_trend(losses(0.0, 0.004)).converged is True
    assert loss_trend(losses(-1e-3, 0.01)).converged is False
    assert "rose by" in loss_trend(losses(-1e-3, 0.01)).words
    assert loss_trend(losses(0.0, 0.02)).converged is None
    assert loss_trend(losses(1e-3, 0.01, 30)) is None
    assert found.gained == pytest.approx(0.4, abs=0.06)
    assert LossTrend(0.009, 0.0, gained=1.0).converged  # a hundredth of what there was to gain
    assert not LossTrend(0.009, 0.0, gained=0.1).converged
    assert not LossTrend(0.03, 0.0, gained=1e9).converged
    assert loss_trend(losses(1e-3, 0.01), start=380) is None


@pytest.mark.parametrize("verdict", [Distance(0.3, 0.1, 0, False), LossTrend(0.1, 0.01, 1.0)])
def test_verdicts_survive_a_file(verdict: Distance | LossTrend) -> None:
    assert verdict_of(verdict.plain()) == verdict
    assert verdict_of(None) is None
