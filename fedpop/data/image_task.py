"""Image classification cut into clients: with few images each, or with all there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from fedpop.checked import Checked, Count, Factor, OneOf, Whole
from fedpop.data.catalogue import DATASETS
from fedpop.data.images import Images, ImageSet, open_images
from fedpop.errors import SettingsError
from fedpop.federation.clients import Client, Federation, Packed, usual_names
from fedpop.federation.partitions import ByClass, Partition, Shards
from fedpop.models.composition import Composition
from fedpop.models.image_layers import CropFlip, Standardise
from fedpop.models.networks import build

NETWORKS = {
    "cifar10": "cnn-cifar10",
    "cifar100": "cnn-cifar100",
    "mnist": "cnn-mnist",
    "fashionmnist": "cnn-mnist",
    "svhn": "cnn-cifar10",
}
"""The default network of each set."""
SHIFTS = {
    "cifar10": CropFlip(4),
    "cifar100": CropFlip(4),
    "mnist": CropFlip(2, flip=False),
    "fashionmnist": CropFlip(2),
    "svhn": CropFlip(4, flip=False),
}
"""How images are shifted in training; digits are not mirrored."""


class PictureTask(ABC):
    """What tasks on images share: the model, and how clients are packed."""

    images: str

    def model(self, seed: int, network: str = "", shift: bool = True) -> Composition:
        """The network of these images, or one of another name, with a keyed random start: the same for every
        method. It takes bytes; ``shift`` is for shifts and mirror images in training."""
        about = DATASETS[self.images]
        first: list[nn.Module] = [Standardise(about.mean, about.sd)]
        first += [SHIFTS[self.images]] if shift else []
        return build(network or NETWORKS[self.images], about.shape, len(about.classes), seed, first)

    def make(self, folder: str | Path | None, seed: int) -> Federation:
        """All clients with their sets."""
        return self.split(folder, seed)[0]

    @abstractmethod
    def split(self, folder: str | Path | None, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        """Clients, and ``new`` ones that are set aside."""

    @abstractmethod
    def partitions(self, source: ImageSet, seed: int, new: int = 0) -> dict[str, Partition]:
        """Who has which rows of each split; new clients come last."""


@dataclass(frozen=True)
class ImageTask(Checked, PictureTask):
    """Clients with few images each, of some of the classes.

    Args:
        images: Which set: "cifar10" (the default), "cifar100", "mnist", "fashionmnist" or "svhn".
        classes: How many different classes each client has (default: 5).
        small: How many clients have few images (default: 50); they come first.
        n_small: How many training images each of those has (default: 5).
        large: How many clients have more (default: 50).
        n_large: How many training images each of those has (default: 25).
        validation: How many images of its own classes each client has to choose settings by (default: 40).
            They are training images that no client has, so that choosing costs no client an example; clients
            may share them.
        test: How many test images of its own classes each client is judged on (default: 100).

    >>> ImageTask("mnist", small=2, large=1).sizes
    (5, 5, 25)
    """

    images: Annotated[str, OneOf(*NETWORKS)] = "cifar10"
    classes: Count = 5
    small: Whole = 50
    n_small: Count = 5
    large: Whole = 50
    n_large: Count = 25
    validation: Whole = 40
    test: Whole = 100

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.n_small,) * self.small + (self.n_large,) * self.large

    def split(self, folder: str | Path | None, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        """Clients, and ``new`` further ones with ``n_small`` images each that are set aside: nobody else
        has their images, nor are they among anybody's validation images."""
        source = open_images(self.images, folder)
        return _packed(source, self.partitions(source, seed, new), len(self.sizes))

    def partitions(self, source: ImageSet, seed: int, new: int = 0) -> dict[str, Partition]:
        own, unseen = source.train.y, source.test.y
        train = ByClass(self.classes, self.sizes + (self.n_small,) * new).deal(own, seed)
        validation = train.draw(own, self.validation, seed, "validation", among=train.rest)
        test = train.draw(unseen, self.test, seed, "test")
        return {"train": train, "validation": validation, "test": test}


@dataclass(frozen=True)
class FullImageTask(Checked, PictureTask):
    """All images of a set dealt out FedRep's way, in equal shards of every class.

    Training and test images are dealt alike.

    Args:
        images: Which set: "cifar10" (the default), "cifar100", "mnist", "fashionmnist" or "svhn".
        classes: How many different classes each client has, exactly (default: 5).
        b: How many clients there are (default: 100).
        validation: The share of each client's training images that is held out to choose settings by,
            in [0, 1) (default: 0, for no validation set).

    >>> FullImageTask("cifar100", classes=20).b
    100
    """

    images: Annotated[str, OneOf(*NETWORKS)] = "cifar10"
    classes: Count = 5
    b: Count = 100
    validation: Factor = 0.0

    def split(self, folder: str | Path | None, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        """Clients, and the last ``new`` of the b, which are set aside."""
        if not 0 <= new < self.b:
            raise SettingsError(f"{new} new clients asked for, but there are {self.b} in all")
        source = open_images(self.images, folder)
        return _packed(source, self.partitions(source, seed), self.b - new)

    def partitions(self, source: ImageSet, seed: int, new: int = 0) -> dict[str, Partition]:
        own, unseen = source.train.y, source.test.y
        dealt = Shards(self.b, self.classes).deal(own, seed)
        out = {"train": dealt, "test": dealt.alike(own, unseen, seed)}
        if self.validation:
            out["train"], out["validation"] = dealt.held_out(own, self.validation, seed)
        return out


def _packed(source: ImageSet, parts: Mapping[str, Partition], known: int) -> tuple[Federation, list[Client]]:
    """The first ``known`` clients as a federation, gathered from the file at once; the others one by one."""
    files = {"train": source.train, "validation": source.train, "test": source.test}
    splits = {name: _gathered(files[name], part.rows[:known]) for name, part in parts.items()}
    newcomers = []
    for i in range(known, len(parts["train"].rows)):
        own = {
            name: (files[name].x[part.rows[i]], files[name].y[part.rows[i]]) for name, part in parts.items()
        }
        x, y = own.pop("train")
        newcomers.append(Client(x, y, **own))
    return Federation(usual_names(known), splits), newcomers


def _gathered(file: Images, rows: Sequence[torch.Tensor]) -> Packed:
    sizes, order = torch.tensor([len(r) for r in rows]), torch.cat(list(rows))
    return Packed(file.x[order], file.y[order], torch.cumsum(sizes, 0) - sizes, sizes)
