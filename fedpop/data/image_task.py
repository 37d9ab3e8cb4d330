"""Image classification cut into clients with few classes and few images, and the networks that fit it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpop.checked import Checked, Count, Whole
from fedpop.data.images import ImageSet, open_images
from fedpop.errors import SettingsError
from fedpop.federation.clients import Client
from fedpop.federation.partitions import ByClass
from fedpop.keys import Key
from fedpop.models.augment import CropFlip
from fedpop.models.composition import Composition


@dataclass(frozen=True)
class ImageTask(Checked):
    """``small`` clients with ``n_small`` images and ``large`` ones with ``n_large``, of ``classes`` classes.

    Every client is tested on ``test`` images of its own classes. Its ``validation`` images are training
    images that no client holds, so that choosing settings costs no client an example.
    """

    images: str = "cifar10"
    classes: Count = 5
    small: Whole = 50
    n_small: Count = 5
    large: Whole = 50
    n_large: Count = 25
    validation: Whole = 40
    test: Whole = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images not in BACKBONES:
            raise SettingsError(f"unknown images {self.images!r}; known are {', '.join(BACKBONES)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.n_small,) * self.small + (self.n_large,) * self.large

    def make(self, folder: str | Path, seed: int) -> list[Client]:
        """Clients with their three sets, standardised."""
        return self.split(folder, seed)[0]

    def split(self, folder: str | Path, seed: int, new: int = 0) -> tuple[list[Client], list[Client]]:
        """Clients, and ``new`` further ones with ``n_small`` images each that are kept apart: nobody else
        holds their images, nor are they among anybody's validation images."""
        source = open_images(self.images, folder)
        train = ByClass(self.classes, self.sizes + (self.n_small,) * new).deal(source.train.labels, seed)
        validation = train.draw(source.train.labels, self.validation, seed, "validation", among=train.rest)
        test = train.draw(source.test.labels, self.test, seed, "test")
        sets = zip(train.rows, validation.rows, test.rows, strict=True)
        pixels = {split: _Cache(source, split) for split in ("train", "test")}
        clients = []
        for own, held, unseen in sets:
            x, y = pixels["train"](own)
            clients.append(Client(x, y, validation=pixels["train"](held), test=pixels["test"](unseen)))
        return clients[: len(self.sizes)], clients[len(self.sizes) :]

    def model(self, seed: int, classes: int = 10) -> Composition:
        """The network of these images with a keyed random start, the same for every method."""
        backbone = BACKBONES[self.images]()
        head = nn.utils.skip_init(nn.Linear, 64, classes)
        redraw(nn.ModuleList((backbone, head)), Key(seed, purpose="start"))
        return Composition(backbone, head, "categorical")


class _Cache:
    """Images of one file, each decoded once."""

    def __init__(self, source: ImageSet, split: str) -> None:
        self.source = source
        self.file = source.train if split == "train" else source.test
        self.held: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        missing = [r for r in rows.tolist() if r not in self.held]
        if missing:
            fresh = self.source.inputs(self.file, torch.tensor(missing))
            self.held.update(zip(missing, fresh, strict=True))
        return torch.stack([self.held[r] for r in rows.tolist()]), self.file.labels[rows]


def cifar_backbone() -> nn.Sequential:
    """The paper's network for CIFAR-10, from images to 64 features, with shifts and mirrors in training."""
    return nn.Sequential(
        CropFlip(padding=4),
        nn.utils.skip_init(nn.Conv2d, 3, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.utils.skip_init(nn.Conv2d, 64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.utils.skip_init(nn.Linear, 1600, 120),
        nn.ReLU(),
        nn.utils.skip_init(nn.Linear, 120, 64),
        nn.ReLU(),
    )


def mnist_backbone() -> nn.Sequential:
    """A small convolutional network for digits, to 64 features; digits are shifted, not mirrored."""
    return nn.Sequential(
        CropFlip(padding=2, flip=False),
        nn.utils.skip_init(nn.Conv2d, 1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.utils.skip_init(nn.Conv2d, 16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.utils.skip_init(nn.Linear, 512, 64),
        nn.ReLU(),
    )


BACKBONES = {"cifar10": cifar_backbone, "mnist": mnist_backbone}


def redraw(module: nn.Module, key: Key) -> None:
    """torch's default law for weights and biases, uniform within 1/sqrt(inputs), from a key."""
    with torch.no_grad():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound = layer.weight[0].numel() ** -0.5
                for kind, tensor in layer.named_parameters(recurse=False):
                    u = key.at(purpose=f"{name}.{kind}").uniform(key.server(), tuple(tensor.shape))[0]
                    tensor.copy_((2 * u - 1) * bound)
