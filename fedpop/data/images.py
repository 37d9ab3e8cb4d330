"""Labelled images from files: Parquet with encoded images (the Hugging Face layout), and IDX (MNIST's).

Labels are read at once, pixels only for the rows that are asked for: an experiment with small clients
decodes what its clients hold and nothing else.
"""

from __future__ import annotations

import gzip
import io
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.extras import library

_IDX_UINT8 = 0x08


class ImageFile(ABC):
    """Labels ``[n]``, and pixels ``[n, channels, height, width]`` in 0..1 of the rows asked for."""

    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    @abstractmethod
    def pixels(self, rows: Tensor) -> Tensor:
        """The images of these rows as float32 between 0 and 1."""


@dataclass(frozen=True)
class ParquetImages(ImageFile):
    """Encoded images (PNG, WebP, JPEG) and whole-number labels in the columns of a Parquet file."""

    path: Path
    labels: Tensor
    _encoded: Any

    @classmethod
    def open(cls, path: str | Path, image: str | None = None, label: str | None = None) -> ParquetImages:
        """``image`` and ``label`` name the columns; unless told, the usual names are tried."""
        parquet = library("pyarrow.parquet", "data", "Parquet files")
        path = _existing(path)
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        image = _column(table, path, image, ("img", "image"))
        label = _column(table, path, label, ("label", "fine_label"))
        encoded = table.column(image).combine_chunks()
        if "bytes" not in [f.name for f in getattr(encoded.type, "fields", [])]:
            raise DataError(f"{path}: column {image!r} does not hold encoded images (a struct with 'bytes')")
        labels = torch.from_numpy(table.column(label).to_numpy().astype(np.int64))
        return cls(path, labels, encoded.field("bytes"))

    def pixels(self, rows: Tensor) -> Tensor:
        image = library("PIL.Image", "data", "encoded images")
        images = []
        for row in rows.tolist():
            try:
                with image.open(io.BytesIO(self._encoded[row].as_py())) as one:
                    array = np.asarray(one)
            except (OSError, TypeError) as error:
                raise DataError(f"{self.path}, row {row}: the image cannot be decoded ({error})") from error
            images.append(array if array.ndim == 3 else array[..., None])
        shapes = {a.shape for a in images}
        if len(shapes) > 1:
            raise DataError(f"{self.path}: images of different shapes {sorted(shapes)}")
        stacked = np.stack(images) if images else np.zeros((0, 1, 1, 1), np.uint8)
        return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous().float() / 255


@dataclass(frozen=True)
class IdxImages(ImageFile):
    """The two files of MNIST and its relatives, gzipped or not."""

    labels: Tensor
    images: Tensor

    @classmethod
    def open(cls, images: str | Path, labels: str | Path) -> IdxImages:
        x, y = read_idx(images), read_idx(labels)
        if x.dim() != 3 or y.dim() != 1:
            raise DataError(
                f"{images} holds {x.dim()}-dimensional and {labels} {y.dim()}-dimensional data; "
                "expected images (3) and labels (1)"
            )
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x)} images but {labels} has {len(y)} labels")
        return cls(y.long(), x)

    def pixels(self, rows: Tensor) -> Tensor:
        return self.images[rows].unsqueeze(1).float() / 255


def read_idx(path: str | Path) -> Tensor:
    """An IDX file of unsigned bytes as a tensor."""
    path = _existing(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _IDX_UINT8:
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    dims = raw[3]
    if len(raw) < 4 + 4 * dims:
        raise DataError(f"{path} is cut short: no room for the sizes of {dims} dimensions")
    shape = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + int(np.prod(shape))
    if len(raw) != expected:
        raise DataError(f"{path} has {len(raw)} bytes where its header {shape} asks for {expected}")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


@dataclass(frozen=True)
class ImageSet:
    """A training and a test file of the same images, with what standardises their pixels."""

    name: str
    train: ImageFile
    test: ImageFile
    mean: tuple[float, ...]
    sd: tuple[float, ...]

    @property
    def classes(self) -> int:
        return int(torch.maximum(self.train.labels.max(), self.test.labels.max())) + 1

    def inputs(self, file: ImageFile, rows: Tensor) -> Tensor:
        """Standardised pixels of these rows."""
        pixels = file.pixels(rows)
        mean, sd = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.sd))
        return (pixels - mean) / sd


_STATISTICS = {
    "cifar10": ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
    "cifar100": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
    "mnist": ((0.1307,), (0.3081,)),
}
"""Mean and standard deviation of the training pixels, per channel."""


def open_images(name: str, folder: str | Path) -> ImageSet:
    """One of the known sets, from a folder with a sub-folder of its name: ``cifar10/train.parquet``,
    ``cifar10/test.parquet``; ``mnist/train-images-idx3-ubyte.gz`` and its three companions."""
    if name not in _STATISTICS:
        raise DataError(f"unknown images {name!r}; known are {', '.join(_STATISTICS)}")
    where = _existing(Path(folder) / name)
    mean, sd = _STATISTICS[name]
    if name != "mnist":
        train, test = (ParquetImages.open(where / f"{split}.parquet") for split in ("train", "test"))
        return ImageSet(name, train, test, mean, sd)
    pairs = [
        IdxImages.open(_idx(where, f"{split}-images-idx3-ubyte"), _idx(where, f"{split}-labels-idx1-ubyte"))
        for split in ("train", "t10k")
    ]
    return ImageSet(name, pairs[0], pairs[1], mean, sd)


def _idx(folder: Path, name: str) -> Path:
    zipped = folder / f"{name}.gz"
    return zipped if zipped.exists() else folder / name


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the folder or file where the data are")
    return path


def _column(table: Any, path: Path, given: str | None, usual: tuple[str, ...]) -> str:
    names = table.column_names
    for name in usual if given is None else (given,):
        if name in names:
            return name
    wanted = " or ".join(map(repr, usual)) if given is None else repr(given)
    raise DataError(f"{path} has no column {wanted}; it has {', '.join(names)}")
