"""How wide the prior should be for newcomers: against closed forms of what clients predict of each other."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as Law

import fedpop as fp
from fedpop.errors import CheckpointError, EstimateError, SettingsError
from fedpop.evaluation.newcomers import (
    UNCHANGED,
    WIDTH_FACTORS,
    DataShare,
    NewcomerWidth,
    best_of,
    for_newcomer,
    shuffled,
)
from fedpop.federation.cohort import Cohort
from fedpop.keys import PUBLIC, Key
from fedpop.population import Population
from fedpop.priors.base import widened
from fedpop.questions import Units
from tests.helpers import cohort_of, federation_of, generator, ragged

NOISE, TRUE_SD = 0.25, 0.5
PRIORS = (
    fp.priors.Normal(),
    fp.priors.Normal("diagonal"),
    fp.priors.Normal("full"),
    fp.priors.Mixture(2),
    fp.priors.Mixture(2, covariance="full"),
)


def drawn(
    b: int, n: int, seed: int = 0, mean: float = 1.0, noise: float = NOISE, sd: float = TRUE_SD
) -> list[tuple[Tensor, Tensor]]:
    """y = x z + noise with z ~ N(mean, sd^2)."""
    g, out = generator(seed), []
    for _ in range(b):
        x, z = torch.randn(n, 1, generator=g), mean + sd * torch.randn(1, generator=g)
        out.append((x, x[:, 0] * z + math.sqrt(noise) * torch.randn(n, generator=g)))
    return out


def population_of(
    clients: list[tuple[Tensor, Tensor]], sd: float, mean: float = 1.0, noise: float = NOISE
) -> Population:
    """With theta as told, whatever the data say."""
    method = fp.FedSOUL(fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(noise)))
    theta = {"phi": method.model.initial_phi(), "beta": torch.tensor([mean, math.log(sd)])}
    return Population(method, theta, Key(0), federation_of(method.model, clients))


def alone(x: Tensor, y: Tensor, sd: float, noise: float) -> tuple[float, float]:
    """What a client's data say of z by themselves, and the share W of z that they decide."""
    x, y = x[:, 0].double(), y.double()
    own = noise / float(x @ x)
    return float(x @ y / (x @ x)), sd**2 / (sd**2 + own)


def best_mean(clients: list[tuple[Tensor, Tensor]], sd: float, noise: float = NOISE) -> float:
    """mu of the largest likelihood at this scale: a weighted mean."""
    each = [alone(x, y, sd, noise) for x, y in clients]
    return sum(z * w for z, w in each) / sum(w for _, w in each)


def exact_scores(clients: list[tuple[Tensor, Tensor]], sd: float, noise: float = NOISE) -> Tensor:
    """Of every client: the sum of log p(y_j | x_j) under each factor, with the mean that fits the others."""
    rows = []
    for i, (x, y) in enumerate(clients):
        mean = best_mean(clients[:i] + clients[i + 1 :], sd, noise)
        x, y = x[:, 0].double(), y.double()
        each = [Law(x * mean, (x**2 * (f * sd) ** 2 + noise).sqrt()).log_prob(y).sum() for f in WIDTH_FACTORS]
        rows.append(torch.stack(each))
    return torch.stack(rows)


def summed(here: Population, question: NewcomerWidth) -> Tensor:
    """What the server has of a question about one number of examples: judged, scores, squared differences."""
    assert here.sites is not None
    told = here.sites.ask(question, here.published, here.key, here._final_plan, here._models_of)
    return told[1].plain["scores"].double()


