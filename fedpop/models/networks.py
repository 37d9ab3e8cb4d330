"""Networks by name: backbones from images to features, and models with a keyed random start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import nn

from fedpop.checked import Factor, Few, OneOf, Seed, checked
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.models.composition import Composition
from fedpop.models.modules import blank

__all__ = ["build", "cnn", "lenet", "mlp", "redraw"]

Shape = tuple[Few, Few, Few]
"""Channels, height and width of an image."""


@checked
def cnn(
    shape: Shape = (3, 32, 32),
    filters: tuple[Few, Few] = (64, 64),
    widths: Sequence[Few] = (120, 64),
    dropout: Factor = 0.0,
) -> list[nn.Module]:
    """Layers of two 5x5 convolutions, each with pooling, and of linear layers with rectifiers.

    With two linear layers, and the head counted, it is the paper's five-layer network.

    Args:
        shape: Channels, height and width of an image (default: (3, 32, 32)), 16 pixels a side or more.
        filters: How many filters each convolution has (default: (64, 64)).
        widths: How many units each linear layer has (default: (120, 64)); the last is the number of features
            that a head is put on.
        dropout: The probability with which a feature is set to zero in training, after the last layer
            (default: 0, for none).

    >>> from torch import nn
    >>> sum(p.numel() for p in nn.Sequential(*cnn()).parameters())
    307192
    """
    channels, height, width = shape
    left = tuple(_pooled(_pooled(side)) for side in (height, width))
    if min(left) < 1:
        raise SettingsError(f"images of {height} x {width} pixels are too small for two 5x5 convolutions")
    layers = [
        # The largest of four rectified numbers is the rectified largest, and has a quarter of the work.
        *(blank(nn.Conv2d, channels, filters[0], 5), nn.MaxPool2d(2), nn.ReLU()),
        *(blank(nn.Conv2d, filters[0], filters[1], 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        *_dense(filters[1] * left[0] * left[1], widths),
    ]
    return [*layers, nn.Dropout(dropout)] if dropout else layers


@checked
def lenet(shape: Shape = (3, 32, 32)) -> list[nn.Module]:
    """LeNet-5 with rectifiers and maximum pooling: 6 and 16 filters, 120 and 84 units.

    Args:
        shape: Channels, height and width of an image (default: (3, 32, 32)), 16 pixels a side or more.

    >>> from torch import nn
    >>> sum(p.numel() for p in nn.Sequential(*lenet((1, 28, 28))).parameters())
    43576
    """
    return cnn(shape, (6, 16), (120, 84))


@checked
def mlp(shape: Shape = (1, 28, 28), widths: Sequence[Few] = (200, 200)) -> list[nn.Module]:
    """Linear layers with rectifiers on the pixels: McMahan et al.'s 2NN.

    Args:
        shape: Channels, height and width of an image (default: (1, 28, 28)).
        widths: How many units each layer has (default: (200, 200)); at least one number.

    >>> from torch import nn
    >>> sum(p.numel() for p in nn.Sequential(*mlp()).parameters())
    197200
    """
    if not widths:
        raise SettingsError("give the width of at least one layer")
    channels, height, width = shape
    return [nn.Flatten(), *_dense(channels * height * width, widths)]


NETWORKS: dict[str, Callable[[Shape], list[nn.Module]]] = {
    "cnn-cifar10": cnn,
    "cnn-cifar100": lambda shape: cnn(shape, (64, 128), (256, 128), dropout=0.6),
    "cnn-mnist": lambda shape: cnn(shape, (16, 32), (64,)),
    "lenet": lenet,
    "mlp": mlp,
}
"""Backbones by name; the first two are the paper's."""


@checked
def build(
    name: Annotated[str, OneOf(*NETWORKS)],
    shape: Shape,
    classes: Few,
    seed: Seed = 0,
    first: Sequence[nn.Module] = (),
) -> Composition:
    """A classifier of images with a shared backbone and one linear head for each client.

    Args:
        name: That of the backbone: "cnn-cifar10" and "cnn-cifar100" (the paper's), "cnn-mnist", "lenet"
            or "mlp".
        shape: Channels, height and width of an image.
        classes: How many classes there are: the outputs of a head.
        seed: Of the first weights, which it alone decides (default: 0).
        first: Layers before the network, such as ``Standardise`` and ``CropFlip`` (default: none). They do
            not change the first weights of the network itself.

    >>> build("lenet", shape=(1, 28, 28), classes=10)
    Composition(phi: 43576, z: 850, likelihood: categorical, linear head)
    """
    layers = NETWORKS[name](shape)
    # What comes first is one layer whether or not there is any, so that it does not change the start.
    backbone = nn.Sequential(nn.Sequential(*first), *layers)
    features = [m.out_features for m in layers if isinstance(m, nn.Linear)][-1]
    head = blank(nn.Linear, features, classes)
    redraw(nn.ModuleList((backbone, head)), Key(seed, purpose="start"))
    return Composition(backbone, head, "categorical")


@checked
def redraw(module: nn.Module, key: Key) -> None:
    """Draw weights and biases anew in place, uniform within 1/sqrt(inputs) as torch does, from a key.

    Args:
        module: Whose linear layers and two-dimensional convolutions are redrawn; other layers stay.
        key: What decides the numbers, with the name of each layer; the same key gives the same ones.

    >>> from torch import nn
    >>> one, same = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> for layer in (one, same):
    ...     redraw(layer, Key(seed=3))
    >>> bool((one.weight == same.weight).all())
    True
    """
    with torch.no_grad():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound = layer.weight[0].numel() ** -0.5
                for kind, tensor in layer.named_parameters(recurse=False):
                    u = key.at(purpose=f"{name}.{kind}").uniform(key.server(), tuple(tensor.shape))[0]
                    tensor.copy_((2 * u - 1) * bound)


def _pooled(side: int) -> int:
    """What is left of a side after a 5x5 convolution and pooling by two."""
    return (side - 4) // 2


def _dense(inputs: int, widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [blank(nn.Linear, inputs, width), nn.ReLU()]
        inputs = width
    return layers
