"""Reading images: what is written comes back; what is broken is named; the real files where they are."""

import gzip
import io
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedpop.data.image_task import ImageTask
from fedpop.data.images import IdxImages, ParquetImages, open_images, read_idx
from fedpop.errors import DataError, SettingsError

REAL = Path(os.environ.get("FEDPOP_DATA", Path(__file__).parents[3] / "shared" / "data"))


def real(name: str) -> Path:
    if not (REAL / name).exists():
        pytest.skip(f"no {name} under {REAL}; set FEDPOP_DATA to a folder that has it")
    return REAL


def pixels(n: int = 3, size: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


def parquet(
    path: Path, images: np.ndarray, labels: list[int], column: str = "img", form: str = "PNG"
) -> Path:
    rows = []
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image).save(out, form, lossless=True)
        rows.append({"bytes": out.getvalue(), "path": None})
    pq.write_table(pa.table({column: rows, "label": labels}), path)
    return path


def idx(path: Path, array: np.ndarray) -> Path:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_parquet_images_come_back_to_the_bit(tmp_path: Path, form: str) -> None:
    images = pixels()
    file = ParquetImages.open(parquet(tmp_path / "a.parquet", images, [2, 0, 1], form=form))
    assert file.labels.tolist() == [2, 0, 1]
    found = file.pixels(torch.tensor([2, 0]))
    expected = torch.from_numpy(images[[2, 0]]).permute(0, 3, 1, 2).float() / 255
    assert torch.equal(found, expected)


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pixels(), [0, 1, 2], column="picture")
    assert len(ParquetImages.open(path, image="picture")) == 3
    with pytest.raises(DataError, match=r"no column 'img' or 'image'.*picture, label"):
        ParquetImages.open(path)
    with pytest.raises(DataError, match="no column 'kind'"):
        ParquetImages.open(path, image="picture", label="kind")
    with pytest.raises(DataError, match="encoded images"):
        ParquetImages.open(path, image="label")


def test_broken_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        ParquetImages.open(bad)
    with pytest.raises(DataError, match="does not exist"):
        ParquetImages.open(tmp_path / "none.parquet")
    table = pa.table({"img": [{"bytes": b"junk", "path": None}], "label": [0]})
    pq.write_table(table, tmp_path / "junk.parquet")
    with pytest.raises(DataError, match="row 0: the image cannot be decoded"):
        ParquetImages.open(tmp_path / "junk.parquet").pixels(torch.tensor([0]))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_come_back(tmp_path: Path, suffix: str) -> None:
    images = pixels(5)[..., 0]
    x = idx(tmp_path / f"x{suffix}", images)
    y = idx(tmp_path / f"y{suffix}", np.array([3, 1, 4, 1, 5]))
    file = IdxImages.open(x, y)
    assert file.labels.tolist() == [3, 1, 4, 1, 5]
    assert torch.equal(file.pixels(torch.tensor([4])), torch.from_numpy(images[4:5])[:, None].float() / 255)


def test_broken_idx_files_are_named(tmp_path: Path) -> None:
    path = idx(tmp_path / "x", pixels(5)[..., 0])
    whole = path.read_bytes()
    for cut, words in ((3, "not an IDX"), (8, "cut short"), (len(whole) - 1, "asks for")):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=words):
            read_idx(path)
    path.write_bytes(b"\0\0\x0d" + whole[3:])
    with pytest.raises(DataError, match="unsigned bytes"):
        read_idx(path)
    zipped = tmp_path / "z.gz"
    zipped.write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_idx(zipped)
    x, y = idx(tmp_path / "x", pixels(5)[..., 0]), idx(tmp_path / "y", np.array([1, 2]))
    with pytest.raises(DataError, match=r"5 images but .* 2 labels"):
        IdxImages.open(x, y)
    with pytest.raises(DataError, match="expected images"):
        IdxImages.open(y, x)


def test_unknown_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="known are cifar10"):
        open_images("imagenet", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_images("cifar10", tmp_path)
    with pytest.raises(SettingsError, match="known are"):
        ImageTask("imagenet")


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_the_real_files(name: str) -> None:
    source = open_images(name, real(name))
    assert len(source.test) == 10_000
    assert source.classes == 10
    x = source.inputs(source.test, torch.arange(500))
    channels, side = (3, 32) if name == "cifar10" else (1, 28)
    assert x.shape == (500, channels, side, side)
    # Standardised by the training set's statistics: 500 images are near 0 and 1.
    assert abs(float(x.mean())) < 0.1
    assert abs(float(x.std()) - 1) < 0.1


def test_a_task_gives_every_client_its_three_sets() -> None:
    task = ImageTask("mnist", classes=2, small=2, large=1, n_small=3, n_large=6, validation=4, test=8)
    clients = task.make(real("mnist"), seed=1)
    assert [len(c.y) for c in clients] == [3, 3, 6]
    for client in clients:
        assert client.validation is not None
        assert client.test is not None
        assert (len(client.validation[1]), len(client.test[1])) == (4, 8)
        assert set(client.y.tolist()) == set(client.test[1].tolist()) == set(client.validation[1].tolist())
    again = task.make(real("mnist"), seed=1)
    assert torch.equal(clients[2].x, again[2].x)
    assert torch.equal(task.model(1).initial_phi(), task.model(1).initial_phi())
