"""QLSD: on a Gaussian target the stationary covariance is that of the discrete Lyapunov equation, with the
bias of the step and the noise of compression or mini-batches; every variant's gradient is unbiased."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.federation.participation import Roster
from fedpop.message import Total
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, generator, linear_model, ragged, train_key
from tests.methods.gaussian_sites import WIDE, Sites, assert_centre, assert_variance, chain

GAMMA, K, ROUNDS = 0.1, 26, 400


def sites(spread: float = 1.0) -> Sites:
    return Sites(d=101, h=[1.0, 2.0, 0.5], spread=spread, prior=0.5)  # gamma q = 0.4; d is prime: see RandK


def noise_of_choice(second: Tensor, d: int, k: int) -> Tensor:
    """Covariance of rand-k of v, E v v' = ``second``: entries are kept with probability k/d, pairs of them
    with k (k - 1) / (d (d - 1))."""
    both = d * (k - 1) / (k * (d - 1))
    return (d / k - both) * torch.diag(second.diagonal()) + (both - 1) * second


def stationary(s: Sites, k: int, about: Tensor) -> Tensor:
    """Sigma = (1 - gamma q)^2 Sigma + 2 gamma I + gamma^2 sum_i Cov(C(h_i (w - about_i)))."""
    eye = torch.eye(s.d, dtype=WIDE)
    shift = s.mean - about
    sigma = eye.clone()
    for _ in range(400):
        noise = sum(
            h**2 * noise_of_choice(sigma + torch.outer(u, u), s.d, k) for h, u in zip(s.h, shift, strict=True)
        )
        sigma = (1 - GAMMA * s.precision) ** 2 * sigma + 2 * GAMMA * eye + GAMMA**2 * noise
    return sigma


@pytest.mark.parametrize("how", ["compressed", "mini-batches"])
def test_the_stationary_law_solves_the_lyapunov_equation(how: str) -> None:
    s = sites()
    noisy: dict[str, Any] = {"compressor": fp.compressors.RandK(k=K)} if how == "compressed" else {"batch": K}
    method = fp.QLSD(s.model, step=GAMMA, prior_precision=s.prior, **noisy)
    draws = chain(method, s, ROUNDS, s.mean)
    sigma, c = stationary(s, K, s.m), 1 - GAMMA * s.precision
    error = assert_variance(draws, s.mean, sigma.diagonal(), c, how)
    assert_centre(draws, s.mean, sigma.diagonal(), c)
    # The noise is most of it: without its term the prediction would be off by more than 20 errors.
    ula = 1 / (s.precision * (1 - GAMMA * s.precision / 2))
    assert float(sigma.diagonal().mean()) > ula * (1 + 20 * error)


def test_without_noise_it_is_the_servers_langevin_step() -> None:
    s = sites()
    draws = chain(fp.QLSD(s.model, step=GAMMA, prior_precision=s.prior), s, ROUNDS, s.mean)
    ula = torch.full((s.d,), 1 / (s.precision * (1 - GAMMA * s.precision / 2)), dtype=WIDE)
    error = assert_variance(draws, s.mean, ula, 1 - GAMMA * s.precision, "ULA")
    assert float(ula[0]) > (1 + 5 * error) / s.precision  # the bias of the step is seen


def test_the_star_removes_the_noise_of_heterogeneity() -> None:
    """Only w - w* is compressed; near the mode that does not know of the clients' distances."""
    s = sites(spread=3.0)
    method = fp.QLSD(
        s.model, variant="star", step=GAMMA, prior_precision=s.prior, compressor=fp.compressors.RandK(k=K)
    )
    star = s.mean + 0.3  # the model as given
    with torch.no_grad():
        s.model.head.weight.copy_(star)
    draws = chain(method, s, ROUNDS, s.mean)
    sigma, c = stationary(s, K, star.expand(3, -1)), 1 - GAMMA * s.precision
    assert_variance(draws, s.mean, sigma.diagonal(), c, "star")
    assert_centre(draws, s.mean, sigma.diagonal(), c)
    plain = stationary(s, K, s.m)
    assert float(plain.diagonal().mean()) > 3 * float(sigma.diagonal().mean())


def with_memory(s: Sites, omega: float, alpha: float) -> Tensor:
    """The stationary second moments of (w - mean, eta_i - grad U_i(mean)), one coordinate's.

    What is compressed, delta_i = h_i u - e_i, has mean zero, so all is a multiple of the identity over
    coordinates and rand-k's noise omega E delta_i^2.
    """
    b = len(s.h)
    a = torch.eye(1 + b, dtype=WIDE)
    a[0, 0] -= GAMMA * (s.prior + sum(s.h))
    out, into = [], []
    for i, h in enumerate(s.h):
        delta = torch.zeros(1 + b, dtype=WIDE)
        delta[0], delta[1 + i] = h, -1.0
        a[1 + i] += alpha * delta
        to = torch.zeros(1 + b, dtype=WIDE)
        to[0], to[1 + i] = -GAMMA, alpha
        out.append(delta)
        into.append(to)
    second = torch.eye(1 + b, dtype=WIDE)
    for _ in range(2000):
        noise = sum(omega * (u @ second @ u) * torch.outer(v, v) for u, v in zip(out, into, strict=True))
        second = a @ second @ a.T + noise
        second[0, 0] += 2 * GAMMA
    return second


def test_with_memory_the_clients_distances_do_not_matter() -> None:
    s = sites(spread=10.0)
    method = fp.QLSD(
        s.model, variant="++", step=GAMMA, prior_precision=s.prior, compressor=fp.compressors.RandK(k=K)
    )
    omega = fp.compressors.RandK(k=K).omega(s.d)
    draws = chain(method, s, ROUNDS, s.mean, burn_in=100)
    expected = with_memory(s, omega, 1 / (1 + omega))[0, 0].expand(s.d)
    c = 1 - GAMMA * s.precision
    assert_variance(draws, s.mean, expected, c, "memory")
    assert_centre(draws, s.mean, expected, c)
    plain = stationary(s, K, s.m).diagonal().mean()
    assert float(plain) > 10 * float(expected[0])


