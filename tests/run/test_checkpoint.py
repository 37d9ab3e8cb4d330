"""Checkpoints that cannot be trusted, runs that are not the same, and folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop import files
from fedpop.errors import CheckpointError, DataError, FedpopWarning, SettingsError
from tests.crash import Crash, CrashAt
from tests.helpers import linear_model, ragged
from tests.run.test_resume import metrics_of, one_thread, same_runs

__all__ = ["one_thread"]  # a fixture for these tests too

# --- checkpoints that cannot be trusted ---------------------------------------------------------


def fit(out: Path, *, rounds: int = 6, resume: bool = True, **changes: Any) -> fp.Population:
    model = changes.pop("model", None) or linear_model()
    clients = changes.pop("clients", None) or ragged()
    settings = {k: changes.pop(k) for k in ("seed", "participation", "memory", "sites") if k in changes}
    method = fp.FedSOUL(model, **changes)
    return method.fit(clients, rounds=rounds, out=out, resume=resume, checkpoint_every=2, **settings)


def newest(out: Path, suffix: str) -> Path:
    return max((out / "checkpoints").glob(f"*.{suffix}"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def edit_the_round(path: Path) -> None:
    path.write_text(path.read_text().replace('"round": 6', '"round": 5'))


DAMAGE = [
    ("safetensors", truncate, "truncated or edited"),
    ("safetensors", flip_a_bit, "truncated or edited"),
    ("safetensors", Path.unlink, "cannot read"),
    ("json", truncate, "not readable JSON"),
    ("json", edit_the_round, "was edited"),
    ("json", lambda p: p.write_text("{}"), "not a checkpoint"),
    ("json", lambda p: p.write_bytes(b"\xff\xfe\x00"), "not readable JSON"),
]


@pytest.mark.parametrize(("suffix", "damage", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    tmp_path: Path, suffix: str, damage: Callable[[Path], Any], message: str
) -> None:
    fit(tmp_path / "whole")
    fit(tmp_path / "run")
    bad = newest(tmp_path / "run", suffix)
    damage(bad)
    with pytest.warns(FedpopWarning, match=rf"{message}.*using the previous one") as caught:
        fit(tmp_path / "run")
    assert bad.name in str(caught[0].message)
    same_runs(tmp_path / "run", tmp_path / "whole")


def test_no_usable_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    fit(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "checkpoints").glob("*.safetensors"):
        truncate(path)
    with (
        pytest.warns(FedpopWarning, match="checkpoint refused"),
        pytest.raises(CheckpointError, match=r"no usable checkpoint.*delete the folder"),
    ):
        fit(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda p: p.write_bytes(p.read_bytes()[:20])])
def test_metrics_that_do_not_reach_the_checkpoint_are_an_error(tmp_path: Path, damage: Any) -> None:
    fit(tmp_path)
    damage(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is missing or shorter"):
        fit(tmp_path)


def test_edited_metrics_are_noticed(tmp_path: Path) -> None:
    """The same length, one number changed: a curve that nobody measured."""
    fit(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"active": 4', '"active": 3', 1))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl was edited: its lines are not those"):
        fit(tmp_path, rounds=8)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_lines_after_the_checkpoint_may_be_anything(tmp_path: Path) -> None:
    """They are of rounds that are run again."""
    fit(tmp_path / "whole", rounds=8)
    fit(tmp_path / "run", rounds=6)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"round": 7, \xff')
    fit(tmp_path / "run", rounds=6)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")[:6]


def test_checkpoints_of_an_older_version_are_not_migrated(tmp_path: Path) -> None:
    fit(tmp_path)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        plain = {
            k: v for k, v in json.loads(path.read_text()).items() if k not in ("format", "version", "seal")
        }
        files.write_sealed(path, plain)
    expected = r"written by fedpop 0\.2\.0 or before in its own layout.*does not migrate.*another folder"
    with pytest.warns(FedpopWarning, match=expected), pytest.raises(CheckpointError, match=expected):
        fit(tmp_path)


# --- resuming something else --------------------------------------------------------------------


def tanh_or_relu(activation: Any) -> fp.Composition:
    return fp.Composition(
        nn.Sequential(nn.Linear(3, 2), activation), nn.Linear(2, 1), fp.likelihoods.Normal(0.5)
    )


def shifted() -> list[Any]:
    clients = ragged()
    clients[2][1][0] += 1e-5
    return clients


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"rounds": 5}, "the saved run has 6 rounds, more than rounds=5"),
        ({"participation": 2}, "participation"),
        ({"memory": "1KiB"}, "memory: 1GiB then, 1KiB now"),
        ({"local_steps": 3}, r"algorithm\.local_steps: None then, 3 now"),
        (
            {"kernel": fp.kernels.Exponential(0.5)},
            r"algorithm\.kernel: None then, .*'Exponential', 'h': 0\.5",
        ),
        ({"phi_step": fp.steps.Adam(0.2)}, r"algorithm\.phi_step: None then, .*'Adam', 'rate': 0\.2"),
        ({"prior": "diagonal"}, r"algorithm\.prior: normal then, diagonal now"),
        ({"chain": fp.chains.Chain(chains=2)}, r"algorithm\.chain\.chains: 1 then, 2 now"),
        ({"sites": {"all": [f"client-{i}" for i in range(4)]}}, r"sites: None then, .*'all'"),
        ({"model": linear_model(d=1)}, "model"),
        ({"model": linear_model(variance=0.6)}, r"likelihood: Normal\(variance=0\.5\) then"),
        ({"clients": ragged()[:3]}, "clients: 4 then, 3 now"),
        ({"clients": shifted()}, "data: "),
        (
            {"clients": {f"other-{i}": c for i, c in enumerate(ragged())}},
            "names: the clients have other names, or another order, than they had then",
        ),
    ],
)
def test_changed_settings_or_data_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    fit(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=rf"cannot resume.*{named}"):
        fit(tmp_path, **changes)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (
            {"kernel": fp.kernels.Exponential()},
            {"kernel": fp.kernels.Exponential(0.5)},
            r"algorithm\.kernel\.h: 1\.0 then, 0\.5 now",
        ),
        (
            {"phi_step": fp.steps.PhiStep(fp.steps.Adam(0.1))},
            {"phi_step": fp.steps.PhiStep(fp.steps.Adam(0.2))},
            r"algorithm\.phi_step\.optimiser\.rate: 0\.1 then, 0\.2 now",
        ),
        (
            {"prior": fp.priors.Normal()},
            {"prior": fp.priors.Normal("diagonal")},
            r"algorithm\.prior\.covariance: isotropic then, diagonal now",
        ),
    ],
    ids=["kernel", "phi step", "prior"],
)
def test_what_differs_inside_a_setting_is_named(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    fit(tmp_path, **then)
    with pytest.raises(CheckpointError, match=rf"cannot resume.*\({named}\)"):
        fit(tmp_path, **now)


def test_another_network_of_the_same_size_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, model=tanh_or_relu(nn.Tanh()))
    with pytest.raises(CheckpointError, match=r"model\.modules"):
        fit(tmp_path, model=tanh_or_relu(nn.ReLU()))


def test_what_does_not_change_the_result_may_change(tmp_path: Path) -> None:
    method = fp.FedSOUL(linear_model())
    method.fit(ragged(), rounds=4, out=tmp_path, checkpoint_every=1)
    method.fit(ragged(), rounds=4, out=tmp_path, checkpoint_every=3, resume=True, progress=False)


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    fit(tmp_path, resume=False)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="already holds a run; use resume=True"):
        fit(tmp_path, resume=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    assert len(fit(tmp_path / "new", resume=True).history) == 6


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am not a folder")
    with pytest.raises(SettingsError, match=r"cannot write to .*file/sub"):
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=1, out=tmp_path / "file" / "sub", callbacks=[CrashAt(1)]
        )
    assert (tmp_path / "file").read_text() == "I am not a folder"


def test_a_run_leaves_the_same_few_files_and_no_pickle(tmp_path: Path) -> None:
    fit(tmp_path, rounds=7)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert names == [
        "checkpoints/round-00000006.json",
        "checkpoints/round-00000006.safetensors",
        "checkpoints/round-00000007.json",
        "checkpoints/round-00000007.safetensors",
        "config.json",
        "metrics.jsonl",
        "result.json",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rounds"] == 7
    assert config["algorithm"]["local_steps"] is None


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"participation": 9}, SettingsError),
        ({"participation": fp.participation.Bernoulli((0.5, 0.5))}, SettingsError),
        ({"memory": "a lot"}, SettingsError),
        ({"callbacks": [fp.callbacks.EarlyStop()]}, DataError),  # no validation data
        ({"rounds": 0}, SettingsError),
        ({"checkpoint_every": 0}, SettingsError),
        ({"seed": -1}, SettingsError),
        ({"restarts": -1}, SettingsError),
    ],
)
def test_impossible_settings_create_nothing(tmp_path: Path, settings: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        fp.FedSOUL(linear_model()).fit(ragged(), out=tmp_path / "new", **({"rounds": 2} | settings))
    assert list(tmp_path.iterdir()) == []


def test_the_thread_count_comes_back_with_the_run(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=4, out=tmp_path, checkpoint_every=2, callbacks=[CrashAt(3)]
        )
    torch.set_num_threads(2)
    seen: list[int] = []

    class Look(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
            seen.append(torch.get_num_threads())
            return False

    fp.FedSOUL(linear_model()).fit(ragged(), rounds=4, out=tmp_path, resume=True, callbacks=[Look()])
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
