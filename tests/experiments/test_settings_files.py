"""Settings files: what they say is what is run, and every mistake in one is named."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.algorithms import METHODS
from fedpop.algorithms.tables import method_from
from fedpop.cli import main
from fedpop.data.image_task import ImageTask
from fedpop.errors import DataError, SettingsError
from fedpop.experiments.comparison.run import fitted
from fedpop.experiments.config import config_from, read_config, to_toml
from fedpop.report.results import Results
from tests.data.files import mnist, real
from tests.helpers import generator, linear_model

SMALL = {
    "task": {"kind": "synthetic", "b": 6, "k": 4, "d": 2, "held_out": 4, "new_clients": 2, "validation": 3},
    "run": {"rounds": 3, "seeds": 1, "participation": 3, "every": 3, "last": 2},
    "method": [
        {"name": "FedAvg", "local": {"epochs": 2, "rate": 0.005, "batch": 3}},
        {
            "name": "FedSOUL",
            "label": "ours",
            "final": {"draws": 20},
            "phi_step": {"kind": "Adam", "rate": 0.05},
        },
    ],
}


def changed(**tables):
    return json.loads(json.dumps(SMALL)) | tables


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
    model = linear_model()
    for name in METHODS:
        assert type(method_from(name, {}, model, "here")) is METHODS[name]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({}, "without a name; known are .*FedAvg"),
        ({"name": "FedAvrg"}, "unknown method 'FedAvrg'; known are .*FedAvg"),
        (
            {"name": "FedAvg", "lokal": 1},
            "method FedAvg: unknown setting 'lokal' of FedAvg; known are .*local",
        ),
        (
            {"name": "FedAvg", "label": "mine", "local": {"epoch": 1}},
            "method mine: unknown setting 'local.epoch' of LocalSGD; known are batch, .*epochs",
        ),
        (
            {"name": "FedAvg", "local": {"epochs": 0}},
            "method FedAvg: local: LocalSGD: epochs must be a whole number, 1 or more",
        ),
        ({"name": "FedAvg", "local": {"epochs": 1.5}}, "local.epochs is a whole number, not 1.5"),
        ({"name": "FedAvg", "local": {"rate": "fast"}}, "local.rate is a number, not 'fast'"),
        ({"name": "FedAvg", "local": 3}, "method FedAvg: local is a table of settings"),
        ({"name": "FedAvg", "local": {"kind": "Adam"}}, "method FedAvg: local takes LocalSGD, not Adam"),
        ({"name": "FedSOUL", "final": 3}, "method FedSOUL: final is a table of settings"),
        ({"name": "L2GD", "schedule": 3}, "method L2GD: schedule is a table of settings"),
        ({"name": "DGLMC", "rho": ["a"]}, "method DGLMC: .*'a'"),
        ({"name": "FedAvg", "server_rate": -1}, "server_rate must be a positive"),
        ({"name": "FedAvg", "compressor": "zip"}, "method FedAvg: .*zip"),
        (
            {"name": "FedSOUL", "phi_step": {"rate": 0.1}},
            "phi_step: say which kind, .* known are Adam, .*PhiStep",
        ),
        (
            {"name": "FedSOUL", "prior": {"scale": 2}},
            "prior: say which kind, .* known are Energy, Mixture, Normal",
        ),
        ({"name": "FedSOUL", "phi_step": {"kind": "Adm"}}, "phi_step: unknown kind 'Adm'; known are .*Adam"),
    ],
)
def test_mistakes_in_a_method_name_the_file_the_method_and_the_key(method, told):
    expect_mistake(method, told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"phi_step": {"kind": "PhiStep", "locl": {}}},
            "unknown setting 'phi_step.locl' of PhiStep; .*local",
        ),
        (
            {"phi_step": {"kind": "PhiStep", "local": {"epoch": 1}}},
            "unknown setting 'phi_step.local.epoch' of LocalSGD; known are .*epochs",
        ),
        ({"phi_step": {"kind": "PhiStep", "local": 3}}, "phi_step.local is a table of settings, .*, not 3"),
        ({"phi_step": {"kind": "PhiStep", "local": {"epochs": 0}}}, "phi_step.local: .*epochs must be"),
        ({"phi_step": {"kind": "PhiStep", "local": {}, "batch": 2}}, "phi_step: a batch of local epochs"),
        ({"phi_step": {"kind": "EM"}}, "phi_step takes PhiStep or Optimiser, not EM"),
        (
            {"phi_step": {"kind": ["Adam"]}},
            "phi_step: unknown kind .*Adam.*; known are Adam, AdamW, MeanMove",
        ),
        ({"phi_step": "adam"}, "phi_step is a table of settings"),
        ({"chain": 2}, "chain is a table of settings, chain = {...}, not 2"),
        ({"chain": {"chains": 0}}, "chain: .*chains must be a whole number in .*, not 0"),
        ({"chain": {"chain": 2}}, "unknown setting 'chain.chain' of Chain; known are burn_in, chains"),
        ({"chains": 2}, "unknown setting 'chains' of FedSOUL; known are .*chain,"),
        ({"start": {"kind": "Spectral", "minimum": 1}}, "start: .*minimum must be a whole number, 2 or more"),
        ({"start": {"kind": "Adam"}}, "start takes Spectral, not Adam"),
        ({"start": "spectrl"}, "start must be one of auto, spectral, random.*, not 'spectrl'"),
        ({"start": 3}, "start is a text or a table of settings, .*, not 3"),
        (
            {"beta_step": {"kind": "BetaStep", "form": "lft"}},
            "beta_step: .*form must be one of auto, .* not 'lft'",
        ),
        ({"beta_step": {"kind": "Steps"}}, "beta_step takes BetaStep or EM or Optimiser, not Steps"),
        ({"kernel": 3}, "kernel is a text or a table of settings, .*, not 3"),
        ({"clip": {"kind": "Adam"}}, "clip is a number, not"),
        ({"prior": {"kind": "Normal", "bounds": [0.1]}}, "prior.bounds is a list of 2 values"),
        ({"local_steps": {"client-0": 5.5}}, "local_steps.client-0 is a whole number, not 5.5"),
        ({"local_steps": {"client-0": 0}}, r"local_steps\[.client-0.\] must be .*, not 0"),
        ({"local_steps": {"kind": "Steps", "start": 2}}, "local_steps.end is missing, which Steps needs"),
        ({"local_steps": {"start": 2, "end": 9}}, 'local_steps: .* each client; .* {kind = "Steps", ...}'),
        ({"local_steps": [5, 6]}, r"local_steps is a whole number or .* for each client, not \[5, 6\]"),
        ({"compressor": {"client-0": "zip"}}, "unknown compressor 'zip'; known are .*qsgd"),
        ({"compressor": {"client-0": {"kind": "QSGD", "level": 7}}}, "'compressor.client-0.level' of QSGD"),
    ],
    ids=str,
)
def test_mistakes_in_a_group_of_settings_name_its_place(settings, told):
    expect_mistake({"name": "FedSOUL", **settings}, f"method FedSOUL: .*{told}")


def expect_mistake(method, told):
    def read():
        config = config_from(changed(method=[method]), Path("wrong.toml"))
        return config.entries[0].build(config.task.task.model(0))

    with pytest.raises(SettingsError, match=f"^wrong.toml: .*{told}"):
        read()
    with pytest.raises(SettingsError) as caught:
        read()
    assert str(caught.value).count("wrong.toml") == 1


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


@pytest.mark.parametrize(
    ("names", "told"),
    [(5, "no value for client 'client-5'"), (7, "there is no client 'client-6'")],
)
@pytest.mark.parametrize("command", ["compare", "tune"])
def test_settings_by_client_are_for_these_clients(names, told, command, tmp_path, capsys):
    path = tmp_path / "each.toml"
    table = {"name": "FedSOUL", "label": "ours", "local_steps": {f"client-{i}": 2 for i in range(names)}}
    path.write_text(to_toml(changed(method=[table])))
    with pytest.raises(SystemExit):
        main([command, str(path), "--out", str(tmp_path / "out"), "--processes", "1"])
    assert f"{path}: method ours: local_steps: {told}" in capsys.readouterr().err
    assert not Results.open(tmp_path / "out").records


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


def test_a_compressor_is_refused_in_the_words_of_the_method(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Plain(fp.FedAvg):
        name = "Plain"
        compressed = ()

    monkeypatch.setitem(METHODS, "Plain", Plain)
    with pytest.raises(SettingsError, match="file: method Plain: Plain does not compress"):
        method_from("Plain", {"compressor": "natural"}, linear_model(), "file: method Plain")


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"task": {"kind": "pictures"}},
            r"\[task\]: kind is one of synthetic, images, full-images, table, folder, function, not 'pic",
        ),
        ({"task": {"kind": "synthetic", "bb": 3}}, r"\[task\]: unknown setting 'bb'; known are kind, b,"),
        ({"task": {"kind": "synthetic", "d": 3, "k": 2}}, r"\[task\]: .*d is at most k"),
        ({"run": {"round": 3}}, r"\[run\]: unknown setting 'round'; known are rounds"),
        ({"run": {"rounds": 3, "passes": 4}}, r"\[run\]: .*not both"),
        ({"run": {"rounds": "3"}}, r"\[run\]: .*rounds must be a whole number"),
        ({"run": {"participation": 1}}, r"\[run\]: participation=1 may mean"),
        ({"runs": {}}, "unknown setting 'runs'"),
        ({"method": []}, "at least one method"),
        ({"method": [{"name": "FedAvg"}, {"name": "FedAvg"}]}, "two methods are called FedAvg"),
        ({"run": {"participation": ["a"]}}, r"\[run\]: .*'a'"),
        ({"run": {"passes": "many"}}, r"\[run\]: .*passes must be a positive finite number.*, not 'many'"),
        (
            {"run": {"precision": "half"}},
            r"\[run\]: .*precision must be one of auto, float32, bfloat16.*, not 'half'",
        ),
        ({"run": {"precision": 16}}, r"\[run\]: .*precision must be one of .*, not 16"),
        ({"run": {"seeds": 1.5}}, r"\[run\]: .*.*seeds must be .* not 1.5"),
        ({"run": {"seeds": True}}, r"\[run\]: .*.*seeds must be .* not True"),
        ({"tune": {"trials": 0}}, r"\[tune\]: .*trials"),
        ({"tune": {"rounds": "3"}}, r"\[tune\]: .*rounds must be a whole number"),
        ({"tune": {"seed": "a"}}, r"\[tune\]: .*seed must be a whole number"),
    ],
)
def test_mistakes_elsewhere_name_the_table(tables, told):
    with pytest.raises(SettingsError, match=f"^wrong.toml.*{told}"):
        config_from(changed(**tables), Path("wrong.toml"))


def test_a_file_that_is_no_toml_or_not_there(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[task\n")
    with pytest.raises(SettingsError, match="not readable TOML"):
        read_config(tmp_path / "bad.toml")


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
