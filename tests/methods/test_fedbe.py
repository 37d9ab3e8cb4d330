"""FedBE: exact moments of the clients' models, an ensemble drawn from them, and distillation into one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.message import Total
from fedpop.methods import Distillation
from fedpop.methods.base import Facts
from tests.helpers import answers, cohort_of, generator, linear_model, ragged, seeded, train_key

WIDE = torch.float64


def one_round(method: fp.FedBE, clients: Any, start: Tensor | None = None) -> tuple[Tensor, Total, Tensor]:
    """The server's w before a round, what the server saw of the round, and where each client ended."""
    cohort = cohort_of(method.model, clients)
    server = method.init(Facts(len(cohort), 10), train_key(), {})
    if start is not None:
        server["w"] = start
    given = method.broadcast(server)
    total = answers(method, cohort, {}, given, train_key()).total
    ended = method.train(method.local, given["w"].expand(len(cohort), -1), cohort, train_key()).w
    return server["w"], total, ended


def weighted_moments(models: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    n = torch.tensor(sizes, dtype=WIDE).unsqueeze(1)
    mean = (n * models.double()).sum(0) / n.sum()
    return mean, (n * (models.double() - mean).square()).sum(0) / n.sum()


def test_moments_are_those_of_the_clients_models() -> None:
    method = fp.FedBE(linear_model(), local=fp.LocalSGD(epochs=3, rate=0.1))
    w, total, ended = one_round(method, ragged((3, 0, 5, 1)))
    mu, variance = method.moments(w, total)
    mean, expected = weighted_moments(ended, [3, 0, 5, 1])
    torch.testing.assert_close(mu, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, expected, rtol=1e-10, atol=1e-14)


def test_the_variance_survives_large_weights_and_common_moves() -> None:
    """Raw squares in single precision lose a variance 1e-10 of w^2 entirely; so would a common move m whose
    square is that far above the variance, were it not for double precision."""
    model = fp.Composition(None, nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(1.0))
    eye = torch.eye(2)
    start = torch.tensor([1000.0, -1000.0])
    # One full-batch step of rate 2 on the mean loss goes all the way: clients end at their own y.
    clients = [(eye, start + 100 + shift) for shift in (0.0, 0.01, -0.02)]
    method = fp.FedBE(model, local=fp.LocalSGD(rate=2.0))
    w, total, ended = one_round(method, clients, start)
    _, variance = method.moments(w, total)
    _, expected = weighted_moments(ended, [2, 2, 2])
    assert bool((expected > 1e-5).all())
    torch.testing.assert_close(variance, expected, rtol=1e-6, atol=0.0)
    raw = ended.square().mean(0) - ended.mean(0).square()
    assert bool(((raw - expected).abs() > 10 * expected).any())


def test_members_are_drawn_from_the_gaussian_by_key() -> None:
    """20,000 draws: means and variances within five standard errors; another seed, other members."""
    method = fp.FedBE(linear_model(), local=fp.LocalSGD(epochs=3, rate=0.3), samples=20_000)
    clients = ragged((3, 5, 1))
    w, total, _ = one_round(method, clients)
    server = method.server_round({"w": w}, total, Facts(3, 10), train_key())
    mu, variance = method.moments(w, total)
    members = method.members(server).double()
    assert members.shape == (20_000, 8)
    assert float(((members.mean(0) - mu) / (variance / 20_000).sqrt()).abs().max()) < 5
    assert float((members.var(0) / variance - 1).abs().max()) < 5 * (2 / 20_000) ** 0.5
    torch.testing.assert_close(server["w"], mu.to(w.dtype))
    again = method.server_round({"w": w}, total, Facts(3, 10), train_key())
    other = method.server_round({"w": w}, total, Facts(3, 10), train_key(seed=1))
    assert torch.equal(method.members(server), method.members(again))
    assert not torch.equal(method.members(server), method.members(other))


def test_the_servers_model_is_fedavgs() -> None:
    clients = ragged((3, 0, 5, 1))
    local = fp.LocalSGD(epochs=2, rate=0.1)
    be = fp.FedBE(linear_model(), local=local).fit(clients, rounds=4)
    avg = fp.FedAvg(linear_model(), local=local).fit(clients, rounds=4)
    torch.testing.assert_close(be.published["phi"], avg.published["phi"])
    torch.testing.assert_close(be.published["z"], avg.published["z"])


def test_the_ensemble_predicts_the_mean_of_its_members() -> None:
    net = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 1)
    model = fp.Composition(net[:2], net[2], "categorical")
    clients = [(x, torch.arange(len(x)) % 3) for x, _ in ragged((4, 6))]
    population = fp.FedBE(model, local=fp.LocalSGD(epochs=5, rate=0.5), samples=7).fit(clients, rounds=3)
    x = torch.randn(5, 3, generator=generator(2))
    total = torch.zeros(5, 3)
    for w in population.published["samples"]:
        views = model.phi_layout.views(w[: model.phi_layout.size])
        head = model.z_layout.views(w[model.phi_layout.size :])
        hidden = torch.tanh(x @ views["backbone.0.weight"].T + views["backbone.0.bias"])
        total += torch.softmax(hidden @ head["weight"].T + head["bias"], -1)
    p = population.predict(0, x)
    torch.testing.assert_close(p.probs, total / 7)
    assert float(p.entropy.epistemic.min()) > 0


