"""APFL: its three updates written out; FedAvg's w at alpha = 0, local training at alpha = 1."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.client.losses import joint_loss
from fedpop.errors import SettingsError
from fedpop.methods.apfl import three_updates
from tests.helpers import FRAME, cohort_of, quadratics, ragged, seeded, states

WIDE = torch.float64
Q = quadratics()
X = Q.clients[0][0]


def network() -> tuple[fp.Composition, list[tuple[Tensor, Tensor]]]:
    net = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(WIDE), 1)
    model = fp.Composition(net[:2], net[2], "categorical")
    return model, [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged((4, 1, 0, 7))]


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_direction_is_autograds_three_gradients(adaptive: bool) -> None:
    """grad f(w), alpha grad f(m) and <v - w, grad f(m)>, on a network."""
    model, clients = network()
    f = joint_loss(model, False)
    size = model.phi_layout.size + model.z_layout.size
    g = torch.Generator().manual_seed(3)
    w, v = (torch.randn(size, generator=g, dtype=WIDE) for _ in range(2))
    alpha = torch.tensor([0.3], dtype=WIDE)
    x, y = clients[3]
    batch = (w[:0], x, y, torch.ones(7, dtype=WIDE), None)
    with torch.no_grad():
        found, loss = three_updates(f, size, adaptive)(torch.cat((w, v, alpha)), *batch)
    m = (0.3 * v + 0.7 * w).requires_grad_()
    at_w = w.clone().requires_grad_()
    (by_m,) = torch.autograd.grad(f(m, *batch), m)
    (by_w,) = torch.autograd.grad(f(at_w, *batch), at_w)
    of_alpha = ((v - w) @ by_m).reshape(1) if adaptive else torch.zeros(1, dtype=WIDE)
    torch.testing.assert_close(found, torch.cat((by_w, 0.3 * by_m, of_alpha)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, f(m, *batch).detach(), rtol=1e-12, atol=0)
    # And alpha's is what autograd gives for f(alpha v + (1 - alpha) w) itself.
    a = alpha.clone().requires_grad_()
    (direct,) = torch.autograd.grad(f(a * v + (1 - a) * w, *batch), a)
    if adaptive:
        torch.testing.assert_close(found[-1:], direct, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_its_rule_written_out(alpha: float, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With momentum and decay, which are w's and v's alone; alpha meets an end of [0, 1]."""
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    rate, momentum, decay = 0.05, 0.5, 0.1
    local = fp.LocalSGD(epochs=4, rate=rate, momentum=momentum, decay=decay)
    population = fp.APFL(Q.model, alpha=alpha, local=local).fit(Q.clients, rounds=5, progress=False)
    sizes = torch.tensor([8.0, 5.0, 12.0], dtype=WIDE)
    server = Q.start()
    v, a, w = Q.start().repeat(3, 1), torch.full((3,), alpha, dtype=WIDE), Q.start().repeat(3, 1)
    ends: set[float] = set()
    for _ in range(5):
        for i in range(3):
            w[i] = server
            speed_w, speed_v = torch.zeros(3, dtype=WIDE), torch.zeros(3, dtype=WIDE)
            for _ in range(4):
                by_m = Q.gradient(i, a[i] * v[i] + (1 - a[i]) * w[i])
                speed_w = momentum * speed_w + Q.gradient(i, w[i]) + decay * w[i]
                speed_v = momentum * speed_v + a[i] * by_m + decay * v[i]
                new = (a[i] - rate * (v[i] - w[i]) @ by_m).clamp(0, 1)
                w[i], v[i], a[i] = w[i] - rate * speed_w, v[i] - rate * speed_v, new
                ends.add(float(new))
        server = server + (sizes / sizes.sum()) @ (w - server)
    assert 0.0 in ends or 1.0 in ends
    for name, expected in (("w", w), ("v", v), ("alpha", a.unsqueeze(1))):
        torch.testing.assert_close(states(population, name, 3), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(population.published["z"], server, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [None, 2])
def test_with_alpha_zero_the_servers_model_is_fedavgs(batch: int | None) -> None:
    """But a client predicts with its own w_i, from before the mean was taken."""
    model, clients = network()
    local = fp.LocalSGD(epochs=2, rate=0.3, batch=batch, momentum=0.5)
    plain = fp.FedAvg(model, local=local).fit(clients, rounds=3, progress=False)
    mixed = fp.APFL(model, alpha=0.0, adaptive=False, local=local).fit(clients, rounds=3, progress=False)
    for name in ("phi", "z"):
        torch.testing.assert_close(mixed.published[name], plain.published[name], rtol=1e-12, atol=1e-13)
    own = states(mixed, "w", 4)[3]
    x, size = clients[3][0], model.phi_layout.size
    expected = fp.FedAvg(model).predict(
        {"phi": own[:size], "z": own[size:]}, {"z": own[size:].unsqueeze(0)}, x, mixed.key
    )
    assert torch.equal(mixed.predict(3, x).probs, expected.probs)
    assert not torch.allclose(mixed.predict(3, x).probs, plain.predict(3, x).probs, rtol=1e-3)


def test_with_alpha_one_v_is_trained_alone() -> None:
    model, clients = network()
    local = fp.LocalSGD(epochs=2, rate=0.3, batch=2, momentum=0.5)
    alone = fp.LocalOnly(model, local=local).fit(clients, rounds=3, progress=False)
    mixed = fp.APFL(model, alpha=1.0, adaptive=False, local=local).fit(clients, rounds=3, progress=False)
    torch.testing.assert_close(states(mixed, "v", 4), states(alone, "w", 4), rtol=1e-12, atol=1e-13)
    for i in range(4):
        x = clients[3][0]
        found, expected = mixed.predict(i, x).probs, alone.predict(i, x).probs
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_a_client_predicts_with_its_own_two_models() -> None:
    """Not with the server's newest w, which is that of the one client of the last round."""
    method = fp.APFL(Q.model, alpha=0.4, local=fp.LocalSGD(epochs=2, rate=0.01))
    population = method.fit(Q.clients, rounds=9, participation=fp.participation.Uniform(1), progress=False)
    w, v, alpha = (states(population, name, 3) for name in ("w", "v", "alpha"))
    assert len(set(alpha.flatten().tolist())) == 3
    mixture = alpha * v + (1 - alpha) * w
    for i in range(3):
        torch.testing.assert_close(population.predict(i, X).mean, X @ mixture[i], rtol=1e-12, atol=1e-12)
    with_the_servers = alpha * v + (1 - alpha) * population.published["z"]
    assert sorted((mixture - with_the_servers).norm(dim=1) > 1e-3) == [False, True, True]


def test_newcomers() -> None:
    """With data: all three from the server's w. Without: that w."""
    sgd = fp.LocalSGD(epochs=6, rate=0.1)
    method = fp.APFL(Q.model, alpha=0.4, adaptive=False, local=fp.LocalSGD(rate=0.1), newcomer=sgd)
    population = method.fit(Q.clients, rounds=2, progress=False)
    other = quadratics((9,), seed=7)
    w = v = server = population.published["z"]
    for _ in range(6):
        step = 0.4 * other.gradient(0, 0.4 * v + 0.6 * w)
        w, v = w - 0.1 * other.gradient(0, w), v - 0.1 * step
    found = population.new_client(*other.clients[0]).predict(X).mean
    torch.testing.assert_close(found, X @ (0.4 * v + 0.6 * w), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(population.new_client().predict(X).mean, X @ server, rtol=1e-14, atol=1e-14)
    none = (torch.zeros(0, 3, dtype=WIDE), torch.zeros(0, dtype=WIDE))
    cohort = cohort_of(method.model, [other.clients[0], none])
    both = method.personalise(population.published, cohort, None, population.key)["z"]
    torch.testing.assert_close(both[0], 0.4 * v + 0.6 * w, rtol=1e-10, atol=1e-10)
    assert torch.equal(both[1], server)


def test_what_is_sent_and_what_it_costs() -> None:
    population = fp.APFL(Q.model, local=fp.LocalSGD(epochs=3)).fit(Q.clients, rounds=2, progress=False)
    assert fp.APFL.private == ("v", "alpha")
    assert population.totals["bytes_up"] == 2 * 3 * (2 * FRAME + 8 * (3 + 1))
    assert population.totals["head_steps"] == 2 * 2 * 3 * 25  # w and the mixture


def test_a_diverging_client_keeps_all_three() -> None:
    stiff = (100 * Q.clients[1][0], Q.clients[1][1])
    data = {"a": Q.clients[0], "stiff": stiff, "c": Q.clients[2]}
    method = fp.APFL(Q.model, alpha=0.6, local=fp.LocalSGD(epochs=200, rate=0.05))
    population = method.fit(data, rounds=1, progress=False)
    assert population.history[0]["left_out"] == ["stiff"]
    for name, old in (("w", Q.start()), ("v", Q.start()), ("alpha", torch.tensor([0.6], dtype=WIDE))):
        assert torch.equal(states(population, name, 3)[1], old)
    assert population.published["z"].isfinite().all()


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_impossible_settings(alpha: float) -> None:
    with pytest.raises(SettingsError, match="APFL: alpha must be a number in"):
        fp.APFL(Q.model, alpha=alpha)


def test_a_compressor_is_refused() -> None:
    with pytest.raises(SettingsError, match="APFL does not compress"):
        fp.APFL(Q.model, compressor="qsgd")


def test_clip_shortens_what_fedavg_would_send() -> None:
    """w is trained as FedAvg's: with the same clip the server's model is the same."""
    settings: dict[str, Any] = {"local": fp.LocalSGD(epochs=3, rate=0.1), "clip": 0.3}
    found, other = (
        method(Q.model, **settings).fit(Q.clients, rounds=6, progress=False).published["z"]
        for method in (fp.APFL, fp.FedAvg)
    )
    torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)
    free = fp.APFL(Q.model, local=settings["local"]).fit(Q.clients, rounds=6, progress=False)
    assert (free.published["z"] - found).norm() > 0.1


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.APFL(Q.model, alpha=0.3, adaptive=False).fit(Q.clients, rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    assert (again.algorithm.alpha, again.algorithm.adaptive) == (0.3, False)
    for i in range(3):
        assert torch.equal(again.predict(i, X).mean, population.predict(i, X).mean)