def test_both_sides_remember_the_same() -> None:
    """The server's eta is the plain sum of the clients' memories, whatever their weights."""
    s = sites()
    method = fp.QLSD(
        s.model, variant="++", step=GAMMA, compressor=fp.compressors.RandK(k=3), batch=5, refresh=3
    )
    population = method.fit(s.clients, rounds=20, participation=[0.9, 0.5, 0.7])
    held = population.store.get(torch.arange(3), torch.device("cpu"))  # type: ignore[union-attr]
    cohort, facts, weights = s.cohort(), Facts(3, 20), torch.tensor([1.5, 2.0, 4.0])
    server, local = begun(method, cohort, facts, train_key())
    for k in range(7):
        key = train_key(k)
        done = answers(method, cohort, local, method.broadcast(server), key, weights, ratio=False)
        local, server = done.local, method.server_round(server, done.total, facts, key)
    torch.testing.assert_close(server["memory"], local["memory"].sum(0))
    assert int(server["version"]) == 2
    assert int(local["version"].max()) == 2
    torch.testing.assert_close(local["anchor"], s.gradient(server["zeta"]))
    assert held["memory"].shape == (3, s.d)


@pytest.mark.parametrize("variant", ["plain", "star", "++"])
def test_every_variant_has_an_unbiased_gradient(variant: str) -> None:
    """Two of three clients a round, mini-batches and compression together, at one w far from everything."""
    s = sites()
    method = fp.QLSD(
        s.model,
        variant=variant,
        step=1.0,
        prior_precision=s.prior,
        batch=60,
        compressor=fp.compressors.RandK(k=60),
    )
    cohort = s.cohort()
    server, local = begun(method, cohort, s.facts, train_key())
    w = torch.randn(s.d, generator=generator(5), dtype=WIDE)
    server = server | {"w": w}
    if variant == "++":  # as if rounds had gone by
        local["memory"] = torch.randn(3, s.d, generator=generator(6), dtype=WIDE)
        server["memory"] = local["memory"].sum(0)
    gradients = []
    for k in range(200):
        key = train_key(k)
        active = fp.participation.Uniform(2).draw(Roster.numbered(3), key.at(purpose="who")).ids
        part, own = cohort.select(active), {n: v[active] for n, v in local.items()}
        total = answers(method, part, own, method.broadcast(server), key, of=3).total
        new = method.server_round(server, total, s.facts, key)["w"]
        xi = key.at(purpose="noise").normal(key.server(), (s.d,), WIDE)[0]
        gradients.append(w - new + 2**0.5 * xi)
    seen = torch.stack(gradients)
    expected = s.gradient(w).sum(0) + s.prior * w
    error = seen.std(0) / len(seen) ** 0.5
    assert float(((seen.mean(0) - expected) / error).abs().max()) < 5


def test_the_step_that_nobody_gave_is_the_curvatures() -> None:
    s = sites()
    method = fp.QLSD(s.model, prior_precision=s.prior)
    server, _ = begun(method, s.cohort(), s.facts, train_key())
    torch.testing.assert_close(server["gamma"], torch.tensor(0.25 / s.precision, dtype=WIDE))


def test_empty_rounds() -> None:
    """b/|A| weights: nothing happens. 1/p_i weights: zero is an unbiased sum, so prior and noise act."""
    method = fp.QLSD(linear_model(), step=1e-3, prior_precision=2.0)
    facts = Facts(4, 10)
    server = method.init(facts, train_key(), {})
    assert method.server_round(server, Total.of_nobody(4), facts, train_key()) is server
    after = method.server_round(server, Total.of_nobody(4, ratio=False), facts, train_key())["w"]
    key = train_key()
    xi = key.at(purpose="noise").normal(key.server(), (8,))[0]
    torch.testing.assert_close(after, server["w"] * (1 - 2e-3) + 2e-3**0.5 * xi)


def test_a_client_that_is_not_finite_is_left_out_and_keeps_its_memory() -> None:
    method = fp.QLSD(linear_model(), step=1e-3, variant="++", batch=2)
    clients = ragged((3, 4))
    clients[1] = (clients[1][0] * 1e30, clients[1][1] * 1e30)
    cohort = cohort_of(method.model, clients)
    server, local = begun(method, cohort, Facts(2, 10), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert done.left_out == (1,)
    assert done.total.count == 1
    assert bool(torch.isfinite(done.total.weighted["U"]).all())
    assert bool(torch.isfinite(done.total.named["memory"]).all())
    assert all(torch.equal(done.local[n][1], local[n][1]) for n in local)
    assert bool(done.local["memory"][0].abs().sum() > 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"variant": "+"}, "variant must be one of"),
        ({"step": 0.0}, "step must be a positive"),
        ({"step": float("nan")}, "step must be a positive"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"prior_precision": -1.0}, "prior_precision"),
        ({"memory_rate": 1.5}, "memory_rate"),
        ({"refresh": 0}, "refresh"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        fp.QLSD(linear_model(), **settings)


def test_the_work_before_the_rounds_is_counted() -> None:
    """Thirty products with a Hessian, two passes each, then one gradient a round."""
    model = linear_model()
    method = fp.QLSD(model, samples=2, burn_in=0)
    population = method.fit(ragged((3, 5)), rounds=4)
    assert population.totals["backbone_passes"] == 8 * (30 * 2 + 4)
