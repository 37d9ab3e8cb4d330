"""Where images are looked for, what is remembered of them, and what is told when there are none."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpop.data import byte_cache
from fedpop.data.catalogue import DATASETS
from fedpop.data.formats.decoded import Decoded
from fedpop.data.images import open_images, prepare
from fedpop.errors import DataError
from tests.data.files import (
    COUNT,
    archive,
    idx,
    labels,
    mat,
    mnist,
    parquet,
    pixels,
    real,
    records,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedpop"


def cifar10_binary(folder: Path) -> None:
    x, y = pixels(40), labels(40)
    for i in range(5):
        part = slice(8 * i, 8 * i + 8)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(records(x[part], y[part]))
    (folder / "test_batch.bin").write_bytes(records(pixels(20), labels(20)))


def written(form: str, folder: Path) -> str:
    """A set in one of its forms, in a folder of data; gives its name."""
    if form.startswith("parquet"):
        name = form.partition(" ")[2]
        label = "fine_label" if name == "cifar100" else "label"
        for split, n in COUNT.items():
            x = pixels(n, DATASETS[name].shape)
            parquet(folder / name / f"{split}.parquet", x, labels(n), label=label)
        return name
    if form == "cifar10 files":
        inside = folder / "cifar10" / "cifar-10-batches-bin"
        inside.mkdir(parents=True)
        cifar10_binary(inside)
        return "cifar10"
    if form == "cifar10 archive":
        inside = folder / "elsewhere"
        inside.mkdir(parents=True)
        cifar10_binary(inside)
        members = {f"cifar-10-batches-bin/{f.name}": f.read_bytes() for f in sorted(inside.iterdir())}
        archive(folder / "cifar-10-binary.tar.gz", members)
        return "cifar10"
    if form == "cifar100 archive":
        members = {
            f"cifar-100-binary/{s}.bin": records(pixels(n), labels(n), labels(n)) for s, n in COUNT.items()
        }
        archive(folder / "cifar100" / "cifar-100-binary.tar.gz", members)
        return "cifar100"
    if form == "svhn":
        for split, n in COUNT.items():
            mat(folder / "svhn" / f"{split}_32x32.mat", pixels(n), labels(n))
        return "svhn"
    if form == "plain idx":
        for split, stem in (("train", "train"), ("test", "t10k")):
            n = COUNT[split]
            idx(folder / "MNIST" / "raw" / f"{stem}-images-idx3-ubyte", pixels(n, (1, 28, 28))[:, 0])
            idx(folder / "MNIST" / "raw" / f"{stem}-labels-idx1-ubyte", labels(n))
        return "mnist"
    mnist(folder, form)
    return form


@pytest.mark.parametrize(
    "form",
    [
        *(f"parquet {name}" for name in DATASETS),
        *("cifar10 files", "cifar10 archive", "cifar100 archive", "svhn"),
        *("mnist", "fashionmnist", "plain idx"),
    ],
)
def test_every_form_of_every_set_comes_back_twice(form: str, tmp_path: Path) -> None:
    name = written(form, tmp_path / "data")
    for _ in range(2):  # decoded, and from the cache
        source = open_images(name, tmp_path / "data", download=False)
        for split, n in COUNT.items():
            images = getattr(source, split)
            assert images.x.dtype == torch.uint8
            assert torch.equal(images.x, torch.from_numpy(pixels(n, source.about.shape)))
            assert images.y.tolist() == labels(n).tolist()


# --- where --------------------------------------------------------------------------------------


def test_the_folder_given_comes_first_then_the_variable_then_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "given", tmp_path / "variable", cache / "data"]
    for seed, place in enumerate(places):
        mnist(place, seed=seed)
    monkeypatch.setenv("FEDPOP_DATA", str(places[1]))

    def seed_of(folder: Path | None) -> int:
        x = open_images("mnist", folder, download=False).train.x.numpy()
        return next(s for s in range(3) if np.array_equal(x, pixels(40, (1, 28, 28), s)))

    assert seed_of(places[0]) == 0
    assert seed_of(tmp_path / "nowhere") == 1
    assert seed_of(None) == 1
    monkeypatch.delenv("FEDPOP_DATA")
    assert seed_of(None) == 2


def test_what_is_missing_is_told_once_with_every_place(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPOP_DATA", str(tmp_path / "variable"))
    with pytest.raises(DataError) as raised:
        _ = open_images("cifar10", tmp_path / "given").train
    told = str(raised.value)
    for words in (
        "no train images of cifar10",
        "train.parquet or data_batch_1.bin to data_batch_5.bin or cifar-10-binary.tar.gz",
        f"{tmp_path / 'given' / 'cifar10'} (the folder given)",
        f"{tmp_path / 'variable' / 'cifar10'} (FEDPOP_DATA)",
        f"{cache / 'data' / 'cifar10'} (the user's cache)",
        "could not be fetched (tests fetch nothing from outside)",
        "--data-dir",
        "fedpop data get cifar10",
    ):
        assert words in told
    assert not list((cache / "data").rglob("*.gz"))
    with pytest.raises(DataError, match="known are cifar10, cifar100, mnist"):
        open_images("imagenet")


def test_a_set_may_lack_a_split_until_it_is_asked_for(tmp_path: Path) -> None:
    mat(tmp_path / "svhn" / "test_32x32.mat", pixels(20), labels(20))
    source = open_images("svhn", tmp_path, download=False)
    assert len(source.test) == 20
    prepare("svhn", tmp_path, ["test"])
    with pytest.raises(DataError, match="no train images of svhn"):
        _ = source.train


# --- what cannot be used ------------------------------------------------------------------------


def test_a_broken_file_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    mnist(tmp_path)
    broken = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:-20])
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz cannot be unpacked.*fedpop data get mnist"
    ):
        _ = open_images("mnist", tmp_path, download=False).train


def test_wrong_labels_and_sizes_are_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cifar10" / "train.parquet"
    parquet(path, pixels(3), [0, 10, 2])
    with pytest.raises(DataError, match=r"train\.parquet, row 1: label 10 is outside the classes 0 to 9"):
        _ = open_images("cifar10", tmp_path, download=False).train
    parquet(path, pixels(3, (3, 28, 32)), [0, 1, 2])
    with pytest.raises(DataError, match=r"images of 3 x 28 x 32 bytes, where 3 x 32 x 32 belong"):
        _ = open_images("cifar10", tmp_path, download=False).train


def test_a_list_of_digests_beside_the_data_is_believed(tmp_path: Path) -> None:
    path = parquet(tmp_path / "cifar10" / "train.parquet", pixels(3), [0, 1, 2])
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(
        f"{'0' * 64}  cifar10/test.parquet\n{right}  cifar10/train.parquet\n"
    )
    assert len(open_images("cifar10", tmp_path, download=False).train) == 3
    parquet(path, pixels(3, seed=1), [0, 1, 2])
    with pytest.raises(DataError, match=r"train\.parquet is damaged: its digest is not the one in"):
        _ = open_images("cifar10", tmp_path, download=False).train


# --- the cache ----------------------------------------------------------------------------------


def test_decoding_is_done_once_however_files_are_moved(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path / "a")
    first = open_images("mnist", tmp_path / "a", download=False).train
    monkeypatch.setattr("fedpop.data.formats.idx.read_idx", None)  # whoever decodes again fails
    (tmp_path / "a").rename(tmp_path / "b")
    os.utime(tmp_path / "b" / "mnist" / "train-images-idx3-ubyte.gz", (1, 1))
    again = open_images("mnist", tmp_path / "b", download=False).train
    assert torch.equal(first.x, again.x)
    held = list((cache / "images").glob("mnist-train-*"))
    assert len(held) == 1
    assert not list((cache / "images").glob(".*"))


def test_files_that_are_as_they_were_are_not_read_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path)
    first = open_images("mnist", tmp_path, download=False).train
    monkeypatch.setattr(byte_cache, "digest_of_file", None)
    assert torch.equal(open_images("mnist", tmp_path, download=False).train.x, first.x)


def test_a_changed_file_is_decoded_anew(tmp_path: Path) -> None:
    mnist(tmp_path)
    _ = open_images("mnist", tmp_path, download=False).train
    mnist(tmp_path, seed=7)
    x = open_images("mnist", tmp_path, download=False).train.x
    assert np.array_equal(x.numpy(), pixels(40, (1, 28, 28), 7))


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_a_broken_entry_is_made_anew(tmp_path: Path, cache: Path, name: str) -> None:
    mnist(tmp_path)
    first = open_images("mnist", tmp_path, download=False).train.x.clone()
    (entry,) = (cache / "images").glob("mnist-train-*")
    whole = (entry / name).read_bytes()
    (entry / name).write_bytes(whole[: len(whole) // 2])
    assert torch.equal(open_images("mnist", tmp_path, download=False).train.x, first)
    assert (entry / name).read_bytes() == whole


def test_two_processes_that_decode_at_once_leave_one_whole_entry(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path)
    write = byte_cache._write

    def overtaken(entry: Path, decoded: Decoded) -> None:
        write(entry, decoded)  # another process, between this one's look and its own writing
        write(entry, decoded)

    monkeypatch.setattr(byte_cache, "_write", overtaken)
    x = open_images("mnist", tmp_path, download=False).train.x
    assert np.array_equal(x.numpy(), pixels(40, (1, 28, 28)))
    assert len(list((cache / "images").glob("*mnist-train-*"))) == 1


def test_without_a_cache_images_are_decoded_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path / "data")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_images("mnist", tmp_path / "data", download=False).train) == 40


def test_images_are_mapped_and_writing_to_them_leaves_the_file_alone(tmp_path: Path, cache: Path) -> None:
    mnist(tmp_path)
    x = open_images("mnist", tmp_path, download=False).train.x
    (entry,) = (cache / "images").glob("mnist-train-*")
    if sys.platform == "linux":
        assert str(entry / "images.npy") in Path("/proc/self/maps").read_text()
    before = (entry / "images.npy").read_bytes()
    x.zero_()
    assert (entry / "images.npy").read_bytes() == before


# --- the real files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cifar10", "mnist", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cifar100", "svhn"))]
)
def test_the_real_test_images(name: str) -> None:
    source = open_images(name, real(name), download=False)
    assert len(source.test) == (26_032 if name == "svhn" else 10_000)
    assert torch.bincount(source.test.y).numel() == source.classes
    x = source.test.x[::4].double() / 255  # evenly, as files may be sorted
    mean, sd = (torch.tensor(v) for v in (source.about.mean, source.about.sd))
    # The statistics are those of the training images: test images are near them, though SVHN's have more
    # contrast.
    assert float((x.mean((0, 2, 3)) - mean).abs().max()) < 0.02
    assert float((x.std((0, 2, 3)) - sd).abs().max()) < (0.04 if name == "svhn" else 0.01)


def test_names_of_classes_are_those_in_the_real_files() -> None:
    parquet_file = pytest.importorskip("pyarrow.parquet")
    for name, column in (("cifar10", "label"), ("cifar100", "fine_label")):
        schema = parquet_file.read_schema(real(name) / name / "test.parquet")
        told = schema.metadata.get(b"huggingface", b"").decode()
        shown = ", ".join(f'"{c}"' for c in DATASETS[name].classes)
        assert shown in told, f"{column} of {name}"
