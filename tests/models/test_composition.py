"""``Composition`` against a log-likelihood written out by hand, example by example."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import fedpop as fp
from fedpop.client.phi_step import PhiGradient
from fedpop.models.base import Model
from tests.helpers import cohort_of, generator, linear_model, ragged, seeded

Outputs = Callable[[dict[str, Tensor], dict[str, Tensor], Any], Tensor]
WIDE = torch.float64


def targets(name: str, n: int, g: torch.Generator, outputs: int) -> Tensor:
    if name == "categorical":
        return torch.randint(outputs, (n,), generator=g)
    if name == "bernoulli":
        return torch.randint(2, (n, outputs), generator=g).to(WIDE)
    if name == "poisson":
        return torch.randint(5, (n, outputs), generator=g).to(WIDE)
    return torch.randn(n, outputs, generator=g, dtype=WIDE)


def clients_for(name: str, outputs: int) -> list[tuple[Tensor, Tensor]]:
    g = generator(5)
    return [(torch.randn(n, 3, generator=g, dtype=WIDE), targets(name, n, g, outputs)) for n in (4, 0, 2)]


def by_hand(name: str, eta: Tensor, y: Tensor) -> Tensor:
    """One client's log-likelihood from torch.distributions."""
    if name == "categorical":
        return distributions.Categorical(logits=eta, validate_args=False).log_prob(y).sum()
    if name == "bernoulli":
        return distributions.Bernoulli(logits=eta).log_prob(y).sum()
    if name == "poisson":
        return distributions.Poisson(eta.exp()).log_prob(y).sum()
    return distributions.Normal(eta, 0.5**0.5).log_prob(y).sum()


def likelihood(name: str) -> fp.likelihoods.Likelihood | str:
    return fp.likelihoods.Normal(0.5) if name == "normal" else name


def agrees(model: Model, name: str, clients: list[tuple[Tensor, Tensor]], outputs: Outputs) -> Model:
    """Value, gradient in z and gradient in phi, for two chains per client; the model that saw examples."""
    model = model.prepared(fp.Federation.of(clients).example)
    cohort = cohort_of(model, clients)
    phi = model.initial_phi().requires_grad_()
    d = model.z_layout.size
    z = 0.5 * torch.randn(len(clients), 2, d, generator=generator(6), dtype=WIDE)
    features = model.features(phi, cohort)
    value, grad = model.bind(phi.detach(), model.features(phi.detach(), cohort), cohort).value_and_grad(z)

    free, free_phi = z.clone().requires_grad_(), phi.detach().clone().requires_grad_()
    expected = torch.stack(
        [
            torch.stack(
                [
                    by_hand(
                        name,
                        outputs(model.phi_layout.views(free_phi), model.z_layout.views(free[c, m]), x),
                        y,
                    )
                    for m in range(2)
                ]
            )
            for c, (x, y) in enumerate(clients)
        ]
    )
    total = expected.sum() + 0 * free_phi.sum()  # phi may be empty
    grad_z, grad_phi = torch.autograd.grad(total, (free, free_phi))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, grad_z)
    torch.testing.assert_close(model.bind(phi, features, cohort).value(z).detach(), expected.detach())
    good = torch.ones(len(clients), dtype=torch.bool)
    ones = torch.ones(len(clients))
    _, _, j = PhiGradient(model, None, z).fused(phi, features, cohort, None, good, ones)
    torch.testing.assert_close(2 * j, grad_phi)  # J averages over the two draws
    return model


NAMES = ("normal", "categorical", "bernoulli", "poisson")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_linear_head(name: str, bias: bool) -> None:
    outputs = 3 if name == "categorical" else 2
    backbone = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to(WIDE), 1)
    model = fp.Composition(backbone, nn.Linear(4, outputs, bias=bias).to(WIDE), likelihood(name))
    assert model.linear

    def out(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ phi["backbone.0.weight"].T + phi["backbone.0.bias"])
        eta = hidden @ z["weight"].T
        return eta + z["bias"] if bias else eta

    agrees(model, name, clients_for(name, outputs), out)


