"""The exact engine against independent answers: the oracle's optimum, numerical derivatives, interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.oracle import everyone, exact_optimum, log_likelihood
from fedpop.kernels.evidence import evidence
from tests.crash import Crash, CrashAt
from tests.helpers import (
    FRAME,
    cohort_of,
    federation_of,
    generator,
    linear_model,
    population_data,
    ragged,
    run_of,
    seeded,
)


def curved(seed: int = 0) -> fp.Composition:
    """A small network with a linear head."""
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return fp.Composition(seeded(backbone, seed), seeded(nn.Linear(2, 1, bias=False), seed + 1), "normal")


def gap(population: fp.Population, clients: Any, iterations: int = 300) -> float:
    """How far below the maximum that L-BFGS finds from the same place a run ended."""
    method, federation = population.algorithm, federation_of(population.model, clients)
    phi, beta = (population.published[n].double() for n in ("phi", "beta"))
    best = exact_optimum(method, federation, [(phi, beta)], iterations).log_likelihood  # type: ignore[arg-type]
    return best - float(log_likelihood(method, everyone(method, federation), phi, beta))  # type: ignore[arg-type]


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "full"])
@pytest.mark.parametrize("variance", [0.25, "learned"])
def test_it_ends_at_a_maximum_of_the_likelihood(covariance: str, variance: float | str) -> None:
    clients, _, _ = population_data(30, 6, 3, 2, 0.25)
    method = fp.FedSOUL(linear_model(variance=variance), prior=covariance)
    population = method.fit(clients, progress=False)
    assert population.engine.startswith("exact: ")
    assert population.rounds < 100
    assert 0 <= population.history[-1]["promised"] < 1e-6
    assert population.convergence is not None
    assert population.convergence.converged is True  # some directions are flat, and seem to curve by rounding
    assert gap(population, clients) < 2e-5  # theta is published in single precision


def test_a_small_network() -> None:
    g, truth = generator(3), curved(7)
    z = torch.randn(25, 2, generator=g)
    clients = []
    for own in z:
        x = torch.randn(12, 3, generator=g)
        mean = truth.outputs_at(truth.initial_phi(), own[None], x)[0, :, 0]
        clients.append((x, mean + 0.3 * torch.randn(12, generator=g)))
    population = fp.FedSOUL(curved()).fit(clients, rounds=1000, progress=False)
    assert population.engine.startswith("exact: ")
    assert population.history[-1]["promised"] < 1e-6
    assert gap(population, clients) < 1e-4


def test_values_gradients_and_curvatures_are_those_of_the_marginal() -> None:
    """Against the density of y ~ N(F mu, F Sigma F' + s2 I), differentiated numerically."""
    model, clients = linear_model(variance="learned"), ragged((4, 0, 2))
    method = fp.FedSOUL(model, prior="full")
    cohort = cohort_of(model, clients)
    theta = torch.randn(6 + 1 + 5, generator=generator(1), dtype=torch.float64) * 0.4

    def density(t: Tensor) -> Tensor:
        w, log_variance, mu = t[:6].reshape(2, 3), t[6], t[7:9]
        root = torch.stack((torch.stack((t[9].exp(), t.new_zeros(()))), torch.stack((t[10], t[11].exp()))))
        total = t.new_zeros(())
        for x, y in clients:
            if not len(y):
                continue
            f = x.double() @ w.T
            cov = f @ root @ root.T @ f.T + log_variance.exp() * torch.eye(len(y), dtype=torch.float64)
            total = total + torch.distributions.MultivariateNormal(f @ mu, cov).log_prob(y.double())
        return total

    found = evidence(method.hierarchy, theta, cohort, curved=True)
    expected = torch.autograd.functional.jacobian(density, theta)
    torch.testing.assert_close(found.values.sum(), density(theta))
    torch.testing.assert_close(found.gradient, expected)
    assert found.hessian is not None
    torch.testing.assert_close(found.hessian, torch.autograd.functional.hessian(density, theta))


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "mala"},
        {"local_steps": 5},
        {"phi_step": fp.steps.Adam(0.1)},
        {"beta_step": fp.steps.EM(0.5)},
        {"chain": fp.chains.Chain(rao_blackwell=True)},
        {"compressor": "natural"},
        {"clip": 1.0},
        {"prior": "mixture"},
        {"engine": "sampled"},
    ],
)
def test_what_was_said_of_sampling_is_obeyed(settings: dict[str, Any]) -> None:
    population = fp.FedSOUL(linear_model(), **settings).fit(ragged((4, 3)), rounds=2, progress=False)
    assert population.engine.startswith("sampled: ")
    assert population.rounds == 2


