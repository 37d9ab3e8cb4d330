"""A site's data in the forms that sites have them, and what is said when they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import DataError, SchemaError
from fedpop.federation.cells import OTHER
from fedpop.federation.reading import read_data, width

FORM: dict[str, Any] = {
    "x": ["age", "sex"],
    "y": "dose",
    "levels": {"sex": ["f", "m", "x"]},
    "scale": {"age": [40.0, 10.0]},
}
TABLE = "age,sex,dose,other\n30,f,1.5,a\n50,m,2.5,b\n40,x,0,c\n"
X = torch.tensor([[-1.0, 0, 0], [1, 1, 0], [0, 0, 1]])
Y = torch.tensor([1.5, 2.5, 0])


def written(folder: Path, text: str = TABLE, name: str = "rows.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_csv_file(tmp_path: Path) -> None:
    found = read_data(written(tmp_path), FORM, "north")
    assert list(found.names) == ["north"]
    torch.testing.assert_close(found.train.x, X)
    torch.testing.assert_close(found.train.y, Y)
    assert width(FORM) == X.shape[1]


def test_a_parquet_file_is_read_alike(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    columns = {"dose": [1.5, 2.5, 0.0], "sex": ["f", "m", "x"], "age": [30, 50, 40], "other": [1, 2, 3]}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = read_data(str(tmp_path / "rows.parquet"), FORM, "north")
    torch.testing.assert_close(found.train.x, X)
    torch.testing.assert_close(found.train.y, Y)


def test_groups_are_units_and_splits_are_held_out(tmp_path: Path) -> None:
    text = "age,sex,dose,patient,part\n30,f,1,p1,train\n50,m,2,p2,\n40,x,3,p1,validation\n40,f,4,p1,test\n"
    form = FORM | {"group": "patient", "split": "part"}
    found = read_data(written(tmp_path, text), form, "north")
    assert list(found.names) == ["north/p1", "north/p2"]
    assert found.train.sizes.tolist() == [1, 1]
    assert found.splits["validation"].sizes.tolist() == [1, 0]
    assert found.splits["test"].y.tolist() == [4.0]


def test_classes_have_numbers(tmp_path: Path) -> None:
    text = "age,sex,dose\n30,f,no\n50,m,yes\n"
    found = read_data(written(tmp_path, text), FORM | {"classes": ["no", "yes"]}, "north")
    assert found.train.y.tolist() == [0, 1]


def test_rare_levels_have_one_of_their_own(tmp_path: Path) -> None:
    form = FORM | {"levels": {"sex": ["f", "m", OTHER]}}
    assert read_data(written(tmp_path), form, "north").train.x[2].tolist() == [0, 0, 1]


BAD = {
    "a column that is missing": ("age,dose\n30,1\n", FORM, "no column 'sex'"),
    "no rows": ("age,sex,dose\n", FORM, "has no rows"),
    "an empty cell": ("age,sex,dose\n30,f,1\n,m,2\n", FORM, "column 'age', line 3: nothing is there"),
    "a word": ("age,sex,dose\n30,f,secret\n", FORM, "column 'dose', line 2: something that is no number"),
    "infinite": ("age,sex,dose\ninf,f,1\n", FORM, "column 'age', line 2"),
    "a level": (
        "age,sex,dose\n30,f,1\n30,secret,1\n",
        FORM,
        "column 'sex', line 3: a level that is not one of f, m, x",
    ),
    "too many fields": (
        "age,sex,dose\n30,f,1\n30,f,1,secret\n",
        FORM,
        "line 3: more values than the 3",
    ),
    "a split": ("age,sex,dose,p\n30,f,1,secret\n", FORM | {"split": "p"}, "column 'p', line 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_told_without_values(what: str, tmp_path: Path) -> None:
    """The server may see these words, so they hold no value of the table."""
    text, form, words = BAD[what]
    with pytest.raises(SchemaError, match=words) as caught:
        read_data(written(tmp_path, text), form, "north")
    assert "'north'" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone\.csv"):
        read_data(str(tmp_path / "gone.csv"), FORM, "north")
    with pytest.raises(DataError, match=r"\.csv or \.parquet"):
        read_data(written(tmp_path, "", "rows.xlsx"), FORM, "north")
    with pytest.raises(DataError, match="cannot read"):
        read_data(written(tmp_path, "no parquet", "rows.parquet"), FORM, "north")
    with pytest.raises(SchemaError, match="names no columns"):
        read_data(written(tmp_path), {}, "north")


def test_a_folder_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        image.new("RGB", (4, 2), (value, 0, 0)).save(tmp_path / name / "1.png")
    form = {"size": [3, 2, 4], "classes": ["cat", "dog"]}
    found = read_data(str(tmp_path), form, "north")
    assert found.train.x.shape == (2, 3, 2, 4)
    assert found.train.x[:, 0].mean((1, 2)).tolist() == [0.0, 1.0]
    assert found.train.y.tolist() == [0, 1]
    with pytest.raises(SchemaError, match="not 3 x 4 pixels"):
        read_data(str(tmp_path), form | {"size": [3, 3, 4]}, "north")
    with pytest.raises(SchemaError, match="not one of the classes"):
        read_data(str(tmp_path), form | {"classes": ["cat"]}, "north")


def one() -> Any:
    return torch.ones(2, 1), torch.zeros(2)


def several(site: str) -> Any:
    return {"p1": one(), f"of {site}": fp.Client(*one())}


def wrong() -> Any:
    return 3


def test_a_function(tmp_path: Path) -> None:
    here = "tests.federation.test_reading"
    assert list(read_data(f"{here}:one", {}, "north").names) == ["north"]
    assert list(read_data(f"{here}:several", {}, "north").names) == ["north/p1", "north/of north"]
    with pytest.raises(DataError, match="returned int"):
        read_data(f"{here}:wrong", {}, "north")
    with pytest.raises(DataError, match="has no 'gone'"):
        read_data(f"{here}:gone", {}, "north")
