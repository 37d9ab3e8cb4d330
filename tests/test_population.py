"""What ``fit`` returns: predictions, posteriors, diagnostics, newcomers, files."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, DataError, SettingsError
from fedpop.evaluation.diagnostics import rhat_and_ess
from fedpop.evaluation.oracle import exact_optimum
from fedpop.files import read_tensors
from fedpop.keys import Key
from fedpop.population import Population
from tests.helpers import generator, linear_model, population_data, ragged, seeded

NOISE = 0.3
Clients = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def clients() -> Clients:
    data, _, _ = population_data(8, 6, 3, 2, NOISE)
    named = {f"site-{i}": c for i, c in enumerate(data)}
    named["empty"] = (torch.zeros(0, 3), torch.zeros(0))
    return named


@pytest.fixture(scope="module")
def fitted(clients: Clients) -> fp.Population:
    return fp.FedSOUL(linear_model(3, 2, NOISE)).fit(clients, rounds=120)


@pytest.fixture
def population(fitted: fp.Population) -> fp.Population:
    """The same theta with nothing computed yet."""
    return Population(
        fitted.algorithm,
        fitted.published,
        fitted.key,
        fitted.federation,
        fitted.store,
        fitted.history,
        fitted.totals,
        fitted.rounds,
        fitted.drift,
    )


def exact_posterior(population: fp.Population, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z by the textbook."""
    f = x.double() @ population.phi["backbone.weight"].double().T
    mu, sd = population.prior_mean.double(), population.prior_sd.double()
    cov = torch.linalg.inv(f.T @ f / NOISE + torch.diag(sd**-2))
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
    here = Population(method, theta, Key(0), method.model.prepare(fp.Federation.of([(x, y)])))

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


def test_uncertainty_about_theta_widens_intervals(population: fp.Population) -> None:
    x = 10 * torch.randn(20, 3, generator=generator(4))  # far out, where noise in y matters little
    plain = population.predict("site-0", x)
    wider = population.predict("site-0", x, theta_uncertainty=True)
    widths = [p.interval(0.9)[1] - p.interval(0.9)[0] for p in (plain, wider)]
    # Each width has an error of about 3 % from 1000 draws; their mean over examples has less.
    assert float((widths[1] / widths[0]).mean()) > 1.05
    assert float((widths[1] / widths[0]).min()) > 0.9
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
    asked: list[int] = []
    real = fp.FedSOUL.personalise

    def personalise(self: Any, published: Any, cohort: Any, local: Any, key: Key) -> Any:
        asked.extend(cohort.ids.tolist())
        return real(self, published, cohort, local, key)

    monkeypatch.setattr(fp.FedSOUK, "personalise", personalise)
    assert asked == []
    population.predict("site-4", torch.zeros(1, 3))
    population.posterior("site-4")
    population.predict("site-4", torch.ones(2, 3))
    assert asked == [4]
    population.new_client()
    assert asked == [4]
    population.posterior("site-2")
    assert asked == [4, 2]


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


# --- what can be said about it ------------------------------------------------------------------


def test_diagnostics_are_quiet_at_the_optimum_and_loud_elsewhere(population: fp.Population) -> None:
    """The gradient at the exact maximum is Monte-Carlo noise; elsewhere it is not."""
    method, federation = population.algorithm, population.federation
    best = exact_optimum(method, federation, [(population.published["phi"], population.published["beta"])])
    at = {"phi": best.phi.float(), "beta": best.beta.float()}
    good = Population(method, at, Key(0), federation).diagnostics()
    assert good.warnings == []
    assert good.theta.phi_gradient < 5
    far = {"phi": at["phi"].roll(1), "beta": at["beta"]}
    bad = Population(method, far, Key(0), federation).diagnostics()
    assert bad.theta.phi_gradient > 20
    assert any("gradient in phi" in w for w in bad.warnings)
    wide = {"phi": at["phi"], "beta": at["beta"] + torch.tensor([0.0, 0.0, 2.0])}
    assert any(
        "gradient in beta" in w for w in Population(method, wide, Key(0), federation).diagnostics().warnings
    )


def test_diagnostics_name_every_client(population: fp.Population) -> None:
    report = population.diagnostics()
    assert report.chains.clients == population.names
    assert float(report.chains.rhat.max()) < 1.05
    assert float(report.chains.ess.min()) > 400
    some = population.diagnostics(limit=3)
    assert len(some.chains.clients) == 3
    assert some.theta.phi_gradient is None  # a sum over all clients, which were not all looked at


