"""``Split``: any parameters of a module may be private, wherever they are."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from tests.helpers import cohort_of, generator, ragged, seeded
from tests.models.test_composition import WIDE, agrees, clients_for, likelihood


def network() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(WIDE), 1)


def hand(named: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ named["0.weight"].T + named["0.bias"])
    return hidden @ named["2.weight"].T + named["2.bias"]


def out(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
    return hand(phi | z, x)


@pytest.mark.parametrize("name", ["normal", "categorical", "bernoulli", "poisson"])
@pytest.mark.parametrize(
    ("personal", "linear"),
    [("2.*", True), ("0.bias", False), (["0.bias", "2.bias"], False), ("0.*", False), ("*", False)],
)
def test_agrees_with_a_log_likelihood_by_hand(name: str, personal: str | list[str], linear: bool) -> None:
    model = fp.Split(network(), personal, likelihood(name))
    assert agrees(model, name, clients_for(name, 2), out).linear is linear


def test_the_fast_path_equals_the_path_through_vmap() -> None:
    fast, slow = (fp.Split(network(), "2.*", "categorical") for _ in range(2))
    clients = clients_for("categorical", 2)
    phi = fast.initial_phi()
    z = torch.randn(3, 2, 10, generator=generator(2), dtype=WIDE)
    results = []
    for model in (fast, slow):
        cohort = cohort_of(model, clients)
        assert model.linear
        model.linear = model is fast
        features = model.features(phi, cohort)
        local = model.bind(phi, features, cohort)
        results.append((*local.value_and_grad(z), model.head_outputs(phi, z[:, 0], features)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_split_before_the_last_layer_is_a_composition() -> None:
    net = network().float()
    clients = [(x, torch.randn(len(x), 2, generator=generator(3))) for x, _ in ragged()]
    both = [
        fp.FedSOUL(fp.Split(net, "2.*", fp.likelihoods.Normal(0.5)), kernel="hmc"),
        fp.FedSOUL(fp.Composition(net[:2], net[2], fp.likelihoods.Normal(0.5)), kernel="hmc"),
    ]
    split, composition = (m.fit(clients, rounds=3) for m in both)
    torch.testing.assert_close(split.published, composition.published)


class Adapted(nn.Module):
    """A private low-rank adapter in the middle of a shared network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.adapter = nn.ModuleDict({"down": nn.Linear(4, 1), "up": nn.Linear(1, 4)})

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.adapter["up"](self.adapter["down"](h)))


def test_an_adapter_in_the_middle() -> None:
    module = seeded(Adapted().to(WIDE), 4)
    model = fp.Split(module, "adapter.*", "categorical")

    def outputs(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(x @ phi["first.weight"].T + phi["first.bias"])
        down = h @ z["adapter.down.weight"].T + z["adapter.down.bias"]
        h = h + down @ z["adapter.up.weight"].T + z["adapter.up.bias"]
        return h @ phi["last.weight"].T + phi["last.bias"]

    agrees(model, "categorical", clients_for("categorical", 2), outputs)


class Scaled(nn.Module):
    """A last linear layer whose output is changed afterwards, or that is used twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice, self.fc = twice, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x)) if self.twice else 2 * self.fc(x)


@pytest.mark.parametrize("twice", [True, False])
def test_a_layer_that_is_not_the_end_of_the_module_takes_the_general_path(twice: bool) -> None:
    module = seeded(Scaled(twice).to(WIDE), 5)
    model = fp.Split(module, "fc.*", "categorical")

    def outputs(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
        once = x @ z["fc.weight"].T + z["fc.bias"]
        return once @ z["fc.weight"].T + z["fc.bias"] if twice else 2 * once

    assert not agrees(model, "categorical", clients_for("categorical", 3), outputs).linear


def test_a_pattern_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(fp.errors.ModelError, match=r"'head\.\*'; the module has 0\.weight"):
        fp.Split(network(), "head.*", "categorical")


def test_a_population_is_learned_through_biases_alone() -> None:
    """Clients that differ by an offset: private biases find each one's."""
    g = generator(6)
    offsets = torch.linspace(-2, 2, 6)
    clients = []
    for offset in offsets:
        x = torch.randn(30, 2, generator=g)
        clients.append((x, x.sum(1) + offset + 0.3 * torch.randn(30, generator=g)))
    model = fp.Split(seeded(nn.Linear(2, 1), 7), "bias", fp.likelihoods.Normal(0.09))
    population = fp.FedSOUL(model, local_steps=2).fit(clients, rounds=60)
    # A bias has a standard error of 0.3 / sqrt(30), and its chain's last state as much spread again.
    assert population.store is not None
    last = population.store.get(torch.arange(6), torch.device("cpu"))["z"][:, 0, 0]
    error = 0.3 / 30**0.5
    torch.testing.assert_close(last, offsets, atol=5 * 2**0.5 * error, rtol=0)
    torch.testing.assert_close(population.phi["weight"], torch.ones(1, 2), atol=4 * error, rtol=0)
