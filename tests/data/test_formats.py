"""Readers of image files: what is written comes back to the byte; what is broken is named."""

import gzip
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io

from fedpop.data.formats.cifar import read_archive, read_files
from fedpop.data.formats.decoded import Decoded
from fedpop.data.formats.idx import read_idx, read_idx_pair
from fedpop.data.formats.mat import read_mat, read_svhn
from fedpop.data.formats.parquet import read_parquet
from fedpop.errors import DataError
from tests.data.files import archive, idx, labels, mat, parquet, pixels, records


def same(decoded: Decoded, images: np.ndarray, y: np.ndarray) -> None:
    assert decoded.images.dtype == np.uint8
    assert decoded.labels.dtype == np.int64
    assert np.array_equal(decoded.images, images)
    assert np.array_equal(decoded.labels, y)


# --- Parquet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_parquet_images_come_back_to_the_byte(tmp_path: Path, form: str) -> None:
    seen: list[tuple[str, int, int]] = []
    path = parquet(tmp_path / "a.parquet", pixels(3), [2, 0, 1], form=form)
    same(read_parquet(path, lambda *told: seen.append(told)), pixels(3), np.array([2, 0, 1]))
    assert seen == [("decoding a.parquet", 3, 3)]


def test_grey_parquet_images_and_fine_labels(tmp_path: Path) -> None:
    x = pixels(4, (1, 28, 28))
    path = parquet(tmp_path / "a.parquet", x, [3, 1, 2, 0], column="image", label="fine_label")
    same(read_parquet(path), x, np.array([3, 1, 2, 0]))


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pixels(2), [0, 1], column="picture")
    with pytest.raises(DataError, match=r"no column 'img' or 'image'; it has picture, label"):
        read_parquet(path)
    pq.write_table(pa.table({"img": [1, 2], "label": [0, 1]}), path)
    with pytest.raises(DataError, match="encoded images"):
        read_parquet(path)
    pq.write_table(pa.table({"img": [{"bytes": b"", "path": None}], "kind": [0]}), path)
    with pytest.raises(DataError, match="no column 'label' or 'fine_label'"):
        read_parquet(path)


def test_broken_parquet_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        read_parquet(path)
    whole = parquet(path, pixels(5), labels(5)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_parquet(path)
    pq.write_table(pa.table({"img": [{"bytes": b"junk", "path": None}], "label": [0]}), path)
    with pytest.raises(DataError, match="row 0: the image cannot be decoded"):
        read_parquet(path)
    pq.write_table(pa.table({"img": [{"bytes": None, "path": "x.png"}], "label": [0]}), path)
    with pytest.raises(DataError, match="row 0: the image cannot be decoded"):
        read_parquet(path)


def test_parquet_images_of_several_sizes_are_refused(tmp_path: Path) -> None:
    small, large = (parquet(tmp_path / f"{s}.parquet", pixels(1, (3, s, s)), [0]) for s in (8, 9))
    both = pa.concat_tables([pq.read_table(small), pq.read_table(large)])
    pq.write_table(both, tmp_path / "both.parquet")
    with pytest.raises(DataError, match=r"different sizes, \(8, 8, 3\) and \(9, 9, 3\)"):
        read_parquet(tmp_path / "both.parquet")


def test_labels_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pixels(2), [0, None])
    with pytest.raises(DataError, match="row 1: label None"):
        read_parquet(path)


