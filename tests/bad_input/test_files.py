"""Damaged files of every kind that is read: one error that names the file, and nothing written."""

import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.comparison.config import read_config
from fedpop.errors import CheckpointError, DataError, FedpopError, FedpopWarning, SettingsError
from fedpop.files import read_tensors, write_tensors
from fedpop.methods.base import Algorithm
from fedpop.population.saving import KEYS
from fedpop.report.results import FIELDS, Results, record
from tests.bad_input.attempts import SEALED, attempt, command, same, small
from tests.bad_input.corrupter import WRONG, content, resealed
from tests.helpers import linear_model, ragged

# --- a saved population -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small().save(tmp_path_factory.mktemp("saved") / "population")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "population"))


def refused(folder: Path, named: str) -> CheckpointError:
    before = content(folder)
    with pytest.raises(CheckpointError) as caught:
        fp.load(folder)
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert content(folder) == before
    return caught.value


FILES = ("population", "theta", "clients-0000", "private", "history")


@pytest.mark.parametrize(("stem", "kind"), list(itertools.product(FILES, SEALED)))
def test_a_damaged_file_of_a_saved_population(folder: Path, stem: str, kind: str) -> None:
    (path,) = folder.glob(f"{stem}.*")
    damaged = SEALED[kind](path.read_bytes())
    if stem == "population" and same(damaged, path.read_bytes()):
        pytest.skip("space around it changes nothing")
    path.write_bytes(damaged)
    error = refused(folder, path.name)
    assert "again" in str(error) or "population.save" in str(error)


@pytest.mark.parametrize("stem", FILES)
def test_a_missing_file_of_a_saved_population(folder: Path, stem: str) -> None:
    (path,) = folder.glob(f"{stem}.*")
    path.unlink()
    refused(folder, path.name)
    path.mkdir()
    refused(folder, path.name)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(FILES, 2)))
def test_swapped_files_of_a_saved_population(folder: Path, one: str, other: str) -> None:
    (a,), (b,) = (list(folder.glob(f"{stem}.*")) for stem in (one, other))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    before = content(folder)
    with pytest.raises(CheckpointError) as caught:
        fp.load(folder)
    assert a.name in str(caught.value) or b.name in str(caught.value)
    assert content(folder) == before


@pytest.mark.parametrize("stem", ["theta", "clients-0000", "private"])
def test_files_of_another_population_are_not_this_ones(folder: Path, tmp_path: Path, stem: str) -> None:
    other = small(1, seed=1).save(tmp_path / "other")
    (mine,), (theirs,) = (list(f.glob(f"{stem}.*")) for f in (folder, other))
    mine.write_bytes(theirs.read_bytes())
    refused(folder, mine.name)


@pytest.mark.parametrize("entry", sorted(KEYS))
def test_an_entry_less_or_more(folder: Path, entry: str) -> None:
    resealed(folder / "population.json", lambda plain: plain.pop(entry))
    refused(folder, "population.json")


def test_an_entry_that_nobody_knows(folder: Path) -> None:
    resealed(folder / "population.json", lambda plain: plain.update(extra=1))
    assert "'extra'" in str(refused(folder, "population.json"))


@pytest.mark.parametrize(("entry", "kind"), list(itertools.product(sorted(KEYS), WRONG)))
def test_entries_of_the_wrong_type_that_were_sealed_again(folder: Path, entry: str, kind: str) -> None:
    """Whoever can seal can lie: what does not hold together is one error, or else a population that works."""
    resealed(folder / "population.json", lambda plain: plain.update({entry: WRONG[kind]}))
    before = content(folder)
    population, told = attempt(lambda: fp.load(folder), CheckpointError)
    if population is None:
        assert str(folder) in told
    else:
        assert str(population)
        assert population.new_client().predict(torch.zeros(1, 3)).mean.shape == (1,)
    assert content(folder) == before


def nested(times: int) -> dict[str, Any]:
    inner: list[dict[str, Any]] = [] if times == 0 else [nested(times - 1)]
    return {"class": "Sequential", "children": inner}