def test_what_a_run_chose_is_open_again_in_a_copy() -> None:
    method = fp.FedSOUL(linear_model())
    population = method.fit(ragged((4, 3)), rounds=2, progress=False)
    fitted = population.algorithm
    assert (method.engine, fitted.engine) == ("auto", "auto")  # type: ignore[attr-defined]
    assert population.engine.startswith("exact: ")
    assert fitted.replace(model=linear_model()).engine == "auto"  # type: ignore[attr-defined]
    assert fitted.replace(engine="exact").engine == "exact"  # type: ignore[attr-defined]
    model = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 2), "categorical")
    clients = [(torch.randn(4, 3, generator=generator(i)), torch.arange(4) % 2) for i in range(3)]
    again = fitted.replace(model=model).fit(clients, rounds=1, progress=False)
    assert again.engine.startswith("sampled: ")
    turns = fitted.fit(ragged((4, 3)), rounds=2, participation=0.5, progress=False)
    assert turns.engine.startswith("sampled: ")


def test_other_models_and_rules_are_sampled() -> None:
    clients = ragged((4, 3))
    wide = fp.Composition(nn.Linear(3, 200), nn.Linear(200, 1), "normal")
    dropout = fp.Composition(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), nn.Linear(2, 1), "normal")
    for model in (wide, dropout, fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1), "poisson")):
        whole = [(x, y.abs().round()) for x, y in clients]
        assert "sampled" in str(fp.FedSOUL(model).fit(whole, rounds=1, progress=False))
    assert "sampled" in str(
        fp.FedSOUL(linear_model()).fit(clients, rounds=1, participation=0.9, progress=False)
    )
    assert "exact" in str(
        fp.FedSOUL(linear_model()).fit(clients, rounds=1, participation=1.0, progress=False)
    )
    paper = fp.FedSOUL.paper(linear_model(), rate=0.01)
    assert "sampled" in str(paper.fit(clients, rounds=1, progress=False))


@pytest.mark.parametrize(
    ("settings", "rule"), [({}, 0.5), ({"compressor": "natural"}, None), ({"prior": "mixture"}, None)]
)
def test_asked_for_where_it_cannot_be(settings: dict[str, Any], rule: float | None) -> None:
    with pytest.raises(SettingsError, match=r"engine='exact' cannot be used here.*use engine='sampled'"):
        fp.FedSOUL(linear_model(), engine="exact", **settings).fit(
            ragged((4, 3)), rounds=1, participation=rule
        )


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    clients, _, _ = population_data(10, 4, 3, 2, 0.1)
    method = fp.FedSOUL(linear_model(variance="learned"))
    whole = method.fit(clients, progress=False)
    assert whole.rounds > 8
    with pytest.raises(Crash):
        method.fit(clients, out=tmp_path, checkpoint_every=3, callbacks=[CrashAt(8)], progress=False)
    again = method.fit(clients, out=tmp_path, checkpoint_every=3, resume=True, progress=False)
    assert again.rounds == whole.rounds
    assert [m["promised"] for m in again.history] == [m["promised"] for m in whole.history]
    for name, value in whole.published.items():
        assert torch.equal(again.published[name], value)
    over = method.fit(clients, out=tmp_path, checkpoint_every=3, resume=True, progress=False)
    assert over.rounds == whole.rounds  # it was over: nothing more is done