def students() -> tuple[fp.Composition, list[tuple[Tensor, Tensor]], Tensor]:
    model = fp.Composition(None, seeded(nn.Linear(3, 3).to(WIDE), 1), "categorical")
    clients = [(x.to(WIDE), torch.full((len(x),), i)) for i, (x, _) in enumerate(ragged((8, 8, 8)))]
    return model, clients, torch.randn(40, 3, generator=generator(3), dtype=WIDE)


def test_the_student_learns_what_the_ensemble_says() -> None:
    """Full-batch distillation is gradient descent from the mean on the cross-entropy to its probabilities."""
    model, clients, x = students()
    local = fp.LocalSGD(epochs=5, rate=1.0)
    teach = Distillation(x, fp.LocalSGD(epochs=30, rate=0.5))
    plain = fp.FedBE(model, local=local, samples=6).fit(clients, rounds=1)
    taught = fp.FedBE(model, local=local, samples=6, distil=teach).fit(clients, rounds=1)
    assert torch.equal(plain.published["samples"], taught.published["samples"])
    probs = plain.predict(0, x).probs
    w = plain.published["z"].clone()

    def loss(w: Tensor) -> Tensor:
        rows = w.reshape(3, 4)
        return -(probs * torch.log_softmax(x @ rows[:, :3].T + rows[:, 3], -1)).sum(-1).mean()

    for _ in range(30):
        leaf = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf), leaf)
        w = w - 0.5 * g
    torch.testing.assert_close(taught.published["z"], w)
    assert float(loss(w)) < float(loss(plain.published["z"]))


def test_distillation_of_a_learned_variance_leaves_it_alone() -> None:
    model = linear_model(variance="learned")
    teach = Distillation(torch.randn(20, 3, generator=generator(3)))
    clients = ragged((4, 6))
    plain = fp.FedBE(model).fit(clients, rounds=1).phi
    taught = fp.FedBE(model, distil=teach).fit(clients, rounds=1).phi
    assert torch.equal(plain["likelihood.log_variance"], taught["likelihood.log_variance"])
    assert not torch.equal(plain["backbone.weight"], taught["backbone.weight"])


def test_a_method_that_distils_is_saved_without_its_examples(tmp_path: Any) -> None:
    model, clients, x = students()
    population = fp.FedBE(model, distil=Distillation(x), samples=3).fit(clients, rounds=2)
    again = fp.load(population.save(tmp_path))
    assert torch.equal(again.published["samples"], population.published["samples"])
    x = x[:4]
    assert torch.equal(again.new_client().predict(x).probs, population.new_client().predict(x).probs)
    with pytest.raises(SettingsError, match="give distil"):
        again.algorithm.fit(clients, rounds=1)


def test_rounds_of_nobody_and_of_clients_that_are_not_finite() -> None:
    method = fp.FedBE(linear_model(), local=fp.LocalSGD(rate=0.1))
    server = method.init(Facts(2, 10), train_key(), {})
    for ratio in (True, False):
        nobody = Total.of_nobody(2, ratio)
        assert method.server_round(server, nobody, Facts(2, 10), train_key()) is server
    clients = ragged((3, 4))
    clients[1] = (clients[1][0] * 1e30, clients[1][1] * 1e30)
    cohort = cohort_of(method.model, clients)
    done = answers(method, cohort, {}, method.broadcast(server), train_key())
    assert done.left_out == (1,)
    assert float(done.total.weighted["n"]) == 3
    assert bool(torch.isfinite(done.total.weighted["dw^2"]).all())


def test_impossible_settings() -> None:
    with pytest.raises(SettingsError, match="samples must be a whole number in"):
        fp.FedBE(linear_model(), samples=0)
    with pytest.raises(SettingsError, match="does not compress"):
        fp.FedBE(linear_model(), compressor="qsgd")
    with pytest.raises(SettingsError, match="unlabelled examples"):
        Distillation(torch.zeros(0, 3))
    with pytest.raises(SettingsError, match="NaN"):
        Distillation(torch.full((2, 3), float("nan")))