@pytest.mark.parametrize("name", NAMES)
def test_network_head_through_vmap(name: str) -> None:
    outputs = 3 if name == "categorical" else 2
    head = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).to(WIDE)
    model = fp.Composition(seeded(nn.Linear(3, 4).to(WIDE), 2), head, likelihood(name))
    assert not model.linear

    def out(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        features = x @ phi["backbone.weight"].T + phi["backbone.bias"]
        hidden = torch.tanh(features @ z["0.weight"].T + z["0.bias"])
        return hidden @ z["2.weight"].T + z["2.bias"]

    agrees(model, name, clients_for(name, outputs), out)


def test_the_native_path_equals_the_path_through_vmap() -> None:
    """A linear layer inside a Sequential takes the general path."""
    head = seeded(nn.Linear(2, 3), 3)
    clients = [(x, torch.arange(len(x)) % 3) for x, _ in ragged()]
    native = fp.Composition(nn.Linear(3, 2), head, "categorical")
    general = fp.Composition(native.backbone, nn.Sequential(head), "categorical")
    assert native.linear
    assert not general.linear
    weight, bias = (
        torch.randn(4, 2, 3, 2, generator=generator(7)),
        torch.randn(4, 2, 3, generator=generator(8)),
    )
    z_native = torch.cat((weight, bias.unsqueeze(-1)), -1).flatten(2)
    z_general = torch.cat((weight.flatten(2), bias), -1)
    phi = native.initial_phi()
    values = []
    for model, z in ((native, z_native), (general, z_general)):
        cohort = cohort_of(model, clients)
        values.append(model.bind(phi, model.features(phi, cohort), cohort).value_and_grad(z))
    torch.testing.assert_close(values[0][0], values[1][0])
    native_grad = values[0][1].unflatten(2, (3, 3))
    torch.testing.assert_close(native_grad[..., :2].flatten(2), values[1][1][..., :6])
    torch.testing.assert_close(native_grad[..., 2], values[1][1][..., 6:])


class Two(nn.Module):
    """Adds two inputs, whatever they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 4), nn.Linear(1, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.left(a) + self.right(b))


class Joined(nn.Module):
    """The same on one tensor."""

    def __init__(self, two: Two) -> None:
        super().__init__()
        self.two = two

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x[:, :2], x[:, 2:])


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_x_may_be_a_tuple_or_a_dict(form: str) -> None:
    two, head = seeded(Two(), 4), seeded(nn.Linear(4, 1), 5)
    clients = ragged()

    def parts(x: Tensor) -> Any:
        return (x[:, :2], x[:, 2:]) if form == "tuple" else {"b": x[:, 2:], "a": x[:, :2]}

    plain = fp.FedSOUL(fp.Composition(Joined(two), head, fp.likelihoods.Normal(0.5)))
    other = fp.FedSOUL(fp.Composition(two, head, fp.likelihoods.Normal(0.5)))
    expected = plain.fit(clients, rounds=3)
    got = other.fit([(parts(x), y) for x, y in clients], rounds=3)
    torch.testing.assert_close(got.published, expected.published)
    x, y = torch.randn(4, 3, generator=generator(9)), torch.zeros(4)
    torch.testing.assert_close(got.predict(0, parts(x)).mean, expected.predict(0, x).mean)
    newcomer, plain_newcomer = got.new_client(parts(x), y), expected.new_client(x, y)
    torch.testing.assert_close(newcomer.predict(parts(x)).mean, plain_newcomer.predict(x).mean)


def test_integer_inputs_reach_an_embedding() -> None:
    table = seeded(nn.Embedding(5, 2), 6)
    words = [torch.tensor([0, 1, 4]), torch.tensor([2])]
    model = fp.Composition(table, nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    population = fp.FedSOUL(model).fit([(w, torch.ones(len(w))) for w in words], rounds=2)
    assert population.predict(1, torch.tensor([3, 3])).mean.shape == (2,)


def test_the_users_modules_are_not_changed() -> None:
    backbone, head = seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2)
    before = [p.clone() for m in (backbone, head) for p in m.parameters()]
    fp.FedSOUL(fp.Composition(backbone, head, fp.likelihoods.Normal(0.5))).fit(ragged(), rounds=3)
    after = [p for m in (backbone, head) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_flat_vectors_round_trip_through_named_views() -> None:
    model = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 3), "normal")
    assert model.phi_layout.names == ("backbone.weight", "backbone.bias", "likelihood.log_variance")
    for layout, flat in ((model.phi_layout, model.initial_phi()), (model.z_layout, model.initial_z())):
        assert torch.equal(layout.flatten(layout.views(flat)), flat)
    views = model.z_layout.views(model.initial_z())
    assert torch.equal(views["weight"], model.head.weight)
    assert torch.equal(views["bias"], model.head.bias)


def test_repr_says_what_was_understood() -> None:
    assert repr(linear_model()) == "Composition(phi: 6, z: 2, likelihood: normal, linear head)"
