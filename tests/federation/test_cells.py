"""What is wrong with a site's table is told at once, by column, and never with a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpop.errors import DataError, ScaleError, SchemaError, SettingsError
from fedpop.federation.cells import OTHER, bad_cells, require_alike, scale_of
from fedpop.federation.reading import read_columns, read_data, read_table, table_notes
from fedpop.federation.table_format import TableFormat
from fedpop.questions.forms import check_form

FORM: dict[str, Any] = {"x": ["age", "sex"], "y": "dose", "levels": {"sex": ["f", "m"]}}


def written(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    (folder / "rows.csv").write_bytes(text.encode(encoding))
    return folder / "rows.csv"


def test_all_bad_cells_are_counted_by_column(tmp_path: Path) -> None:
    text = "age,sex,dose\n,f,1\nsecret,f,2\n3,x,4\n,q,\n7,m,1e39\n"
    with pytest.raises(SchemaError) as caught:
        read_data(str(written(tmp_path, text)), FORM, "north")
    words = str(caught.value)
    assert words.startswith("site 'north', ")
    for part in (
        "column 'age', line 2 and 1 more: nothing is there",
        "column 'age', line 3: something that is no number is there",
        "column 'sex', line 4 and 1 more: a level that is not one of f, m",
        "column 'dose', line 5: nothing is there",
        "column 'dose', line 6: a number too large for float32",
        "the federation may list more levels",
    ):
        assert part in words
    assert "secret" not in words


def test_values_of_bad_cells_are_for_their_owner(tmp_path: Path) -> None:
    columns = read_columns(
        written(tmp_path, "age,sex,dose\n1,f,1\nold,f,2\nvery old,f,2\n"), ["age"], "north"
    )
    (bad,) = bad_cells(columns, FORM)
    assert bad.words(columns, values=True).endswith("is there ('old', 'very old')")
    assert "old" not in bad.words(columns)


def test_a_range_is_checked_in_x_and_y(tmp_path: Path) -> None:
    form = FORM | {"range": {"age": [0, 120], "dose": [0, 10]}, "unit": {"age": "years"}}
    path = written(tmp_path, "age,sex,dose\n0,f,10\n120,f,0\n121,f,1\n-1,f,1\n5,f,11\n")
    with pytest.raises(
        SchemaError, match="line 4 and 1 more: a number that is not in the range 0 to 120 years"
    ):
        read_table(path, form, "north", TableFormat(unit={"age": "years"}))
    with pytest.raises(SchemaError, match="column 'dose', line 6: a number that is not in the range 0 to 10"):
        read_table(path, form, "north", TableFormat(unit={"age": "years"}))


def test_a_unit_must_be_the_federations(tmp_path: Path) -> None:
    form, path = FORM | {"unit": {"age": "years"}}, written(tmp_path, "age,sex,dose\n30,f,1\n")
    with pytest.raises(SchemaError, match=r'write unit = \{"age" = "years"\} once it is so'):
        read_table(path, form, "north", TableFormat(unit={}))
    with pytest.raises(SchemaError, match="'age' is wanted in years, and in another unit"):
        read_table(path, form, "north", TableFormat(unit={"age": "months"}))
    assert len(read_table(path, form, "north", TableFormat(unit={"age": "years"}))) == 1


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_is_named_and_can_be_set(separator: str, tmp_path: Path) -> None:
    path = written(tmp_path, "age,sex,dose\n30,f,1.5\n".replace(",", separator))
    with pytest.raises(SchemaError, match="set separator = ") as caught:
        read_table(path, FORM, "north")
    assert repr(separator) in str(caught.value)
    columns = read_table(path, FORM, "north", TableFormat(separator))
    assert columns.numbers("dose").tolist() == [1.5]


def test_decimal_commas_are_named_and_can_be_set(tmp_path: Path) -> None:
    path = written(tmp_path, "age;sex;dose\n30;f;1,5\n31;m;-2,25e1\n1.000,5;f;3\n")
    with pytest.raises(SchemaError, match=r'line 2 and 1 more: a number with a decimal comma.*decimal = ","'):
        read_table(path, FORM, "north", TableFormat(";"))
    with pytest.raises(SchemaError, match="column 'age', line 4: something that is no number"):
        read_table(path, FORM, "north", TableFormat(";", ","))  # a thousand is not guessed at
    path = written(tmp_path, "age;sex;dose\n30;f;1,5\n31;m;-2,25e1\n")
    columns = read_table(path, FORM, "north", TableFormat(";", ","))
    assert columns.numbers("dose").tolist() == [1.5, -22.5]


def test_another_encoding_is_named_and_can_be_set(tmp_path: Path) -> None:
    text = "age,sex,dose\n30,männlich,1\n"
    for encoding in ("cp1252", "utf-16"):
        path = written(tmp_path, text, encoding)
        with pytest.raises(DataError, match=r"is not UTF-8 text; .* set encoding in site\.toml"):
            read_table(path, FORM, "north")
        found = read_columns(path, ["sex"], "north", TableFormat(encoding=encoding))
        assert found["sex"] == ["männlich"]
    path = written(tmp_path, text, "utf-8-sig")
    assert read_columns(path, ["age"], "north", TableFormat(encoding="utf8"))["age"] == ["30"]


@pytest.mark.parametrize(
    "wrong", [{"separator": ";;"}, {"separator": ","} | {"decimal": ","}, {"encoding": "x"}]
)
def test_how_a_table_is_written_is_checked(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"separator|encoding"):
        TableFormat(**wrong)
    with pytest.raises(SettingsError, match="decimal"):
        TableFormat(decimal="'")


def test_rows_that_miss_something_can_be_dropped(tmp_path: Path) -> None:
    form = FORM | {"missing": "drop", "group": "who", "split": "part"}
    head = "age,sex,dose,who,part,other\n"
    text = "30,f,1,a,,\nNA,f,2,a,train,\n31,,3,a,train,\n32,m,nan,b,train,\n33,m,5,,train,\n34,m,6,b,test,\n"
    found = read_data(str(written(tmp_path, head + text)), form, "north")
    assert found.names == ["north/a", "north/b"]
    assert found.train.y.tolist() == [1.0]
    assert found.splits["test"].y.tolist() == [6.0]
    columns = read_table(tmp_path / "rows.csv", form, "north")
    assert table_notes(columns, form) == ["4 row(s) are left out because something is missing in them"]
    with pytest.raises(SchemaError, match="has no row in which nothing is missing of age, sex, dose, who"):
        read_data(str(written(tmp_path, head + "30,NA,1,a,,\n")), form, "north")
    with pytest.raises(SchemaError, match="column 'age', line 2: something that is no number"):
        read_data(str(written(tmp_path, head + "NA,f,1,a,,\n")), form | {"missing": "error"}, "north")


def test_a_site_is_told_which_of_its_levels_are_too_rare(tmp_path: Path) -> None:
    form = FORM | {"levels": {"sex": ["f", "m", OTHER]}}
    columns = read_table(written(tmp_path, "age,sex,dose\n1,f,1\n2,x,1\n3,x,1\n4,div,1\n"), form, "north")
    (note,) = table_notes(columns, form)
    assert note.endswith("these count as (other): 'div' (1), 'x' (2)")


def columns_with(tmp_path: Path, values: np.ndarray) -> Any:
    text = "age,sex,dose\n" + "".join(f"{v!r},f,1\n" for v in values.tolist())
    return read_columns(written(tmp_path, text), ["age", "sex", "dose"], "north")


def test_a_column_out_of_proportion_stops_and_one_within_does_not(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(50, 10, 40)
    size, spread = (float(np.log2(v)) for v in scale_of(values))
    form = {"medians": {"age": [size, spread]}, "scale_tolerance": 64.0}
    for factor in (1.0, 1 / 63, 63.0, -1.0):
        require_alike(columns_with(tmp_path, values * factor), form)
    for factor in (65.0, 1 / 65):
        with pytest.raises(ScaleError, match=r"column 'age': its median size is .*'age': its spread is"):
            require_alike(columns_with(tmp_path, values * factor), form)
    one_cell = values.copy()
    one_cell[3] = 1e7  # the median does not see it, a variance would
    with pytest.raises(ScaleError, match="site 'north', column 'age': its spread is") as caught:
        require_alike(columns_with(tmp_path, one_cell), form)
    assert "median size" not in str(caught.value)


def test_nothing_is_compared_where_there_is_no_scale(tmp_path: Path) -> None:
    zeros = columns_with(tmp_path, np.zeros(4))
    require_alike(zeros, {"medians": {"age": [10.0, 3.0]}})
    require_alike(columns_with(tmp_path, np.full(4, 1e9)), {"medians": {"age": [None, None]}})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"range": {"sex": [0, 1]}, "categories": ["sex"]}, "'sex' is not a column of numbers"),
        ({"range": {"age": [3, 1]}}, r"not 3 to 1"),
        ({"range": {"age": [3]}}, "range"),
        ({"unit": {"height": "m"}}, "unit: 'height' is not a column"),
        ({"unit": {"age": 3}}, "unit"),
        ({"missing": "guess"}, "missing"),
        ({"scale_tolerance": 1.0}, "scale_tolerance"),
    ],
)
def test_settings_of_columns_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_form({"x": ["age", "sex"], "y": "dose"} | wrong)
