"""pFedBayes: its steps by torch's distributions, autograd and Adam, and the Gaussian case in closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from fedpop.methods.pfedbayes import kl_slopes
from tests.helpers import answers, begun, cohort_of, generator, ragged, seeded, train_key

WIDE = torch.float64
CLOSE = {"rtol": 1e-8, "atol": 1e-10}
SIZES = (6, 3, 0)


def network() -> nn.Sequential:
    return nn.Sequential(seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2))


def model() -> fp.Composition:
    return fp.Composition(*network(), "categorical")


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def at(w: Tensor, x: Tensor) -> Tensor:
    """The network's outputs with these weights, layer by layer; a head has biases beside weights."""
    whole, rows = network(), w[8:].reshape(3, 3)
    values = {
        "0.weight": w[:6].reshape(2, 3),
        "0.bias": w[6:8],
        "1.weight": rows[:, :2],
        "1.bias": rows[:, 2],
    }
    found: Tensor = functional_call(whole, values, (x,))
    return found


def by_torch(
    x: Tensor, y: Tensor, q: Tensor, v: Tensor, unit: Tensor, method: fp.PFedBayes
) -> tuple[Tensor, Tensor]:
    """A client's epochs on all of its examples at once, as published."""
    key = train_key()
    q, v = q.clone().requires_grad_(), v.clone().requires_grad_()
    own, shared = (torch.optim.Adam([p], lr=method.local.rate, eps=1e-300) for p in (q, v))

    def normal(p: Tensor) -> Normal:
        m, a = p.chunk(2)
        return Normal(m, softplus(a))

    for epoch in range(method.local.epochs):
        now = key.at(purpose=f"epoch-{epoch}").at(purpose="batch-0")
        draws = now.at(purpose="networks").normal(unit, (method.samples, 17), WIDE)[0]
        mine = normal(q)
        losses = [cross_entropy(at(mine.loc + mine.scale * xi, x), y, reduction="sum") for xi in draws]
        bound = sum(losses) / method.samples + method.zeta * kl_divergence(mine, normal(v.detach())).sum()
        own.zero_grad()
        bound.backward()
        own.step()
        shared.zero_grad()
        (method.zeta * kl_divergence(normal(q.detach()), normal(v)).sum()).backward()
        shared.step()
    return q.detach(), v.detach()


def test_a_round_is_the_published_one() -> None:
    method = fp.PFedBayes(model(), local=fp.LocalSGD(epochs=3, rate=0.03), zeta=0.7, scale=0.4, samples=2)
    cohort = cohort_of(method.model, clients())
    server, local = begun(method, cohort, Facts(3, 5), train_key())
    v = server["v"]
    torch.testing.assert_close(softplus(v[17:]), torch.full((17,), 0.4, dtype=WIDE), **CLOSE)
    q = local["q"] + 0.3 * torch.randn(3, 34, generator=generator(7), dtype=WIDE)
    done = answers(method, cohort, {"q": q}, method.broadcast(server), train_key())
    moves = 0
    for i, (x, y) in enumerate(clients()[:2]):
        new_q, new_v = by_torch(x, y, q[i], v, cohort.units[i : i + 1], method)
        torch.testing.assert_close(done.local["q"][i], new_q, **CLOSE)
        moves = moves + len(y) * (new_v - v)
    assert torch.equal(done.local["q"][2], q[2])  # without data nothing moves
    after = method.replace(beta=0.5).server_round(server, done.total, Facts(3, 5), train_key())
    torch.testing.assert_close(after["v"], v + 0.5 * moves / 9, **CLOSE)


