"""Per-FedAvg: its direction against autograd of the MAML loss, and what its variants leave out."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import FedpopWarning, SettingsError
from fedpop.message import Total
from fedpop.methods import per_fedavg
from fedpop.methods.base import Facts
from tests.helpers import answers, cohort_of, generator, linear_model, ragged, seeded, site_key, train_key

WIDE = torch.float64
ALPHA = 0.3


def softmax() -> fp.Composition:
    """Not quadratic: the Hessian depends on w."""
    body = nn.Sequential(seeded(nn.Linear(3, 4).to(WIDE), 1), nn.Tanh())
    return fp.Composition(body, seeded(nn.Linear(4, 3).to(WIDE), 2), "categorical")


def quadratic() -> fp.Composition:
    return fp.Composition(None, seeded(nn.Linear(3, 1, bias=False).to(WIDE), 1), fp.likelihoods.Normal(1.0))


def examples(model: fp.Composition, n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=generator(seed), dtype=WIDE)
    if model.likelihood.name == "categorical":
        return x, torch.arange(n) % 3
    return x, torch.randn(n, generator=generator(seed + 1), dtype=WIDE)


def loss(model: fp.Composition, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss written out; only the places of w's entries are fedpop's."""
    if model.likelihood.name == "categorical":
        body, head = model.phi_layout.views(w[:16]), model.z_layout.views(w[16:])
        hidden = torch.tanh(x @ body["backbone.0.weight"].mT + body["backbone.0.bias"])
        return nn.functional.cross_entropy(hidden @ head["weight"].mT + head["bias"], y)
    return 0.5 * (x @ w - y).square().mean() + 0.5 * math.log(2 * math.pi)


