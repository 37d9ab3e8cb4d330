"""Damaged files that users write themselves: data, or one error that names the place."""

import re
from pathlib import Path

import pytest

import fedpop as fp
from fedpop.data.table_task import TableTask
from fedpop.errors import DataError, FedpopError
from tests.bad_input.attempts import attempt, command
from tests.bad_input.corrupter import FLIPS, Damage

CSV = "age,dose,site\n" + "".join(f"{i},{2 * i},{'ab'[i % 2]}\n" for i in range(12))
TRACE = "round,client,available\n0,anna,1\n0,ben,0\n1,ben,1\n"
TOML = '[task]\nkind = "synthetic"\nb = 4\n\n[run]\nrounds = 2\n\n[[method]]\nname = "FedAvg"\n'
TEXT: dict[str, Damage] = {
    "latin-1": lambda d: d.replace(b"a", "ä".encode("latin-1")),
    "utf-16": lambda d: d.decode().encode("utf-16"),
    "utf-32": lambda d: d.decode().encode("utf-32"),
    "a huge field": lambda d: d.replace(b"\n", b"\n" + b'"' + b"9" * 200_000, 2),
    "a quote that never closes": lambda d: d.replace(b"\n", b'\n"', 1) + b"x" * 150_000,
    "binary": lambda d: bytes(range(256)) * 8,
    "empty": lambda d: b"",
    "zeros": lambda d: bytes(100),
}