def test_a_scale_at_its_bound_is_reported() -> None:
    same = ragged((6,))[0]  # clients that do not differ: the scale goes to zero
    prior = fp.priors.Normal(scale=0.3, bounds=(0.2, 5.0))
    population = fp.FedSOUL(linear_model(), prior=prior).fit([same] * 6, rounds=60)
    assert "the prior's scale is at its lower bound 0.2" in population.diagnostics().warnings
    assert "warning  the prior's scale is at its lower bound" in str(population)


def test_print_says_what_was_learned(population: fp.Population) -> None:
    text = str(population)
    for words in (
        "FedSOUL population: 9 clients, 48 examples (0 to 6 each), 120 rounds",
        "Composition(phi: 6, z: 2",
        "Normal, isotropic: norm of mean",
        "kernel   Exponential(h=1.0), 10 per round",
        "MB up",
        "R-hat at most",
        "gradient over its Monte-Carlo error: phi",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 140


def test_theta_by_name(population: fp.Population) -> None:
    assert len(population) == 9
    assert population.phi["backbone.weight"].shape == (2, 3)
    assert population.prior_mean.shape == (2,)
    assert float(population.prior_sd[0]) == pytest.approx(float(population.published["beta"][2].exp()))


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
    assert "2 client(s) that took part hold 3.2e-05 MB each" in str(population)  # eight floats


# --- files --------------------------------------------------------------------------------------


def test_save_and_load(population: fp.Population, tmp_path: Path) -> None:
    population.save(tmp_path)
    loaded = fp.load(tmp_path)
    x = torch.randn(3, 3, generator=generator(5))
    for client in ("site-0", "empty", 4):
        assert torch.equal(loaded.predict(client, x).mean, population.predict(client, x).mean)
        assert torch.equal(loaded.predict(client, x).samples, population.predict(client, x).samples)
    newcomer = population.new_client(*ragged((3,))[0])
    assert torch.equal(loaded.new_client(*ragged((3,))[0]).predict(x).mean, newcomer.predict(x).mean)
    assert torch.equal(loaded.new_client().predict(x).mean, population.new_client().predict(x).mean)
    assert loaded.algorithm.describe() == population.algorithm.describe()
    assert loaded.names == population.names
    assert loaded.rounds == 120
    assert loaded.history == population.history
    assert "FedSOUL population: 9 clients" in str(loaded)


def test_theta_and_each_client_have_files_of_their_own(population: fp.Population, tmp_path: Path) -> None:
    population.save(tmp_path)
    theta = read_tensors(tmp_path / "theta.safetensors")
    assert set(theta) == {"phi", "beta"}
    assert theta["phi"].numel() + theta["beta"].numel() == 9
    files = sorted((tmp_path / "clients").iterdir())
    assert len(files) == 9
    for i, file in enumerate(files):
        (draws,) = read_tensors(file).values()
        assert torch.equal(draws[0], population.posterior(i).draws)
        assert file.stat().st_size < draws.numel() * 4 + 1000  # nobody else's draws
    # What describes the run holds no number of any client.
    described = json.loads((tmp_path / "population.json").read_text())
    assert set(described) == {
        "version", "method", "algorithm", "model", "theta", "seed", "clients", "learned_from", "rounds",
        "drift", "totals",
    }  # fmt: skip


def test_a_population_without_its_clients_files(
    population: fp.Population, clients: Clients, tmp_path: Path
) -> None:
    """What one would give away: theta answers for newcomers, and for no one else."""
    population.save(tmp_path)
    shutil.rmtree(tmp_path / "clients")
    bare = fp.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"'site-0'.*clients=\.\.\."):
        bare.predict("site-0", torch.zeros(1, 3))
    assert bare.new_client(*ragged((2,))[0]).predict(torch.zeros(1, 3)).mean.shape == (1,)
    assert bare.new_client().predict(torch.zeros(1, 3)).mean.shape == (1,)
    with_data = fp.load(tmp_path, clients=clients)
    expected = population.posterior("site-0").draws
    torch.testing.assert_close(with_data.posterior("site-0").draws, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep])
def test_point_methods_save_and_load(method: Any, tmp_path: Path) -> None:
    population = method(linear_model()).fit(ragged((4, 3)), rounds=2)
    population.save(tmp_path)
    x = torch.randn(3, 3, generator=generator(5))
    loaded = fp.load(tmp_path)
    for i in range(2):
        assert torch.equal(loaded.predict(i, x).mean, population.predict(i, x).mean)


