"""``CustomModel``: any function of (phi, z, data), against the same model written another way."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.client.phi_step import PhiGradient
from tests.helpers import cohort_of, generator, population_data, ragged
from tests.models.custom_models import (
    BURNT_IN,
    QUICK,
    SHORT,
    VARIANCE,
    WIDE,
    composition,
    custom,
    growth,
    growth_data,
    growth_model,
)

# --- the linear Normal model, written twice -----------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["log_likelihood", "outputs"])
def test_the_linear_model_has_the_same_likelihood_and_gradients(whole: bool) -> None:
    clients, results = ragged((3, 0, 5, 1)), []
    z = torch.randn(4, 3, 2, generator=generator(2), dtype=WIDE)
    for model in (composition(False), composition(True), custom(whole)):
        cohort = cohort_of(model, clients)
        phi = model.initial_phi().requires_grad_()
        features = model.features(phi, cohort)
        good = torch.ones(4, dtype=torch.bool)
        _, value, j = PhiGradient(model, None, z).fused(phi, features, cohort, None, good, torch.ones(4))
        local = model.bind(phi.detach(), model.features(phi.detach(), cohort), cohort)
        rows = model.log_prob(phi.detach(), z[0], *_one(model, phi, clients[2]))
        results.append((value, j, *local.value_and_grad(z), local.value(z), rows))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def _one(model: Any, phi: Tensor, client: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
    cohort = cohort_of(model, [client])
    return model.features(phi.detach(), cohort), cohort.y


@pytest.mark.parametrize("whole", [True, False], ids=["log_likelihood", "outputs"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chain": fp.chains.Chain(burn_in=5, stateful=False)},
        {"chain": fp.chains.Chain(2, burn_in=5), "prior": fp.priors.Normal("full", scale=1.0)},
        {"phi_step": fp.steps.PhiStep(batch=2)},
        {"phi_step": fp.steps.PhiStep(local=fp.LocalSGD(epochs=2, batch=2))},
        {"compressor": fp.compressors.RandK(k=2)},
        {"kernel": fp.kernels.SGLD(batch=3)},
        {"prior": fp.priors.Mixture(2, scale=1.0)},
    ],
    ids=["stateful", "stateless", "two chains", "minibatch", "epochs", "compressed", "SGLD", "mixture"],
)
def test_a_run_is_the_run_of_the_same_composition(whole: bool, options: dict[str, Any]) -> None:
    """The same keys draw the same chains, so theta agrees round by round, not only in the end."""
    clients, _, _ = population_data(6, 5, 3, 2, VARIANCE)
    settings = {
        "prior": fp.priors.Normal(scale=1.0),
        "local_steps": 3,
        "chain": BURNT_IN,
        "final": SHORT,
        "anneal": fp.steps.Anneal(0),
        "start": "random",
        "beta_step": fp.steps.Adam(0.05),  # EM's goes by whether a backbone is seen
    } | options
    runs = [
        fp.FedSOUL(model, **settings).fit(clients, rounds=4, participation=0.7, seed=4)
        for model in (composition(True), custom(whole))
    ]
    torch.testing.assert_close(runs[0].published, runs[1].published)
    assert runs[0].history[-1]["loss"] == pytest.approx(runs[1].history[-1]["loss"])


def test_the_final_pass_is_that_of_the_same_composition() -> None:
    clients, _, _ = population_data(3, 5, 3, 2, VARIANCE)
    runs = [
        fp.FedSOUL(
            model,
            prior=fp.priors.Normal(scale=1.0, learn_scale=False),
            chain=fp.chains.Chain(burn_in=10),
            final=SHORT,
        ).fit(clients, rounds=1)
        for model in (composition(True), custom(True), composition(False))
    ]
    runs[2].published = runs[1].published
    general, given, exact = (run.log_likelihood() for run in runs)
    assert general.value == pytest.approx(given.value)
    assert abs(given.value - exact.value) < 5 * given.error  # importance sampling against the closed form
    torch.testing.assert_close(runs[0].posterior(2).draws, runs[1].posterior(2).draws)


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep], ids=["FedAvg", "FedRep"])
def test_methods_with_a_point_estimate_learn_it_too(method: Any) -> None:
    clients, _, _ = population_data(6, 5, 3, 2, VARIANCE)
    runs = [method(m).fit(clients, rounds=5) for m in (composition(True), custom(True), custom(False))]
    for run in runs[1:]:
        torch.testing.assert_close(runs[0].published, run.published)
    x = torch.randn(4, 3, generator=generator(3))
    torch.testing.assert_close(runs[0].predict(0, x).mean, runs[2].predict(0, x).mean)


# --- a nonlinear one, by hand -------------------------------------------------------------------


def test_links_enter_by_the_chain_rule() -> None:
    """Free values to natural ones by hand, differentiated by plain autograd, client by client."""
    model, clients = growth_model(), growth_data()
    cohort = cohort_of(model, clients)
    phi = model.initial_phi()
    torch.testing.assert_close(phi, torch.tensor([0.7, 1.0], dtype=WIDE).log() + torch.tensor([0, 0.2]))
    torch.testing.assert_close(model.initial_z(), torch.tensor([3 / 7, 0.5, 1.5], dtype=WIDE).log())
    z = torch.randn(4, 2, 3, generator=generator(9), dtype=WIDE)
    free_phi, free_z = phi.clone().requires_grad_(), z.clone().requires_grad_()
    expected = torch.zeros(4, 2, dtype=WIDE)
    for c, (x, y) in enumerate(clients):
        for k in range(2):
            share, slope = 1 / (1 + torch.exp(-free_z[c, k, 0])), torch.exp(free_z[c, k, 1:])
            named = ({"rate": torch.exp(free_phi[0]), "level": free_phi[1]}, {"share": share, "slope": slope})
            law = torch.distributions.Normal(growth(*named, x), 0.5**0.5)
            expected[c, k] = law.log_prob(y).sum()
    grad_phi, grad_z = torch.autograd.grad(expected.sum(), (free_phi, free_z))
    value, grad = model.bind(phi, cohort.x, cohort).value_and_grad(z)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, grad_z)
    leaf = phi.clone().requires_grad_()
    good = torch.ones(4, dtype=torch.bool)
    _, _, j = PhiGradient(model, None, z).fused(leaf, cohort.x, cohort, None, good, torch.ones(4))
    torch.testing.assert_close(2 * j, grad_phi)


def test_what_a_client_gets_does_not_depend_on_its_cohort() -> None:
    """Others, longer or empty, only change the padding."""
    model = growth_model()
    cohort = cohort_of(model, growth_data((3, 0, 5, 1)))
    z = torch.randn(4, 1, 3, generator=generator(9), dtype=WIDE)
    phi = model.initial_phi()
    value, grad = model.bind(phi, cohort.x, cohort).value_and_grad(z)
    assert value[1] == 0
    assert bool((grad[1] == 0).all())
    for c in range(4):
        one = cohort.select(torch.tensor([c]))
        alone = model.bind(phi, one.x, one).value_and_grad(z[c : c + 1])
        torch.testing.assert_close((value[c : c + 1], grad[c : c + 1]), alone)


def test_an_empty_client_is_not_hurt_by_a_broken_one() -> None:
    """It borrows rows only for their shape: whatever they do, its own likelihood is one."""
    model = growth_model()
    clients = growth_data((2, 0, 3))
    cohort = cohort_of(model, clients)
    z = model.initial_z().expand(3, 1, -1).clone()
    z[0] = float("nan")
    value, grad = model.bind(model.initial_phi(), cohort.x, cohort).value_and_grad(z)
    assert float(value[1]) == 0.0
    assert bool((grad[1] == 0).all())
    assert bool(torch.isfinite(value[2]).all() & torch.isfinite(grad[2]).all())


def test_clients_that_only_have_a_prior() -> None:
    model = growth_model()
    population = fp.FedSOUL(model, **QUICK).fit(growth_data((0, 0, 3)), rounds=2, participation=0.5)
    assert bool(torch.isfinite(population.published["phi"]).all())