def test_batches_are_epochs_of_all_examples() -> None:
    """Of every example once in each, and bound as the whole: n_i times the mean over a batch."""
    method = fp.PFedBayes(model(), local=fp.LocalSGD(epochs=2, batch=4), zeta=1e-12, scale=1e-6)
    cohort = cohort_of(method.model, clients((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    x, y = clients((6,))[0]
    # Steps are tiny, so that the mean loss over two epochs is the first network's over all.
    expected = cross_entropy(at(server["v"][:17], x), y)
    assert done.cost["log_likelihood"] == pytest.approx(-6 * float(expected), rel=0.02)
    assert done.cost["backbone_passes"] == 12


def test_the_mean_field_posterior_of_a_gaussian_model_is_where_q_rests() -> None:
    """Tempered by zeta, under the common Normal: the expected slope is zero there, and only there."""
    g = generator(0)
    x = torch.randn(12, 2, generator=g, dtype=WIDE)
    y = x @ torch.tensor([1.0, -2.0], dtype=WIDE) + 0.5 * torch.randn(12, generator=g, dtype=WIDE)
    head = seeded(nn.Linear(2, 1, bias=False).to(WIDE), 2)
    zeta, t, count = 3.0, 0.8, 3000
    method = fp.PFedBayes(
        fp.Composition(None, head, fp.likelihoods.Normal(0.5)), zeta=zeta, scale=t, samples=count
    )
    cohort, mu = cohort_of(method.model, [(x, y)]), head.weight.detach()[0]
    v = torch.cat((mu, torch.full_like(mu, t).expm1().log()))
    curvature = x.mT @ x / 0.5
    precision = curvature / zeta + torch.eye(2, dtype=WIDE) / t**2
    mean = torch.linalg.solve(precision, x.mT @ y / 0.5 / zeta + mu / t**2)
    s = precision.diagonal().rsqrt()

    def slope(m: Tensor, s: Tensor) -> Tensor:
        q = torch.cat((m, s.expm1().log()))
        _, found = method.data_slope(q, cohort, torch.arange(12), train_key())
        return 12 * found + zeta * kl_slopes(q, v)[0]

    # A draw's slope in m is off by H (s xi), and that in s by (H (s xi)) xi, no larger than thrice its sum.
    error = (curvature.abs() @ s).repeat(2) * torch.tensor([1.0, 1, 3, 3], dtype=WIDE) / count**0.5
    assert bool((slope(mean, s).abs() < 4 * error).all())
    assert bool((slope(mean + 0.5 * s, s)[:2].abs() > 4 * error[:2]).any())
    assert bool((slope(mean, 1.5 * s)[2:].abs() > 4 * error[2:]).all())


def test_the_common_posterior_rests_at_the_moments_of_everybodys() -> None:
    """Where the mean of KL(q_i, v) has no slope in v; and both slopes are autograd's."""
    g = generator(3)
    q = torch.randn(5, 8, generator=g, dtype=WIDE)
    m, s = q[:, :4], softplus(q[:, 4:])
    mu = m.mean(0)
    t = (s.square() + (m - mu).square()).mean(0).sqrt()
    v = torch.cat((mu, t.expm1().log()))
    total = torch.stack([kl_slopes(own, v)[1] for own in q]).sum(0)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12)
    one, other = q[0].clone().requires_grad_(), q[1].clone().requires_grad_()
    (a, b), (c, d) = one.chunk(2), other.chunk(2)
    kl_divergence(Normal(a, softplus(b)), Normal(c, softplus(d))).sum().backward()
    for found, leaf in zip(kl_slopes(one.detach(), other.detach()), (one, other), strict=True):
        torch.testing.assert_close(found, leaf.grad, **CLOSE)


def test_predictions_average_over_networks() -> None:
    population = fp.PFedBayes(model(), scale=0.5, draws=4000).fit(clients(), rounds=2, progress=False)
    x, held = clients((5,))[0][0], population.published
    v = torch.cat((held["phi"], held["z"], held["a"]))
    xi = torch.randn(4000, 17, generator=generator(1), dtype=WIDE)
    expected = torch.stack([at(w, x).softmax(-1) for w in v[:17] + softplus(v[17:]) * xi]).mean(0)
    for found in (population.predict(2, x), population.new_client().predict(x)):  # who has no data
        torch.testing.assert_close(found.probs, expected, rtol=0, atol=5 * (0.5 / 8000**0.5))
        assert not found.plug_in
        assert float(found.entropy.epistemic.min()) > 0


def test_without_draws_it_predicts_at_the_mean() -> None:
    population = fp.PFedBayes(model(), draws=0).fit(clients(), rounds=2, progress=False)
    x = clients((5,))[0][0]
    found = population.predict(0, x)
    assert found.plug_in
    assert found.eta.shape == (1, 5, 3)


def test_settings_that_it_does_not_have_are_refused() -> None:
    for name in ("local", "newcomer"):
        for sgd in (fp.LocalSGD(momentum=0.9), fp.LocalSGD(decay=0.1)):
            with pytest.raises(SettingsError, match=f"leave momentum and decay out of {name}"):
                fp.PFedBayes(model(), **{name: sgd})


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.PFedBayes(model(), draws=3).fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
