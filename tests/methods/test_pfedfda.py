"""pFedFDA: Bayes' rule for Normal classes, torch's SGD under that head, moments and folds by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from fedpop.methods.pfedfda import Classes, estimated, folds, interpolation, lda
from tests.helpers import answers, begun, cohort_of, generator, ragged, seeded, train_key

WIDE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SIZES = (9, 4, 0, 1)


def model() -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2), "categorical"
    )


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 2) for x, _ in ragged(sizes)]


def some(k: int = 3, q: int = 2, seed: int = 5) -> Classes:
    g = generator(seed)
    root = torch.randn(q, q, generator=g, dtype=WIDE)
    return Classes(
        torch.randn(k, q, generator=g, dtype=WIDE), root @ root.mT + 0.5 * torch.eye(q, dtype=WIDE)
    )


def shrunk(covariance: Tensor) -> Tensor:
    q = len(covariance)
    return (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / q * torch.eye(q, dtype=WIDE)


def by_bayes(f: Tensor, means: Tensor, covariance: Tensor, share: Tensor) -> Tensor:
    """p(class | feature) from densities."""
    each = torch.stack([MultivariateNormal(m, shrunk(covariance)).log_prob(f) for m in means], -1)
    return torch.softmax(each + share.log(), -1)


def test_the_head_is_bayes_rule_for_normal_classes() -> None:
    classes, share = some(4, 3), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=WIDE)
    f = torch.randn(20, 3, generator=generator(1), dtype=WIDE)
    head = lda(classes, share.log())
    found = torch.softmax(f @ head[:, :-1].mT + head[:, -1], -1)
    torch.testing.assert_close(found, by_bayes(f, *classes, share), **CLOSE)


def by_hand(f: Tensor, y: Tensor, shared: Classes, ridge: float, fewest: int) -> Classes:
    enough = [int((y == k).sum()) >= fewest for k in range(len(shared.means))]
    means = [f[y == k].mean(0) if enough[k] else shared.means[k] for k in range(len(shared.means))]
    scatter = sum(torch.outer(v - means[k], v - means[k]) for v, k in zip(f, y.tolist(), strict=True))
    return Classes(torch.stack(means), scatter / (len(y) - 1) + ridge * torch.eye(f.shape[1], dtype=WIDE))


@pytest.mark.parametrize("fewest", [1, 3])
def test_moments_and_interpolation_are_those_by_hand(fewest: int) -> None:
    """With folds of two examples of a class among them, which three are asked of."""
    shared, share = some(), torch.tensor([0.5, 0.49, 0.01], dtype=WIDE)
    g = generator(3)
    y = torch.tensor([0, 1, 0, 0, 1, 2, 1, 1, 0, 1])
    f = torch.randn(10, 2, generator=g, dtype=WIDE) + torch.tensor([[2.0], [-2.0], [0.0]], dtype=WIDE)[y]
    for found, expected in zip(
        estimated(f, y, shared, 0.3, fewest), by_hand(f, y, shared, 0.3, fewest), strict=True
    ):
        torch.testing.assert_close(found, expected, **CLOSE)
    fold = folds(y, torch.rand(10, generator=g))
    assert int(fold[5]) == -1  # the only one of its class
    for k, counts in ((0, (2, 2)), (1, (3, 2))):
        assert tuple(int(((fold == p) & (y == k)).sum()) for p in (0, 1)) == counts
    best, at = None, torch.linspace(0, 1, 11, dtype=WIDE).tolist()
    for i in at:
        for j in at:
            loss = 0.0
            for p in (0, 1):
                inside, outside = (fold >= 0) & (fold != p), fold == p
                own = by_hand(f[inside], y[inside], shared, 0.3, fewest)
                means = i * own.means + (1 - i) * shared.means
                covariance = j * own.covariance + (1 - j) * shared.covariance
                probs = by_bayes(f[outside], means, covariance, share)
                loss -= float(probs[torch.arange(len(probs)), y[outside]].log().mean())
            best = min(best or (loss, i, j), (loss, i, j))
    assert best is not None
    found = interpolation(f, y, shared, share.log(), fold, 0.3, fewest)
    torch.testing.assert_close(found, torch.tensor(best[1:], dtype=WIDE), **CLOSE)


def test_clusters_of_its_own_are_believed_and_single_examples_are_not() -> None:
    shared = some()
    y = torch.arange(200) % 3
    f = torch.randn(200, 2, generator=generator(4), dtype=WIDE) + 5 * shared.means.roll(1, 0)[y]
    share = torch.full((3,), 1 / 3, dtype=WIDE).log()
    fold = folds(y, torch.rand(200, generator=generator(6)))
    b = interpolation(f, y, shared, share, fold, 1.0, 3)
    assert b[0] > 0.8
    three = torch.tensor([2, 0, 1])
    assert torch.equal(
        interpolation(f[three], y[three], shared, share, folds(y[three], torch.rand(3)), 1.0, 1),
        b.new_zeros(2),
    )


def test_a_round_is_torchs_sgd_under_the_shared_classifier() -> None:
    """And the moments that are sent are those of the trained body's features."""
    method = fp.PFedFDA(model(), local=fp.LocalSGD(epochs=3, rate=0.2))
    cohort = cohort_of(method.model, clients((9, 1)))
    server, local = begun(method, cohort, Facts(2, 5), train_key())
    broadcast = method.broadcast(server)
    shared = Classes(server["means"].reshape(3, 2), server["covariance"].reshape(2, 2))
    sums: dict[str, Any] = {"dphi": 0, "means": 0, "covariance": 0}
    for n, (x, y) in zip((9, 1), clients((9, 1)), strict=True):
        body = seeded(nn.Linear(3, 2).to(WIDE), 1)
        start = torch.cat([p.detach().flatten() for p in body.parameters()])
        share = torch.bincount(y, minlength=3) / n + 1e-4
        log_share = (share / share.sum()).to(WIDE).log()
        precision = torch.linalg.inv(shrunk(shared.covariance))
        constant = log_share - 0.5 * torch.einsum("ki,ij,kj->k", shared.means, precision, shared.means)
        optimiser = torch.optim.SGD(body.parameters(), lr=0.2)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(body(x) @ precision @ shared.means.mT + constant, y).backward()
            optimiser.step()
        moved = torch.cat([p.detach().flatten() for p in body.parameters()])
        own = shared
        if n > 1:
            with torch.no_grad():
                f = body(x)
            uniform = train_key().at(purpose="folds").uniform(cohort.units[:1], (n,))[0]
            b = interpolation(f, y, shared, log_share, folds(y, uniform), 1.0, 3)
            assert bool((b > 0).any())
            own = shared.towards(by_hand(f, y, shared, 1.0, 3), *b)
        sums["dphi"] += n * (moved - start)
        sums["means"] += n * own.means.flatten()
        sums["covariance"] += n * own.covariance.flatten()
    done = answers(method, cohort, local, broadcast, train_key())
    for name, value in sums.items():
        torch.testing.assert_close(done.total.plain[name], value, rtol=1e-6, atol=1e-8)
    after = method.server_round(server, done.total, Facts(2, 5), train_key())
    torch.testing.assert_close(after["phi"], server["phi"] + sums["dphi"] / 10, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(after["means"], sums["means"] / 10, rtol=1e-6, atol=1e-8)


def test_who_has_nothing_to_tell_has_the_shared_classifier() -> None:
    """With its own shares of classes where it has an example, all alike where it has none."""
    population = fp.PFedFDA(model()).fit(clients(), rounds=3, progress=False)
    held = population.published
    x = clients((5,))[0][0]
    f = population.model.embed(held["phi"], x)
    classes = Classes(held["means"].reshape(3, 2), held["covariance"].reshape(2, 2))
    alike, one = torch.full((3,), 1 / 3, dtype=WIDE), torch.tensor([1.0 + 1e-4, 1e-4, 1e-4], dtype=WIDE)
    torch.testing.assert_close(population.predict(2, x).probs, by_bayes(f, *classes, alike), **CLOSE)
    torch.testing.assert_close(
        population.new_client().predict(x).probs, by_bayes(f, *classes, alike), **CLOSE
    )
    torch.testing.assert_close(
        population.predict(3, x).probs, by_bayes(f, *classes, one / one.sum()), **CLOSE
    )


def test_what_it_is_not_for_is_refused() -> None:
    body = nn.Linear(3, 2)
    for head, likelihood in (
        (nn.Linear(2, 1), "normal"),
        (nn.Linear(2, 3, bias=False), "categorical"),
        (nn.Sequential(nn.Tanh(), nn.Linear(2, 3)), "categorical"),
    ):
        with pytest.raises(SettingsError, match="linear head with biases and a categorical"):
            fp.PFedFDA(fp.Composition(body, head, likelihood))


def test_a_diverging_client_is_left_out() -> None:
    x = 1e200 * torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], dtype=WIDE)
    method = fp.PFedFDA(model(), local=fp.LocalSGD(epochs=3, rate=1e200))
    data = {"far": (x, torch.tensor([0, 1])), "idle": (x[:0], torch.tensor([]).long())}
    population = method.fit(data, rounds=2, progress=False)
    assert [m["left_out"] for m in population.history] == [["far"], ["far"]]
    assert torch.equal(population.published["phi"], method.model.initial_phi())


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.PFedFDA(model(), ridge=0.1).fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(4):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
