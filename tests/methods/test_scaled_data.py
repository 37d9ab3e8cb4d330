"""Units of the user's data do not matter: the same numbers come out, in other units."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import FedpopWarning
from tests.helpers import generator

Rows = dict[str, tuple[Tensor, Tensor]]


def lines(units: int = 12, rows: int = 8) -> Rows:
    """Intercepts about 250 and slopes about 10 that differ between clients, as reaction times do."""
    g = generator(4)
    out = {}
    for i in range(units):
        x, e = torch.arange(rows, dtype=torch.float32).unsqueeze(1), torch.randn(2, generator=g)
        y = 250 + 24 * e[0] + (10 + 6 * e[1]) * x[:, 0] + 25 * torch.randn(rows, generator=g)
        out[f"subject-{i}"] = (x, y)
    return out


def scaled(clients: Rows, of_x: float, of_y: float) -> Rows:
    return {name: (x * of_x, y * of_y) for name, (x, y) in clients.items()}


def fitted(clients: Rows, engine: str, rounds: int | None = None) -> fp.Population:
    model = fp.Composition(None, nn.Linear(1, 1), "normal")
    prior = fp.priors.Normal(covariance="full")
    return fp.FedSOUL(model, prior=prior, engine=engine).fit(clients, rounds=rounds, progress=False)


@pytest.mark.parametrize(("of_x", "of_y"), [(1.0, 1e3), (1.0, 1e6), (1.0, 1e-6), (1e4, 1.0), (1e-4, 1e4)])
@pytest.mark.parametrize(("engine", "rounds"), [("exact", None), ("sampled", 40)])
def test_a_run_in_other_units_is_the_same_run(
    engine: str, rounds: int | None, of_x: float, of_y: float
) -> None:
    clients = lines()
    here = fitted(clients, engine, rounds)
    there = fitted(scaled(clients, of_x, of_y), engine, rounds)
    examples = sum(len(y) for _, y in clients.values())
    nats = there.log_likelihood().value + examples * math.log(of_y)
    assert nats == pytest.approx(here.log_likelihood().value, abs=1e-2)
    unit = torch.tensor([of_y / of_x, of_y])
    torch.testing.assert_close(there.prior_sd / unit, here.prior_sd, rtol=1e-2, atol=0)
    torch.testing.assert_close(there.prior_mean / unit, here.prior_mean, rtol=1e-2, atol=0)
    assert there.at_bound == []


def test_fixed_effects_in_large_units_are_inside_their_ball() -> None:
    """A million times where phi starts, not a million: targets may be counted in millionths."""
    g = generator(2)
    clients = []
    for _ in range(8):
        x, z = torch.randn(6, 1, generator=g), torch.randn(1, generator=g)
        y = 1e8 * (3 + z - 2 * x[:, 0] + 0.1 * torch.randn(6, generator=g))
        clients.append(({"fixed": x, "random": torch.ones(6, 1)}, y))
    slope, intercept = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    population = fp.FedSOUL(fp.Composition(None, intercept, "normal", fixed=slope)).fit(
        clients, progress=False
    )
    assert population.at_bound == []
    assert float(population.phi["fixed.weight"]) == pytest.approx(-2e8, rel=0.1)
    assert population.convergence is not None
    assert population.convergence.converged


@pytest.mark.parametrize(("of_x", "of_y"), [(1.0, 1e4), (1.0, 1e-6), (1e-4, 1.0)])
def test_theta_is_drawn_in_the_units_of_the_data(of_x: float, of_y: float) -> None:
    """Which directions data determine is judged in units of each parameter's own information."""
    clients, x = lines(), torch.tensor([[3.0]])
    here, there = fitted(clients, "exact"), fitted(scaled(clients, of_x, of_y), "exact")
    low, high = here.predict("subject-0", x, theta_uncertainty=True).interval(0.9)
    wide = there.predict("subject-0", x * of_x, theta_uncertainty=True).interval(0.9)
    torch.testing.assert_close(torch.stack(wide) / of_y, torch.stack((low, high)), rtol=0.1, atol=0)


def test_a_mixture_starts_about_the_data() -> None:
    """Two kinds of clients, at 270 and 330: rescaled about zero one component began at 7,000 and died."""
    g = generator(0)
    clients = []
    for i in range(20):
        z = 5 * torch.randn(1, generator=g) + (330 if i % 2 else 270)
        clients.append((torch.ones(6, 1), z + 5 * torch.randn(6, generator=g)))
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "normal")
    population = fp.FedSOUL(model, prior=fp.priors.Mixture(2)).fit(clients, rounds=10, progress=False)
    parts = population.algorithm.hierarchy.prior.parts(population.published["beta"])
    assert all(abs(float(p.normal.mu(p.beta)) - 300) < 50 for p in parts)
    assert population.at_bound == []


@pytest.mark.parametrize(("family", "seed"), [("poisson", 0), ("bernoulli", 0)])
def test_all_levels_of_a_category_beside_a_bias_are_fitted(family: str, seed: int) -> None:
    g, clients = generator(seed), []
    for _ in range(10):
        level, e = torch.randint(3, (12,), generator=g), torch.randn(3, generator=g)
        eta = 0.3 + 0.6 * e[0] + 0.5 * e[1] * (level - 1)
        y = torch.poisson(eta.exp(), generator=g) if family == "poisson" else (eta > 0).float()
        clients.append((nn.functional.one_hot(level, 3).float(), y))
    model, prior = fp.Composition(None, nn.Linear(3, 1), family), fp.priors.Normal(covariance="full")
    population = fp.FedSOUL(model, prior=prior).fit(clients, rounds=10, progress=False)
    assert float(population.prior_mean.norm()) < 30
    assert math.isfinite(population.log_likelihood().value)


