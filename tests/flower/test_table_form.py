"""A table that has another form than it had at enrolment is told to its owner, column by column."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fedpop.federation.table_format import USUAL_TABLE, TableFormat
from fedpop.flower.requests import Request, versions
from fedpop.flower.site import open_site
from fedpop.flower.table_form import FORM, form_changes, keep_form
from tests.flower.commands import Made, fedpop, refused, rows


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def other_form() -> str:
    """The rows with age in words, a column that is new, and one under another name."""
    head, *lines = rows(0).splitlines()
    assert head == "age,sex,dose"
    cells = [line.split(",") for line in lines]
    return "age,gender,dose,ward\n" + "".join(f"{a} years,{s},{d},1\n" for a, s, d in cells)


def told(text: str) -> list[str]:
    return [
        word
        for word in (
            "column 'sex' was there when this site was enrolled, and is not now",
            "column 'gender' was not there when this site was enrolled",
            "column 'ward' was not there when this site was enrolled",
            "column 'age' held numbers when this site was enrolled, and holds names now",
            "column 'dose'",
        )
        if word in text
    ]


def test_enrolment_keeps_columns_and_what_they_hold(made: Made) -> None:
    found = json.loads((made.root / "north" / FORM).read_text())
    assert found["columns"] == {"age": "numbers", "sex": "names", "dose": "numbers"}
    assert form_changes(made.root / "north", str(made.root / "north.csv"), USUAL_TABLE) == []


def test_the_check_tells_each_column(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.root / "north.csv").write_text(other_form())
    capsys.readouterr()
    fedpop("site", "check", made.root / "north")
    output = capsys.readouterr().out
    assert len(told(output)) == 4, output
    assert "30 years" not in output


def test_a_node_tells_it_once_where_the_file_has_changed(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first greeting, and again when the file is another one; not at every request."""
    site, file = open_site(made.root / "north", lasting=True), made.root / "north.csv"
    caplog.set_level(logging.WARNING, logger="fedpop.site")

    def greeted() -> list[str]:
        caplog.clear()
        study = {"kind": "Survey", "form": {"x": ["age"], "y": "dose"}}
        about = {"experiment": "one", "study": study, "study_digest": "", "drawn": False}
        site.answer(Request("hello", versions() | about))
        return told(caplog.text)

    assert greeted() == []
    file.write_text(other_form())
    assert len(greeted()) == 4
    assert greeted() == []
    file.write_text(rows(1))
    assert greeted() == []


def test_other_data_by_the_operators_own_word_have_a_form_of_their_own(tmp_path: Path) -> None:
    """Another file, or the same that is said to be written in another way."""
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("a;b\n1,5;2\n")
    two.write_text("a,c\n1,x\n")
    keep_form(tmp_path, str(one), USUAL_TABLE)
    assert not (tmp_path / FORM).exists()  # by commas it is no table
    german = TableFormat(";", ",")
    keep_form(tmp_path, str(one), german)
    assert json.loads((tmp_path / FORM).read_text())["columns"] == {"a": "numbers", "b": "numbers"}
    assert form_changes(tmp_path, str(two), USUAL_TABLE) == []
    keep_form(tmp_path, str(two), USUAL_TABLE)
    assert json.loads((tmp_path / FORM).read_text())["columns"] == {"a": "numbers", "c": "names"}
    two.write_text("a,c\nx,1\n")
    keep_form(tmp_path, str(two), USUAL_TABLE)  # what was kept stays
    assert len(form_changes(tmp_path, str(two), USUAL_TABLE)) == 2


def test_an_empty_column_may_be_filled(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,\n2,NA\n")
    keep_form(tmp_path, str(file), USUAL_TABLE)
    file.write_text("a,b\n1,x\n2,\n")
    assert form_changes(tmp_path, str(file), USUAL_TABLE) == []


def test_a_parquet_file_has_one_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"a": [1, 2], "b": ["x", "y"]}), file)
    keep_form(tmp_path, str(file), USUAL_TABLE)
    parquet.write_table(arrow.table({"a": ["1", "2"], "b": ["x", "y"]}), file)
    (words,) = form_changes(tmp_path, str(file), USUAL_TABLE)
    assert words.startswith("column 'a' held numbers when this site was enrolled, and holds names now")


@pytest.mark.parametrize("text", ["", "[]", '{"columns": 3}'])
def test_a_damaged_form_is_made_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / FORM).write_text(text)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    where = str(tmp_path / "rows.csv")
    assert form_changes(tmp_path, where, USUAL_TABLE) == []
    keep_form(tmp_path, where, USUAL_TABLE)
    assert json.loads((tmp_path / FORM).read_text())["columns"] == {"a": "numbers", "b": "numbers"}


def test_a_table_with_semicolons_and_decimal_commas_is_enrolled(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """As spreadsheets write it where commas are decimal: enrolment says what site.toml has to say."""
    table, folder = made.root / "east.csv", made.root / "east"
    table.write_text(rows(0).replace(",", ";").replace(".", ","))
    assert ";" in table.read_text().splitlines()[1]
    assert "," in table.read_text()
    fedpop(
        "site", "enrol", folder, "--name", "east", "--server", made.address,
        "--ca", made.server / "tls" / "ca.crt", "--data", table,
    )  # fmt: skip
    assert """say separator = ";", and decimal = ",\"""" in capsys.readouterr().out
    check = ("site", "check", folder, "--federation", made.server / "app")
    assert 'set separator = ";"' in refused(capsys, *check)
    with (folder / "site.toml").open("a") as file:
        file.write('separator = ";"\n')
    assert 'set decimal = ","' in refused(capsys, *check)
    with (folder / "site.toml").open("a") as file:
        file.write('decimal = ","\n')
    fedpop(*check)
    assert "the data fit" in capsys.readouterr().out


def test_columns_of_another_name_are_shown_to_the_site(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    table = made.root / "north.csv"
    table.write_text(table.read_text().replace("age,", "AGE ,", 1))
    with pytest.raises(SystemExit):
        fedpop("site", "check", made.root / "north", "--federation", made.server / "app")
    words = capsys.readouterr().out
    assert "its columns are 'AGE ', 'sex', 'dose'; wanted are 'age', 'sex', 'dose'" in words
