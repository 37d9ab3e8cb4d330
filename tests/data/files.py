"""Small files in the forms in which images are published; and the folder of real ones, where there is one."""

import gzip
import io
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
from PIL import Image

REAL = Path(os.environ.get("FEDPOP_DATA", Path(__file__).parents[3] / "shared" / "data"))
COUNT = {"train": 40, "test": 20}


def real(name: str) -> Path:
    if not (REAL / name).exists():
        pytest.skip(f"no {name} under {REAL}; set FEDPOP_DATA to a folder that has it")
    return REAL


def pixels(n: int, shape: tuple[int, int, int] = (3, 32, 32), seed: int = 0) -> np.ndarray:
    """Images as they are held, channels first."""
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n: int, classes: int = 10) -> np.ndarray:
    return np.arange(n) % classes


def parquet(
    path: Path, images: np.ndarray, y: Any, column: str = "img", label: str = "label", form: str = "PNG"
) -> Path:
    rows = []
    for image in images.transpose(0, 2, 3, 1):
        out = io.BytesIO()
        Image.fromarray(image.squeeze()).save(out, form, lossless=True)
        rows.append({"bytes": out.getvalue(), "path": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows, label: list(y)}), path)
    return path


def idx(path: Path, array: np.ndarray) -> Path:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def records(images: np.ndarray, *columns: np.ndarray) -> bytes:
    """CIFAR's binary version: labels, then pixels, of one image after the other."""
    flat = images.reshape(len(images), -1)
    return np.concatenate([*(c.astype(np.uint8)[:, None] for c in columns), flat], 1).tobytes()


def archive(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def mat(path: Path, images: np.ndarray, y: np.ndarray, compress: bool = True) -> Path:
    """SVHN's files: height, width, channels, n; the digit 0 is class 10."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"X": images.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10, y).astype(np.uint8)[:, None]}
    scipy.io.savemat(path, told, do_compression=compress)
    return path


def mnist(folder: Path, name: str = "mnist", seed: int = 0) -> Path:
    """A small set of both splits; gives the folder of data."""
    for split, stem in (("train", "train"), ("test", "t10k")):
        n = COUNT[split]
        idx(folder / name / f"{stem}-images-idx3-ubyte.gz", pixels(n, (1, 28, 28), seed)[:, 0])
        idx(folder / name / f"{stem}-labels-idx1-ubyte.gz", labels(n))
    return folder