def test_rounds_limit_it_and_the_best_so_far_is_published() -> None:
    clients, _, _ = population_data(10, 4, 3, 2, 0.1)
    method = fp.FedSOUL(linear_model())
    values = [method.fit(clients, rounds=r, progress=False).log_likelihood().value for r in (1, 40, 80)]
    assert values[0] < values[1] <= values[2] + 1e-4
    assert method.fit(clients, rounds=3, progress=False).rounds == 3


def test_sites_of_several_units_and_blocks_change_nothing() -> None:
    clients = dict(zip("abcd", ragged((4, 3, 0, 5)), strict=True))
    method = fp.FedSOUL(linear_model())
    alone = method.fit(clients, rounds=12, progress=False)
    sites = method.fit(clients, rounds=12, sites={"one": ["a", "b", "c"], "two": ["d"]}, progress=False)
    small = method.fit(clients, rounds=12, memory="1MiB", progress=False)
    for other in (sites, small):
        torch.testing.assert_close(other.published["phi"], alone.published["phi"], atol=1e-5, rtol=1e-5)
    assert sites.totals["bytes_up"] < alone.totals["bytes_up"]


def test_bytes_and_passes_are_counted() -> None:
    clients, method = (
        ragged((4, 3)),
        fp.FedSOUL(linear_model(), prior=fp.priors.Normal(scale=1.0), start="random"),
    )
    p, b, n = 6 + 3, 2, 7
    run = run_of(method, clients)
    assert run.totals.get("bytes_up", 0) == 0
    first, second = run.train_round(), run.train_round()
    assert first["bytes_up"] == b * (3 * FRAME + 8 * (1 + p + p * (p + 1) // 2))
    assert second["bytes_up"] - first["bytes_up"] == b * (2 * FRAME + 8 * (1 + p))
    assert run.totals["backbone_passes"] == n * (1 + p) + n
    assert first["bytes_down"] == 8 * b * (p + 1)


def test_what_is_fixed_stays() -> None:
    clients, _, _ = population_data(20, 5, 3, 2, 0.25)
    prior = fp.priors.Normal(mean=0.3, scale=0.7, learn_mean=False, learn_scale=False)
    population = fp.FedSOUL(linear_model(), prior=prior).fit(clients, progress=False)
    torch.testing.assert_close(population.prior_mean, torch.full((2,), 0.3))
    torch.testing.assert_close(population.prior_sd, torch.full((2,), 0.7))
    assert population.history[-1]["promised"] < 1e-6
    assert gap(population, clients) < 2e-5


def test_clients_that_are_all_alike_leave_a_scale_at_its_bound() -> None:
    g = generator(0)
    clients = [
        (x, x @ torch.tensor([1.0, -2.0]) + 0.5 * torch.randn(40, generator=g))
        for x in (torch.randn(40, 2, generator=g) for _ in range(12))
    ]
    model = fp.Composition(None, nn.Linear(2, 1, bias=False), "normal")
    population = fp.FedSOUL(model).fit(clients, progress=False)
    pooled = torch.linalg.lstsq(
        torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients])[:, None]
    )
    assert population.rounds < 100
    torch.testing.assert_close(population.prior_mean, pooled.solution[:, 0], atol=5e-3, rtol=0)
    assert float(population.prior_sd.max()) < 0.1