# --- what clients answer ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "n", "noise", "sd"), [(6, 40, 0.25, 0.5), (20, 5, 4.0, 0.3), (30, 10, 1e-4, 1.0)]
)
def test_scores_without_examples_are_those_of_a_fit_without_the_client(
    b: int, n: int, noise: float, sd: float
) -> None:
    """Much data, little, and hardly any noise: gains over the prior as it is, per client, within five
    hundredths of a nat, where a mean that knows the client is ten times as far off in the second case."""
    clients = drawn(b, n, seed=5, noise=noise, sd=sd)
    here = population_of(clients, sd, best_mean(clients, sd, noise), noise)
    shares = here.ask(DataShare(here.algorithm.hierarchy))
    assert shares == pytest.approx(sum(alone(x, y, sd, noise)[1] for x, y in clients), rel=0.1, abs=0.02 * b)
    found = summed(here, NewcomerWidth(here.algorithm, (0,), "train", shares, b))
    exact = exact_scores(clients, sd, noise)
    assert float(found[0]) == b * n
    gains, theirs = found[1:7] - found[1 + UNCHANGED], exact.sum(0) - exact[:, UNCHANGED].sum()
    spread = (exact - exact[:, UNCHANGED, None]).square().sum(0)
    # Moments of 200 draws: a variance is a tenth off, which moves the log-density of a row by at most a
    # twentieth of how far it lies from its mean; of the widths that matter that is about one.
    near = theirs > -0.5 * b
    torch.testing.assert_close(gains[near] / b, theirs[near] / b, atol=0.05 * math.sqrt(n), rtol=0.1)
    torch.testing.assert_close(found[7:].sqrt()[near], spread.sqrt()[near], rtol=0.3, atol=0.1)
    assert best_of(gains, torch.zeros(6)) == pytest.approx(best_of(theirs, torch.zeros(6)), rel=0.25)


def test_a_mean_that_knows_the_client_calls_for_a_prior_that_is_too_narrow() -> None:
    """Thirty federations together whose clients know little, the mean fitted to each."""
    b, n, noise, sd = 20, 5, 4.0, 0.3
    knowing = without = exact = torch.zeros(6, dtype=torch.float64)
    for seed in range(30):
        clients = drawn(b, n, seed, noise=noise, sd=sd)
        here = population_of(clients, sd, best_mean(clients, sd, noise), noise)
        shares = here.ask(DataShare(here.algorithm.hierarchy))
        without = without + summed(here, NewcomerWidth(here.algorithm, (0,), "train", shares, b))[1:7]
        knowing = knowing + summed(here, NewcomerWidth(here.algorithm, (0,)))[1:7]
        exact = exact + exact_scores(clients, sd, noise).sum(0)
    none = torch.zeros(6)
    assert best_of(knowing, none) < 0.5
    assert best_of(without, none) == pytest.approx(best_of(exact, none), abs=0.15)
    assert best_of(exact, none) > 0.7


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_the_width_is_what_predicts_best(wrong: float) -> None:
    """A prior that is so many times as wide as the clients' z: it is put right, whatever the theta was."""
    clients = drawn(200, 12, seed=3)
    found = population_of(clients, wrong * TRUE_SD).for_newcomers((0, 2)).newcomers
    for count in (0, 2):
        expected = min(max(1 / wrong, WIDTH_FACTORS[0]), WIDTH_FACTORS[-1])
        assert found[count] == pytest.approx(expected, rel=0.25)


def test_few_clients_change_nothing_by_chance() -> None:
    """Three clients under the right prior: what the best factor gains is within its error, mostly."""
    kept = [
        population_of(drawn(3, 6, seed), TRUE_SD).for_newcomers((0,)).newcomers[0] == 1 for seed in range(20)
    ]
    assert sum(kept) >= 18


def test_clients_of_a_public_population_are_new_to_it(tmp_path: Path) -> None:
    """Its mean never saw them, so that nothing is taken away from it."""
    few, others = drawn(3, 8, seed=1), drawn(150, 8, seed=2, mean=1.0)
    here = population_of(few, TRUE_SD)
    again = fp.load(here.public().save(tmp_path), clients=others)
    assert again.for_newcomers((0,)).newcomers[0] == pytest.approx(1.0, abs=0.2)
    assert again.key == PUBLIC


def test_units_answer_alike_together_and_alone() -> None:
    clients = ragged((7, 1, 12, 0))
    model = fp.Composition(None, nn.Linear(3, 2), "categorical")
    clients = [(x, (y > 0).long()) for x, y in clients]
    method, cohort = fp.FedSOUL(model), cohort_of(model, clients)
    theta = {"phi": model.initial_phi(), "beta": torch.zeros(9)}
    question, key = NewcomerWidth(method, (0, 1, 3)), Key(2)

    def answered(of: Cohort) -> Tensor:
        units = Units(of, {}, lambda: {"draws": torch.zeros(len(of), 1, 2, 8)}, lambda _: of)
        return question.answer(theta, units, key).vectors["scores"].unflatten(1, (3, -1))

    together = answered(cohort)
    each = torch.cat([answered(one) for one in cohort.one_by_one()])
    torch.testing.assert_close(together, each, rtol=1e-4, atol=1e-4)
    # What each has to be judged on, with 0, 1 and 3 examples given.
    assert together[:, :, 0].tolist() == [[7, 6, 4], [1, 0, 0], [12, 11, 9], [0, 0, 0]]


