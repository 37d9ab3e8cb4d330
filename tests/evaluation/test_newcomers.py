"""How wide the prior should be for newcomers: against closed forms of what clients predict of each other."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as Law

import fedpop as fp
from fedpop.errors import CheckpointError, EstimateError, SettingsError
from fedpop.evaluation.newcomers import FACTORS, NewcomerWidth, best_of, for_newcomer, shuffled
from fedpop.keys import Key
from fedpop.population import Population
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


def drawn(b: int, n: int, seed: int = 0, mean: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """y = x z + noise with z ~ N(mean, TRUE_SD^2)."""
    g, out = generator(seed), []
    for _ in range(b):
        x, z = torch.randn(n, 1, generator=g), mean + TRUE_SD * torch.randn(1, generator=g)
        out.append((x, x[:, 0] * z + math.sqrt(NOISE) * torch.randn(n, generator=g)))
    return out


def population_of(clients: list[tuple[Tensor, Tensor]], sd: float, mean: float = 1.0) -> Population:
    """With theta as told, whatever the data say."""
    method = fp.FedSOUL(fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(NOISE)))
    theta = {"phi": method.model.initial_phi(), "beta": torch.tensor([mean, math.log(sd)])}
    return Population(method, theta, Key(0), federation_of(method.model, clients))


def exact_scores(clients: list[tuple[Tensor, Tensor]], sd: float, mean: float) -> Tensor:
    """Of every client: the sum of log p(y_j | x_j) under each factor and a prior that does not know it."""
    rows = []
    for x, y in clients:
        x, y = x[:, 0].double(), y.double()
        own = (float(x @ y) / NOISE + mean / sd**2) / (float(x @ x) / NOISE + sd**-2)
        without = mean - (own - mean) / (len(clients) - 1)
        each = [Law(x * without, (x**2 * (f * sd) ** 2 + NOISE).sqrt()).log_prob(y).sum() for f in FACTORS]
        rows.append(torch.stack(each))
    return torch.stack(rows)


# --- what clients answer ----------------------------------------------------------------------


def test_scores_without_examples_are_those_of_a_prior_that_does_not_know_the_client() -> None:
    """200 draws for each: a mean of densities p has a relative variance of (E p^2 / (E p)^2 - 1) / 200,
    below .03 here; 40 examples of a client use the same draws, so errors add up within it."""
    clients, sd = drawn(6, 40), 1.0
    here = population_of(clients, sd)
    found = here.sites.ask(  # type: ignore[union-attr]
        question := NewcomerWidth(here.algorithm, (0,), len(clients)),
        here.published,
        here.key,
        here._final_plan,
        here._models_of,
    )[1].total.plain["scores"]
    assert question.split == "train"
    assert float(found[0]) == 6 * 40
    exact = exact_scores(clients, sd, 1.0)
    each = found[1:].double() / 240
    torch.testing.assert_close(each, exact.sum(0) / 240, atol=0.03, rtol=0)
    # A mean that knows the client would be told from one that does not.
    knowing = torch.stack(
        [
            Law(x[:, 0].double(), (x[:, 0].double() ** 2 * (f * sd) ** 2 + NOISE).sqrt()).log_prob(y).mean()
            for f in FACTORS[:1]
            for x, y in clients
        ]
    ).mean()
    assert abs(float(exact[:, 0].sum() / 240 - knowing)) > 0.06  # twice the tolerance


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_the_width_is_what_predicts_best(wrong: float) -> None:
    """A prior that is so many times as wide as the clients' z: it is put right, whatever the theta was."""
    clients = drawn(200, 12, seed=3)
    here = population_of(clients, wrong * TRUE_SD)
    found = here.for_newcomers((0, 2)).newcomers
    best = FACTORS[int(exact_scores(clients, wrong * TRUE_SD, 1.0).sum(0).argmax())]
    assert found[0] == pytest.approx(best, rel=0.45)  # between the factors that were tried
    for count in (0, 2):
        expected = min(max(1 / wrong, FACTORS[0]), FACTORS[-1])
        assert found[count] == pytest.approx(expected, rel=0.35)


def test_units_answer_alike_together_and_alone() -> None:
    clients = ragged((7, 1, 12, 0))
    model = fp.Composition(None, nn.Linear(3, 2), "categorical")
    clients = [(x, (y > 0).long()) for x, y in clients]
    method, cohort = fp.FedSOUL(model), cohort_of(model, clients)
    theta = {"phi": model.initial_phi(), "beta": torch.zeros(9)}
    question, key = NewcomerWidth(method, (0, 1, 3), 4), Key(2)

    def units(of: fp.federation.cohort.Cohort) -> Units:  # type: ignore[name-defined]
        personal = {"draws": torch.zeros(len(of), 1, 1, 8)}
        return Units(of, {}, lambda: personal, lambda _: of)

    together = question.answer(theta, units(cohort), key).vectors["scores"]
    alone = [question.answer(theta, units(one), key).vectors["scores"] for one in cohort.one_by_one()]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    per = 1 + len(FACTORS)
    judged = together[:, ::per]  # what each has to be judged on, with 0, 1 and 3 examples given
    assert judged.tolist() == [[7, 6, 4], [1, 0, 0], [12, 11, 9], [0, 0, 0]]


def test_rows_are_given_in_random_order() -> None:
    """Clients' rows may lie class by class; every row is as likely to be given as any other."""
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    cohort = cohort_of(model, ragged((5,) * 200))
    order = shuffled(cohort, Key(0)).reshape(200, 5)
    assert bool((order.sort(1).values == torch.arange(5)).all())
    first = (order == 0).double().mean(0)
    assert float((first - 0.2).abs().max()) < 5 * math.sqrt(0.2 * 0.8 / 200)


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
    assert here.for_newcomers((0,), split="train").newcomers[0] == FACTORS[0]
    found = here.for_newcomers((0,)).newcomers  # where there are any, they are
    assert found[0] > 1.2
    assert found == here.for_newcomers((0,), split="validation").newcomers
    with pytest.raises(EstimateError, match="nobody has test examples"):
        here.for_newcomers((0,), split="test")


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
    wider = prior.widened(beta, 2.5)
    for was, now in zip(prior.parts(beta) or [], prior.parts(wider) or [], strict=True):
        torch.testing.assert_close(now.log_weight, was.log_weight)
        torch.testing.assert_close(now.normal.mu(now.beta), was.normal.mu(was.beta))
        torch.testing.assert_close(now.normal.sigma(now.beta), 2.5**2 * was.normal.sigma(was.beta))


def test_the_best_factor_lies_between_those_that_were_tried() -> None:
    at = torch.tensor(FACTORS).log2()
    assert math.log2(best_of(-(at + 1.25).square())) == pytest.approx(-1.25)
    assert best_of(at) == FACTORS[-1]
    assert best_of(-at) == FACTORS[0]
    assert best_of(torch.zeros(len(FACTORS))) == FACTORS[0]


# --- what cannot be asked ---------------------------------------------------------------------


def test_who_cannot_be_asked_is_told() -> None:
    clients = drawn(5, 2)
    here = population_of(clients, 1.0)
    with pytest.raises(SettingsError, match="examples are numbers of them"):
        here.for_newcomers(())
    with pytest.raises(SettingsError, match="examples"):
        here.for_newcomers((-1,))
    with pytest.raises(EstimateError, match="more than 2 example"):
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