def along(model: fp.Composition, batch: tuple[Tensor, Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    method = fp.PerFedAvg(model, alpha=ALPHA, **settings)
    w = method.initial_w()
    rows = cohort_of(model, [batch])  # targets in the shape of a run
    with torch.no_grad():
        return method.direction(False)(w, w[:0], rows.x, rows.y, torch.ones(len(rows.y), dtype=WIDE), None)


def maml(model: fp.Composition, d1: tuple[Tensor, Tensor], d2: tuple[Tensor, Tensor], order: bool) -> Tensor:
    """Autograd of f(w - alpha grad f(w; D1); D2), through the inner gradient or not."""
    w = fp.FedAvg(model).initial_w().requires_grad_()
    (g,) = torch.autograd.grad(loss(model, w, *d1), w, create_graph=order)
    (out,) = torch.autograd.grad(loss(model, w - ALPHA * g, *d2), w)
    return out


def every(batch: tuple[Tensor, Tensor], k: int, parts: int) -> tuple[Tensor, Tensor]:
    return batch[0][k::parts], batch[1][k::parts]


@pytest.mark.parametrize("model", [softmax, quadratic])
@pytest.mark.parametrize("n", [2, 7])
def test_with_d3_equal_to_d1_the_exact_direction_is_the_gradient_of_the_maml_loss(model: Any, n: int) -> None:
    batch = examples(model(), n)
    found, value = along(model(), batch, third="first")
    d1, d2 = every(batch, 0, 2), every(batch, 1, 2)
    torch.testing.assert_close(found, maml(model(), d1, d2, True), rtol=1e-12, atol=1e-14)
    w = fp.FedAvg(model()).initial_w()
    torch.testing.assert_close(value, loss(model(), w, *d1), rtol=1e-12, atol=0)


def test_first_order_drops_exactly_the_hessian_term() -> None:
    model = softmax()
    batch = examples(model, 8)
    d1, d2 = every(batch, 0, 2), every(batch, 1, 2)
    first, _ = along(model, batch, variant="first-order")
    torch.testing.assert_close(first, maml(model, d1, d2, False), rtol=1e-12, atol=1e-14)
    exact, _ = along(model, batch, third="first")
    hessian = torch.autograd.functional.hessian(
        lambda w: loss(model, w, *d1), fp.FedAvg(model).initial_w(), vectorize=True
    )
    torch.testing.assert_close(first - exact, ALPHA * hessian @ first, rtol=1e-11, atol=1e-14)
    assert float((first - exact).norm() / exact.norm()) > 0.01  # the term is there to be dropped


def test_three_parts_of_their_own() -> None:
    """The published form: the Hessian of D3 at w, on the gradient of D2 at w' made with D1."""
    model = softmax()
    batch = examples(model, 9)
    d1, d2, d3 = (every(batch, k, 3) for k in range(3))
    v = maml(model, d1, d2, False)
    w = fp.FedAvg(model).initial_w()
    hessian = torch.autograd.functional.hessian(lambda u: loss(model, u, *d3), w, vectorize=True)
    expected = v - ALPHA * hessian @ v
    torch.testing.assert_close(along(model, batch)[0], expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("delta", [1.0, 1e-3])
def test_on_a_quadratic_the_difference_is_exact(delta: float) -> None:
    """Gradients are linear in w there; what remains is rounding, magnified by 1 / delta."""
    model = quadratic()
    batch = examples(model, 9)
    exact, _ = along(model, batch)
    free, _ = along(model, batch, variant="hessian-free", delta=delta)
    # Gradients are of size one: a few units in the last place of each of the two.
    assert float((exact - free).abs().max()) < 20 * torch.finfo(WIDE).eps / delta


def test_elsewhere_the_difference_is_exact_in_the_limit() -> None:
    """A central difference: its error falls with delta squared."""
    model = softmax()
    batch = examples(model, 9)
    exact, _ = along(model, batch)
    errors = [
        float((along(model, batch, variant="hessian-free", delta=delta)[0] - exact).norm())
        for delta in (0.4, 0.2, 0.1, 0.05)
    ]
    assert errors[0] > 1e-6
    for before, after in pairwise(errors[1:]):
        assert 3.8 < before / after < 4.2
    small, _ = along(model, batch, variant="hessian-free", delta=1e-4)
    # delta^2 times what errors show, and rounding over delta
    assert float((small - exact).norm()) < 2 * errors[3] * (1e-4 / 0.05) ** 2 + 1e-11


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("hands", [2, 3])
def test_a_batch_is_dealt_out(count: int, hands: int) -> None:
    """Every example once where there are enough; else they are dealt again, and none is padding."""
    x = torch.arange(5.0)
    mask = (torch.arange(5) < count).to(WIDE)
    parts = [per_fedavg.dealt(k, hands, x, x, mask, None) for k in range(hands)]
    seen = [p[0][p[2] > 0].tolist() for p in parts]
    if count >= hands:
        assert sorted(i for s in seen for i in s) == list(range(count))
        assert all(s[0] == k for k, s in enumerate(seen))
    else:
        assert seen == [[k % count] for k in range(hands)]
    assert all(bool((p[0] < count).all()) for p in parts)


def test_ragged_clients_side_by_side_are_those_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, and clients with few or no examples: vmap and the plain loop agree."""
    method = fp.PerFedAvg(softmax(), alpha=ALPHA, local=fp.LocalSGD(epochs=2, rate=0.2, batch=4))
    sizes = (7, 0, 1, 2, 5)
    cohort = cohort_of(method.model, [examples(method.model, n, n) for n in sizes])

    def one_round() -> Total:
        return answers(method, cohort, {}, {"w": method.initial_w()}, train_key()).total

    together = one_round()
    monkeypatch.setattr("fedpop.client.local_sgd.LARGEST_BATCHED", 0)
    torch.testing.assert_close(together.plain, one_round().plain, rtol=1e-11, atol=1e-14)
    assert together.count == 5


def test_parts_are_dealt_anew_in_every_epoch() -> None:
    """Batches of all examples are shuffled too: two epochs are not one repeated with the same parts."""
    model = quadratic()
    x, y = examples(model, 2)
    one = fp.PerFedAvg(model, alpha=ALPHA, variant="first-order", local=fp.LocalSGD(rate=1e-6))
    ends = []
    for seed in range(12):
        w = one.fit([(x, y)], rounds=1, seed=seed).published["z"]
        ends.append(((w - one.initial_w()) / -1e-6).tolist())
    w0 = one.initial_w()
    orders = [maml(model, (x[[i]], y[[i]]), (x[[j]], y[[j]]), False) for i, j in ((0, 1), (1, 0))]
    kinds = {tuple(round(v, 5) for v in end) for end in ends}
    # eps |w| / rate bounds what the subtraction of w loses
    assert kinds == {tuple(round(float(v), 5) for v in o) for o in orders}
    assert float(w0.abs().max()) * torch.finfo(WIDE).eps / 1e-6 < 1e-6


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_the_server_takes_the_mean(weights: str) -> None:
    """Equal as published, or by examples: two clients in one round against each alone."""
    method = fp.PerFedAvg(linear_model(), weights=weights, local=fp.LocalSGD(rate=0.1))
    clients = ragged((6, 2))
    start = method.initial_w()
    both, *each = (
        torch.cat(tuple(p[n] for n in ("phi", "z"))) - start
        for p in (
            method.fit(clients, rounds=1).published,
            *(moved(method, clients, [i]) for i in range(2)),
        )
    )
    share = (0.5, 0.5) if weights == "equal" else (0.75, 0.25)
    torch.testing.assert_close(both, share[0] * each[0] + share[1] * each[1])


def moved(method: fp.PerFedAvg, clients: Any, ids: list[int]) -> dict[str, Tensor]:
    """What is published after one round of these clients alone, under their own names."""
    cohort = cohort_of(method.model, clients).select(torch.tensor(ids))
    server = method.init(Facts(1, 1), train_key(), {})
    total = answers(method, cohort, {}, method.broadcast(server), site_key()).total
    return method.publish(method.server_round(server, total, Facts(1, 1), train_key()))


def test_unequal_participation_is_unbiased() -> None:
    """1/p_i weights: the mean over who may come of what the server adds is that of everyone."""
    method = fp.PerFedAvg(quadratic(), local=fp.LocalSGD(rate=0.1))
    clients = [examples(method.model, n, n) for n in (4, 5)]
    probability = (0.8, 0.3)
    everyone = cohort_of(method.model, clients)
    server, facts = {"w": method.initial_w()}, Facts(2, 1)

    def step(ids: list[int], weights: list[float], ratio: bool) -> Tensor:
        cohort, weight = everyone.select(torch.tensor(ids)), torch.tensor(weights, dtype=WIDE)
        total = answers(method, cohort, {}, server, train_key(), weight, of=2, ratio=ratio).total
        return method.server_round(server, total, facts, train_key())["w"] - server["w"]

    expected = step([0, 1], [1.0, 1.0], True)
    a, b = probability
    found = a * b * step([0, 1], [1 / a, 1 / b], False)
    found = found + a * (1 - b) * step([0], [1 / a], False) + b * (1 - a) * step([1], [1 / b], False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    empty = Total.of_nobody(2, ratio=False)
    assert torch.equal(method.server_round(server, empty, facts, train_key())["w"], server["w"])


@pytest.mark.parametrize("steps", [1, 3])
def test_a_client_predicts_after_its_own_steps(steps: int) -> None:
    model = quadratic()
    clients = [examples(model, n, n) for n in (4, 6)]
    method = fp.PerFedAvg(model, alpha=ALPHA, adapt_steps=steps, local=fp.LocalSGD(rate=0.1))
    population = method.fit(clients, rounds=2)
    before = population.published["z"].clone()
    for i, (x, y) in enumerate(clients):
        w = before.clone()
        for _ in range(steps):
            w = w - ALPHA * x.mT @ (x @ w - y) / len(y)
        torch.testing.assert_close(population.predict(i, x).mean, x @ w, rtol=1e-12, atol=1e-13)
    assert torch.equal(population.published["z"], before)  # nothing of it goes back
    torch.testing.assert_close(population.new_client().predict(x).mean, x @ before, rtol=1e-12, atol=1e-13)


def test_a_round_is_gradient_descent_on_the_mean_maml_loss() -> None:
    """Copies of one example make D1, D2 and D3 the same whatever the shuffle: gradient descent on F."""
    model = quadratic()
    clients = []
    for seed in range(4):
        x, y = examples(model, 1, 10 * seed)
        clients.append((x.expand(4, 3), y.expand(4)))
    method = fp.PerFedAvg(model, alpha=ALPHA, local=fp.LocalSGD(rate=0.5))
    found = method.fit(clients, rounds=1).published["z"]
    # F_i(w) = f_i(w - alpha grad f_i(w)), whose gradient is (I - alpha H) (H (w - alpha (H w - c)) - c)
    w, total = method.initial_w(), torch.zeros(3, dtype=WIDE)
    for x, y in clients:
        h, c = x.mT @ x / len(y), x.mT @ y / len(y)
        total += (torch.eye(3, dtype=WIDE) - ALPHA * h) @ (h @ (w - ALPHA * (h @ w - c)) - c)
    torch.testing.assert_close(found, w - 0.5 * total / 4, rtol=1e-12, atol=1e-14)


def test_a_client_with_one_example_takes_part_and_is_named() -> None:
    model = quadratic()
    x, y = examples(model, 1)
    clients = {"few": (x, y), "many": examples(model, 4, 8)}
    method = fp.PerFedAvg(model, alpha=ALPHA, local=fp.LocalSGD(rate=0.5))
    with pytest.warns(FedpopWarning, match="'few'.*two examples or more"):
        population = method.fit(clients, rounds=2)
    assert population.history[-1]["left_out"] == []
    # Its step is the exact MAML gradient with D1 = D2 = D3.
    found = moved(method, clients, [0])["z"]
    expected = method.initial_w() - 0.5 * maml(model, (x, y), (x, y), True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_dropout_is_on_and_keyed() -> None:
    body = nn.Sequential(seeded(nn.Linear(3, 8).to(WIDE), 1), nn.Dropout(0.5))
    model = fp.Composition(body, seeded(nn.Linear(8, 1).to(WIDE), 2), fp.likelihoods.Normal(1.0))
    clients = [examples(quadratic(), 6)]
    runs = [fp.PerFedAvg(m, alpha=ALPHA).fit(clients, rounds=1).published["z"] for m in (model, model)]
    plain = fp.Composition(body[0], model.head, fp.likelihoods.Normal(1.0))
    assert torch.equal(*runs)
    assert not torch.allclose(runs[0], fp.PerFedAvg(plain, alpha=ALPHA).fit(clients, rounds=1).published["z"])


def test_cost_counts_the_gradients() -> None:
    """Two for D1 and D2, two more for the Hessian, each on its share of the examples."""
    clients = ragged((6, 6))
    for settings, passes in (
        ({"variant": "first-order"}, 12.0),
        ({"variant": "hessian-free"}, 16.0),
        ({}, 16.0),
        ({"third": "first"}, 24.0),
    ):
        population = fp.PerFedAvg(linear_model(), **settings).fit(clients, rounds=1)
        assert population.totals["backbone_passes"] == passes


def test_labels_and_impossible_settings() -> None:
    model = quadratic()
    assert [fp.PerFedAvg(model, variant=v).label for v in ("exact", "first-order", "hessian-free")] == [
        "Per-FedAvg",
        "Per-FedAvg-FO",
        "Per-FedAvg-HF",
    ]
    for settings, words in (
        ({"variant": "second-order"}, "variant must be one of"),
        ({"third": "second"}, "third must be"),
        ({"weights": "n"}, "weights must be one of"),
        ({"alpha": 0.0}, "alpha"),
        ({"delta": 0.0}, "delta"),
        ({"adapt_steps": 0}, "adapt_steps"),
        ({"adapt_steps": 1.5}, "whole number"),
        ({"local": fp.LocalSGD(batch=2)}, "cut into 3 parts"),
        ({"local": fp.LocalSGD(batch=1), "variant": "first-order"}, "cut into 2 parts"),
    ):
        with pytest.raises(SettingsError, match=words):
            fp.PerFedAvg(model, **settings)