def test_rows_are_given_in_random_order() -> None:
    """Clients' rows may lie class by class; every row is as likely to be given as any other."""
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    cohort = cohort_of(model, ragged((5,) * 200))
    order = shuffled(cohort, Key(0)).reshape(200, 5)
    assert bool((order.sort(1).values == torch.arange(5)).all())
    first = (order == 0).double().mean(0)
    assert float((first - 0.2).abs().max()) < 5 * math.sqrt(0.2 * 0.8 / 200)


def test_functions_of_the_user_never_see_a_client_without_rows() -> None:
    """One that looks at its first row, and clients with too few of them to be judged by."""

    def curve(phi: Any, z: Any, x: Any) -> Tensor:
        return z["h"] * torch.exp(-phi["rate"].exp() * (x["t"] - x["t"][0]))

    model = fp.CustomModel(outputs=curve, phi={"rate": 0.0}, z={"h": 1.0}, likelihood="normal")
    g = generator(0)
    clients = [
        ({"t": torch.linspace(0, 1, n)}, torch.randn(1, generator=g) + 0.1 * torch.randn(n, generator=g))
        for n in (4, 10, 10, 2, 10)
    ]
    here = fp.FedSOUL(model).fit(clients, rounds=3)
    assert set(here.for_newcomers((0, 4, 25)).newcomers) == {0, 4}


def test_what_cannot_be_counts_against_a_width_and_not_against_a_client() -> None:
    """Targets within 1 of z: a narrow prior about the wrong place makes some of them impossible."""

    def log_likelihood(phi: Any, z: Any, x: Any, y: Tensor) -> Tensor:
        return torch.where((y - z["h"]).abs() < 1, -math.log(2.0), -math.inf)

    model = fp.CustomModel(log_likelihood=log_likelihood, phi={}, z={"h": 0.0})
    g = generator(0)
    clients = [
        (torch.zeros(4, 1), 3 * torch.randn(1, generator=g) + torch.rand(4, generator=g)) for _ in range(40)
    ]
    method = fp.FedSOUL(model)
    theta = {"phi": model.initial_phi(), "beta": torch.tensor([0.0, math.log(3.0)])}
    here = Population(method, theta, PUBLIC, federation_of(model, clients))
    found = summed(here, NewcomerWidth(method, (0,)))
    assert float(found[0]) == 160  # all of them were heard
    assert best_of(found[1:7], found[7:].sqrt()) >= 1


def test_validation_examples_can_be_the_judges() -> None:
    """z is 1 in training and 3 in validation: only the wide prior expects the latter."""
    g = generator(1)
    clients = []
    for _ in range(30):
        x, v = torch.randn(6, 1, generator=g), torch.randn(6, 1, generator=g)
        clients.append(fp.Client(x, x[:, 0], validation=(v, 3 * v[:, 0])))
    method = fp.FedSOUL(fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(NOISE)))
    theta = {"phi": method.model.initial_phi(), "beta": torch.tensor([1.0, 0.0])}
    here = Population(method, theta, Key(0), method.model.checked(fp.Federation.of(clients)))
    assert here.for_newcomers((0,), split="train").newcomers[0] == WIDTH_FACTORS[0]
    found = here.for_newcomers((0,)).newcomers  # where there are any, they are
    assert found[0] > 1.2
    assert found == here.for_newcomers((0,), split="validation").newcomers
    for split, count in (("test", 0), ("validation", 7)):
        with pytest.raises(EstimateError, match=f"nobody has {count} training example.* a {split} example"):
            here.for_newcomers((count,), split=split)
    few = [replace(client, validation=None) if i else client for i, client in enumerate(clients)]
    one = replace(here, federation=method.model.checked(fp.Federation.of(few)), _personal={})
    assert one.for_newcomers((0,)).newcomers[0] == WIDTH_FACTORS[0]  # one client is no judge for all


def test_examples_that_a_network_may_know_by_heart_are_no_judges_without_a_word() -> None:
    clients = [(x, (y > 0).long()) for x, y in ragged((5, 6))]
    backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    method = fp.FedSOUL(fp.Composition(backbone, nn.Linear(8, 2), "categorical"))
    here = method.fit(clients, rounds=1)
    with pytest.warns(fp.errors.FedpopWarning, match="by heart.*validation"):
        here.for_newcomers((0,))
    assert here.for_newcomers((0,), split="train").newcomers  # who says so knows


