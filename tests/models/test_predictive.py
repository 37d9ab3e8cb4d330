"""The predictive distribution as the mixture that it is, against torch's own mixture."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, distributions, nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key
from fedpop.models.likelihoods import Likelihood
from fedpop.models.predictive import Predictive
from tests.helpers import generator, linear_model, ragged

LEVELS = (0.5, 0.8, 0.9, 0.99)


def predictive(family: Likelihood, eta: Tensor, plug_in: bool = False) -> Predictive:
    return Predictive(eta, family, {}, Key(0), plug_in)


def normal(
    draws: int = 300, spread: float = 1.5, n: int = 4, dtype: torch.dtype = torch.float64
) -> Predictive:
    eta = spread * torch.randn(draws, n, 1, generator=generator(0), dtype=dtype)
    return predictive(fp.likelihoods.Normal(0.2), eta)


def mixture(p: Predictive) -> distributions.MixtureSameFamily:
    """The same law, by torch."""
    eta = p.eta[..., 0].T
    weights = distributions.Categorical(torch.ones_like(eta))
    family = distributions.Poisson(eta.exp()) if p.likelihood.name == "poisson" else None
    return distributions.MixtureSameFamily(weights, family or distributions.Normal(eta, 0.2**0.5))


def counts() -> Predictive:
    eta = 1.0 + 0.5 * torch.randn(200, 3, 1, generator=generator(1), dtype=torch.float64)
    return predictive(fp.likelihoods.Poisson(), eta)


@pytest.mark.parametrize("p", [normal(), counts()], ids=["normal", "poisson"])
def test_mean_sd_and_density_are_those_of_the_mixture(p: Predictive) -> None:
    law = mixture(p)
    torch.testing.assert_close(p.mean, law.mean)
    torch.testing.assert_close(p.sd, law.variance.sqrt())
    y = torch.arange(1.0, p.eta.shape[1] + 1, dtype=torch.float64)
    torch.testing.assert_close(p.log_prob(y), law.log_prob(y))


def test_a_noise_level_for_each_draw() -> None:
    """Where theta is drawn too, so is the residual variance: everything follows that mixture."""
    eta = torch.randn(300, 4, 1, generator=generator(0), dtype=torch.float64)
    log_variance = torch.randn(300, generator=generator(1), dtype=torch.float64)
    params = {"log_variance": log_variance[:, None, None]}
    p = Predictive(eta, fp.likelihoods.Normal(), params, Key(0), plug_in=False)
    parts = distributions.Normal(eta[..., 0].T, (0.5 * log_variance).exp().expand(4, -1))
    law = distributions.MixtureSameFamily(distributions.Categorical(torch.ones_like(parts.loc)), parts)
    y = torch.arange(4.0, dtype=torch.float64)
    torch.testing.assert_close(p.sd, law.variance.sqrt())
    torch.testing.assert_close(p.log_prob(y), law.log_prob(y))
    torch.testing.assert_close(p.cdf(y), law.cdf(y))
    low, high = p.interval(0.9)
    torch.testing.assert_close(law.cdf(low), torch.full((4,), 0.05, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(law.cdf(high), torch.full((4,), 0.95, dtype=torch.float64), atol=1e-8, rtol=0)
    exact = (0.5 * (2 * math.pi * math.e * log_variance.exp()).log()).mean()
    # One y per draw: its log-density has variance 1/2 around minus the entropy of its own component.
    assert p.entropy.aleatoric.tolist() == pytest.approx([float(exact)] * 4, abs=5 * (0.5 / 300) ** 0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_normal_interval_has_the_exact_tails(level: float) -> None:
    p = normal()
    low, high = p.interval(level)
    tail = torch.full((4,), (1 - level) / 2, dtype=torch.float64)
    torch.testing.assert_close(mixture(p).cdf(low), tail, atol=1e-8, rtol=0)
    torch.testing.assert_close(mixture(p).cdf(high), 1 - tail, atol=1e-8, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_normal_interval_against_brute_force(level: float) -> None:
    """Draws of y from the mixture fall inside at the stated rate: five binomial standard errors."""
    p = normal(n=1)
    g, n = generator(2), 100_000
    component = torch.randint(300, (n,), generator=g)
    y = p.eta[component, 0, 0] + 0.2**0.5 * torch.randn(n, generator=g, dtype=torch.float64)
    low, high = p.interval(level)
    inside = float(((y > low) & (y < high)).double().mean())
    assert abs(inside - level) < 5 * (level * (1 - level) / n) ** 0.5


@pytest.mark.parametrize("level", LEVELS)
def test_poisson_interval_is_the_smallest_count_with_that_much_below(level: float) -> None:
    p = counts()
    mass = lambda c: p.likelihood.cdf(p.eta, c.unsqueeze(1), {}).mean(0)[:, 0]  # noqa: E731
    low, high = p.interval(level)
    for quantile, at in ((low, (1 - level) / 2), (high, 1 - (1 - level) / 2)):
        assert bool((mass(quantile) >= at).all())
        assert bool((mass(quantile - 1) < at).all())


def test_intervals_are_nested() -> None:
    p = normal()
    ends = [p.interval(level) for level in LEVELS]
    for (low, high), (wider_low, wider_high) in pairwise(ends):
        assert bool((wider_low < low).all())
        assert bool((wider_high > high).all())


def test_single_precision_intervals() -> None:
    exact, rounded = normal(), normal(dtype=torch.float32)
    same = predictive(rounded.likelihood, exact.eta.float())
    torch.testing.assert_close(same.interval(0.9)[0].double(), exact.interval(0.9)[0], atol=1e-4, rtol=0)


def test_the_interval_of_the_mean_leaves_the_noise_out() -> None:
    p = normal()
    low, high = p.interval(0.9, of="mean")
    ends = torch.quantile(p.eta[..., 0], torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
    torch.testing.assert_close(torch.stack((low, high)), ends)
    assert bool((high - low < p.interval(0.9)[1] - p.interval(0.9)[0]).all())


def test_cdf_and_coverage_agree_with_the_interval() -> None:
    p = normal()
    y = torch.tensor([-3.0, -0.5, 0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(p.cdf(y), mixture(p).cdf(y))
    low, high = p.interval(0.8)
    assert torch.equal(p.covers(y, 0.8), (y >= low) & (y <= high))
    with pytest.raises(SettingsError, match="no cdf"):
        predictive(fp.likelihoods.Categorical(), torch.zeros(1, 2, 3)).cdf(y[:2])


def test_class_probabilities_average_over_draws() -> None:
    eta = torch.randn(50, 4, 3, generator=generator(3), dtype=torch.float64)
    p = predictive(fp.likelihoods.Categorical(), eta)
    torch.testing.assert_close(p.probs, torch.softmax(eta, -1).mean(0))
    torch.testing.assert_close(p.mean, p.probs)
    torch.testing.assert_close(p.log_prob(torch.tensor([0, 1, 2, 0])), p.probs[range(4), [0, 1, 2, 0]].log())
    yes = predictive(fp.likelihoods.Bernoulli(), eta[..., :1])
    torch.testing.assert_close(yes.probs[:, 1], torch.sigmoid(eta[..., 0]).mean(0))
    torch.testing.assert_close(yes.probs.sum(1), torch.ones(4, dtype=torch.float64))
    low, high = p.interval(0.9)
    assert low.shape == (4, 3)
    assert bool((low <= p.probs).all() & (p.probs <= high).all())


# --- entropy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [fp.likelihoods.Categorical(), fp.likelihoods.Bernoulli()])
def test_entropy_of_classes(family: Likelihood) -> None:
    outputs = 3 if family.name == "categorical" else 1
    eta = 2 * torch.randn(60, 5, outputs, generator=generator(4), dtype=torch.float64)
    each = (
        distributions.Categorical(logits=eta)
        if outputs == 3
        else distributions.Bernoulli(logits=eta.squeeze(-1))
    )
    p = predictive(family, eta)
    total, aleatoric, epistemic = p.entropy
    torch.testing.assert_close(aleatoric, each.entropy().mean(0))
    torch.testing.assert_close(total, distributions.Categorical(p.probs).entropy())
    torch.testing.assert_close(total, aleatoric + epistemic)
    assert bool((epistemic > 0).all())


def test_entropy_of_one_certain_draw_is_all_aleatoric() -> None:
    p = predictive(fp.likelihoods.Categorical(), torch.tensor([[[0.3, -0.2, 1.0]]]), plug_in=True)
    torch.testing.assert_close(p.entropy.total, p.entropy.aleatoric)
    assert float(p.entropy.epistemic) == pytest.approx(0.0, abs=1e-6)


def test_entropy_of_disagreeing_draws_is_all_epistemic() -> None:
    sure = torch.tensor([[[50.0, -50.0]], [[-50.0, 50.0]]])
    entropy = predictive(fp.likelihoods.Categorical(), sure).entropy
    assert float(entropy.total) == pytest.approx(math.log(2))
    assert float(entropy.aleatoric) == pytest.approx(0.0, abs=1e-6)


def test_entropy_of_a_normal_against_the_closed_form() -> None:
    """eta ~ N(0, v): y ~ N(0, s2 + v). From 200 draws, log p(y) has variance 1/2: five standard errors."""
    v, s2 = 2.0, 0.2
    eta = v**0.5 * torch.randn(4000, 3, 1, generator=generator(5), dtype=torch.float64)
    total, aleatoric, epistemic = predictive(fp.likelihoods.Normal(s2), eta).entropy
    error = 5 * (0.5 / 200) ** 0.5
    wanted = 0.5 * math.log(2 * math.pi * math.e * (s2 + v))
    assert bool(((total - wanted).abs() < error).all())
    assert bool(((aleatoric - 0.5 * math.log(2 * math.pi * math.e * s2)).abs() < error).all())
    torch.testing.assert_close(total, aleatoric + epistemic)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_the_parts_always_add_up_and_are_never_negative(spread: float) -> None:
    for p in (normal(spread=spread), predictive(fp.likelihoods.Poisson(), spread * normal().eta)):
        total, aleatoric, epistemic = p.entropy
        torch.testing.assert_close(total, aleatoric + epistemic, rtol=0, atol=1e-12)
        assert bool((epistemic >= 0).all())


# --- samples and shapes -------------------------------------------------------------------------


def test_samples_have_the_moments_of_the_mixture() -> None:
    p = normal(draws=5000)
    y = p.samples
    assert y.shape == (5000, 4)
    law = mixture(p)
    assert bool(((y.mean(0) - law.mean).abs() < 5 * (law.variance / 5000).sqrt()).all())
    assert torch.equal(y, predictive(p.likelihood, p.eta).samples)  # the same key, the same draws


def test_samples_of_classes_follow_the_probabilities() -> None:
    eta = torch.zeros(4000, 1, 3).index_fill(2, torch.tensor([2]), 1.0)
    p = predictive(fp.likelihoods.Categorical(), eta)
    rate = torch.bincount(p.samples[:, 0], minlength=3) / 4000
    assert bool(((rate - p.probs[0]).abs() < 5 * (p.probs[0] * (1 - p.probs[0]) / 4000).sqrt()).all())


def test_several_outputs_keep_their_axis() -> None:
    eta = torch.randn(20, 3, 2, generator=generator(6))
    p = predictive(fp.likelihoods.Normal(0.2), eta)
    assert p.mean.shape == (3, 2)
    assert p.interval(0.9)[0].shape == (3, 2)
    assert p.samples.shape == (20, 3, 2)
    assert p.log_prob(torch.zeros(3, 2)).shape == (3,)
    assert p.entropy.total.shape == (3,)


def test_one_example_keeps_its_axis() -> None:
    p = normal(n=1)
    assert p.mean.shape == p.interval(0.9)[0].shape == p.sd.shape == (1,)
    assert p.samples.shape == (300, 1)


def test_point_methods_are_flagged_and_have_noise_only() -> None:
    p = predictive(fp.likelihoods.Normal(0.2), torch.zeros(1, 2, 1), plug_in=True)
    assert "noise only" in repr(p)
    half = 1.6448536 * 0.2**0.5
    torch.testing.assert_close(p.interval(0.9)[1], torch.full((2,), half), atol=1e-5, rtol=0)
    assert p.samples.shape == (1000, 2)
    assert "300 draws of z" in repr(normal())


# --- questions that have no answer --------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, 90, float("nan")])
def test_bad_levels(level: float) -> None:
    population = fp.FedSOUL(linear_model()).fit(ragged(), rounds=1)
    with pytest.raises(SettingsError, match=r"level must be a number in \(0, 1\)"):
        population.predict(0, torch.zeros(1, 3)).interval(level)
    with pytest.raises(SettingsError, match=r"level must be a number in \(0, 1\)"):
        population.posterior(0).interval(level)
    with pytest.raises(SettingsError, match=r"level must be a number in \(0, 1\)"):
        population.predict(0, torch.zeros(1, 3)).covers(torch.zeros(1), level)


def test_questions_that_do_not_fit_the_family() -> None:
    with pytest.raises(SettingsError, match="no class probabilities"):
        normal().probs  # noqa: B018
    classes = predictive(fp.likelihoods.Categorical(), torch.zeros(5, 2, 3))
    with pytest.raises(SettingsError, match="of='mean'"):
        classes.interval(0.9, of="y")
    with pytest.raises(SettingsError, match="of='other'"):
        normal().interval(0.9, of="other")
    with pytest.raises(DataError, match="row 1: label 3 is out of range"):
        classes.log_prob(torch.tensor([0, 3]))


def test_predictions_of_a_network_head() -> None:
    head = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
    model = fp.Composition(None, head, "categorical")
    clients = [(x, torch.arange(len(x)) % 3) for x, _ in ragged((3, 2))]
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    newcomer = population.new_client()
    assert newcomer.predict(torch.zeros(4, 3)).probs.shape == (4, 3)
