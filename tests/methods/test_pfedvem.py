"""pFedVEM: its two steps by torch's distributions and autograd, and the Gaussian case in closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softplus

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, generator, ragged, seeded, train_key

WIDE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
SIZES = (6, 2, 0)


def model() -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2), "categorical"
    )


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def outputs(z: Tensor, f: Tensor) -> Tensor:
    """Of heads ``[S, d]``: rows of weights with their biases."""
    rows = z.unflatten(-1, (3, 3))
    return f @ rows[..., :-1].mT + rows[..., -1].unsqueeze(-2)


def by_autograd(
    x: Tensor, y: Tensor, m: Tensor, a: Tensor, mu: Tensor, unit: Tensor, method: fp.PFedVEM
) -> tuple[Tensor, Tensor, Tensor]:
    """A client's round as published: (m, a) and the body's move."""
    key, samples = train_key(), method.samples
    m, a = m.clone().requires_grad_(), a.clone().requires_grad_()
    rho = (softplus(a).square() + (m - mu).square()).mean().sqrt().detach()
    body = seeded(nn.Linear(3, 2).to(WIDE), 1)
    start = torch.cat([p.detach().flatten() for p in body.parameters()])
    head = torch.optim.SGD([m, a], lr=method.head.rate, momentum=method.head.momentum)
    for e in range(method.head.epochs):
        xi = key.at(purpose=f"head-{e}").normal(unit, (samples, 9), WIDE)[0]
        q = Normal(m, softplus(a))
        eta = outputs(q.loc + q.scale * xi, body(x).detach())
        nll = sum(cross_entropy(one, y, reduction="sum") for one in eta) / samples
        head.zero_grad()
        (nll + kl_divergence(q, Normal(mu, rho)).sum()).backward()
        head.step()
    xi = key.at(purpose="body").at(purpose="heads").normal(unit, (samples, 9), WIDE)[0]
    z = (m + softplus(a) * xi).detach()
    steps = torch.optim.SGD(body.parameters(), lr=method.body.rate)
    for _ in range(method.body.epochs):
        steps.zero_grad()
        (sum(cross_entropy(one, y) for one in outputs(z, body(x))) / samples).backward()
        steps.step()
    return m.detach(), a.detach(), torch.cat([p.detach().flatten() for p in body.parameters()]) - start


def test_a_round_is_the_published_one() -> None:
    method = fp.PFedVEM(
        model(),
        head=fp.LocalSGD(epochs=4, rate=0.02, momentum=0.9),
        body=fp.LocalSGD(epochs=2, rate=0.1),
        scale=0.5,
    )
    cohort = cohort_of(method.model, clients())
    server, local = begun(method, cohort, Facts(3, 5), train_key())
    mu = server["mu"]
    torch.testing.assert_close(softplus(local["a"]), torch.full((3, 9), 0.5, dtype=WIDE), **CLOSE)
    g = generator(7)
    m, a = (v + 0.3 * torch.randn(3, 9, generator=g, dtype=WIDE) for v in (local["m"], local["a"]))
    done = answers(method, cohort, {"m": m, "a": a}, method.broadcast(server), train_key())
    precision = 1 / (softplus(a).square() + (m - mu).square()).mean(1)
    moves, heads = 0, 0
    for i, (x, y) in enumerate(clients()[:2]):
        new_m, new_a, move = by_autograd(x, y, m[i], a[i], mu, cohort.units[i : i + 1], method)
        torch.testing.assert_close(done.local["m"][i], new_m, **CLOSE)
        torch.testing.assert_close(done.local["a"][i], new_a, **CLOSE)
        moves, heads = moves + len(y) * move, heads + precision[i] * new_m
    after = method.server_round(server, done.total, Facts(3, 5), train_key())
    torch.testing.assert_close(after["phi"], server["phi"] + moves / 8, **CLOSE)
    # The mean of m_i by what is known of each; the client without data does not count.
    torch.testing.assert_close(after["mu"], heads / (precision[0] + precision[1]), **CLOSE)


def test_the_e_step_finds_the_mean_field_posterior_of_a_gaussian_model() -> None:
    """m is the posterior's mean, 1 / s^2 the diagonal of its precision, and draws average to the same."""
    g = generator(0)
    x = torch.randn(12, 2, generator=g, dtype=WIDE)
    y = x @ torch.tensor([1.0, -2.0], dtype=WIDE) + 0.5 * torch.randn(12, generator=g, dtype=WIDE)
    head = seeded(nn.Linear(2, 1, bias=False).to(WIDE), 2)
    method = fp.PFedVEM(
        fp.Composition(None, head, fp.likelihoods.Normal(0.5)),
        head=fp.LocalSGD(epochs=400, rate=4e-3),
        samples=400,
    )
    cohort = cohort_of(method.model, [(x, y)])
    mu, rho2 = torch.tensor([0.3, 0.1], dtype=WIDE), torch.full((1, 1), 0.7, dtype=WIDE)
    start = method.enter(cohort.units, {"mu": mu}, train_key())
    target = method.likelihood(method.model.initial_phi(), cohort, None)
    m, a = method.e_step(target, start["m"], start["a"], mu, rho2, cohort, train_key())
    precision = x.mT @ x / 0.5 + torch.eye(2, dtype=WIDE) / 0.7
    mean = torch.linalg.solve(precision, x.mT @ y / 0.5 + mu / 0.7)
    # The gradient's noise, sd / sqrt(samples) times its curvature, is averaged over some 1 / (rate curvature)
    # steps: an error of sd / sqrt(samples) is not reached by far.
    sd = precision.diagonal().rsqrt()
    assert bool(((m[0] - mean).abs() < sd / 20).all())
    torch.testing.assert_close(softplus(a[0]), sd, rtol=0.05, atol=0)


def test_rho_is_the_m_step() -> None:
    """No other spread of the prior makes the bound larger."""
    method, g = fp.PFedVEM(model()), generator(3)
    m, a = (torch.randn(4, 9, generator=g, dtype=WIDE) for _ in range(2))
    mu = torch.randn(9, generator=g, dtype=WIDE)
    rho = method.spread(m, a, mu).sqrt().requires_grad_()
    kl_divergence(Normal(m, softplus(a)), Normal(mu, rho)).sum().backward()
    assert rho.grad is not None
    torch.testing.assert_close(rho.grad, torch.zeros_like(rho.grad), rtol=0, atol=1e-12)


def test_who_has_no_data_predicts_at_the_common_mean() -> None:
    population = fp.PFedVEM(model()).fit(clients(), rounds=2, progress=False)
    x = clients((5,))[0][0]
    held = population.published
    expected = outputs(held["z"], population.model.embed(held["phi"], x)).softmax(-1)
    for found in (population.predict(2, x), population.new_client().predict(x)):
        torch.testing.assert_close(found.probs, expected, **CLOSE)
    assert float(population.predict(0, x).entropy.epistemic.min()) > 0


def test_without_draws_it_predicts_at_the_mean() -> None:
    method = fp.PFedVEM(model(), draws=0)
    population = method.fit(clients(), rounds=2, progress=False)
    x = clients((5,))[0][0]
    assert population.predict(0, x).plug_in
    assert population.predict(0, x).eta.shape == (1, 5, 3)


def test_settings_that_its_head_does_not_have_are_refused() -> None:
    for head in (fp.LocalSGD(batch=3), fp.LocalSGD(decay=0.1)):
        with pytest.raises(SettingsError, match="leave batch and decay out of head"):
            fp.PFedVEM(model(), head=head)


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.PFedVEM(model(), samples=3).fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
