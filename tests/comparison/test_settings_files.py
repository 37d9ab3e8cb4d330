"""Settings files: what they say is what is run."""

import json
from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.cli import main
from fedpop.comparison.config import config_from, read_config, to_toml
from fedpop.comparison.run import fitted
from fedpop.data.image_task import ImageTask
from fedpop.errors import DataError
from fedpop.methods import METHODS
from fedpop.methods.tables import method_from
from fedpop.report.results import Results
from tests.comparison.small_settings import SMALL, changed
from tests.data.files import mnist, real
from tests.helpers import generator, linear_model


def test_a_file_is_compared_with_one_command(tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(to_toml(SMALL))
    main(["compare", str(path), "--out", str(tmp_path / "out"), "--processes", "1"])
    told = capsys.readouterr().out
    assert "ours" in told
    assert "FedAvg *" in told
    records = Results.open(tmp_path / "out").records
    assert [r["config"]["class"] for r in records] == ["FedAvg", "FedSOUL"]
    assert records[0]["config"]["local"]["batch"] == 3
    step = records[1]["config"]["phi_step"]
    assert (step["kind"], step["rate"]) == ("Adam", 0.05)
    assert (tmp_path / "out" / "report.html").exists()


def test_all_images_of_a_set_are_a_task_of_their_own(tmp_path):
    task = {
        "kind": "full-images",
        "images": "mnist",
        "classes": 5,
        "b": 4,
        "validation": 0.2,
        "new_clients": 1,
    }
    config = config_from(changed(task=task), tmp_path / "full.toml", data=mnist(tmp_path))
    subject = config.task.make(0)
    assert {s: p.sizes.tolist() for s, p in subject.clients.splits.items()} == {
        "train": [8] * 3,
        "validation": [2] * 3,
        "test": [5] * 3,
    }
    assert len(subject.newcomers) == 1
    assert "data" not in config.task.describe()
    assert config_from(changed(task=task), tmp_path / "full.toml").task.more["data"] is None  # looked for


def test_a_comparison_over_processes_gives_the_same_numbers(tmp_path):
    config = tmp_path / "two.toml"
    config.write_text(to_toml(SMALL))
    for folder, processes in (("a", "1"), ("b", "2")):
        main(["compare", str(config), "--out", str(tmp_path / folder), "--processes", processes])
    a, b = (Results.open(tmp_path / f).records for f in "ab")
    assert [r["metrics"] for r in a] == [r["metrics"] for r in b]


def test_every_registered_method_can_be_named_in_a_file():
    models = {False: linear_model(), True: fp.Composition(None, torch.nn.Linear(3, 2), "categorical")}
    for name, cls in METHODS.items():
        assert type(method_from(name, {}, models[cls.of_classes], "here")) is cls


MODEL = linear_model()
EACH = {"client-0": 5, "client-1": 20}


@pytest.mark.parametrize(
    ("name", "settings", "method"),
    [
        (
            "FedSOUL",
            {"phi_step": {"kind": "PhiStep", "local": {"epochs": 1, "rate": 0.05}}},
            fp.FedSOUL(MODEL, phi_step=fp.steps.PhiStep(local=fp.LocalSGD(epochs=1, rate=0.05))),
        ),
        (
            "FedSOUL",
            {
                "phi_step": {
                    "kind": "PhiStep",
                    "optimiser": {"kind": "MeanMove"},
                    "local": {"epochs": 2, "batch": 10},
                    "schedule": {"kind": "Cosine"},
                }
            },
            fp.FedSOUL(
                MODEL,
                phi_step=fp.steps.PhiStep(
                    fp.steps.MeanMove(), local=fp.LocalSGD(epochs=2, batch=10), schedule=fp.steps.Cosine()
                ),
            ),
        ),
        (
            "FedSOUK",
            {"phi_step": {"kind": "PhiStep", "optimiser": {"kind": "Adam", "rate": 1}, "batch": 5}},
            fp.FedSOUK(MODEL, phi_step=fp.steps.PhiStep(fp.steps.Adam(1.0), batch=5)),
        ),
        (
            "FedSOUL",
            {"phi_step": {"kind": "Adam", "schedule": {"constant": 0.2}}},
            fp.FedSOUL(MODEL, phi_step=fp.steps.Adam(schedule=fp.steps.Decay(0.2))),
        ),
        ("FedSOUL", {"chain": {"chains": 2}}, fp.FedSOUL(MODEL, chain=fp.chains.Chain(chains=2))),
        (
            "FedSOUL",
            {"start": {"kind": "Spectral", "minimum": 5}},
            fp.FedSOUL(MODEL, start=fp.steps.Spectral(minimum=5)),
        ),
        ("FedSOUL", {"start": {"minimum": 5}}, fp.FedSOUL(MODEL, start=fp.steps.Spectral(minimum=5))),
        ("FedSOUL", {"anneal": {"rounds": 50}}, fp.FedSOUL(MODEL, anneal=fp.steps.Anneal(50))),
        (
            "FedSOUL",
            {"beta_step": {"kind": "EM", "rate": 0.5}},
            fp.FedSOUL(MODEL, beta_step=fp.steps.EM(0.5)),
        ),
        (
            "FedSOUL",
            {"beta_step": {"kind": "BetaStep", "step": {"kind": "EM", "rate": 0.5}, "form": "left"}},
            fp.FedSOUL(MODEL, beta_step=fp.steps.BetaStep(fp.steps.EM(0.5), form="left")),
        ),
        (
            "FedSOUL",
            {"prior": {"kind": "Normal", "bounds": [0.1, 1]}},
            fp.FedSOUL(MODEL, prior=fp.priors.Normal(bounds=(0.1, 1.0))),
        ),
        (
            "FedSOUL",
            {"local_steps": {"kind": "Steps", "start": 2, "end": 10}},
            fp.FedSOUL(MODEL, local_steps=fp.chains.Steps(2, 10)),
        ),
        ("FedSOUL", {"local_steps": EACH}, fp.FedSOUL(MODEL, local_steps=EACH)),
        (
            "FedSOUL",
            {"compressor": {"client-0": "qsgd", "client-1": {"kind": "QSGD", "levels": 7}}},
            fp.FedSOUL(MODEL, compressor={"client-0": "qsgd", "client-1": fp.compressors.QSGD(levels=7)}),
        ),
        (
            "DGLMC",
            {"rho": {"client-0": 1, "client-1": 0.5}},
            fp.DGLMC(MODEL, rho={"client-0": 1.0, "client-1": 0.5}),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_groups_of_settings_are_tables_inside_tables(name, settings, method):
    built = method_from(name, settings, MODEL, "here")
    assert type(built) is type(method)
    assert json.dumps(built.describe()) == json.dumps(method.describe())  # 1 is not 1.0


def test_settings_by_client_are_what_is_run(tmp_path):
    each = {f"client-{i}": 2 + 3 * (i % 2) for i in range(6)}
    table = {"name": "FedSOUL", "final": {"draws": 20}, "local_steps": each}
    path = tmp_path / "each.toml"
    path.write_text(to_toml(changed(method=[table])))
    assert read_config(path).entries[0].settings == {k: v for k, v in table.items() if k != "name"}
    main(["compare", str(path), "--out", str(tmp_path / "out"), "--processes", "1"])
    (found,) = Results.open(tmp_path / "out").records
    subject = read_config(path).task.make(0)
    method = fp.FedSOUL(subject.model, final=fp.chains.Final(draws=20), local_steps=each)
    alone = method.fit(subject.clients, rounds=3, seed=0, participation=3)
    assert found["metrics"]["test_rmse"] == fp.evaluate(alone).summary()["rmse"]
    other = method.replace(local_steps=2).fit(subject.clients, rounds=3, seed=0, participation=3)
    assert found["metrics"]["test_rmse"] != fp.evaluate(other).summary()["rmse"]


# --- precision --------------------------------------------------------------------------------


def test_precision_is_a_word_of_the_run(tmp_path):
    plain = config_from(SMALL, Path("plain.toml"))
    path = tmp_path / "asked.toml"
    path.write_text(to_toml(changed(run=SMALL["run"] | {"precision": "float32"})))
    asked = read_config(path)
    assert (plain.terms.precision, asked.terms.precision) == (None, "float32")
    # Records of runs that were not asked for it stay what they were; others are another comparison.
    assert asked.terms.describe() == plain.terms.describe() | {"precision": "float32"}
    seen = []
    for config in (plain, asked):
        subject = config.task.make(0)
        assert subject.model.precision == "auto"
        method = config.entries[0].build(subject.model)
        seen.append(fitted(method, subject.clients, config.terms, 0).model.precision)
    assert seen == ["auto", "float32"]


def test_precision_reaches_every_run_of_a_comparison_and_a_search(tmp_path, monkeypatch):
    seen = []
    inner = fp.FedAvg.fit

    def spy(self, clients, **settings):
        seen.append(settings["precision"])
        return inner(self, clients, **(settings | {"precision": "float32"}))

    monkeypatch.setattr(fp.FedAvg, "fit", spy)
    path = tmp_path / "half.toml"
    run = SMALL["run"] | {"precision": "bfloat16"}
    path.write_text(to_toml(changed(run=run, method=SMALL["method"][:1], tune={"trials": 1})))
    for command in ("compare", "tune"):
        main([command, str(path), "--out", str(tmp_path / command), "--processes", "1"])
        assert Results.open(tmp_path / command).records[0]["setting"]["precision"] == "bfloat16"
    assert seen == ["bfloat16"] * 2


def test_the_examples_are_read_and_their_methods_built():
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.toml")):
        config = read_config(path)
        model = config.task.task.model(0)
        assert len([entry.build(model) for entry in config.entries]) >= 4


def test_rows_of_a_csv_file_are_clients(tmp_path):
    g = generator(0)
    lines = ["who,dose,age,y"]
    for i in range(6):
        for _ in range(10):
            dose, age = torch.randn(2, generator=g).tolist()
            lines.append(f"site-{i},{dose},{50 + age},{2 * dose + i}")
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    task = {"kind": "csv", "file": "rows.csv", "x": ["dose", "age"], "y": "y", "client": "who"}
    raw = changed(task=task | {"new_clients": 2, "features": 3})
    config = config_from(raw, tmp_path / "c.toml")
    subject = config.task.make(0)
    assert {s: p.sizes.tolist() for s, p in subject.clients.splits.items()} == {
        "train": [6] * 4, "validation": [2] * 4, "test": [2] * 4
    }  # fmt: skip
    assert len(subject.newcomers) == 2
    known = {tuple(row) for p in subject.clients.splits.values() for row in p.x.tolist()}
    new = [tuple(row) for c in subject.newcomers for row in (*c.x.tolist(), *c.test[0].tolist())]
    assert len(known) == 40
    assert len(new) == 16  # those of their validation sets are not looked at here
    assert not known & set(new)
    torch.testing.assert_close(subject.clients.train.x.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(subject.clients.train.x.std(0), torch.ones(2), atol=1e-5, rtol=0)
    with pytest.raises(DataError, match="no column 'weight'; it has who, dose, age, y"):
        config_from(changed(task=task | {"x": ["weight"]}), tmp_path / "c.toml").task.make(0)
    (tmp_path / "rows.csv").write_text("who,dose,age,y\na,1,2,3\na,1,old,3\n")
    with pytest.raises(DataError, match="line 3: age is 'old', not a number"):
        config.task.make(0)


def test_new_image_clients_share_no_image_with_anybody():
    task = ImageTask("mnist", classes=2, small=4, large=2, n_small=3, n_large=4, validation=6, test=4)
    folder = real("mnist")
    known, new = task.split(folder, 0, new=3)
    alone = task.make(folder, 0)
    assert torch.equal(known.train.x, alone.train.x)
    assert [len(c.y) for c in new] == [3, 3, 3]
    held = {tuple(x.flatten().tolist()) for s in ("train", "validation") for x in known.splits[s].x}
    assert not any(tuple(x.flatten().tolist()) in held for c in new for x in c.x)