@pytest.mark.parametrize("label", [True, 2**64 - 1, 1.0, "cat"])
def test_labels_of_other_kinds_are_named(tmp_path: Path, label: object) -> None:
    kind = pa.uint64() if label == 2**64 - 1 else None
    path = parquet(tmp_path / "a.parquet", pixels(1), [0])
    pq.write_table(pq.read_table(path).set_column(1, "label", pa.array([label], kind)), path)
    with pytest.raises(DataError, match=r"a\.parquet, row 0: label .* is not the number of a class"):
        read_parquet(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pq.read_table(parquet(tmp_path / "a.parquet", pixels(1), [0]))
    pq.write_table(table.append_column("img", table["img"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns 'img'"):
        read_parquet(tmp_path / "a.parquet")


def test_grey_images_of_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    shades = np.arange(256, dtype=np.uint16).reshape(1, 1, 16, 16)
    same(read_parquet(parquet(tmp_path / "a.parquet", shades * 257, [0])), shades, np.array([0]))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["dog", "cat", "ant"], r"class 0 is called 'dog', where 'cat' belongs"),
        (["cat", "dog"], r"its 2 classes \(cat, dog, \.\.\.\) are not the 3 of this set"),
        (["0", "1", "2"], r"its 3 classes \(0, 1, 2, \.\.\.\) are not the 3"),
        (["Cat", "dog", "an t"], None),
        (["cat", "dog", "emmet"], None),  # another word for it, and nobody else's
        (None, None),
    ],
)
def test_classes_that_the_file_names_are_those_of_the_set(
    tmp_path: Path, names: list[str] | None, told: str | None
) -> None:
    path = parquet(tmp_path / "a.parquet", pixels(2), [0, 1])
    about = json.dumps({"info": {"features": {"label": {"names": names}}}})
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": about}), path)
    if told is None:
        assert len(read_parquet(path, classes=("cat", "dog", "ant")).labels) == 2
        return
    with pytest.raises(DataError, match=told):
        read_parquet(path, classes=("cat", "dog", "ant"))


# --- IDX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_come_back(tmp_path: Path, suffix: str) -> None:
    x = pixels(5, (1, 28, 28))
    images, y = idx(tmp_path / f"x{suffix}", x[:, 0]), idx(tmp_path / f"y{suffix}", np.array([3, 1, 4, 1, 5]))
    same(read_idx_pair(images, y), x, np.array([3, 1, 4, 1, 5]))


def test_broken_idx_files_are_named(tmp_path: Path) -> None:
    path = idx(tmp_path / "x", pixels(5)[:, 0])
    whole = path.read_bytes()
    for cut, words in ((3, "not an IDX"), (8, "cut short"), (len(whole) - 1, "asks for")):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=words):
            read_idx(path)
    path.write_bytes(b"\0\0\x0d" + whole[3:])
    with pytest.raises(DataError, match="unsigned bytes"):
        read_idx(path)
    zipped = tmp_path / "z.gz"
    for broken in (gzip.compress(whole)[:-9], gzip.compress(whole)[:10] + b"junk" * 10, b"junk"):
        zipped.write_bytes(broken)
        with pytest.raises(DataError, match=r"z\.gz cannot be unpacked"):
            read_idx(zipped)
    x, y = idx(tmp_path / "x", pixels(5)[:, 0]), idx(tmp_path / "y", np.array([1, 2]))
    with pytest.raises(DataError, match="expected images"):
        read_idx_pair(y, x)