# --- what becomes of it -----------------------------------------------------------------------


def test_newcomers_have_the_prior_that_was_chosen(tmp_path: Path) -> None:
    here = population_of(drawn(60, 8), 4 * TRUE_SD)
    new = here.for_newcomers((0, 3))
    assert here.newcomers == {}
    for one in (
        new,
        new.public(),
        fp.load(new.save(tmp_path / "whole")),
        fp.load(new.public().save(tmp_path)),
    ):
        assert one.newcomers == new.newcomers
        sd = float(one.new_client().posterior.sd)
        assert sd == pytest.approx(float(here.new_client().posterior.sd) * new.newcomers[0], rel=1e-4)
    x, y = torch.ones(1, 1), torch.zeros(1)
    factor = float(for_newcomer(new.algorithm.hierarchy.prior, new.published, 1)["beta"][1].exp()) / (
        4 * TRUE_SD
    )
    log = [math.log(new.newcomers[n]) for n in (0, 3)]
    assert math.log(factor) == pytest.approx(log[0] + 0.5 * (log[1] - log[0]), abs=1e-5)  # log 2 / log 4
    variance = 1 / (1 / NOISE + (factor * 4 * TRUE_SD) ** -2)
    assert float(new.new_client(x, y).posterior.sd) == pytest.approx(math.sqrt(variance), rel=0.1)
    many = for_newcomer(new.algorithm.hierarchy.prior, new.published, 1000)["beta"][1].exp() / (4 * TRUE_SD)
    assert float(many) == pytest.approx(new.newcomers[3], rel=1e-5)
    assert "prior's sd times" in str(new)
    assert "prior's sd times" not in str(here)


def test_clients_of_the_federation_are_as_they_were() -> None:
    here = population_of(drawn(10, 8), 4 * TRUE_SD)
    before, new = here.predict(3, [[1.0]]).mean, here.for_newcomers((0,))
    torch.testing.assert_close(new.predict(3, [[1.0]]).mean, before)
    torch.testing.assert_close(new.prior_sd, here.prior_sd)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_widened_multiplies_what_lies_about_the_centres(prior: fp.priors.Prior) -> None:
    beta = 0.3 * torch.randn(prior.size(3), generator=generator(1), dtype=torch.float64)
    wider = widened(prior, beta, 2.5)
    for was, now in zip(prior.parts(beta) or [], prior.parts(wider) or [], strict=True):
        torch.testing.assert_close(now.log_weight, was.log_weight)
        torch.testing.assert_close(now.normal.mu(now.beta), was.normal.mu(was.beta))
        torch.testing.assert_close(now.normal.sigma(now.beta), 2.5**2 * was.normal.sigma(was.beta))


def test_the_best_factor_lies_between_those_that_were_tried() -> None:
    at, none = torch.tensor(WIDTH_FACTORS).log2(), torch.zeros(len(WIDTH_FACTORS))
    assert math.log2(best_of(-(at + 1.25).square(), none)) == pytest.approx(-1.25)
    assert best_of(at, none) == WIDTH_FACTORS[-1]
    assert best_of(-at, none) == WIDTH_FACTORS[0]
    assert best_of(none, none) == 1
    assert best_of(-(at + 1.25).square(), none + 0.8) == 1  # a gain of 1.5, not twice its error
    assert best_of(-(at + 1.25).square(), none + 0.7) < 0.5


# --- what cannot be asked ---------------------------------------------------------------------


def test_who_cannot_be_asked_is_told() -> None:
    clients = drawn(5, 2)
    here = population_of(clients, 1.0)
    with pytest.raises(SettingsError, match="examples are numbers of them"):
        here.for_newcomers(())
    with pytest.raises(SettingsError, match="examples"):
        here.for_newcomers((-1,))
    with pytest.raises(EstimateError, match=r"nobody has 2 training example.* and another"):
        here.for_newcomers((2, 10))
    assert set(here.for_newcomers((0, 1, 10)).newcomers) == {0, 1}
    with pytest.raises(CheckpointError, match="clients="):
        here.public().for_newcomers()
    model = fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    with pytest.raises(SettingsError, match="FedAvg has no population prior"):
        fp.FedAvg(model).fit(clients, rounds=1).for_newcomers()
    energy = fp.FedSOUL(model, prior="energy").fit(clients, rounds=1)
    with pytest.raises(SettingsError, match="whose width can be changed"):
        energy.for_newcomers()