def test_a_hyperprior_is_part_of_the_objective() -> None:
    clients, _, _ = population_data(8, 4, 3, 2, 0.5)
    hyper = fp.priors.Hyperprior(phi_scale=0.5, mean_scale=0.3, log_scale=(-1.0, 0.2))
    method = fp.FedSOUL(linear_model(), hyperprior=hyper)
    population = method.fit(clients, progress=False)
    assert population.history[-1]["promised"] < 1e-6
    cohort = everyone(population.algorithm, federation_of(population.model, clients))  # type: ignore[arg-type]
    theta = torch.cat([population.published[n].double() for n in ("phi", "beta")]).requires_grad_()
    phi, beta = theta[:6], theta[6:]
    posterior = log_likelihood(population.algorithm, cohort, phi, beta)  # type: ignore[arg-type]
    posterior = posterior - phi.square().sum() / (2 * 0.5**2) - beta[:2].square().sum() / (2 * 0.3**2)
    posterior = posterior - (beta[2] + 1.0) ** 2 / (2 * 0.2**2)
    (g,) = torch.autograd.grad(posterior, theta)
    assert float(g.abs().max()) < 5e-3
    assert population.history[-1]["log_posterior"] == pytest.approx(float(posterior.detach()), abs=1e-4)


def test_a_client_that_is_not_finite_is_left_out_by_name() -> None:
    clients = ragged((4, 3, 5))
    clients[1] = (clients[1][0] * 1e38, clients[1][1])
    wide = [(x.double() * 1e200 if i == 1 else x.double(), y.double()) for i, (x, y) in enumerate(clients)]
    model = fp.Composition(nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 1).double(), "normal")
    population = fp.FedSOUL(model).fit(wide, rounds=30, progress=False)
    assert population.history[0]["left_out"] == ["client-1"]
    assert all(bool(torch.isfinite(t).all()) for t in population.published.values())


def test_annealing_leaves_the_wrong_subspace() -> None:
    """Four examples and a variance of .09: from the spectral start alone the search ends 45 nats below."""
    clients, phi, _ = population_data(100, 4, 20, 2, 0.09, seed=5)
    method = fp.FedSOUL(linear_model(20, 2, 0.09))
    federation = federation_of(method.model, clients)
    best = exact_optimum(method, federation, [(phi.T.reshape(-1), torch.zeros(3))]).log_likelihood
    assert method.fit(clients, progress=False).log_likelihood().value > best - 1.0


def test_a_mean_far_from_zero_and_a_small_variance() -> None:
    """z around (3, 0, 1) with variance .02: chains with an isotropic prior are nats short after 300 rounds.
    A full covariance has the same likelihood here, and must end at the same."""
    g = generator(1)
    weight, centre = torch.randn(6, 3, generator=g), torch.tensor([3.0, 0.0, 1.0])
    clients = []
    for _ in range(60):
        z, x = centre + 0.02**0.5 * torch.randn(3, generator=g), torch.randn(8, 6, generator=g)
        clients.append((x, x @ weight @ z + 0.3 * torch.randn(8, generator=g)))
    values = []
    for covariance in ("isotropic", "full"):
        population = fp.FedSOUL(linear_model(6, 3, 0.09), prior=covariance).fit(clients, progress=False)
        assert population.history[-1]["promised"] < 1e-6
        values.append(population.log_likelihood().value)
        truth = (weight.T.reshape(-1), fp.priors.Normal(covariance=covariance).init(centre, 0.02**0.5))
        method = population.algorithm
        best = exact_optimum(method, federation_of(method.model, clients), [truth], 1000).log_likelihood  # type: ignore[arg-type]
        assert values[-1] > best - 1e-3
    assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_a_covariance_that_is_singular_ends_at_its_bound() -> None:
    """Slopes differ, intercepts do not: at the optimum intercepts have no spread."""
    x = torch.linspace(-1, 1, 8).unsqueeze(1)
    clients = {"anna": (x, 2 * x[:, 0]), "ben": (x, 4 * x[:, 0])}
    model = fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal(0.01))
    population = fp.FedSOUL(model, prior="full").fit(clients, progress=False)
    assert population.rounds < 80
    # By hand: slopes 2 and 4 are measured with variance .01 / sum x^2 each, so that sd^2 = 1 - that.
    expected = (1 - 0.01 / float(x.square().sum())) ** 0.5
    assert float(population.prior_sd[0]) == pytest.approx(expected, abs=1e-3)
    assert population.at_bound