SPECS: dict[str, Any] = {
    "a layer that is none": {"class": "os.system", "args": {}},
    "a function": {"class": "init", "args": {}},
    "absurd": {"class": "Linear", "args": {"in_features": 10**12, "out_features": 10**6}},
    "larger than any model": {"class": "Linear", "args": {"in_features": 10**6, "out_features": 10**6}},
    "too large to try": {"class": "Linear", "args": {"in_features": 10**5, "out_features": 10**5}},
    "layers without end": {"class": "LSTM", "args": {"input_size": 3, "hidden_size": 2, "num_layers": 10**8}},
    "very many": {"class": "Sequential", "children": [{"class": "ReLU", "args": {}}] * 2000},
    "more than there are values for": {
        "class": "Embedding",
        "args": {"num_embeddings": 2**20, "embedding_dim": 40},
    },
    "nested without end": nested(200),
    "negative": {"class": "Linear", "args": {"in_features": -3, "out_features": 2}},
    "no arguments": {"class": "Linear"},
    "other arguments": {"class": "Linear", "args": {"depth": 3}},
    "another width": {"class": "Linear", "args": {"in_features": 5, "out_features": 2}},
    "nothing": None,
}


@pytest.mark.parametrize("kind", SPECS)
def test_layers_that_cannot_be(folder: Path, kind: str) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["model"]["modules"][0] = SPECS[kind]

    resealed(folder / "population.json", change)
    refused(folder, str(folder))


@pytest.mark.parametrize("name", ["../private.json", "/etc/hostname", "a/b"])
def test_files_elsewhere_are_not_read(folder: Path, name: str) -> None:
    resealed(folder / "population.json", lambda p: p.update(theta=name, files=p["files"] | {name: "0"}))
    refused(folder, "is not the name of a file beside it")


@pytest.mark.parametrize("path", [None, 3, b"x", ["a"]])
def test_a_path_is_a_path(path: Any) -> None:
    with pytest.raises(SettingsError, match="path must be a text or a Path"):
        fp.load(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("stem", ["population.json", "theta"])
def test_what_is_no_file_is_not_waited_for(folder: Path, stem: str, kind: str) -> None:
    path = next(p for p in folder.iterdir() if p.name.startswith(stem))
    path.unlink()
    no_file(path, kind)
    with pytest.raises(CheckpointError, match=path.name):
        fp.load(folder)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_nor_is_a_table_or_a_settings_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.csv"
    no_file(path, kind)
    with pytest.raises(DataError, match=r"cannot read .*table\.csv"):
        fp.mixed_model("y ~ x + (1 | g)", path)
    with pytest.raises(SettingsError, match=r"cannot read .*table\.csv"):
        read_config(path)


def no_file(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def test_links_that_somebody_planted_are_replaced_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    population = small()
    names = [p.name for p in folder.iterdir()]
    for name in names:
        (folder / name).unlink()
        (folder / name).symlink_to(precious)
    for name in names:
        (folder / f".{name}.{os.getpid()}.tmp").symlink_to(precious)
    population.save(folder)
    assert precious.read_text() == "precious"
    assert not any(p.is_symlink() for p in folder.iterdir())
    assert fp.load(folder).names == population.names


# --- a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ran") / "run"
    small(1, out=out)
    return out


@pytest.fixture
def run(ran: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ran, tmp_path / "run"))


def not_resumed(run: Path, named: str) -> None:
    before = content(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)
        with pytest.raises(CheckpointError) as caught:
            small(2, out=run, resume=True)
    assert named in str(caught.value)
    assert content(run) == before


PARTS = ("checkpoints/round-00000001.json", "checkpoints/round-00000001.safetensors", "metrics.jsonl")


@pytest.mark.parametrize(("part", "kind"), list(itertools.product(PARTS, SEALED)))
def test_a_damaged_file_of_a_run(run: Path, part: str, kind: str) -> None:
    path = run / part
    damaged = SEALED[kind](path.read_bytes())
    if part == "metrics.jsonl" and damaged.startswith(path.read_bytes()):
        pytest.skip("lines after those that the checkpoint counts are run again")
    if part.endswith(".json") and same(damaged, path.read_bytes()):
        pytest.skip("space around it changes nothing")
    path.write_bytes(damaged)
    not_resumed(run, path.name)


META = ("round", "config", "metrics_bytes", "metrics_digest", "ends", "threads", "totals", "digest", "format")


@pytest.mark.parametrize(("entry", "kind"), list(itertools.product(META, WRONG)))
def test_a_checkpoint_of_the_wrong_types_that_was_sealed_again(run: Path, entry: str, kind: str) -> None:
    resealed(run / PARTS[0], lambda plain: plain.update({entry: WRONG[kind]}))
    before = content(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)
        population, _ = attempt(lambda: small(2, out=run, resume=True), CheckpointError)
    if population is None:
        assert content(run) == before
    else:
        assert (entry, kind) in {("totals", "object"), ("ends", "numbers")}  # as if it had been so


# --- reports ------------------------------------------------------------------------------------


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "reshaped": lambda t: t.reshape(-1)[:1] if t.numel() > 1 else torch.zeros(2, 3, dtype=t.dtype),
    "longer": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1], torch.zeros(2, dtype=t.dtype)]),
    "with an axis more": lambda t: t.unsqueeze(0),
    "whole numbers": lambda t: t.double() if t.dtype == torch.int64 else t.to(torch.int64),
    "truth values": lambda t: t.bool(),
    "of another precision": lambda t: t.float() if t.dtype == torch.float64 else t.double(),
}


