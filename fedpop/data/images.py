"""Labelled images by name: found or fetched, decoded once, cached as bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedpop.data.byte_cache import cached, known_digests
from fedpop.data.catalogue import Dataset, dataset
from fedpop.data.download import fetch
from fedpop.data.formats.decoded import Decoded, Watch, unwatched
from fedpop.data.lookup import Found, downloads, find, published, searched
from fedpop.errors import DataError, FedpopError, SettingsError, warn_user

SPLITS = ("train", "test")
SUMS = "SHA256SUMS"
LEAST_IMAGES_OF_A_SET = 1000
"""Images below which a set is taken for somebody's own sample."""
MEAN_PIXEL_TOLERANCE = 0.05
"""How far the mean pixel may be from that of the training images; other sets' are further."""
REMEDY = "Remove or replace the file, or name another folder with --data-dir"


@dataclass(frozen=True)
class Images:
    """One split of a set of images, as bytes with labels.

    Args:
        x: Images as bytes (0 to 255), ``[n, channels, height, width]``; they may lie in a file.
        y: The class of each image, a whole number from 0 on, ``[n]``.

    >>> import torch
    >>> len(Images(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([3, 1])))
    2
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.y.shape[0]


@dataclass(frozen=True)
class ImageSet:
    """A set of images; each split is opened when it is first asked for.

    Args:
        about: What is known of the set, such as ``DATASETS["mnist"]``.
        folder: Where its files are searched for first, or None.
        download: Fetch files that are not found from their public home (default: True); without it they are
            an error.
        watch: Called as ``watch(what, done, total)`` while files are fetched and decoded, for a bar (default:
            nothing).

    >>> from fedpop.data.catalogue import dataset
    >>> ImageSet(dataset("cifar100")).classes
    100
    """

    about: Dataset
    folder: Path | None = None
    download: bool = True
    watch: Watch = unwatched

    @property
    def classes(self) -> int:
        return len(self.about.classes)

    @cached_property
    def train(self) -> Images:
        return self._open("train")

    @cached_property
    def test(self) -> Images:
        return self._open("test")

    def find(self, split: str) -> Found:
        """The files of a split, fetched if need be."""
        found = find(self.about, split, self.folder)
        if found is not None:
            return found
        failure = self._fetched(split)
        found = find(self.about, split, self.folder)
        if found is not None:
            return found
        package = f", install Debian's package {self.about.package}" if self.about.package else ""
        homes = " and ".join(r.homes[0] + r.file for r in self.about.remotes[split])
        raise DataError(
            f"there are no {split} images of {self.about.name}: {searched(self.about, split, self.folder)}; "
            f"{failure}. Put {homes} into one of these folders, name another one with --data-dir or "
            f"FEDPOP_DATA{package}, or run `fedpop data get {self.about.name}` where there is a network"
        )

    def get(self, split: str) -> tuple[Path, ...]:
        """The files of a split, proved to be sound: those that were fetched are compared with their digests
        once more and fetched anew where they differ, all are decoded, and where that fails the published ones
        are fetched."""
        found, home = find(self.about, split, self.folder), published(self.about, split)
        if found is None:
            return self.find(split).files
        failure = self._fetched(split) if home is not None and found.files == home.files else ""
        try:
            self._read(found, split)
        except DataError as error:
            failure = failure or self._fetched(split)
            if failure or home is None:
                raise DataError(
                    f"{error}; the published files cannot be had ({failure}). {REMEDY}"
                ) from error
            self._read(home, split)
            return home.files
        return found.files

    def _fetched(self, split: str) -> str:
        """What went wrong with it, if anything."""
        folder = downloads()
        if not self.download:
            return "downloads were not asked for"
        if folder is None:
            return "there is no home folder to fetch them into"
        try:
            for remote in self.about.remotes[split]:
                fetch(remote, folder / self.about.name, self.watch)
        except FedpopError as error:
            return str(error)
        return ""

    def _open(self, split: str) -> Images:
        """From the first place that has the files; where those are damaged, fetched ones, with a warning."""
        found = self.find(split)
        try:
            images = self._read(found, split)
        except DataError as error:
            home = published(self.about, split)
            if home is None or home.files == found.files or not all(file.is_file() for file in home.files):
                get = f"`fedpop data get {self.about.name}`"
                raise DataError(f"{error}. {REMEDY}, or fetch it anew with {get}") from error
            images = self._read(home, split)
            warn_user(f"{error}. What was fetched to {home.files[0].parent} is used in its stead. {REMEDY}")
            return images
        if strange := _strange(images, self.about, split):
            warn_user(
                f"{found.names}: {'; '.join(strange)}. If these are meant to be the {split} images of "
                f"{self.about.title.partition(':')[0]}, replace them"
            )
        return images

    def _read(self, found: Found, split: str) -> Images:
        about = self.about

        def decode() -> Decoded:
            try:
                decoded = found.form.read(found.files, self.watch)
            except OSError as error:
                raise DataError(f"{found.names} cannot be read: {error.strerror or error}") from error
            return decoded.checked(found.names, about.shape, self.classes)

        digests = known_digests(found.files)
        _compare(found, digests)
        decoded = cached(f"{about.name}-{split}", digests, about.shape, decode)
        return Images(torch.from_numpy(decoded.images), torch.from_numpy(decoded.labels))


def open_images(
    name: str, folder: str | Path | None = None, *, download: bool = True, watch: Watch = unwatched
) -> ImageSet:
    """One of the known sets of images, by name; no file is opened yet.

    Files are searched for in ``folder``, in FEDPOP_DATA, in the user's cache and where a system's package
    puts them. A folder holds a sub-folder for each set: ``cifar10/train.parquet``, ``svhn/test_32x32.mat``;
    docs/data.md lists the forms.

    Args:
        name: That of the set, a key of ``DATASETS``: "cifar10", "cifar100", "mnist", "fashionmnist",
            "svhn".
        folder: Where its files are searched for first; None (the default) searches the other places only.
        download: Fetch files that are in none of these places from their public home into the user's cache
            (default: True); without it they are an error.
        watch: Called as ``watch(what, done, total)`` while files are fetched and decoded, for a bar (default:
            nothing).

    >>> images = open_images("mnist")
    >>> images.about.shape, images.classes
    ((1, 28, 28), 10)
    """
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise SettingsError(f"a folder is given by its path, not by {folder!r}")
    return ImageSet(dataset(name), None if folder is None else Path(folder), download, watch)


def prepare(name: str, folder: str | Path | None = None, splits: Sequence[str] = SPLITS) -> None:
    """Find or fetch these splits and decode them, so that what is missing is reported before hours of work,
    and worker processes find bytes."""
    source = open_images(name, folder)
    for split in splits:
        getattr(source, split)


def _strange(images: Images, about: Dataset, split: str) -> list[str]:
    """How images of the right form differ from the published ones; a small sample may, and is let be."""
    if len(images) < LEAST_IMAGES_OF_A_SET:
        return []
    found = []
    if len(images) != about.rows[split]:
        found.append(f"there are {len(images):,} images, where the release has {about.rows[split]:,}")
    present = int((torch.bincount(images.y, minlength=len(about.classes)) > 0).sum())
    if present < len(about.classes):
        found.append(f"there are images of {present} classes, where the release has {len(about.classes)}")
    some = images.x[:: len(images) // LEAST_IMAGES_OF_A_SET].double().mean((0, 2, 3)) / 255
    if float((some - torch.tensor(about.mean)).abs().max()) > MEAN_PIXEL_TOLERANCE:
        means = ", ".join(f"{float(m):.2f}" for m in some)
        usual = ", ".join(f"{m:.2f}" for m in about.mean)
        found.append(f"pixels are {means} on average, where the release has {usual}")
    return found


def _compare(found: Found, digests: Sequence[str]) -> None:
    """Raise where a list of digests in the folder of data says that a file should be another one."""
    sums = found.root / SUMS
    try:
        listed = sums.read_text(errors="replace") if sums.is_file() else ""
    except OSError as error:
        raise DataError(f"{sums} cannot be read: {error.strerror or error}") from error
    known = {}
    for line in listed.splitlines():
        if entry := re.fullmatch(
            r"([0-9A-Fa-f]{64}) [ *](?:\./)?(.+)", line.strip()
        ):  # * is for binary files
            known[entry[2]] = entry[1].lower()
    for file, digest in zip(found.files, digests, strict=True):
        name = file.relative_to(found.root).as_posix()
        if name in known and f"sha256:{known[name]}" != digest:
            raise DataError(f"{file} is damaged: its digest is not the one in {sums}")
