"""A round on a batch of each client's examples: chains, I and J are those of the batch, J times n over it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.comparison.budget import rounds_within
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation import Uniform
from fedpop.keys import Key
from fedpop.methods.base import Facts
from tests.helpers import answers, cohort_of, ragged, seeded, train_key

WIDE = torch.float64
SIZES = (4, 1, 0, 7)


def body(width: int = 120) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(WIDE), 1)


def network(likelihood: Any = "categorical", outputs: int = 3, width: int = 120) -> fp.Composition:
    return fp.Composition(body(width), seeded(nn.Linear(2, outputs).to(WIDE), 2), likelihood)


def labelled(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def measured(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.sin(torch.arange(len(x)) * 1.3).to(WIDE)) for x, _ in ragged(sizes)]


def message(method: fp.FedSOUK, clients: Any, round: int = 0) -> dict[str, Tensor]:
    cohort = cohort_of(method.model, clients)
    broadcast = method.broadcast(method.init(Facts(len(cohort), 10), Key(0), {}))
    local = method.enter(cohort.units, broadcast, train_key())
    return answers(method, cohort, local, broadcast, train_key(round)).total.plain


# --- which examples ------------------------------------------------------------------------------


def rows_of(cohort: Cohort) -> list[list[float]]:
    assert isinstance(cohort.x, Tensor)
    return [part[:, 0].tolist() for part in cohort.x.split(cohort.sizes.tolist())]


def numbered(sizes: tuple[int, ...] = SIZES) -> Cohort:
    clients = [(torch.arange(n).to(WIDE).unsqueeze(1).repeat(1, 3), torch.zeros(n).long()) for n in sizes]
    return cohort_of(network(), clients)


def test_a_batch_has_different_examples_of_everyone_in_their_order() -> None:
    for k in range(20):
        drawn = numbered().drawn(3, Key(0, k))
        assert drawn.sizes.tolist() == [3, 1, 0, 3]
        assert drawn.longest == 3
        for rows, n in zip(rows_of(drawn), SIZES, strict=True):
            assert rows == sorted(set(rows))
            assert set(rows) <= set(range(n))


def test_nobodys_batch_depends_on_who_else_is_there() -> None:
    together = numbered().drawn(3, Key(0, 5))
    for i in range(len(SIZES)):
        alone = numbered().select(torch.tensor([i])).drawn(3, Key(0, 5))
        assert rows_of(alone)[0] == rows_of(together)[i]


def test_every_batch_is_as_likely_as_any_other() -> None:
    rounds, cohort = 1200, numbered((4,))
    found = Counter(tuple(rows_of(cohort.drawn(2, Key(0, k)))[0]) for k in range(rounds))
    assert len(found) == 6
    expected = rounds / 6
    statistic = sum((n - expected) ** 2 / expected for n in found.values())
    assert statistic < 20.5  # chi-squared with five degrees of freedom: one in a thousand


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["identity", "natural"])
def test_whoever_has_no_more_than_a_batch_sends_what_it_would_send_of_all(compressor: str) -> None:
    method = fp.FedSOUL(network(), prior=fp.priors.Normal(scale=0.5), compressor=compressor)
    some, every = (message(method.replace(batch=n), labelled()) for n in (7, None))
    assert all(torch.equal(some[n], every[n]) for n in every)
    assert not torch.equal(message(method.replace(batch=3), labelled())["J"], every["J"])


@pytest.mark.parametrize("compressor", ["identity", fp.compressors.RandK(share=1.0)])
def test_j_is_the_slope_of_the_batches_marginal_likelihood(compressor: Any) -> None:
    """y of a batch is N(F mu, s^2 F F' + v): with conditional expectations in closed form, J is the gradient
    of its log-density, times n over the batch, whether it travels in a sum or by itself."""
    model = network(fp.likelihoods.Normal(0.3), outputs=1)
    chain, prior = fp.chains.Chain(rao_blackwell=True), fp.priors.Normal(scale=0.7)
    method = fp.FedSOUL(
        model, engine="sampled", chain=chain, prior=prior, start="random", batch=3, compressor=compressor
    )
    clients, now = measured(), train_key(4)
    found = message(method, clients, 4)["J"]
    cohort = cohort_of(model, clients)
    batch = cohort.drawn(3, now.at(purpose="batch"))
    phi = model.initial_phi().requires_grad_()
    features = model.embed(phi, batch.x)
    assert isinstance(features, Tensor)
    columns = torch.cat((features, torch.ones_like(features[:, :1])), 1)
    total = phi.new_zeros(())
    for f, y, n in zip(
        columns.split(batch.sizes.tolist()), batch.y.flatten().split(batch.sizes.tolist()), SIZES, strict=True
    ):
        if n:
            cov = 0.49 * f @ f.mT + 0.3 * torch.eye(len(y), dtype=WIDE)
            law = torch.distributions.MultivariateNormal(torch.zeros_like(y), cov)
            total = total + n / len(y) * law.log_prob(y)
    (expected,) = torch.autograd.grad(total, phi)
    torch.testing.assert_close(found, expected.to(found), rtol=1e-6, atol=1e-8)


# --- for whom it is, and what it costs -----------------------------------------------------------


def test_it_is_for_networks_with_a_linear_head_whose_chains_follow() -> None:
    method = fp.FedSOUL(network())
    assert method.rows == method.footprint.rows == 50
    assert method.replace(batch=None).rows is None
    assert method.replace(chain=fp.chains.Chain(follow=False)).rows is None
    assert method.replace(prior="mixture").rows is None
    assert method.replace(phi_step=fp.steps.PhiStep(local=fp.LocalSGD())).rows is None
    assert fp.FedSOUL.paper(network()).rows is None
    assert fp.FedSOUL(network(width=20)).rows is None  # small: judged by its likelihood
    linear = fp.Composition(nn.Linear(300, 2), nn.Linear(2, 3), "categorical")
    assert fp.FedSOUL(linear).rows is None
    deep = fp.Composition(
        body(), nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).to(WIDE), "categorical"
    )
    assert fp.FedSOUL(deep).rows is None


def test_a_round_costs_the_passes_of_its_batches() -> None:
    clients, method = labelled((4, 9, 6, 7)), fp.FedSOUL(network(), batch=5)
    run = method.fit(clients, rounds=3, threads=1)
    assert run.totals["backbone_passes"] == 3 * (4 + 3 * 5)
    federation = fp.Federation.of(clients)
    assert rounds_within(method, federation, 10 * 19, 0, Uniform(4)) == 10
    assert rounds_within(method.replace(batch=None), federation, 10 * 26, 0, Uniform(4)) == 10


# --- the prior's scale ---------------------------------------------------------------------------


def test_batches_do_not_widen_the_prior() -> None:
    """Heads drawn from the prior, classes from the heads: over clients, the mean score of the prior's scale
    given any batch is 0. Chains that were widened by the curvature of the new batch at the old mode, which
    fits it badly, had a large one, and the learned scale grew without end."""
    clients, examples, inputs, classes, rounds = 12, 200, 64, 10, 12
    rng = torch.Generator().manual_seed(0)
    x = 1.4 * torch.randn(clients, examples, inputs, generator=rng).relu()  # outputs of about 8
    heads = torch.randn(clients, inputs, classes, generator=rng)
    y = torch.multinomial((x @ heads).softmax(-1).flatten(0, 1), 1, generator=rng).reshape(clients, examples)
    model = fp.Composition(None, nn.Linear(inputs, classes, bias=False), "categorical")
    sampler = replace(fp.FedSOUL(model, engine="sampled").sampler, batches=True)
    cohort = cohort_of(model, list(zip(x, y, strict=True)))
    d, phi, everyone = model.z_layout.size, model.initial_phi(), torch.ones(clients, dtype=torch.bool)
    beta = torch.zeros(d + 1)  # mean 0, standard deviation 1

    def score_of_scale(drawn: Tensor | None) -> Tensor:
        local, found = sampler.enter(cohort.units, beta, Key(1), None), []
        for k in range(rounds):
            part = cohort.drawn(50, Key(2, k))
            target = sampler.hierarchy.target(phi, beta, model.features(phi, part), part)
            done = sampler.run(target, local, part, 10, Key(3, round=k), states=None, drawn=drawn)
            found.append(sampler.scores(target, done, done.draws.flatten(1, 2), "mixed")[:, -1] / d)
            local = sampler.states(done, local, beta, everyone)
        return torch.stack(found[rounds // 2 :]).mean(0)

    found, widened = score_of_scale(everyone), score_of_scale(None)
    assert abs(float(found.mean())) < 0.05  # chains of a dozen rounds are still finding their width
    assert float(widened.mean()) > 0.2
