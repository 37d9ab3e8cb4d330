"""FedAvg: one full-batch step is gradient descent on the pooled loss; local epochs are torch's SGD."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from tests.helpers import cohort_of, generator, linear_model, ragged, seeded

WIDE = torch.float64


def network() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(WIDE), 1)


def softmax_clients(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def loss(net: nn.Module, clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = (torch.cat([c[j] for c in clients]) for j in (0, 1))
    return nn.functional.cross_entropy(net(x), y)


def as_network(population: fp.Population) -> dict[str, Tensor]:
    """phi and the shared head under the names of the network."""
    head = population.personal(0)
    body = {n.removeprefix("backbone."): t for n, t in population.phi.items()}
    return body | {"2.weight": head["weight"], "2.bias": head["bias"]}


@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_one_full_batch_step_is_gradient_descent_on_the_pooled_loss(server_rate: float) -> None:
    net, clients = network(), softmax_clients()
    model = fp.Composition(net[:2], net[2], "categorical")
    method = fp.FedAvg(model, local=fp.LocalSGD(rate=0.3), server_rate=server_rate)
    found = as_network(method.fit(clients, rounds=3))
    for _ in range(3):
        grads = torch.autograd.grad(loss(net, clients), list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p -= server_rate * 0.3 * g
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name], p.detach())


def test_a_learned_variance_is_part_of_the_model() -> None:
    model = linear_model(variance="learned")
    clients = ragged((4, 6))
    found = fp.FedAvg(model, local=fp.LocalSGD(rate=0.1)).fit(clients, rounds=1)
    x, y = (torch.cat([c[j] for c in clients]) for j in (0, 1))
    eta = x @ model.backbone.weight.T @ model.head.weight.T
    # d/d log s2 of the mean of (y - eta)^2 / (2 s2) + log(s2) / 2, at s2 = 1
    gradient = 0.5 - 0.5 * (y - eta[:, 0]).square().mean()
    torch.testing.assert_close(found.phi["likelihood.log_variance"], -0.1 * gradient.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_epochs_are_those_of_torch(momentum: float) -> None:
    """A single client: full-batch epochs with momentum are torch.optim.SGD."""
    net, clients = network(), softmax_clients((6,))
    model = fp.Composition(net[:2], net[2], "categorical")
    local = fp.LocalSGD(epochs=5, rate=0.2, momentum=momentum)
    found = as_network(fp.FedAvg(model, local=local).fit(clients, rounds=1))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2, momentum=momentum)
    for _ in range(5):
        optimiser.zero_grad()
        loss(net, clients).backward()
        optimiser.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name], p.detach())


def test_a_mini_batch_epoch_sees_every_example_once() -> None:
    """With a linear loss the order of the batches does not matter, and ragged clients end at the same sum."""
    model = linear_model()
    cohort = cohort_of(model, ragged((5, 3, 0, 7)))

    def linear(w: Tensor, aux: Tensor, x: Tensor, y: Tensor, mask: Tensor, rows: object) -> Tensor:
        return (w * (mask @ x)).sum()  # the gradient is the sum of the examples in the batch

    from fedpop.keys import Key

    start = torch.zeros(4, 3)
    for batch in (None, 1, 2, 3, 100):
        sgd = fp.LocalSGD(rate=1.0, batch=batch)
        end = sgd.run(linear, start, start[:, :0], cohort.x, cohort, Key(0)).w
        expected = -torch.stack([x.sum(0) for x in cohort.x.split(cohort.sizes.tolist())])
        torch.testing.assert_close(end, expected)


def test_batches_are_shuffled_by_key() -> None:
    clients = ragged((8, 8))
    runs = [
        fp.FedAvg(linear_model(), local=fp.LocalSGD(rate=0.2, batch=2)).fit(clients, rounds=2, seed=s)
        for s in (0, 0, 1)
    ]
    assert torch.equal(runs[0].published["phi"], runs[1].published["phi"])
    assert not torch.equal(runs[0].published["phi"], runs[2].published["phi"])


def test_everyone_has_the_same_head() -> None:
    population = fp.FedAvg(linear_model()).fit(ragged((4, 3)), rounds=2)
    x = torch.randn(3, 3, generator=generator(1))
    assert torch.equal(population.predict(0, x).mean, population.predict(1, x).mean)


def test_a_split_is_averaged_like_any_module() -> None:
    """What is private elsewhere is shared here, so both ways to write a model give the same."""
    net, clients = network(), softmax_clients()
    runs = [
        fp.FedAvg(model).fit(clients, rounds=2)
        for model in (fp.Composition(net[:2], net[2], "categorical"), fp.Split(net, "2.*", "categorical"))
    ]
    x = torch.randn(4, 3, generator=generator(2), dtype=WIDE)
    torch.testing.assert_close(runs[0].predict(0, x).probs, runs[1].predict(0, x).probs)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"epochs": 2.5},
        {"epochs": True},
        {"rate": 0.0},
        {"rate": -1.0},
        {"batch": 0},
        {"batch": 2.5},
        {"momentum": 1.0},
        {"momentum": -0.1},
    ],
)
def test_impossible_local_steps_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        fp.LocalSGD(**settings)