@pytest.mark.parametrize(
    ("dims", "told"),
    [
        ((2**31, 2**31, 4), "asks for"),
        ((2**32 - 1,) * 3, "asks for"),
        ((1,) * 255, "255 dimensions"),
        ((), "0 d"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path: Path, dims: tuple[int, ...], told: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack(f">BBBB{len(dims)}I", 0, 0, 8, len(dims), *dims) + b"\0")
    with pytest.raises(DataError, match=told):
        read_idx(path)


# --- CIFAR's binary version --------------------------------------------------------------------


def test_records_in_files_and_in_the_archive(tmp_path: Path) -> None:
    x, y = pixels(8), labels(8)
    for name, part in (("a.bin", slice(0, 4)), ("b.bin", slice(4, 8))):
        (tmp_path / name).write_bytes(records(x[part], y[part]))
    same(read_files([tmp_path / "a.bin", tmp_path / "b.bin"], 1), x, y)
    content = {f"cifar/{n}": (tmp_path / n).read_bytes() for n in ("b.bin", "a.bin")} | {
        "cifar/readme": b"hi"
    }
    packed = archive(tmp_path / "all.tar.gz", content)
    same(read_archive(packed, ("a.bin", "b.bin"), 1), x, y)


def test_a_file_that_ends_early_between_two_records_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for path, n in zip(paths, (4, 2, 4), strict=True):
        path.write_bytes(records(pixels(n), labels(n)))
    with pytest.raises(DataError, match=r"1\.bin has 2 images, the first file 4; .* cut short"):
        read_files(paths, 1)


def test_of_two_labels_the_fine_one_is_read(tmp_path: Path) -> None:
    x, fine = pixels(6), np.array([99, 0, 50, 7, 8, 9])
    (tmp_path / "train.bin").write_bytes(records(x, fine // 5, fine))
    same(read_files([tmp_path / "train.bin"], 2), x, fine)


def test_broken_records_and_archives_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(records(pixels(2), labels(2))[:-1])
    with pytest.raises(
        DataError, match=r"a\.bin has 6145 bytes, which is no whole number of records of 3073"
    ):
        read_files([path], 1)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes"):
        read_files([path], 1)
    packed = archive(tmp_path / "a.tar.gz", {"x/a.bin": records(pixels(20), labels(20))})
    with pytest.raises(DataError, match=r"no member b\.bin"):
        read_archive(packed, ("a.bin", "b.bin"), 1)
    whole = packed.read_bytes()
    for broken in (whole[: len(whole) // 2], b"junk", whole[:-6]):
        packed.write_bytes(broken)
        with pytest.raises(DataError, match="cannot be unpacked"):
            read_archive(packed, ("a.bin",), 1)


# --- MATLAB ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [True, False])
def test_svhn_files_come_back(tmp_path: Path, compress: bool) -> None:
    x, y = pixels(11), labels(11)
    same(read_svhn(mat(tmp_path / "a.mat", x, y, compress)), x, y)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.uint16, np.int32, np.float32, np.float64, np.uint64])
def test_arrays_are_those_that_scipy_wrote(tmp_path: Path, kind: type) -> None:
    told = {
        "one": np.arange(6).reshape(2, 3).astype(kind),
        "a_long_name_that_is_not_packed": np.arange(24).reshape(2, 3, 4).astype(kind),
        "words": "not numbers",
        "complex": np.array([1j]),
    }
    scipy.io.savemat(tmp_path / "a.mat", told, do_compression=True)
    found = read_mat(tmp_path / "a.mat")
    assert list(found) == ["one", "a_long_name_that_is_not_packed"]
    for name, array in found.items():
        assert np.array_equal(array, told[name])


def test_broken_mat_files_are_named(tmp_path: Path) -> None:
    path = mat(tmp_path / "a.mat", pixels(3), labels(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(DataError, match="not a MATLAB file of level 5"):
        read_svhn(path)
    for cut in (130, 200, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="damaged or cut short"):
            read_svhn(path)
    path.write_bytes(whole[:136] + zlib.compress(b"junk") + whole[136:])
    with pytest.raises(DataError, match="damaged or cut short"):
        read_svhn(path)
    scipy.io.savemat(path, {"X": np.zeros((2, 2)), "y": np.zeros((2, 1))})
    with pytest.raises(DataError, match=r"no array X of 4 dimensions; it has X \(2, 2\), y \(2, 1\)"):
        read_svhn(path)
    scipy.io.savemat(path, {"X": np.zeros((2, 2, 3, 4)), "y": np.zeros((4, 1))})
    with pytest.raises(DataError, match="X holds float64, not bytes"):
        read_svhn(path)
    for wrong in (1.7, -1.0, 11.0, np.nan, np.inf):
        y = np.array([[1.0], [wrong]])
        scipy.io.savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": y})
        with pytest.raises(DataError, match=r"a\.mat, row 1: label .* none of the digits"):
            read_svhn(path)


# --- what all have in common -------------------------------------------------------------------


def test_what_cannot_be_is_told_with_its_row() -> None:
    good = Decoded(pixels(3), labels(3))
    assert good.checked("here", (3, 32, 32), 10) is good
    with pytest.raises(DataError, match="here: images of 3 x 32 x 32 bytes, where 1 x 28 x 28 belong"):
        good.checked("here", (1, 28, 28), 10)
    with pytest.raises(DataError, match="here, row 2: label 2 is outside the classes 0 to 1"):
        good.checked("here", (3, 32, 32), 2)
    with pytest.raises(DataError, match="row 0: label -1"):
        Decoded(pixels(1), np.array([-1])).checked("here", (3, 32, 32), 2)
    with pytest.raises(DataError, match="3 images but 2 labels"):
        Decoded(pixels(3), labels(2)).checked("here", (3, 32, 32), 10)
    with pytest.raises(DataError, match="no images"):
        Decoded(pixels(0), labels(0)).checked("here", (3, 32, 32), 10)
