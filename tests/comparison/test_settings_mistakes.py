"""Every mistake in a settings file is told with its place."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import fedpop as fp
from fedpop.cli import main
from fedpop.comparison.config import config_from, read_config, to_toml
from fedpop.errors import SettingsError
from fedpop.methods import METHODS
from fedpop.methods.tables import method_from
from fedpop.report.results import Results
from tests.comparison.small_settings import changed, expect_mistake
from tests.helpers import linear_model


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
        (
            {"beta_step": {"kind": "Steps"}},
            "takes BetaStep or EM or EMAdam or Optimiser, not Steps",
        ),
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