@pytest.mark.parametrize("kind", TEXT)
def test_tables_that_are_not_text(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(TEXT[kind](CSV.encode()))
    with pytest.raises(DataError) as caught:
        TableTask(str(path), ("age",), "dose", "site").split(0)
    assert "data.csv" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", TEXT)
def test_traces_that_are_not_text(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(TEXT[kind](TRACE.encode()))
    with pytest.raises(DataError) as caught:
        fp.participation.Availability.read(path, ["anna", "ben"])
    assert "trace.csv" in str(caught.value)


@pytest.mark.parametrize("number", ["1.5", "1e3", "", "٣", "--1", "9" * 30, "nan", "inf"])
def test_rounds_of_a_trace_are_whole_numbers(tmp_path: Path, number: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"round,client\n0,anna\n{number},ben\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"trace\.csv, line 3: round .* is not a whole number"):
        fp.participation.Availability.read(path, ["anna", "ben"])


@pytest.mark.parametrize("kind", FLIPS)
def test_a_flipped_bit_in_a_users_own_file_is_data_or_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(FLIPS[kind](TRACE.encode()))
    table = tmp_path / "data.csv"
    table.write_bytes(FLIPS[kind](CSV.encode()))
    for read in (
        lambda: fp.participation.Availability.read(path, ["anna", "ben"]),
        lambda: TableTask(str(table), ("age",), "dose", "site").split(0),
    ):
        attempt(read, FedpopError)


def settings(tmp_path: Path, text: str | bytes) -> list[str]:
    path = tmp_path / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ["compare", str(path), "--out", str(tmp_path / "out"), "--processes", "1"]


@pytest.mark.parametrize("kind", [k for k in TEXT if k != "a huge field"])
def test_settings_that_are_not_text(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = command(settings(tmp_path, TEXT[kind](TOML.encode())), capsys)
    assert said is not None
    assert "settings.toml" in said
    assert [p.name for p in tmp_path.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize(
    "line",
    [
        "passes = inf", "passes = nan", "passes = -inf", "passes = -3.0", "passes = 0", "passes = true",
        'passes = "9"', "rounds = inf", "rounds = 1.5", "rounds = 0", "rounds = -1", "rounds = []",
        "rounds = 2\npasses = 3", "seeds = 1.5", "seeds = [0, 0]", "seeds = 0", "seeds = {a = 1}",
        "participation = 0", "participation = 1.5", 'participation = "all"', "participation = nan",
        "every = 0", "every = 0.5", "last = -1", 'last = "x"', "precision = 3", 'precision = "float8"',
        "rounds = 2026-01-01", "epochs = 3", "a = " + "[" * 5000 + "]" * 5000,
    ],
)  # fmt: skip
def test_settings_of_the_wrong_type(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = command(settings(tmp_path, TOML.replace("rounds = 2", line)), capsys)
    assert said is not None
    assert "settings.toml" in said
    assert [p.name for p in tmp_path.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("x = [1]", "x"), ('x = "age"', "x"), ("y = 3", "y"), ("client = []", "client"),
        ("file = 3", "file"), ("test = inf", "test"), ('test = "a"', "test"), ("features = 1.5", "features"),
        ('x = ["none"]', "none"), ('client = "none"', "none"), ('likelihood = "odd"', "odd"),
        ('x = ["age", "age"]', "age"), ('x = ["dose"]', "dose"), ('client = "dose"', "dose"),
        ("features = 2000000000", "features"), ('likelihood = "bernoulli"', "bernoulli"),
        ('levels = {age = ["1", "1"]}', "named twice"), ("new_clients = -1", "-1"), ("new_clients = 9", "9"),
        (f'file = "{"d" * 300}.csv"', "ddd"), ('file = "d\\u0000.csv"', "null byte"),
    ],
)  # fmt: skip
def test_a_task_of_the_wrong_type(
    tmp_path: Path, table: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.csv").write_text(CSV)
    task = {"kind": '"csv"', "file": '"data.csv"', "x": '["age"]', "y": '"dose"', "client": '"site"'}
    key, value = table.split(" = ", 1)
    lines = "\n".join(f"{k} = {v}" for k, v in (task | {key: value}).items())
    text = f'[task]\n{lines}\n\n[run]\nrounds = 1\n\n[[method]]\nname = "FedAvg"\n'
    said = command(settings(tmp_path, text), capsys)
    assert said is not None
    assert named in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.csv", "settings.toml"]


ROWS: dict[str, tuple[str, str]] = {
    "a column twice": ("age,age,dose,site\n1,2,3,a\n", "several columns 'age'"),
    "an underscore": ("age,dose,site\n1_000,2,a\n", "line 2: age is '1_000', not a number"),
    "other digits": ("age,dose,site\n１２,2,a\n", "line 2: age is"),
    "beyond float32": ("age,dose,site\n1,2,a\n-1e39,2,a\n", "line 3: age is '-1e39', too large for float32"),
}


@pytest.mark.parametrize("case", ROWS)
def test_numbers_and_names_of_a_table(tmp_path: Path, case: str) -> None:
    text, message = ROWS[case]
    (tmp_path / "data.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        TableTask(str(tmp_path / "data.csv"), ("age",), "dose", "site").split(0)


@pytest.mark.parametrize(
    "line", ["new_clients = -1", "validation = -3", "new_clients = 10000000000", "b = -1"]
)
def test_numbers_of_clients_and_examples(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[task]\nkind = "synthetic"\n{line}\n[run]\nrounds = 1\n[[method]]\nname = "FedAvg"\n'
    said = command(settings(tmp_path, text), capsys)
    assert said is not None
    assert f"{line.split()[0]} must be a whole number" in said
    assert [p.name for p in tmp_path.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize("name", ["[1, 2]", "{a = 1}", "5", "true"])
def test_names_of_methods_that_are_none(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[task]\nkind = "synthetic"\nb = 4\n[run]\nrounds = 1\n[[method]]\nname = {name}\n'
    said = command(settings(tmp_path, text), capsys)
    assert said is not None
    assert "unknown method" in said
    assert [p.name for p in tmp_path.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize("method", ['["FedAvg"]', "[3]", "[[]]", "[{}]", '"FedAvg"', "{}"])
def test_methods_that_are_no_tables(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'method = {method}\n[task]\nkind = "synthetic"\nb = 4\n[run]\nrounds = 1\n'
    said = command(settings(tmp_path, text), capsys)
    assert said is not None
    assert "[[method]]" in said
    assert [p.name for p in tmp_path.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "import sys; sys.exit()", "raise KeyError(1)"])
def test_functions_that_end_the_program(
    tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"ends_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def clients():\n    {body}\n")
    task = f'kind = "function"\nentry = "{name}:clients"'
    text = (
        f'[task]\n{task}\n[model]\nentry = "{name}:clients"\n[run]\nrounds = 1\n[[method]]\nname = "FedAvg"\n'
    )
    said = command(settings(tmp_path, text), capsys)
    assert said is not None
    assert f"{name}:clients failed" in said


FORMULA = "y,x,g\n" + "".join(f"{i * 7 % 11},{i % 5},{'abc'[i % 3]}\n" for i in range(12))
MIXED: dict[str, tuple[str, list[str], str]] = {
    "a value too many in every row": (
        FORMULA.replace("a\n", "a,1\n").replace("b\n", "b,1\n").replace("c\n", "c,1\n"),
        [],
        "more values",
    ),
    "a column twice": (FORMULA.replace("y,x,g", "x,x,g"), [], "several columns 'x'|no column 'y'"),
    "a square too large": (FORMULA.replace(",3,", ",1e300,"), [], "'x' is 1e\\+300 in row 3"),
    "a seed below zero": (FORMULA, ["--seed=-1"], "seed must be"),
    "estimates in a folder": (FORMULA, ["--json", "."], "cannot write"),
    "estimates nowhere": (FORMULA, ["--json", "no/where.json"], "cannot write no/where.json"),
}


@pytest.mark.parametrize("case", MIXED)
def test_tables_of_a_formula(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, more, message = MIXED[case]
    (tmp_path / "data.csv").write_text(text)
    said = command(["fit", str(tmp_path / "data.csv"), "y ~ x + (1 | g)", *more], capsys)
    assert said is not None
    assert re.search(message, said)
    assert [p.name for p in tmp_path.iterdir()] == ["data.csv"]
