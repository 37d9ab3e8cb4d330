"""``fedpop compare`` on one's own data and models: the examples run, and what is wrong is told in a line."""

import importlib.util
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.cli import main
from fedpop.comparison.config import read_config, to_toml
from fedpop.data.folder_task import FolderTask
from fedpop.data.table_task import TableTask
from fedpop.data.user_data import FunctionTask
from fedpop.errors import DataError, SettingsError
from fedpop.report.records import Report
from fedpop.report.results import Results

pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
pytest.importorskip("PIL", reason="images need pillow")

EXAMPLES = Path(__file__).parents[2] / "examples" / "own-data"
FILES = sorted(path.name for path in EXAMPLES.glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The examples, with their data beside them; modules in it are forgotten afterwards."""
    place = tmp_path_factory.mktemp("own") / "own-data"
    shutil.copytree(EXAMPLES, place, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.spec_from_file_location("make_own_data", place / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.write(place)
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(place))
    yield place
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {read_config(EXAMPLES / name).task.kind for name in FILES}
    assert kinds == {"table", "folder", "function"}


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs, and are looked at elsewhere."""
    monkeypatch.setattr(Report, "write", lambda self, results: None)


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("name", FILES)
def test_the_examples_run(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", str(folder / name), "--out", str(tmp_path / "out"), "--processes", "1"])
    told = capsys.readouterr().out
    assert "Time of all runs together: training" in told
    records = Results.open(tmp_path / "out").records
    assert [r["method"] for r in records] == ["FedAvg", "FedSOUL"]
    score = "test_accuracy" if "test_accuracy" in records[0]["metrics"] else "test_rmse"
    assert all(r["metrics"][score] is not None for r in records)
    assert all(r["cost"]["evaluation_seconds"] > 0 for r in records)
    again = Results.open(tmp_path / "out").records
    main(["compare", str(folder / name), "--out", str(tmp_path / "out"), "--processes", "1"])
    assert again == Results.open(tmp_path / "out").records  # nothing is run a second time


@pytest.mark.usefixtures("no_page")
def test_functions_work_in_other_processes(folder: Path, tmp_path: Path) -> None:
    raw = tomllib.loads((folder / "functions.toml").read_text())
    raw["run"], raw["method"] = {"rounds": 2, "last": 1, "every": 2}, raw["method"][1:]
    (folder / "short.toml").write_text(to_toml(raw))
    for out, many in (("a", "1"), ("b", "2")):
        main(["compare", str(folder / "short.toml"), "--out", str(tmp_path / out), "--processes", many])
    a, b = ({r["method"]: r["metrics"] for r in Results.open(tmp_path / out).records} for out in "ab")
    assert a == b  # first weights that torch draws are the seed's, too


# --- tables ----------------------------------------------------------------------------------


def table(tmp_path: Path, text: str, **settings: Any) -> TableTask:
    (tmp_path / "rows.csv").write_text(text)
    usual: dict[str, Any] = {"x": ("age", "sex"), "categories": ("sex",), "y": "y", "client": "who"}
    return TableTask(**({"file": str(tmp_path / "rows.csv")} | usual | settings))


ROWS = "who,age,sex,y,set\n" + "".join(
    f"p{i % 3},{20 + i},{'fmx'[i % 4 % 3]},{i % 2},{('train', 'train', 'test')[i % 5 % 3]}\n"
    for i in range(30)
)


def test_names_become_columns_and_numbers_are_standardised(tmp_path: Path) -> None:
    task = table(tmp_path, ROWS)
    known, new = task.split(seed=1, new=1)
    x = known.train.x
    assert isinstance(x, torch.Tensor)
    assert x.shape[1] == 3  # age, m, x: f is the baseline
    torch.testing.assert_close(x[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(x[:, 0].std(), torch.tensor(1.0))
    assert set(x[:, 1:].unique().tolist()) == {0.0, 1.0}
    assert float((x[:, 1] * x[:, 2]).sum()) == 0
    # New clients are standardised by the others' numbers.
    raw, apart = task.apart(task.federation(1), 1, 1)
    mean, sd = raw.train.x[:, 0].mean(), raw.train.x[:, 0].std()  # type: ignore[index]
    torch.testing.assert_close(new[0].x[:, 0], (apart[0].x[:, 0] - mean) / sd)
    assert torch.equal(new[0].x[:, 1:], apart[0].x[:, 1:])


def test_levels_are_those_that_are_told(tmp_path: Path) -> None:
    told = table(tmp_path, ROWS, categories=(), levels={"sex": ("x", "m", "f")})
    x = told.federation(0).train.x
    sorted_ones = table(tmp_path, ROWS).federation(0).train.x
    assert isinstance(x, torch.Tensor)
    assert isinstance(sorted_ones, torch.Tensor)
    assert torch.equal(x[:, 1], sorted_ones[:, 1])  # m
    assert torch.equal(x[:, 2], 1 - sorted_ones[:, 1] - sorted_ones[:, 2])  # f
    with pytest.raises(DataError, match=r"rows.csv, line 4: sex is 'x', none of m, f"):
        table(tmp_path, ROWS, categories=(), levels={"sex": ("m", "f")}).federation(0)


def test_a_column_may_say_which_rows_are_held_out(tmp_path: Path) -> None:
    known, _ = table(tmp_path, ROWS, sets="set").split(seed=0)
    told = [line.rsplit(",", 1)[1] for line in ROWS.splitlines()[1:]]
    assert set(known.splits) == {"train", "test"}
    assert len(known.splits["test"].y) == told.count("test")


def test_classes_may_have_names(tmp_path: Path) -> None:
    text = ROWS.replace(",0,", ",no,").replace(",1,", ",yes,")
    for likelihood, outputs in (("categorical", 2), ("bernoulli", 1)):
        task = table(tmp_path, text, likelihood=likelihood)
        known, _ = task.split(seed=0)
        numbers, _ = table(tmp_path, ROWS, likelihood=likelihood).split(seed=0)
        assert known.labels == ("no", "yes")
        assert known.train.y.tolist() == numbers.train.y.tolist()
        model = task.model(0, known)
        assert model.prepared(known.example).outputs == outputs
        population = fp.FedAvg(model).fit(known, rounds=1)
        assert set(population.predict("p0", known.train.x[:3]).most_likely) <= {"no", "yes"}  # type: ignore[index]


def test_a_table_that_changed_is_another_comparison(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "patients.csv", tmp_path)
    shutil.copy(folder / "table.toml", tmp_path)
    task = read_config(tmp_path / "table.toml").task
    before = task.describe()
    assert before["file"] == "patients.csv"
    assert str(tmp_path) not in json.dumps(before)
    with (tmp_path / "patients.csv").open("a") as file:
        file.write("doctor-0,50,70,f,no,5\n")
    assert task.describe() != before


# --- images ----------------------------------------------------------------------------------


def test_whose_an_image_is(folder: Path) -> None:
    """By folders and by a table: the same clients with the same images."""
    by_folder = FolderTask(str(folder / "drawings"), "folders", channels=1).federation(0)
    who = {"file": str(folder / "who.csv"), "path": "image", "client": "person"}
    by_table = FolderTask(str(folder / "shapes"), who, channels=1).federation(0)
    assert by_folder.labels == by_table.labels == ("bar", "cross", "slash")
    assert sorted(by_folder.names) == sorted(by_table.names) == sorted(f"person-{i}" for i in range(10))
    for name in by_folder.names:
        a, b = (f.cohort(torch.tensor([f.index(name)]), torch.device("cpu")) for f in (by_folder, by_table))
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.x, b.x)  # type: ignore[arg-type]


def test_pixels_are_those_of_the_files(folder: Path) -> None:
    from PIL import Image

    task = FolderTask(str(folder / "shapes"), {"kind": "IID", "b": 1}, channels=1)
    for _ in range(2):  # the second time out of the cache
        found = task.federation(0).train
        files, classes, _ = task.files()
        pixels = np.stack([np.asarray(Image.open(f)) for f in files])[:, None]
        assert found.x.dtype == torch.uint8  # type: ignore[union-attr]
        # One client has all of them, in their order.
        assert np.array_equal(found.x.numpy(), pixels)  # type: ignore[union-attr]
        assert [("bar", "cross", "slash")[k] for k in found.y.tolist()] == classes
    large = FolderTask(str(folder / "shapes"), {"kind": "IID", "b": 4}, size=(20, 24)).federation(0)
    assert tuple(large.train.x.shape[1:]) == (3, 20, 24)  # type: ignore[union-attr]


def test_the_network_standardises_what_clients_train_on(folder: Path) -> None:
    task = FolderTask(str(folder / "shapes"), {"kind": "Shards", "b": 5, "classes": 2}, channels=1)
    clients = task.split(0)[0]
    model = task.model(0, clients)
    x = clients.train.x
    assert isinstance(x, torch.Tensor)
    first = next(m for m in model.modules()[0].modules() if isinstance(m, fp.layers.Standardise))
    out = first(x).double()
    assert float(out.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(out.std(correction=0)) == pytest.approx(1.0, abs=1e-5)


# --- what is wrong ---------------------------------------------------------------------------


def spoil_image(folder: Path) -> None:
    (folder / "shapes" / "bar" / "000.png").write_bytes(b"no image")


def another_size(folder: Path) -> None:
    from PIL import Image

    Image.new("L", (8, 8)).save(folder / "shapes" / "cross" / "zzz.png")


def no_class(folder: Path) -> None:
    (folder / "shapes" / "empty").mkdir()


def stray(folder: Path) -> None:
    shutil.copy(folder / "shapes" / "bar" / "000.png", folder / "shapes" / "stray.png")


def unnamed(folder: Path) -> None:
    lines = (folder / "who.csv").read_text().splitlines()
    (folder / "who.csv").write_text("\n".join(lines[:-1]))


def unknown(folder: Path) -> None:
    with (folder / "who.csv").open("a") as file:
        file.write("\nbar/none.png,person-0\n")


def changed(**task: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["task"] |= task

    return change


def model(entry: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["model"] = {"entry": entry}

    return change


def functions(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "own_wrong.py").write_text(text)
        sys.modules.pop("own_wrong", None)

    return change


def nothing(given: Any) -> None:
    """Leave it."""


WRONG: dict[str, tuple[str, Callable[[Path], None], Callable[[dict[str, Any]], None], str]] = {
    "no image": ("folder", spoil_image, nothing, r"cannot read the image .*000\.png"),
    "another size": (
        "folder", another_size, lambda raw: raw["task"].pop("size"), r"zzz\.png has 8 x 8 pixels.*give size",
    ),
    "an empty class": ("folder", no_class, nothing, "empty holds no image"),
    "an image beside the classes": ("folder", stray, nothing, r"stray\.png lies beside the folders"),
    "no folder": ("folder", nothing, changed(folder="gone"), "there is no folder .*gone"),
    "nobody's": ("folder-who", unnamed, nothing, r"who\.csv does not say whose .*\.png is"),
    "no such file": ("folder-who", unknown, nothing, r"who\.csv, line \d+: image is 'bar/none.png'"),
    "no such column": (
        "folder-who", nothing, changed(clients={"file": "who.csv"}), "no column 'path'; it has image, person",
    ),
    "no such partition": (
        "folder", nothing, changed(clients={"kind": "Dirichlett"}), "kind is one of IID, ByClass, Dirichlet",
    ),
    "a partition without its numbers": (
        "folder", nothing, changed(clients={"kind": "IID"}), "IID: missing a required argument: 'b'",
    ),
    "a strange setting of it": (
        "folder", nothing, changed(clients={"kind": "IID", "b": 2, "c": 1}), "unknown setting 'c' of IID",
    ),
    "no clients": ("folder", nothing, changed(clients="people"), 'clients is "folders", a partition'),
    "too small a picture": ("folder", nothing, changed(size=[8, 8]), "too small for two 5x5 convolutions"),
    "two channels": ("folder", nothing, changed(channels=2), "1 for grey or 3 for colours"),
    "too many new clients": ("folder", nothing, changed(new_clients=10), "10 new clients asked for"),
    "no such category": ("table", nothing, changed(categories=["town"]), "'town' has levels but is not"),
    "words among numbers": (
        "table", nothing, changed(categories=["sex"]), r"patients\.csv, line 2: smokes is '.*', not a number",
    ),
    "no table": ("table", nothing, changed(file="gone.csv"), r"cannot read .*gone\.csv"),
    "another kind of file": ("table", nothing, changed(file="table.toml"), r"a \.csv or \.parquet file"),
    "no module": ("functions", nothing, changed(entry="own_gone:clients"), "there is no module own_gone"),
    "no function": ("functions", nothing, changed(entry="own_functions:gone"), "own_functions has no 'gone'"),
    "no colon": ("functions", nothing, changed(entry="own_functions"), "is not a module and a name in it"),
    "no model": ("functions", nothing, lambda raw: raw.pop("model"), r"needs a \[model\]"),
    "another thing for a model": ("functions", nothing, model("math:pi"), "is not a model.*float"),
    "a model for other data": ("functions", nothing, model("own_functions:clients"), "is not a model.*dict"),
    "an error in a function": (
        "functions", functions("def clients():\n    return 1 / 0\n"), changed(entry="own_wrong:clients"),
        r"own_wrong:clients failed: ZeroDivisionError: .*\(own_wrong\.py, line 2\)",
    ),
    "an error in a module": (
        "functions", functions("import no_such_thing\n"), changed(entry="own_wrong:clients"), "no_such_thing",
    ),
    "no Python": (
        "functions", functions("def clients(:\n"), changed(entry="own_wrong:clients"), "SyntaxError",
    ),
    "no clients either": (
        "functions", functions("def clients():\n    return 3\n"), changed(entry="own_wrong:clients"),
        "clients must be a list",
    ),
    "other data each time": (
        "functions",
        functions("import numpy\n\ndef clients():\n    r = numpy.random.default_rng()\n"
                  "    return [(r.normal(size=(9, 3)), r.normal(size=9)) for _ in range(4)]\n"),
        changed(entry="own_wrong:clients"),
        "returns other data each time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_in_a_line(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, change, told = WRONG[case]
    place = tmp_path / "own-data"
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("own_functions.py", "__pycache__"))
    raw = tomllib.loads((place / f"{name}.toml").read_text())
    spoil(place)
    change(raw)
    (place / "wrong.toml").write_text(to_toml(raw))
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(place / "wrong.toml"), "--out", str(tmp_path / "out"), "--processes", "1"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert re.search(told, said), said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    sys.path[:] = [p for p in sys.path if p != str(place.resolve())]


def test_a_module_that_another_one_hides_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def clients():\n    return []\n")
    before = list(sys.path)
    with pytest.raises(SettingsError, match="another module called json is loaded already"):
        FunctionTask("json:clients", str(tmp_path)).federation(0)
    sys.path[:] = before


@pytest.mark.usefixtures("no_page")
def test_what_is_tuned_is_found_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    """tuned.toml lies in another folder; data and modules are where they were."""
    for name in ("functions", "folder-who", "table"):
        main(["tune", str(folder / f"{name}.toml"), "--out", str(tmp_path / name), "--processes", "1"])
        again = read_config(tmp_path / name / "tuned.toml")
        assert again.task.describe() == read_config(folder / f"{name}.toml").task.describe()
