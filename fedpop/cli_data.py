"""``fedpop data``: fetch sets of images, list them, draw who has what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from fedpop.data.formats.decoded import Watch
    from fedpop.federation.partitions import Scheme

DataDir = Annotated[Path | None, arg(metavar="PATH", aliases=("--data",))]


@contextmanager
def _bar() -> Iterator[Watch]:
    """A line that shows how far fetching or decoding is, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    if not sys.stderr.isatty():  # older versions of rich write an empty line even for a bar that is off
        yield lambda what, done, total: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total or None)
            progress.update(tasks[what], completed=done)

        yield watch


@dataclass(frozen=True)
class Get:
    """Fetch a set from its public home unless it is there, check it, and decode it once."""

    name: Positional[str]
    """cifar10, cifar100, mnist, fashionmnist or svhn."""
    data_dir: DataDir = None
    """Folder that is searched first."""

    def run(self) -> None:
        from fedpop.data.images import SPLITS, open_images

        with _bar() as watch:
            source = open_images(self.name, self.data_dir, watch=watch)
            lines = []
            for split in SPLITS:
                files, images = source.get(split), getattr(source, split)
                rows = source.about.rows[split]
                of = "" if len(images) == rows else f" (the release has {rows:,})"
                lines.append(f"{split}: {len(images):,} images{of} from {files[0].parent}")
        sys.stdout.write("\n".join([source.about.title, *lines]) + "\n")


@dataclass(frozen=True)
class Listing:
    """List the sets, and where their files are on this machine."""

    data_dir: DataDir = None
    """Folder that is searched first."""

    def run(self) -> None:
        from fedpop.data.catalogue import DATASETS
        from fedpop.data.images import SPLITS
        from fedpop.data.lookup import find

        lines = []
        for name, about in DATASETS.items():
            shape = " x ".join(map(str, about.shape))
            lines.append(f"{name:<14}{about.title}; {len(about.classes)} classes, {shape}")
            for split in SPLITS:
                found = find(about, split, self.data_dir)
                where = (
                    f"not here; `fedpop data get {name}` fetches it"
                    if found is None
                    else found.files[0].parent
                )
                lines.append(f"  {split:<12}{where}")
        sys.stdout.write("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Show:
    """Draw who has what when training images are dealt to clients."""

    name: Positional[str]
    """cifar10, cifar100, mnist, fashionmnist or svhn."""
    partition: Literal["shards", "small", "dirichlet", "iid"] = "shards"
    """shards: all images, so many classes each (FedRep); small: few images, so many classes each."""
    b: int = 100
    """Clients."""
    classes: int = 5
    """Classes per client, of shards and small."""
    alpha: float = 0.3
    """Of dirichlet; a small one gives each class to few clients."""
    share_small: float = 0.5
    """Of small: the share of clients with n-small images; the others have n-large."""
    n_small: int = 5
    """Images of a small client."""
    n_large: int = 25
    """Images of the others."""
    seed: int = 0
    """Which deal."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """File for the picture, .png, .svg or .pdf; NAME-PARTITION.png by default."""
    data_dir: DataDir = None
    """Folder that is searched first."""

    @property
    def scheme(self) -> Scheme:
        """The partition that was asked for."""
        from fedpop.federation.partitions import IID, ByClass, Dirichlet, Shards, share_sizes

        if self.partition == "shards":
            return Shards(self.b, self.classes)
        if self.partition == "dirichlet":
            return Dirichlet(self.b, self.alpha)
        if self.partition == "iid":
            return IID(self.b)
        return ByClass(self.classes, share_sizes(self.b, self.share_small, self.n_small, self.n_large))

    def run(self) -> None:
        from fedpop.data.images import open_images
        from fedpop.report.holdings import draw_holdings

        with _bar() as watch:
            source = open_images(self.name, self.data_dir, watch=watch)
            labels = source.train.y
        dealt = self.scheme.deal(labels, self.seed)
        counts = dealt.counts(labels)
        classes = (counts > 0).sum(1)
        out = self.out or Path(f"{self.name}-{self.partition}.png")
        title = f"{source.about.title.partition(':')[0]}, {self.description}, seed {self.seed}"
        draw_holdings(counts, source.about.classes, title, out)
        sys.stdout.write(
            f"{title}: {_span(dealt.sizes)} images and {_span(classes.tolist())} classes per client, "
            f"{len(dealt.rest):,} images left over; {out}\n"
        )

    @property
    def description(self) -> str:
        """The partition in words."""
        most = "at most " if min(self.n_small, self.n_large) < self.classes else ""  # of one image one class
        return {
            "shards": f"{self.b} clients with shards of {self.classes} classes",
            "small": f"{self.b} clients with few images of {most}{self.classes} classes",
            "dirichlet": f"{self.b} clients, Dirichlet({self.alpha:g})",
            "iid": f"{self.b} clients alike",
        }[self.partition]


def _span(numbers: tuple[int, ...] | list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
