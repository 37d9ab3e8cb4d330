"""What is not as it was: files and entries of the cache that were damaged or shut, and what is used then."""

import gzip
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpop.cli import main
from fedpop.data import byte_cache, images
from fedpop.data.catalogue import DATASETS, Remote
from fedpop.data.folder_task import FolderTask
from fedpop.data.images import open_images
from fedpop.errors import CheckpointError, DataError, FedpopWarning, SettingsError
from tests.data.files import archive, idx, labels, mnist, parquet, pixels, records


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedpop"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A public home of CIFAR-10, without a network: gives the folder whose files can be fetched."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    members = {f"cifar-10-batches-bin/{name}": records(pixels(4, seed=9), labels(4)) for name in names}
    path = archive(tmp_path / "public" / "cifar-10-binary.tar.gz", members)
    remote = Remote(path.name, ("http://here/",), f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
    about = replace(DATASETS["cifar10"], remotes={"train": (remote,), "test": (remote,)})
    monkeypatch.setitem(DATASETS, "cifar10", about)

    def fetch(remote: Remote, folder: Path, watch: object) -> Path:
        if not (path.parent / remote.file).exists():
            raise DataError("there is no network")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(path.parent / remote.file, folder))

    monkeypatch.setattr(images, "fetch", fetch)
    return path.parent


def opened(folder: Path | None = None, name: str = "mnist") -> torch.Tensor:
    return open_images(name, folder, download=False).train.x


# --- files in the user's cache ------------------------------------------------------------------


def test_sound_files_of_another_form_need_no_published_ones(home: Path, cache: Path) -> None:
    shutil.rmtree(home)
    path = parquet(cache / "data" / "cifar10" / "train.parquet", pixels(3), labels(3))
    assert open_images("cifar10").get("train") == (path,)


def test_files_that_were_packed_anew_are_sound(cache: Path) -> None:
    mnist(cache / "data")
    for file in (cache / "data" / "mnist").iterdir():
        file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()), 1))
    assert len(open_images("mnist").get("train")) == 2


@pytest.mark.parametrize("where", ["the cache", "the folder given"])
def test_what_is_fetched_in_place_of_a_damaged_file_is_used(
    home: Path, cache: Path, tmp_path: Path, where: str
) -> None:
    given = None if where == "the cache" else tmp_path / "given"
    path = parquet((given or cache / "data") / "cifar10" / "train.parquet", pixels(3), labels(3))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as Parquet.*fedpop data get cifar10"):
        opened(given, "cifar10")
    found = open_images("cifar10", given).get("train")
    assert found == (cache / "data" / "cifar10" / "cifar-10-binary.tar.gz",)
    with pytest.warns(
        FedpopWarning, match=r"train\.parquet cannot.*is used in its stead\. Remove or replace"
    ):
        assert np.array_equal(opened(given, "cifar10")[:4].numpy(), pixels(4, seed=9))


def test_a_damaged_file_and_no_network_say_what_to_do(home: Path, cache: Path) -> None:
    shutil.rmtree(home)
    path = cache / "data" / "cifar10" / "train.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1junk")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read.*no network.*Remove or replace"):
        open_images("cifar10").get("train")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n": 1100}, r"there are 1,100 images, where the release has 60,000\."),
        ({"classes": 3}, r"images of 3 classes, where the release has 10\."),
        (
            {"name": "fashionmnist"},
            r"pixels are 0\.13 on average, where the release has 0\.29\. .*FashionMNIST",
        ),
        ({}, None),
        ({"n": 900, "classes": 3, "name": "fashionmnist"}, None),  # somebody's own sample
    ],
)
def test_images_that_are_not_those_of_the_release_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], told: str | None
) -> None:
    about = {"n": 1000, "classes": 10, "name": "mnist"} | change
    name, n = about["name"], about["n"]
    idx(tmp_path / name / "train-images-idx3-ubyte", np.full((n, 28, 28), 33))
    idx(tmp_path / name / "train-labels-idx1-ubyte", labels(n, about["classes"]))
    if n == 1000:
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], rows={"train": 1000}))
    if told is None:
        assert len(opened(tmp_path, name)) == n
        return
    with pytest.warns(FedpopWarning, match=told) as warned:
        assert len(opened(tmp_path, name)) == n
    assert warned[0].filename == __file__


# --- digests beside the data --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}  {}", "{} *{}", "{}  ./{}"])
def test_digests_count_after_decoding_too_in_all_their_forms(tmp_path: Path, form: str) -> None:
    path = parquet(tmp_path / "cifar10" / "train.parquet", pixels(3), labels(3))
    assert len(opened(tmp_path, "cifar10")) == 3
    sums, right = tmp_path / "SHA256SUMS", hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text(form.format(right.upper(), "cifar10/train.parquet") + "\r\n")
    assert len(opened(tmp_path, "cifar10")) == 3
    sums.write_text(form.format("0" * 64, "cifar10/train.parquet"))
    with pytest.raises(DataError, match="is damaged: its digest is not the one in"):
        opened(tmp_path, "cifar10")


# --- entries of decoded images ------------------------------------------------------------------


