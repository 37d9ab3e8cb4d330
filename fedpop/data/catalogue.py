"""The sets of images that are known by name: what is in them, in which files, where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedpop.data.formats import cifar, idx, mat, parquet
from fedpop.data.formats.decoded import Decoded, Watch
from fedpop.errors import DataError

Read = Callable[[Sequence[Path], Watch], Decoded]


@dataclass(frozen=True)
class Form:
    """One way in which a split lies on a disk: files in one of these folders, and what reads them."""

    folders: tuple[str, ...]
    """Below a folder of data; the set's own name comes first."""
    files: tuple[str, ...]
    read: Read


@dataclass(frozen=True)
class Remote:
    """A published file: where to fetch it, and its digest, ``md5:...`` or ``sha256:...``."""

    file: str
    homes: tuple[str, ...]
    digest: str

    @property
    def kind(self) -> str:
        """Of the digest."""
        return self.digest.partition(":")[0]


@dataclass(frozen=True)
class Dataset:
    """What is known of a set of images before any file is opened.

    Args:
        name: The word by which it is asked for, and the name of its folder.
        title: Its name as people write it.
        classes: What classes are called, in the order of their numbers.
        shape: Channels, height and width of an image.
        mean: Of the training pixels between 0 and 1, for each channel.
        sd: The standard deviation of the same, for each channel.
        rows: How many images each split of the release has.
        forms: For each split ("train", "test") the ways in which it may lie on a disk, tried in this
            order.
        remotes: For each split the published files that it is in.
        system: Folders in which an operating system's package puts them (default: none).
        package: What Debian calls that package (default: none).

    >>> DATASETS["fashionmnist"].classes[9]
    'ankle boot'
    """

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    sd: tuple[float, ...]
    rows: Mapping[str, int]
    forms: Mapping[str, tuple[Form, ...]]
    remotes: Mapping[str, tuple[Remote, ...]]
    system: tuple[str, ...] = ()
    package: str = ""


def _parquet(name: str, split: str, classes: tuple[str, ...]) -> Form:
    def read(paths: Sequence[Path], watch: Watch) -> Decoded:
        return parquet.read_parquet(paths[0], watch, classes)

    return Form((name,), (f"{split}.parquet",), read)


def _cifar(name: str, inside: str, members: tuple[str, ...], labels: int, archive: str) -> tuple[Form, ...]:
    def files(paths: Sequence[Path], watch: Watch) -> Decoded:
        return cifar.read_files(paths, labels)

    def packed(paths: Sequence[Path], watch: Watch) -> Decoded:
        return cifar.read_archive(paths[0], members, labels)

    return (
        Form((f"{name}/{inside}", inside), members, files),
        Form((name, "."), (archive,), packed),
    )


