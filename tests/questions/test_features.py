"""Where a prior's scale starts: from a few dozen rows of each client, in any units and from any origin."""

import json

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.methods.asking import describe_question, question_from_description
from fedpop.priors import Normal
from fedpop.questions import features, starts
from tests.helpers import asked, cohort_of, generator

Rows = list[tuple[Tensor, Tensor]]


def counted(sizes: tuple[int, ...] = (3, 7, 1, 5), seed: int = 3) -> Rows:
    """Counts over two covariates in double precision, the second far from zero."""
    g = generator(seed)
    xs = [torch.randn(n, 2, generator=g, dtype=torch.float64) + torch.tensor([0.0, 11.0]) for n in sizes]
    return [(x, torch.poisson(x[:, 0].exp(), generator=g).clamp(max=2)) for x in xs]


def model(outputs: int = 1, likelihood: str = "poisson") -> fp.Composition:
    return fp.Composition(None, nn.Linear(2, outputs).double(), likelihood)


def first(model: fp.Composition, prior: Normal, clients: Rows) -> tuple[Tensor, Tensors]:
    """beta at the start, and what the questions before it had found."""
    phi, known = model.initial_phi(), {}
    for question in starts.questions("auto", model, prior, phi):
        known |= asked(question, cohort_of(model, clients), known, Key(0))[0]
    return starts.theta(model, prior, phi, known, Key(0))[1], known


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_a_thinned_cohort_has_evenly_spaced_rows_of_everyone(most: int) -> None:
    sizes = (0, 1, 4, 5, 13, 64, 130)
    rows = [(torch.arange(n).double().unsqueeze(1).expand(n, 2), torch.ones(n)) for n in sizes]
    cohort = cohort_of(model(), rows).thinned(most)
    assert cohort.sizes.tolist() == [min(n, most) for n in sizes]
    assert isinstance(cohort.x, Tensor)
    for n, values in zip(sizes, cohort.x[:, 0].split(cohort.sizes.tolist()), strict=True):
        if n:
            gaps = values.diff()
            assert values[0] == 0
            assert n - values[-1] <= -(-n // most)
            assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_the_scale_is_that_of_a_few_dozen_rows_of_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEATURE_ROWS", 4)
    clients = counted((3, 9, 4))
    seen = torch.cat([clients[0][0], clients[1][0][[0, 3, 5, 7]], clients[2][0]])
    beta, known = first(model(), Normal(), clients)
    assert list(known) == ["scale"]
    assert float(beta[-1].exp()) == pytest.approx(float(seen.square().sum(1).mean().rsqrt()))


@pytest.mark.parametrize("outputs", [1, 3])
def test_outputs_have_variance_one_where_a_full_covariance_starts(outputs: int) -> None:
    """In proportion to the inverse of E f f', with a one for the bias; who has a single row is not heard."""
    clients, prior = counted(), Normal(covariance="full")
    kept = torch.cat([x for x, _ in clients if len(x) >= features.LEAST_EXAMPLES])
    f = torch.cat((kept, torch.ones(len(kept), 1)), 1)
    beta, known = first(model(outputs, "poisson" if outputs == 1 else "categorical"), prior, clients)
    sigma = prior.sigma(beta)
    assert sigma.shape == (3 * outputs, 3 * outputs)
    one = torch.linalg.inv(f.mT @ f / len(f)) / 3
    torch.testing.assert_close(sigma, torch.block_diag(*[one] * outputs), rtol=1e-3, atol=1e-4)
    variance = torch.einsum("ni,ij,nj->n", f, sigma[:3, :3], f).mean()
    assert float(variance) == pytest.approx(1.0, rel=1e-3)
    assert known["shape"].shape == (3, 3)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_units_and_origins_of_inputs_do_not_change_where_a_prior_starts(covariance: str) -> None:
    """z'f is the same function whatever x is counted in; for a full covariance also from where."""
    prior, clients, unit = Normal(covariance=covariance), counted(), torch.tensor([1e4, 1e-3]).double()
    origin = torch.tensor([3.0, -11.0]).double() if covariance == "full" else torch.zeros(2).double()
    other = [((x + origin) * unit, y) for x, y in clients]
    back = torch.diag(torch.cat((unit, torch.ones(1).double())))  # z of the one from z of the other
    back[2, :2] = origin * unit
    here, there = (prior.sigma(first(model(), prior, c)[0]) for c in (clients, other))
    torch.testing.assert_close(back @ there @ back.mT, here, rtol=2e-3, atol=2e-3)


def test_all_levels_of_a_category_beside_a_bias_leave_one_direction_as_wide_as_the_others() -> None:
    """No features lie along it: an inverse would be infinitely wide there, and EM runs away."""
    g = generator(0)
    levels = [nn.functional.one_hot(torch.randint(2, (6,), generator=g), 2).double() for _ in range(5)]
    clients = [(x, torch.ones(6)) for x in levels]
    prior = Normal(covariance="full")
    beta, _ = first(model(), prior, clients)
    assert float(torch.linalg.svdvals(prior.factor(beta)).max()) < 2.0
    f = torch.cat((torch.cat(levels), torch.ones(30, 1)), 1)
    outputs = torch.einsum("ni,ij,nj->n", f, prior.sigma(beta), f)
    assert float(outputs.mean()) == pytest.approx(2 / 3, rel=1e-6)  # two of three directions have features


def test_a_diagonal_covariance_asks_for_squares_alone() -> None:
    """Of 784 pixels a whole matrix would be five megabytes from everyone."""
    for covariance, numbers in (("diagonal", 3 + 1), ("full", 9 + 1)):
        (question,) = starts.questions("auto", model(), Normal(covariance=covariance), model().initial_phi())
        cohort = cohort_of(model(), counted())
        _, done = asked(question, cohort, {}, Key(0))
        assert done.total.plain["moments"].shape == (numbers,)
    (question,) = starts.questions("auto", model(), fp.priors.Mixture(2, "full"), model().initial_phi())
    assert not question.whole


def test_a_feature_that_is_always_zero_starts_no_wider_than_the_others() -> None:
    clients = [(x * torch.tensor([1.0, 0.0]), y) for x, y in counted()]
    prior = Normal(covariance="full")
    sd = prior.sd(first(model(), prior, clients)[0])
    assert float(sd[1]) <= float(sd.max()) <= 1.0


def test_features_that_are_learned_start_with_one_scale() -> None:
    """A unit that is dead at first must not start with a wide weight: it may come to life."""
    network = fp.Composition(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), nn.Linear(4, 1), "poisson")
    asked_for = starts.questions("auto", network, Normal(covariance="full"), network.initial_phi())
    assert [q.name for q in asked_for] == ["feature scale"]


def test_without_anyone_heard_the_start_is_the_settings_own() -> None:
    clients = [(torch.randn(1, 2, generator=generator(0), dtype=torch.float64), torch.ones(1))] * 3
    beta, known = first(model(), prior := Normal(covariance="full"), clients)
    assert known == {}
    torch.testing.assert_close(prior.sigma(beta), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("prior", [Normal("full"), Normal("diagonal"), Normal(), Normal(bounds=(0.1, 2.0))])
def test_the_question_is_the_same_at_a_site(prior: Normal) -> None:
    """Described in plain values, and made again with the site's method."""
    method = fp.FedSOUL(model(), prior=prior)
    (question,) = starts.questions("auto", method.model, prior, method.model.initial_phi())
    description, sent = describe_question(question, {})
    again = question_from_description(json.loads(json.dumps(description)), sent, method)
    cohort = cohort_of(method.model, counted())
    here, there = (asked(q, cohort, {}, Key(0))[0] for q in (question, again))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[n], there[n]) for n in here)