@pytest.mark.parametrize("posteriors", ["computed", "all"])
def test_whose_posteriors_are_saved(population: fp.Population, tmp_path: Path, posteriors: str) -> None:
    population.posterior("site-6")
    population.save(tmp_path, posteriors=posteriors)
    names = [p.stem for p in (tmp_path / "clients").iterdir()]
    assert names == ["00000006"] if posteriors == "computed" else len(names) == 9
    with pytest.raises(SettingsError, match="'auto', 'all' or 'computed'"):
        population.save(tmp_path, posteriors="some")


def test_saving_over_another_population_leaves_none_of_its_clients(
    population: fp.Population, tmp_path: Path
) -> None:
    population.save(tmp_path)
    small = fp.FedSOUL(linear_model()).fit(ragged((2, 2)), rounds=1)
    small.posterior(0)
    small.save(tmp_path, posteriors="computed")
    assert [p.stem for p in (tmp_path / "clients").iterdir()] == ["00000000"]
    assert torch.equal(fp.load(tmp_path).posterior(0).draws, small.posterior(0).draws)


def test_public_holds_theta_alone(population: fp.Population, tmp_path: Path) -> None:
    population.posterior("site-0")
    public = population.public()
    assert set(public.published) == {"phi", "beta"}
    assert public.federation is None
    assert public.store is None
    assert public._personal == {}
    assert public.history == []
    assert public.names == []
    for theta in (public, fp.load(public.save(tmp_path))):
        assert repr(theta) == f"Population(FedSOUL, theta alone, from {len(population)} clients, 120 rounds)"
        assert "theta alone, from" in str(theta).splitlines()[0]
        assert "0 clients" not in str(theta)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["population.json", "theta.safetensors"]
    x = torch.zeros(1, 3)
    data = ragged((3,))[0]
    assert torch.equal(public.new_client(*data).predict(x).mean, population.new_client(*data).predict(x).mean)
    assert torch.equal(public.new_client().predict(x).mean, population.new_client().predict(x).mean)


def test_saved_files_that_cannot_be_used(population: fp.Population, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no saved population"):
        fp.load(tmp_path)
    population.save(tmp_path)
    whole = (tmp_path / "theta.safetensors").read_bytes()
    (tmp_path / "theta.safetensors").write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match="truncated or edited"):
        fp.load(tmp_path)
    (tmp_path / "theta.safetensors").write_bytes(whole)
    client = tmp_path / "clients" / "00000003.safetensors"
    client.write_bytes(client.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"00000003\.safetensors"):
        fp.load(tmp_path)


class Unusual(nn.Module):
    """A module that no file describes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


def test_a_model_of_the_users_own_is_given_again(tmp_path: Path) -> None:
    model = fp.Composition(seeded(Unusual(), 1), seeded(nn.Linear(2, 1), 2), fp.likelihoods.Normal(NOISE))
    population = fp.FedSOUL(model).fit(ragged((3, 4)), rounds=2)
    population.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model=\.\.\."):
        fp.load(tmp_path)
    x = torch.ones(2, 3)
    assert torch.equal(fp.load(tmp_path, model=model).predict(0, x).mean, population.predict(0, x).mean)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        fp.load(tmp_path, model=linear_model())


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1)), nn.Linear(4, 1), "normal"),
        fp.Composition(None, nn.Linear(3, 1, bias=False).double(), "poisson"),
        fp.Composition(
            nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.ELU(0.5), nn.Linear(2, 1)), "bernoulli"
        ),
        fp.Split(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1)), ["2.*"], "normal"),
    ],
    ids=["network", "double", "network head", "split"],
)
def test_models_of_torchs_layers_are_rebuilt_from_the_file(model: Any, tmp_path: Path) -> None:
    clients = [(x, (y > 0).float()) for x, y in ragged((3, 2))]
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    population.save(tmp_path, posteriors="computed")
    loaded = fp.load(tmp_path)
    x = torch.randn(4, 3, generator=generator(6))
    torch.testing.assert_close(loaded.new_client().predict(x).mean, population.new_client().predict(x).mean)
    assert repr(loaded.model) == repr(population.model)
    assert loaded.published["phi"].dtype == population.published["phi"].dtype