def _idx(name: str, split: str, raw: str) -> tuple[Form, ...]:
    stem = "train" if split == "train" else "t10k"
    names = (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")

    def read(paths: Sequence[Path], watch: Watch) -> Decoded:
        return idx.read_idx_pair(paths[0], paths[1])

    return tuple(Form((name, raw), tuple(n + end for n in names), read) for end in (".gz", ""))


def _idx_remotes(
    homes: tuple[str, ...], digests: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[Remote, ...]]:
    out = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        files = (f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz")
        out[split] = tuple(Remote(f, homes, f"md5:{d}") for f, d in zip(files, digests[split], strict=True))
    return out


def _svhn(split: str) -> Form:
    return Form(("svhn", "SVHN", "."), (f"{split}_32x32.mat",), lambda paths, watch: mat.read_svhn(paths[0]))


_DIGITS = tuple(map(str, range(10)))
_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_HUNDRED = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel "
    "can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur "
    "dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion "
    "lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree "
    "pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea "
    "seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table "
    "tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman "
    "worm"
)
_FINE = tuple(_HUNDRED.split())
_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR10 = partial(_cifar, "cifar10", "cifar-10-batches-bin", labels=1, archive="cifar-10-binary.tar.gz")
_CIFAR100 = partial(_cifar, "cifar100", "cifar-100-binary", labels=2, archive="cifar-100-binary.tar.gz")
_CIFAR10_ARCHIVE = Remote(
    "cifar-10-binary.tar.gz",
    _TORONTO,
    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
_CIFAR100_ARCHIVE = Remote(
    "cifar-100-binary.tar.gz",
    _TORONTO,
    "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)
_STANFORD = ("http://ufldl.stanford.edu/housenumbers/",)

DATASETS: dict[str, Dataset] = {
    d.name: d
    for d in (
        Dataset(
            name="cifar10",
            title="CIFAR-10: photographs of ten kinds of things",
            classes=_TEN,
            shape=(3, 32, 32),
            mean=(0.49140, 0.48216, 0.44653),
            sd=(0.24703, 0.24349, 0.26159),
            rows={"train": 50_000, "test": 10_000},
            forms={
                "train": (_parquet("cifar10", "train", _TEN), *_CIFAR10(_BATCHES)),
                "test": (_parquet("cifar10", "test", _TEN), *_CIFAR10(("test_batch.bin",))),
            },
            remotes={"train": (_CIFAR10_ARCHIVE,), "test": (_CIFAR10_ARCHIVE,)},
        ),
        Dataset(
            name="cifar100",
            title="CIFAR-100: photographs with a hundred fine labels",
            classes=_FINE,
            shape=(3, 32, 32),
            mean=(0.50708, 0.48655, 0.44092),
            sd=(0.26733, 0.25644, 0.27615),
            rows={"train": 50_000, "test": 10_000},
            forms={
                split: (_parquet("cifar100", split, _FINE), *_CIFAR100((f"{split}.bin",)))
                for split in ("train", "test")
            },
            remotes={"train": (_CIFAR100_ARCHIVE,), "test": (_CIFAR100_ARCHIVE,)},
        ),
        Dataset(
            name="mnist",
            title="MNIST: handwritten digits",
            classes=_DIGITS,
            shape=(1, 28, 28),
            mean=(0.1307,),
            sd=(0.3081,),
            rows={"train": 60_000, "test": 10_000},
            forms={
                s: (*_idx("mnist", s, "MNIST/raw"), _parquet("mnist", s, _DIGITS)) for s in ("train", "test")
            },
            remotes=_idx_remotes(
                (
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/",
                ),
                {
                    "train": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
                    "test": ("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
                },
            ),
        ),
        Dataset(
            name="fashionmnist",
            title="FashionMNIST: pieces of clothing",
            classes=_CLOTHES,
            shape=(1, 28, 28),
            mean=(0.2860,),
            sd=(0.3530,),
            rows={"train": 60_000, "test": 10_000},
            forms={
                s: (*_idx("fashionmnist", s, "FashionMNIST/raw"), _parquet("fashionmnist", s, _CLOTHES))
                for s in ("train", "test")
            },
            remotes=_idx_remotes(
                (
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                ),
                {
                    "train": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
                    "test": ("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
                },
            ),
            system=("/usr/share/datasets/fashion-mnist",),
            package="dataset-fashion-mnist",
        ),
        Dataset(
            name="svhn",
            title="SVHN: digits of house numbers (not for commercial use)",
            classes=_DIGITS,
            shape=(3, 32, 32),
            mean=(0.4377, 0.4438, 0.4728),
            sd=(0.1980, 0.2010, 0.1970),
            rows={"train": 73_257, "test": 26_032},
            forms={s: (_parquet("svhn", s, _DIGITS), _svhn(s)) for s in ("train", "test")},
            remotes={
                "train": (Remote("train_32x32.mat", _STANFORD, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),),
                "test": (Remote("test_32x32.mat", _STANFORD, "md5:eb5a983be6a315427106f1b164d9cef3"),),
            },
        ),
    )
}


def dataset(name: str) -> Dataset:
    """The set of this name."""
    if not isinstance(name, str) or name not in DATASETS:
        raise DataError(f"unknown images {name!r}; known are {', '.join(DATASETS)}")
    return DATASETS[name]
