"""pFedMe on quadratics: the closed-form prox, the envelope's gradient, and the minimiser of its mean."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.message import Total
from fedpop.methods.base import Facts
from tests.helpers import answers, cohort_of, generator, linear_model, seeded, train_key

WIDE = torch.float64
LAM = 1.0


def quadratic() -> fp.Composition:
    return fp.Composition(None, seeded(nn.Linear(3, 1, bias=False).to(WIDE), 1), fp.likelihoods.Normal(1.0))


def clients_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Linear regressions whose curvature lies between 1 and 2 (0 and 2 for fewer examples than three)."""
    g = generator(5)
    out = []
    for n in sizes:
        u, _, v = torch.linalg.svd(torch.randn(n, 3, generator=g, dtype=WIDE), full_matrices=False)
        roots = torch.linspace(2.0, 1.0, 3, dtype=WIDE)[: len(v)].sqrt()
        out.append((n**0.5 * (u * roots) @ v, 3 * torch.randn(n, generator=g, dtype=WIDE)))
    return out


def curvature(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """H and c of f(w) = w' H w / 2 - c' w + constant."""
    n = max(len(y), 1)
    return x.mT @ x / n, x.mT @ y / n


def prox(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h, c = curvature(x, y)
    return torch.linalg.solve(h + LAM * torch.eye(3, dtype=WIDE), c + LAM * w)


def envelope(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """min over theta of f(theta) + lambda/2 norm(theta - w)^2, up to a constant."""
    theta = prox(x, y, w)
    return 0.5 * (x @ theta - y).square().mean() + 0.5 * LAM * (theta - w).square().sum()


def exact(inner_steps: int = 24, **settings: Any) -> fp.PFedMe:
    """So many inner steps that theta is the prox to rounding: H + lambda lies between 2 and 3, so that errors
    shrink by 0.2 in a step of 0.4, and 0.2^24 < 2e-17."""
    settings = {"local": fp.LocalSGD(rate=0.5)} | settings
    return fp.PFedMe(quadratic(), lam=LAM, inner_steps=inner_steps, inner_rate=0.4, **settings)


def test_theta_is_the_prox_and_w_steps_along_the_gradient_of_the_envelope() -> None:
    clients = clients_of(4, 1, 9, 0)
    method = exact(75)  # of one example H + lambda is 1 in two directions: 0.6^75 < 3e-17
    cohort = cohort_of(method.model, clients)
    w = torch.tensor([0.3, -1.0, 2.0], dtype=WIDE)
    own, theta, _ = method.personal_round(w.expand(4, -1), cohort, train_key())
    for i, (x, y) in enumerate(clients[:3]):
        torch.testing.assert_close(theta[i], prox(x, y, w), rtol=1e-12, atol=1e-13)
        (g,) = torch.autograd.grad(envelope(x, y, leaf := w.clone().requires_grad_()), leaf)
        torch.testing.assert_close(own[i], w - 0.5 * g, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(g, LAM * (w - prox(x, y, w)), rtol=1e-12, atol=1e-13)
    assert torch.equal(theta[3], w)  # f = 0
    assert torch.equal(own[3], w)


def minimiser(clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the mean envelope: its gradient lambda (w - (H + lambda)^-1 (c + lambda w)) is linear in w."""
    eye = torch.eye(3, dtype=WIDE)
    a, b = torch.zeros(3, 3, dtype=WIDE), torch.zeros(3, dtype=WIDE)
    for x, y in clients:
        h, c = curvature(x, y)
        inverse = torch.linalg.inv(h + LAM * eye)
        a, b = a + eye - LAM * inverse, b + inverse @ c
    return torch.linalg.solve(a, b)


@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_one_local_step_reaches_the_minimiser_of_the_mean_envelope(beta: float) -> None:
    clients = clients_of(4, 3, 9, 6)
    method = exact(local=fp.LocalSGD(rate=1.0), beta=beta)
    best = minimiser(clients)
    # How slowly the slowest mode of the mean envelope shrinks says how many rounds are needed.
    eye = torch.eye(3, dtype=WIDE)
    inverses = torch.stack([torch.linalg.inv(curvature(x, y)[0] + LAM * eye) for x, y in clients])
    slowest = float(torch.linalg.eigvalsh(LAM * (eye - LAM * inverses.mean(0)))[0])
    rounds = int(25 / -torch.log(torch.tensor(1 - beta * slowest)).item())
    assert rounds < 100
    population = method.fit(clients, rounds=rounds)
    torch.testing.assert_close(population.published["z"], best, rtol=0, atol=1e-10)
    for i, (x, y) in enumerate(clients):
        torch.testing.assert_close(population.predict(i, x).mean, x @ prox(x, y, best), rtol=0, atol=1e-9)


def test_several_local_steps_end_elsewhere() -> None:
    """Clients drift: the fixed point of R = 5 is that of R gradient steps each, not the minimiser."""
    clients = clients_of(4, 3, 9, 6)
    eye = torch.eye(3, dtype=WIDE)
    a, b = torch.zeros(3, 3, dtype=WIDE), torch.zeros(3, dtype=WIDE)
    for x, y in clients:  # w_i = M^5 w + (I - M^5) w_i*, M the map of one step
        h, c = curvature(x, y)
        inverse = torch.linalg.inv(h + LAM * eye)
        power = torch.linalg.matrix_power(eye - LAM * (eye - LAM * inverse), 5)
        offset = torch.zeros(3, dtype=WIDE)
        for _ in range(5):
            offset = offset - LAM * (offset - inverse @ (c + LAM * offset))
        a, b = a + eye - power, b + offset
    fixed = torch.linalg.solve(a, b)
    found = exact(local=fp.LocalSGD(epochs=5, rate=1.0)).fit(clients, rounds=10).published["z"]
    torch.testing.assert_close(found, fixed, rtol=0, atol=1e-9)
    assert float((found - minimiser(clients)).norm()) > 1e-2


@pytest.mark.parametrize("batched", [True, False])
def test_few_inner_steps_start_where_the_last_ones_ended(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pseudo-code in a plain loop: K = 2 and R = 3, side by side and one by one."""
    if not batched:
        monkeypatch.setattr("fedpop.client.local_sgd.LARGEST_BATCHED", 0)
    clients = clients_of(4, 7, 0)
    local = fp.LocalSGD(epochs=3, rate=0.3)
    method = fp.PFedMe(quadratic(), lam=LAM, inner_steps=2, inner_rate=0.1, local=local)
    start = method.initial_w()
    cohort = cohort_of(method.model, clients)
    own, personal, _ = method.personal_round(start.expand(3, -1), cohort, train_key())
    for i, (x, y) in enumerate(clients):
        h, c = curvature(x, y)
        w, theta = start.clone(), start.clone()
        for _ in range(3):
            for _ in range(2):
                theta = theta - 0.1 * (h @ theta - c + LAM * (theta - w))
            w = w - 0.3 * LAM * (w - theta)
        torch.testing.assert_close(own[i], w, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(personal[i], theta, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weights", ["equal", "examples"])
@pytest.mark.parametrize("beta", [1.0, 0.5, 2.0])
def test_the_server_mixes_with_the_mean(weights: str, beta: float) -> None:
    clients = clients_of(6, 2)
    method = exact(beta=beta, weights=weights)
    w = method.initial_w()
    own, _, _ = method.personal_round(w.expand(2, -1), cohort_of(method.model, clients), train_key())
    share = torch.tensor([0.5, 0.5] if weights == "equal" else [0.75, 0.25], dtype=WIDE)
    expected = (1 - beta) * w + beta * (share @ own)
    found = method.fit(clients, rounds=1).published["z"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_unequal_participation_is_unbiased_and_an_empty_round_changes_nothing() -> None:
    clients = clients_of(4, 5)
    method = exact(beta=0.5)
    everyone = cohort_of(method.model, clients)
    server, facts = {"w": method.initial_w()}, Facts(2, 1)

    def step(ids: list[int], weights: list[float], ratio: bool) -> Tensor:
        cohort, weight = everyone.select(torch.tensor(ids)), torch.tensor(weights, dtype=WIDE)
        total = answers(method, cohort, {}, server, train_key(), weight, of=2, ratio=ratio).total
        return method.server_round(server, total, facts, train_key())["w"] - server["w"]

    a, b = 0.8, 0.3
    found = a * b * step([0, 1], [1 / a, 1 / b], False)
    found = found + a * (1 - b) * step([0], [1 / a], False) + b * (1 - a) * step([1], [1 / b], False)
    torch.testing.assert_close(found, step([0, 1], [1.0, 1.0], True), rtol=1e-12, atol=1e-15)
    for ratio in (True, False):
        assert method.server_round(server, Total.of_nobody(2, ratio), facts, train_key()) is server


def test_absent_clients_predict_with_theta_at_the_final_w() -> None:
    """One of four active per round: everyone's theta is nevertheless the prox at the published w."""
    clients = clients_of(4, 3, 9, 6)
    population = exact().fit(clients, rounds=2, participation=fp.participation.Uniform(1))
    w = population.published["z"]
    for i, (x, y) in enumerate(clients):
        expected = x @ prox(x, y, w)
        torch.testing.assert_close(population.predict(i, x).mean, expected, rtol=1e-11, atol=1e-12)
    x, y = clients_of(5)[0]
    newcomer = population.new_client(x, y)
    torch.testing.assert_close(newcomer.predict(x).mean, x @ prox(x, y, w), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(population.new_client().predict(x).mean, x @ w, rtol=1e-12, atol=1e-13)


def test_cost_counts_the_inner_steps() -> None:
    method = fp.PFedMe(linear_model(), inner_steps=4, local=fp.LocalSGD(epochs=3, rate=0.01, batch=2))
    clients = [(x.float(), y.float()) for x, y in clients_of(5, 2)]
    assert method.fit(clients, rounds=1).totals["backbone_passes"] == 4 * 3 * 7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lam": 0.0}, "lam must be a positive"),
        ({"inner_rate": 0.0}, "inner_rate must be a positive"),
        ({"beta": 0.0}, "beta must be a positive"),
        ({"inner_steps": 0}, "inner_steps must be a whole number, 1 or more"),
        ({"inner_steps": 2.5}, "whole number"),
        ({"weights": "n"}, "weights must be one of"),
        ({"local": fp.LocalSGD(rate=0.01, momentum=0.5)}, "plain"),
        ({"local": fp.LocalSGD(rate=0.01, decay=0.5)}, "plain"),
        ({"inner_rate": 0.2}, "below 2 / lam"),
        ({"local": fp.LocalSGD(rate=0.2)}, "below 2 / lam"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        fp.PFedMe(quadratic(), **settings)