def _saved(entry: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(entry / name, change(np.load(entry / name)))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "other labels": lambda e: _saved(e, "labels.npy", lambda y: (y + 1) % 10),
    "labels out of range": lambda e: _saved(e, "labels.npy", lambda y: y + 50),
    "labels of another type": lambda e: _saved(e, "labels.npy", lambda y: y.astype(np.int32)),
    "images of another shape": lambda e: np.save(e / "images.npy", pixels(40)),
    "another order": lambda e: _saved(e, "images.npy", np.asfortranarray),
    "fewer": lambda e: [_saved(e, n, lambda a: a[:5]) for n in ("images.npy", "labels.npy")],
    "none": lambda e: [_saved(e, n, lambda a: a[:0]) for n in ("images.npy", "labels.npy")],
    "a long header": lambda e: (e / "images.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70_000),
    "a header of junk": lambda e: (e / "images.npy").write_bytes(
        b"\x93NUMPY\x01\x00\x10\x00{'descr': 5,    " + b"x" * 100
    ),
    "a header that does not end": lambda e: (e / "labels.npy").write_bytes(
        b"\x93NUMPY\x01\x00\x10\x00(((((((((((((((("
    ),
    "a zip": lambda e: (e / "labels.npy").write_bytes(b"PK\x03\x04junk"),
    "an archive": lambda e: [np.savez(e / "z.npz", a=[1]), os.replace(e / "z.npz", e / "images.npy")],
    "nothing": lambda e: (e / "images.npy").write_bytes(b""),
    "a folder": lambda e: [(e / "images.npy").unlink(), (e / "images.npy").mkdir()],
    "no word about it": lambda e: (e / "about.json").unlink(),
    "a file": lambda e: [shutil.rmtree(e), e.write_text("x")],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_entry_that_is_not_what_was_written_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    mnist(tmp_path)
    opened(tmp_path)
    (entry,) = (cache / "images").glob("mnist-train-*")
    before = (entry / "labels.npy").read_bytes()
    DAMAGE[damage](entry)
    found = open_images("mnist", tmp_path, download=False).train
    assert np.array_equal(found.x.numpy(), pixels(40, (1, 28, 28)))
    assert found.y.tolist() == labels(40).tolist()
    assert (entry / "labels.npy").read_bytes() == before


def test_a_note_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path)
    opened(tmp_path)
    os.utime(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", (1, 1))

    def full(path: Path, data: bytes) -> None:
        raise CheckpointError(f"cannot write {path}: no space left")

    monkeypatch.setattr(byte_cache, "write_bytes", full)
    monkeypatch.setattr("fedpop.data.formats.idx.read_idx", None)  # the entry serves
    assert len(opened(tmp_path)) == 40


def test_what_a_killed_process_left_is_removed(tmp_path: Path, cache: Path) -> None:
    old, new = (cache / "images" / f".mnist-test-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * byte_cache.ABANDONED_AFTER,) * 2)
    mnist(tmp_path)
    opened(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_scaled_images_of_a_folder_are_not_those_that_were_not_asked_to_be(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for k, size in enumerate(((16, 16), (24, 20))):
        (tmp_path / "photos" / f"class{k}").mkdir(parents=True)
        image.new("RGB", size).save(tmp_path / "photos" / f"class{k}" / "1.png")

    def shape(size: tuple[int, int] | None) -> torch.Size:
        task = FolderTask(str(tmp_path / "photos"), {"kind": "IID", "b": 1}, size=size)
        return torch.as_tensor(task.federation(0).train.x).shape

    assert shape((16, 16)) == (2, 3, 16, 16)
    with pytest.raises(DataError, match="give size"):
        shape(None)


# --- what one may not read ----------------------------------------------------------------------


def shut(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    """Files of this name refuse this method of Path."""
    whole = getattr(Path, method)

    def refused(self: Path, *args: Any, **more: Any) -> Any:
        if name in self.name:
            raise PermissionError(13, "Permission denied", str(self))
        return whole(self, *args, **more)

    monkeypatch.setattr(Path, method, refused)


@pytest.mark.parametrize(
    ("method", "name"),
    [("stat", "train-images"), ("open", "train-images"), ("resolve", "train-images"), ("read_text", "SUMS")],
)
def test_what_may_not_be_read_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    (mnist(tmp_path) / "SHA256SUMS").write_text("")
    shut(monkeypatch, method, name)
    with pytest.raises(DataError, match=rf"{name}.*: Permission denied"):
        opened(tmp_path)
    with pytest.raises(DataError, match="Permission denied"):
        open_images("mnist", tmp_path, download=False).get("train")


def test_list_says_which_folder_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shut(monkeypatch, "stat", "train.parquet")
    with pytest.raises(SystemExit):
        main(["data", "list", "--data-dir", str(tmp_path)])
    assert "cannot look for" in capsys.readouterr().err


# --- what is asked for wrongly ------------------------------------------------------------------


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"~nosuch/x \(the folder given\): there is no home"):
        opened(Path("~nosuch/x"))
    monkeypatch.setenv("FEDPOP_DATA", "~nosuch/x")
    with pytest.raises(DataError, match=r"~nosuch/x \(FEDPOP_DATA\): there is no home"):
        opened()


def test_a_cache_that_cannot_be_written_to_is_told_with_the_places(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(
        DataError, match=r"no train images of mnist: searched for .*cannot write to.*--data-dir"
    ):
        _ = open_images("mnist", tmp_path / "given").train


def test_a_folder_and_a_link_where_files_should_be_are_named(tmp_path: Path) -> None:
    (tmp_path / "svhn" / "train.parquet").mkdir(parents=True)
    os.symlink("nowhere", tmp_path / "svhn" / "train_32x32.mat")
    with pytest.raises(
        DataError, match=r"train\.parquet is a folder, .*train_32x32\.mat is a link to nothing"
    ):
        opened(tmp_path, "svhn")


def test_names_and_folders_of_other_types() -> None:
    wrong: Any = []
    with pytest.raises(DataError, match=r"unknown images \[\]"):
        open_images(wrong)
    wrong = 3
    with pytest.raises(SettingsError, match="by its path, not by 3"):
        open_images("mnist", wrong)
