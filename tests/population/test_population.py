"""What ``fit`` returns: predictions, posteriors, newcomers; each made when it is asked for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.evaluation.diagnostics import rhat_and_ess
from fedpop.keys import Key, unit_of
from fedpop.population import Population
from tests.helpers import federation_of, generator, linear_model, population_data, ragged, seeded
from tests.population.conftest import NOISE, Clients


def exact_posterior(population: fp.Population, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z at the returned theta."""
    weight = population.phi["backbone.weight"].double()
    return posterior_at(weight, population.prior_mean.double(), population.prior_sd.double(), x, y)


def posterior_at(weight: Tensor, mu: Tensor, sd: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z by the textbook."""
    f = x.double() @ weight.T
    cov = torch.linalg.inv(f.T @ f / NOISE + torch.eye(2, dtype=f.dtype) * sd**-2)
    return cov @ (f.T @ y.double() / NOISE + mu / sd**2), cov


def check_moments(draws: Tensor, mean: Tensor, cov: Tensor) -> None:
    """Mean and covariance within five standard errors of so many effective draws."""
    _, ess = rhat_and_ess(draws)
    flat = draws.reshape(-1, draws.shape[-1]).double()
    sd = cov.diagonal().sqrt()
    assert bool(((flat.mean(0) - mean).abs() < 5 * sd / ess**0.5).all())
    # Var of a product of two normals: C_ii C_jj + C_ij^2.
    error = ((torch.outer(sd**2, sd**2) + cov**2) / ess).sqrt()
    assert bool(((torch.cov(flat.T) - cov).abs() < 5 * error).all())


# --- posteriors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["site-0", "site-5", "empty"])
def test_posteriors_match_the_closed_form(population: fp.Population, clients: Clients, client: str) -> None:
    posterior = population.posterior(client)
    assert posterior.draws.shape[0] >= 4
    check_moments(posterior.draws, *exact_posterior(population, *clients[client]))


def test_a_posterior_answers_in_several_forms(population: fp.Population) -> None:
    posterior = population.posterior("site-1")
    chains, n, d = posterior.draws.shape
    assert posterior.flat.shape == (chains * n, d)
    torch.testing.assert_close(posterior.mean, posterior.flat.mean(0))
    low, high = posterior.interval(0.8)
    inside = ((posterior.flat > low) & (posterior.flat < high)).float().mean(0)
    torch.testing.assert_close(inside, torch.full((d,), 0.8), atol=0.01, rtol=0)
    assert posterior.named()["weight"].shape == (chains * n, 1, 2)
    assert "4 chains" in repr(posterior)
    torch.testing.assert_close(population.personal("site-1")["weight"][0], posterior.mean)


def test_the_posterior_of_a_logistic_head_against_quadrature() -> None:
    """One dimension, HMC: mean and standard deviation within five standard errors."""
    g = generator(3)
    x = torch.randn(12, 1, generator=g)
    y = (torch.rand(12, generator=g) < torch.sigmoid(2 * x[:, 0])).float()
    method = fp.FedSOUL(fp.Composition(None, nn.Linear(1, 1, bias=False), "bernoulli"))
    theta = {"phi": torch.zeros(0), "beta": torch.tensor([0.5, math.log(1.5)])}
    here = Population(method, theta, Key(0), federation_of(method.model, [(x, y)]))

    def density(z: float, power: int) -> float:
        log_p = torch.distributions.Bernoulli(logits=z * x[:, 0].double()).log_prob(y.double()).sum()
        return z**power * math.exp(float(log_p) - 0.5 * ((z - 0.5) / 1.5) ** 2)

    total, first, second = (integrate.quad(density, -15, 15, args=(p,), limit=200)[0] for p in range(3))
    mean, variance = first / total, second / total - (first / total) ** 2
    draws = here.posterior(0).draws
    _, ess = rhat_and_ess(draws)
    assert abs(float(draws.mean()) - mean) < 5 * (variance / ess) ** 0.5
    _, ess = rhat_and_ess((draws - mean).square())
    spread = (draws - mean).square()
    assert abs(float(spread.mean()) - variance) < 5 * float(spread.std()) / ess**0.5


def test_the_paper_preset_still_shows_exact_posteriors(clients: Clients) -> None:
    """ULA is biased; what users see comes from the exact step."""
    paper = fp.FedSOUL.paper(linear_model(3, 2, NOISE), rate=1e-3).fit(clients, rounds=5)
    check_moments(paper.posterior("site-2").draws, *exact_posterior(paper, *clients["site-2"]))


# --- predictions --------------------------------------------------------------------------------


def test_predictions_match_the_closed_form(population: fp.Population, clients: Clients) -> None:
    """y at x is N(f' m, f' C f + s2): mean, intervals, samples, density."""
    x = torch.randn(5, 3, generator=generator(1))
    mean, cov = exact_posterior(population, *clients["site-3"])
    f = x.double() @ population.phi["backbone.weight"].double().T
    centre = f @ mean
    spread = torch.einsum("ni,ij,nj->n", f, cov, f)
    law = torch.distributions.Normal(centre, (spread + NOISE).sqrt())
    p = population.predict("site-3", x)
    draws = population.posterior("site-3").flat.shape[0]
    error = 5 * (spread / draws).sqrt()  # of the mean over draws of z
    assert bool(((p.mean.double() - centre).abs() < error).all())
    for level in (0.5, 0.9, 0.99):
        low, high = p.interval(level)
        # A quantile moves with the mean and with the spread; the latter by at most its own error.
        slack = error + 5 * spread * (2 / draws) ** 0.5
        assert bool(((low.double() - law.icdf(torch.tensor((1 - level) / 2).double())).abs() < slack).all())
        assert bool(((high.double() - law.icdf(torch.tensor((1 + level) / 2).double())).abs() < slack).all())
    y = p.samples.double()
    assert bool(((y.mean(0) - centre).abs() < 5 * ((spread + NOISE) / draws).sqrt()).all())
    torch.testing.assert_close(p.log_prob(centre.float()).double(), law.log_prob(centre), atol=0.1, rtol=0)
    wanted = 0.5 * torch.log(2 * math.pi * math.e * (spread + NOISE))
    assert bool(((p.entropy.total - wanted).abs() < 5 * (0.5 / 200) ** 0.5).all())


def test_uncertainty_is_larger_far_from_the_data_and_for_the_client_without(
    population: fp.Population,
) -> None:
    x = torch.randn(4, 3, generator=generator(2))

    def width(p: Any) -> Tensor:
        return p.interval(0.9)[1] - p.interval(0.9)[0]

    near, far = population.predict("site-0", x), population.predict("site-0", 10 * x)
    assert bool((width(far) > width(near)).all())
    assert bool((width(population.predict("empty", x)) > width(near)).all())
    assert bool((far.entropy.epistemic > near.entropy.epistemic).all())


def test_predict_takes_what_people_have(population: fp.Population) -> None:
    x = torch.randn(4, 3, generator=generator(2))
    expected = population.predict("site-1", x).mean
    assert torch.equal(population.predict(1, x.numpy()).mean, expected)
    assert torch.equal(population.predict(-8, x.tolist()).mean, expected)


def test_uncertainty_about_theta_widens_intervals(population: fp.Population, clients: Clients) -> None:
    """The law of total variance over the draws of theta, closed-form at each of them; five standard errors
    of ten draws of z at each."""
    x = 10 * torch.randn(20, 3, generator=generator(4))  # far out, where noise in y matters little
    wider = population.predict("site-0", x, theta_uncertainty=True)
    here = population.published["phi"], population.published["beta"]
    means, variances = [], []
    for phi, beta in [here, *population.theta_draws()]:
        weight = phi.reshape(2, 3).double()
        mean, cov = posterior_at(weight, beta[:2].double(), beta[2].double().exp(), *clients["site-0"])
        f = x.double() @ weight.T
        means.append(f @ mean)
        variances.append(torch.einsum("ni,ij,nj->n", f, cov, f))
    plain, spread = variances[0], torch.stack(variances[1:])
    off = torch.stack(means[1:]) - torch.stack(means[1:]).mean(0)
    total = spread.mean(0) + off.square().mean(0)
    # Var of the square of N(m, v): 4 m^2 v + 2 v^2.
    error = (10 * (4 * off**2 * spread + 2 * spread**2).sum(0)).sqrt() / (10 * len(off))
    assert bool(((wider.sd.double() ** 2 - NOISE - total).abs() < 5 * error).all())
    assert float(((total - plain) / error).max()) > 5  # it could tell
    assert torch.equal(wider.mean, population.predict("site-0", x, theta_uncertainty=True).mean)


def test_unknown_clients_are_refused(population: fp.Population) -> None:
    for client in ("nobody", 9, -10):
        with pytest.raises(DataError, match="no client"):
            population.predict(client, torch.zeros(1, 3))
        with pytest.raises(DataError, match="no client"):
            population.posterior(client)


# --- clients never seen -------------------------------------------------------------------------


def test_a_newcomer_without_data_is_the_prior(population: fp.Population) -> None:
    draws = population.new_client().posterior.draws
    assert draws.shape[0] >= 4
    check_moments(draws, population.prior_mean.double(), torch.diag(population.prior_sd.double() ** 2))


def test_a_newcomer_with_data_has_its_posterior_with_theta_fixed(population: fp.Population) -> None:
    data, _, _ = population_data(1, 4, 3, 2, NOISE, seed=9)
    before = {n: t.clone() for n, t in population.published.items()}
    newcomer = population.new_client(*data[0])
    check_moments(newcomer.posterior.draws, *exact_posterior(population, *data[0]))
    assert newcomer.predict(torch.zeros(2, 3)).mean.shape == (2,)
    assert all(torch.equal(before[n], t) for n, t in population.published.items())


def test_a_newcomer_needs_both_x_and_y(population: fp.Population) -> None:
    with pytest.raises(DataError, match="both x and y"):
        population.new_client(torch.zeros(2, 3))
    with pytest.raises(DataError, match=r"'the new client'.*x has 2 rows but y has 3"):
        population.new_client(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(DataError, match="does not accept examples"):
        population.new_client(torch.zeros(2, 2), torch.zeros(2))


def test_a_newcomer_to_a_frozen_backbone() -> None:
    body = seeded(nn.Linear(3, 2), 1).requires_grad_(False)
    model = fp.Composition(body, seeded(nn.Linear(2, 1), 2), fp.likelihoods.Normal(NOISE))
    population = fp.FedSOUL(model).fit(ragged((3, 4)), rounds=2)
    x, y = ragged((5,), seed=3)[0]
    newcomer = population.new_client(x, y)
    torch.testing.assert_close(
        newcomer.predict(x).mean, newcomer.posterior.mean[:2] @ body(x).T + newcomer.posterior.mean[2]
    )


# --- only what is asked for ---------------------------------------------------------------------


def test_the_final_pass_is_lazy(population: fp.Population, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    names = {unit_of(name): name for name in population.names}
    real = fp.FedSOUL.personalise

    def personalise(self: Any, published: Any, cohort: Any, local: Any, key: Key) -> Any:
        asked.extend(names[u] for u in cohort.units.tolist())
        return real(self, published, cohort, local, key)

    monkeypatch.setattr(fp.FedSOUK, "personalise", personalise)
    assert asked == []
    population.predict("site-4", torch.zeros(1, 3))
    population.posterior("site-4")
    population.predict("site-4", torch.ones(2, 3))
    assert asked == ["site-4"]
    population.new_client()
    assert asked == ["site-4"]
    population.posterior("site-2")
    assert asked == ["site-4", "site-2"]


def test_draws_do_not_depend_on_who_else_was_asked_for(population: fp.Population, clients: Clients) -> None:
    alone = population.posterior("site-4").draws
    together = Population(population.algorithm, population.published, population.key, population.federation)
    together.diagnostics()
    torch.testing.assert_close(together.posterior("site-4").draws, alone, rtol=1e-4, atol=1e-5)


def test_a_point_method_does_not_depend_on_it_either(tmp_path: Path) -> None:
    """Some clients took part and have a head, some never did."""
    method = fp.FedRep(linear_model())
    runs = [method.fit(ragged((4, 3, 5, 2)), rounds=1, participation=2) for _ in range(2)]
    x = torch.ones(2, 3)
    alone = [runs[0].predict(i, x).mean for i in range(4)]
    runs[1].save(tmp_path)
    for i in range(4):
        torch.testing.assert_close(runs[1].predict(i, x).mean, alone[i])


# --- methods without a posterior ----------------------------------------------------------------


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep])
def test_point_methods_answer_what_they_can_and_refuse_the_rest(method: Any) -> None:
    population = method(linear_model()).fit(ragged((4, 3)), rounds=2)
    p = population.predict(0, torch.zeros(2, 3))
    assert p.plug_in
    assert "noise only" in repr(p)
    assert float((p.interval(0.9)[1] - p.interval(0.9)[0])[0]) == pytest.approx(
        2 * 1.6449 * 0.5**0.5, rel=1e-3
    )
    for question in (
        lambda: population.posterior(0),
        lambda: population.diagnostics(),
        lambda: population.log_likelihood(),
        lambda: population.prior_mean,
        lambda: population.predict(0, torch.zeros(1, 3), theta_uncertainty=True),
        lambda: population.new_client(*ragged((3,))[0]).posterior,
    ):
        with pytest.raises(SettingsError, match=method.name):
            question()
    assert method.name in str(population)


def test_a_newcomer_without_data_gets_the_shared_head_or_an_answer_why_not() -> None:
    shared = fp.FedAvg(linear_model()).fit(ragged((4, 3)), rounds=2)
    x = torch.ones(2, 3)
    assert torch.equal(shared.new_client().predict(x).mean, shared.predict(0, x).mean)
    private = fp.FedRep(linear_model()).fit(ragged((4, 3)), rounds=2)
    with pytest.raises(DataError, match="FedRep has no model for a client without data"):
        private.new_client()


def test_what_clients_keep_is_told_and_paid_for_those_who_took_part_only() -> None:
    method = fp.Ditto(linear_model(), local=fp.LocalSGD(rate=0.01), personal=fp.LocalSGD(rate=0.01))
    population = method.fit(ragged((4, 3, 5, 6, 2)), rounds=1, participation=2)
    assert population.store is not None
    assert population.store.used == 2
    assert sum(t.numel() for t in population.store.tensors.values()) <= 5 * 8
    assert "2 client(s) that took part store 3.2e-05 MB each" in str(population)  # eight floats