def test_the_likelihood_of_a_covariate_far_from_zero_is_that_of_a_centred_one() -> None:
    """Air pressure in pascal: an intercept whose variance is a million times the slope's."""
    g, far, near = generator(0), [], []
    for _ in range(8):
        a, e = torch.randn(12, 1, generator=g), torch.randn(2, generator=g)
        y = torch.bernoulli(torch.sigmoid(0.3 + 0.6 * e[0] + (0.5 + 0.5 * e[1]) * a[:, 0]), generator=g)
        near.append((a, y))
        far.append((10_000 + 500 * a, y))
    model, prior = fp.Composition(None, nn.Linear(1, 1), "bernoulli"), fp.priors.Normal(covariance="full")
    here, there = (
        fp.FedSOUL(model, prior=prior).fit(c, rounds=20, progress=False).log_likelihood() for c in (near, far)
    )
    assert there.value == pytest.approx(here.value, abs=0.2 + 3 * math.hypot(here.error, there.error))


def test_bounds_that_were_given_are_kept_and_others_go_with_the_start() -> None:
    beta = torch.tensor([3.0, -4.0, math.log(0.5)])
    given = fp.priors.Normal(bounds=(0.1, 2.0), ball=7.0).first_sets(beta)
    assert given.tolist() == pytest.approx([0.1, 2.0, 7.0])
    assert fp.priors.Normal().first_sets(beta).tolist() == pytest.approx([0.5e-3, 0.5e3, 0.5e6])
    far = torch.tensor([3e9, -4e9, math.log(0.5)])
    assert float(fp.priors.Normal().first_sets(far)[2]) == pytest.approx(5e12)
    mixed = fp.priors.Mixture(2)
    two = torch.cat((torch.log(torch.tensor([0.5, 0.5])), beta, beta + math.log(4)))
    assert mixed.first_sets(two)[:2].tolist() == pytest.approx([0.5e-3, 2e3])


def test_classes_over_a_covariate_far_from_zero_end_where_a_centred_one_does() -> None:
    """Random intercepts and slopes of a logit, x from 8 to 14: from a spread in proportion to the identity
    the intercepts' would grow from a tenth to two over thousands of rounds."""
    g = generator(1)
    raw: Rows = {}
    for i in range(30):
        x, e = 8 + 6 * torch.rand(20, 1, generator=g), torch.randn(2, generator=g)
        eta = 0.3 + 0.5 * e[0] + 0.4 * e[1] * (x[:, 0] - 11)
        raw[f"site-{i}"] = (x, torch.bernoulli(torch.sigmoid(eta), generator=g))
    centred = {name: (x - 11, y) for name, (x, y) in raw.items()}
    ends = []
    for clients in (raw, centred):
        model = fp.Composition(None, nn.Linear(1, 1), "bernoulli")
        prior = fp.priors.Normal(covariance="full")
        ends.append(fp.FedSOUL(model, prior=prior).fit(clients, rounds=40, progress=False))
    here, there = (p.log_likelihood() for p in ends)
    assert here.value == pytest.approx(there.value, abs=0.1 + 3 * math.hypot(here.error, there.error))
    torch.testing.assert_close(ends[0].prior_sd[0], ends[1].prior_sd[0], rtol=0.1, atol=0)
    assert float(ends[0].prior_sd[1]) > 8 * float(ends[1].prior_sd[0])


@pytest.mark.parametrize("covariance", ["isotropic", "full"])
def test_a_scale_that_was_given_in_other_units_is_left_or_said_to_be_wrong(covariance: str) -> None:
    """Told to start 20,000 times too small: at the optimum, or one line that says which setting to change."""
    g = torch.Generator().manual_seed(0)
    x, clients = torch.arange(10.0)[:, None], []
    for _ in range(18):
        z = torch.tensor([10.0, 250.0]) + torch.tensor([6.0, 25.0]) * torch.randn(2, generator=g)
        clients.append((x, x[:, 0] * z[0] + z[1] + 25 * torch.randn(10, generator=g)))
    model = fp.Composition(None, nn.Linear(1, 1), "normal")
    best = (
        fp.FedSOUL(model, prior=fp.priors.Normal(covariance=covariance)).fit(clients).log_likelihood().value
    )
    prior = fp.priors.Normal(covariance=covariance, scale=1e-3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FedpopWarning)
        found = fp.FedSOUL(model, prior=prior).fit(clients).log_likelihood().value
    right = abs(found - best) < 1e-3
    assert right != any("leave out the prior's scale" in str(w.message) for w in told)
    assert right or covariance == "full"


def test_a_scale_that_is_held_back_by_its_bound_is_a_warning() -> None:
    g = torch.Generator().manual_seed(1)
    clients = [
        (torch.ones(8, 1), 5 * torch.randn(1, generator=g) + torch.randn(8, generator=g)) for _ in range(12)
    ]
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), "normal")
    with pytest.warns(FedpopWarning, match=r"scale is at its upper bound, 0.5; leave bounds out, or raise"):
        fp.FedSOUL(model, prior=fp.priors.Normal(bounds=(0.01, 0.5))).fit(clients)