def methods() -> dict[str, Algorithm]:
    model = linear_model()
    exact, sampled = (fp.FedSOUL(model, engine=e) for e in ("exact", "sampled"))
    return {"exact": exact, "sampled": sampled, "Ditto": fp.Ditto(model), "FSGLD": fp.FSGLD(model)}


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("name", ["exact", "sampled", "Ditto", "FSGLD"])
def test_tensors_of_a_checkpoint_that_do_not_belong_to_the_run(
    tmp_path: Path, name: str, rounds: int
) -> None:
    """Dropped, reshaped or of another type, and sealed again: one error of ours, which names the checkpoint,
    or a run that ends."""
    method = methods()[name]
    clients = dict(zip(("anna", "ben", "cara"), ragged((3, 4, 2)), strict=True))
    begun, run = tmp_path / "begun", tmp_path / "run"
    method.fit(clients, rounds=2, out=begun)
    kept = read_tensors(begun / "checkpoints" / "round-00000002.safetensors")
    refused = 0
    for entry in sorted(kept):
        for change in (None, *CHANGED.values()):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(begun, run)
            tensors = {n: t for n, t in kept.items() if n != entry}
            if change is not None:
                tensors[entry] = change(kept[entry]).contiguous()
            file = run / "checkpoints" / "round-00000002.safetensors"
            digest = write_tensors(file, tensors)
            resealed(file.with_suffix(".json"), partial(dict.update, digest=digest))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FedpopWarning)
                population, told = attempt(
                    lambda: method.fit(clients, rounds=rounds, out=run, resume=True), FedpopError
                )
            if population is None:
                refused += "round-00000002" in told
            else:
                attempt(partial(population.predict, "anna", torch.zeros(1, 3)), FedpopError)
    assert refused > len(kept)


@pytest.mark.parametrize(
    ("part", "kind"), list(itertools.product(("metrics.jsonl", "config.json", "result.json"), SEALED))
)
def test_a_report_of_a_damaged_run(
    run: Path, part: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """These files have no digest: a flipped bit may go unnoticed, but is never a traceback."""
    path = run / part
    path.write_bytes(SEALED[kind](path.read_bytes()))
    before = content(run)
    said = command(["report", str(run)], capsys)
    if said is not None:
        assert str(run) in said
        assert content(run) == before


@pytest.fixture
def results(tmp_path: Path) -> Path:
    items = [record("drift", {"b": 2}, "FedSOUL", s, {"angle": 0.1}, {"rounds": 3}, {}) for s in (0, 1)]
    Results(tmp_path / "results").add(items)
    return tmp_path / "results"


@pytest.mark.parametrize("kind", SEALED)
def test_a_report_of_damaged_results(results: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "results.json"
    path.write_bytes(SEALED[kind](path.read_bytes()))
    before = content(results)
    said = command(["report", str(results)], capsys)
    if said is not None:
        assert "results.json" in said
        assert content(results) == before


@pytest.mark.parametrize(
    ("field", "kind"),
    list(itertools.product(FIELDS, WRONG)),
)
def test_records_of_the_wrong_types(results: Path, field: str, kind: str) -> None:
    path = results / "results.json"
    records = json.loads(path.read_text())
    records[1][field] = WRONG[kind]
    path.write_text(json.dumps(records))
    wanted = {"seed": int, "experiment": str, "method": str, "version": str}.get(field, dict)
    fine = isinstance(WRONG[kind], wanted) and not isinstance(WRONG[kind], bool) and (
        field in ("setting", "config", "seed", "experiment", "method", "version")
        or (field == "metrics" and kind == "object")
    )  # fmt: skip
    if fine:
        assert len(Results.open(results).records) == 2
        return
    with pytest.raises(CheckpointError, match=r"results\.json, record 1: "):
        Results.open(results)
