"""Networks by name: the layers they say, and a start that the seed alone decides."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.layers import CropFlip, Standardise
from fedpop.models.networks import NETWORKS, build

SHAPES = {"cnn-cifar10": (3, 32, 32), "cnn-cifar100": (3, 32, 32), "cnn-mnist": (1, 28, 28)}


def widths(model: fp.Composition) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in [*model.backbone.parameters(), *model.head.parameters()] if p.dim() > 1]


def test_the_papers_networks_have_five_layers() -> None:
    assert widths(build("cnn-cifar10", (3, 32, 32), 10)) == [
        *((64, 3, 5, 5), (64, 64, 5, 5)),
        *((120, 1600), (64, 120), (10, 64)),
    ]
    large = build("cnn-cifar100", (3, 32, 32), 100)
    assert widths(large) == [(64, 3, 5, 5), (128, 64, 5, 5), (256, 3200), (128, 256), (100, 128)]
    last = list(large.backbone)[-1]
    assert last.p == 0.6  # dropout, right before the head
    assert sum(isinstance(m, nn.MaxPool2d) for m in large.backbone.modules()) == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_classifies_and_trains(name: str) -> None:
    shape = SHAPES.get(name, (1, 28, 28))
    model = build(name, shape, 4, seed=1)
    assert type(model.head) is nn.Linear
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    population = fp.FedAvg(model).fit([(x, torch.arange(6) % 4)], rounds=1, progress=False)
    assert population.predict(0, x).probs.shape == (6, 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_alone_decides_the_start(name: str) -> None:
    shape = SHAPES.get(name, (1, 28, 28))
    before = torch.get_rng_state()
    one = build(name, shape, 10, seed=3)
    torch.rand(5)
    first = [Standardise((0.5,) * shape[0], (0.2,) * shape[0]), CropFlip(2)]
    same, other = build(name, shape, 10, 3, first), build(name, shape, 10, 4)
    assert torch.equal(one.initial_phi(), same.initial_phi())
    assert torch.equal(one.initial_z(), same.initial_z())
    assert not torch.equal(one.initial_phi(), other.initial_phi())
    torch.set_rng_state(before)
    build(name, shape, 10)
    assert torch.equal(torch.get_rng_state(), before)
    # Within 1/sqrt(inputs) of zero, and nearly up to it.
    weight = one.head.weight.detach()
    bound = weight.shape[1] ** -0.5
    assert 0.98 * bound < float(weight.abs().max()) <= bound


def test_networks_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="name must be one of cnn-cifar10"):
        build("resnet", (3, 32, 32), 10)
    with pytest.raises(SettingsError, match="too small for two 5x5 convolutions"):
        build("lenet", (1, 15, 32), 10)
    with pytest.raises(SettingsError, match="width"):
        fp.networks.mlp((1, 28, 28), ())
