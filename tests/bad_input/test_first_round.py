"""Bad input: each one clear error that says what, where and what to do, and nothing half-written."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, DataError, FedpopError, ModelError, SettingsError
from tests.crash import CrashAt
from tests.helpers import federation_of, linear_model, ragged

NORMAL = fp.likelihoods.Normal(0.5)


def softmax() -> fp.Composition:
    return fp.Composition(nn.Linear(3, 2), nn.Linear(2, 3), "categorical")


def named(**changes: Any) -> dict[str, Any]:
    a, b, c = ragged((3, 4, 2))
    return {"anna": a, "ben": b, "cara": c} | changes


def with_value(value: float, part: int, row: int) -> tuple[Tensor, Tensor]:
    pair = tuple(t.clone() for t in ragged((4,))[0])
    pair[part][row] = value
    return pair


def labels(*values: Any) -> dict[str, Any]:
    x = torch.zeros(len(values), 3)
    good = (torch.zeros(2, 3), torch.tensor([0, 2]))
    return {"anna": good, "ben": (x, torch.tensor(values))}


def held_out(y: Tensor, x: Tensor | None = None) -> dict[str, Any]:
    a, b = ragged((3, 4))
    inputs = torch.zeros(len(y), 3) if x is None else x
    return {"anna": a, "ben": fp.Client(*b, validation=(inputs, y))}


DATA: dict[str, tuple[Any, Any, str]] = {
    "no clients": (linear_model, [], "no clients"),
    "no clients in a mapping": (linear_model, {}, "no clients"),
    "lengths": (
        linear_model,
        named(ben=(torch.zeros(3, 3), torch.zeros(2))),
        "'ben'.*3 rows but y has 2.*equal",
    ),
    "lengths of a table": (
        linear_model,
        fp.Table(torch.zeros(3, 3), torch.zeros(2), [0, 1, 1]),
        "3 rows but y has 2",
    ),
    "names twice": (linear_model, {1: ragged()[0], "1": ragged()[0]}, "'1' appears twice"),
    "nan in x": (linear_model, named(ben=with_value(float("nan"), 0, 2)), "'ben', row 2.*NaN.*drop the row"),
    "infinity in x": (linear_model, named(cara=with_value(float("inf"), 0, 3)), "'cara', row 3.*infinite"),
    "nan in y": (linear_model, named(ben=with_value(float("nan"), 1, 1)), "'ben', row 1: y is NaN"),
    "infinity in y": (linear_model, named(cara=with_value(-float("inf"), 1, 0)), "'cara', row 0: y is"),
    "nan in an array": (
        linear_model,
        {"dora": (np.array([[1.0, 2.0, np.nan]]), np.zeros(1))},
        "'dora', row 0.*NaN",
    ),
    "too large for float32 in x": (
        linear_model,
        named(ben=(np.array([[1.0] * 3, [0.0, -1e39, 0.0]]), np.zeros(2)), empty=ragged((0,))[0]),
        r"'ben', row 1: x holds -1e\+39.*float32.*3\.4e\+38.*rescale",
    ),
    "too large for float32 in y": (
        linear_model,
        named(cara=(np.ones((2, 3)), np.array([0.0, 1e300]))),
        r"'cara', row 1: y holds 1e\+300",
    ),
    "too large for float32 in held-out x": (
        linear_model,
        held_out(torch.zeros(1), torch.full((1, 3), 1e39, dtype=torch.float64)),
        r"'ben', validation set, row 0: x holds 1e\+39",
    ),
    "nan in held-out y": (
        linear_model,
        held_out(torch.tensor([0.0, float("nan")])),
        "'ben', validation set, row 1",
    ),
    "nan in held-out x": (
        linear_model,
        held_out(torch.zeros(1), torch.full((1, 3), float("nan"))),
        "'ben', validation set, row 0",
    ),
    "nan in a table's x": (
        linear_model,
        fp.Table(
            torch.tensor([[0.0], [1.0], [float("nan")]]).expand(3, 3), torch.zeros(3), ["anna", "ben", "ben"]
        ),
        r"the table, row 2 \(client 'ben'\): x is NaN",
    ),
    "nan in a table's y": (
        linear_model,
        fp.Table(torch.zeros(3, 3), torch.tensor([0.0, 1.0, float("nan")]), ["anna", "ben", "ben"]),
        "'ben', row 1",
    ),
    "label too large": (softmax, labels(0, 1, 3), "'ben', row 2: label 3 is out of range.*from 0 to 2"),
    "label negative": (softmax, labels(-1), "'ben', row 0: label -1 is out of range"),
    "label not whole": (softmax, labels(0.5), "'ben', row 0.*not a whole number"),
    "label nan": (softmax, labels(0.0, float("nan")), "'ben', row 1.*NaN"),
    "labels one-hot": (softmax, {"anna": (torch.zeros(2, 3), torch.eye(3)[:2])}, "class labels must be"),
    "bernoulli": (
        lambda: fp.Composition(None, nn.Linear(3, 1), "bernoulli"),
        {"anna": (torch.zeros(2, 3), torch.tensor([0.0, 2.0]))},
        "'anna', row 1: a bernoulli target is 0 or 1",
    ),
    "poisson": (
        lambda: fp.Composition(None, nn.Linear(3, 1), "poisson"),
        {"anna": (torch.zeros(2, 3), torch.tensor([0.5, 2.0]))},
        "'anna', row 0: a poisson target is a whole number",
    ),
    "y too wide": (linear_model, {"anna": (torch.zeros(2, 3), torch.zeros(2, 2))}, "'anna'.*1 output"),
    "x too narrow": (
        linear_model,
        {"anna": (torch.zeros(2, 4), torch.zeros(2))},
        r"examples of shape \[\(4,\)\]",
    ),
    "x too narrow for a split": (
        lambda: fp.Split(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "1.*", NORMAL),
        {"anna": (torch.zeros(2, 4), torch.zeros(2))},
        r"examples of shape \[\(4,\)\]",
    ),
}


@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("method", [fp.FedSOUL, fp.FedAvg])
def test_data_that_cannot_be_used(tmp_path: Path, case: str, method: Any) -> None:
    model, clients, message = DATA[case]
    with pytest.raises(DataError, match=message):
        method(model()).fit(clients, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Squeezed(nn.Module):
    """A head that forgets the axis of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).squeeze(-1)


class Pooled(nn.Module):
    """A head that mixes its examples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean(0, keepdim=True)


MODELS: dict[str, tuple[Any, str]] = {
    "one logit for classes": (
        lambda: fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1), "categorical"),
        "at least 2.*'bernoulli'",
    ),
    "one logit for classes in a split": (
        lambda: fp.Split(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "1.*", "categorical"),
        "at least 2",
    ),
    "squeezed": (
        lambda: fp.Composition(nn.Linear(3, 2), Squeezed(), NORMAL),
        r"gave outputs of shape \(2,\)",
    ),
    "pooled": (lambda: fp.Composition(nn.Linear(3, 2), Pooled(), NORMAL), r"for 2 examples the head gave"),
    "no width": (lambda: fp.Composition(None, nn.PReLU(3), NORMAL), "how many outputs"),
    "two tensors of features": (
        lambda: fp.Composition(nn.GRU(3, 2), nn.Linear(2, 1), NORMAL),
        "one tensor of features",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_heads_that_do_not_fit(tmp_path: Path, case: str) -> None:
    make, message = MODELS[case]
    with pytest.raises(ModelError, match=message):
        fp.FedSOUL(make()).fit([(torch.zeros(4, 3), torch.zeros(4))], rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "M = 0": ({"local_steps": 0}, {}, r"FedSOUL: local_steps must be a whole number.*not 0"),
    "M < 0": ({"local_steps": -3}, {}, "local_steps"),
    "M = 0 for one": (
        {"local_steps": {"anna": 3, "ben": 0, "cara": 3}},
        {},
        r"local_steps\['ben'\] must be a whole number in \[1, 1,000,000\], not 0",
    ),
    "half a step for one": (
        {"local_steps": {"anna": 3, "ben": 2.5, "cara": 3}},
        {},
        r"local_steps\['ben'\] must be a whole number.*not 2.5",
    ),
    "M for two of three": (
        {"local_steps": {"anna": 3, "cara": 4}},
        {},
        "local_steps: no value for client 'ben'; give one for each client",
    ),
    "M for a stranger": (
        {"local_steps": {"anna": 3, "ben": 3, "cara": 4, "dora": 2}},
        {},
        "local_steps: there is no client 'dora'",
    ),
    "M by position": ({"local_steps": (3, 4, 5)}, {}, r"mapping from names.*not \(3, 4, 5\)"),
    "M in words": ({"local_steps": "many"}, {}, "local_steps must be a whole number.*not 'many'"),
    "a compressor for two of three": (
        {"compressor": {"anna": "qsgd", "ben": "natural"}},
        {},
        "compressor: no value for client 'cara'",
    ),
    "a start that is not there": (
        {"start": "warm"},
        {},
        "start must be one of auto, spectral, random, or a Spectral, not 'warm'",
    ),
    "kernel": ({"kernel": "nuts"}, {}, "unknown kernel 'nuts'; known are"),
    "prior": ({"prior": "cauchy"}, {}, "unknown prior 'cauchy'; known are"),
    "rounds = 0": ({}, {"rounds": 0}, "rounds must be a whole number, 1 or more, or None, not 0"),
    "rounds < 0": ({}, {"rounds": -1}, "rounds must be a whole number, 1 or more, or None, not -1"),
    "p = 0": ({}, {"participation": 0.0}, r"p must be a number in \(0, 1\]"),
    "p > 1": ({}, {"participation": 1.5}, r"probability, at most 1\.0.*whole number"),
    "one of several p > 1": (
        {},
        {"participation": [0.5, 0.5, 2.0]},
        r"p\[2\] must be a number in \(0, 1\].*not 2\.0",
    ),
    "a number of clients as a fraction": ({}, {"participation": 2.0}, "without the point"),
    "one client or everyone": (
        {},
        {"participation": 1},
        r"1\.0 for everyone, fedpop\.participation\.Uniform\(1\)",
    ),
    "a word for participation": (
        {},
        {"participation": "all"},
        "participation must be a Participation, .* or None, not 'all'",
    ),
    "nobody": ({}, {"participation": 0}, "Uniform: size must be a whole number, 1 or more, not 0"),
    "more than there are": ({}, {"participation": 4}, "only 3"),
    "seed": ({}, {"seed": -1}, "seed"),
    "checkpoints": ({}, {"checkpoint_every": 0}, "checkpoint_every"),
    "memory": ({}, {"memory": "lots"}, "memory budget"),
    "half a round": ({}, {"rounds": 2.5}, "fit: rounds must be a whole number.*not 2.5"),
    "half a step": ({"local_steps": 1.5}, {}, "local_steps must be a whole number"),
    "seed in words": ({}, {"seed": "a"}, "fit: seed must be a whole number.*not 'a'"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_impossible_settings(tmp_path: Path, case: str) -> None:
    options, settings, message = SETTINGS[case]
    with pytest.raises(SettingsError, match=message):
        fp.FedSOUL(linear_model(), **options).fit(named(), out=tmp_path / "run", **({"rounds": 1} | settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: fp.kernels.ULA(step_size=-0.1),
        lambda: fp.kernels.ULA(step_size=0.0),
        lambda: fp.kernels.ULA(step_size=2.0),
        lambda: fp.kernels.ULA(decay=-1.0),
        lambda: fp.kernels.Exponential(h=0.0),
        lambda: fp.kernels.Exponential(h=1.1),
        lambda: fp.kernels.HMC(leapfrog=0),
        lambda: fp.priors.Normal("spherical"),
        lambda: fp.priors.Normal(scale=0.0),
        lambda: fp.priors.Normal(scale=-1.0),
        lambda: fp.priors.Normal(bounds=(2.0, 1.0)),
        lambda: fp.priors.Normal(bounds=(0.0, 1.0)),
        lambda: fp.priors.Normal(ball=0.0),
        lambda: fp.priors.Normal(mean=float("nan")),
        lambda: fp.FedSOUL(softmax(), chain=fp.chains.Chain(rao_blackwell=True)),
        lambda: fp.chains.Chain(chains=0),
        lambda: fp.chains.Chain(burn_in=-1),
        lambda: fp.steps.BetaStep(form="centre"),
        lambda: fp.steps.PhiStep(batch=0),
        lambda: fp.steps.PhiStep(batch=2, local=fp.LocalSGD()),
        lambda: fp.steps.PhiStep(ball=0.0),
        lambda: fp.steps.Spectral(minimum=1),
    ],
)
def test_negative_steps_and_other_impossible_pieces(make: Any) -> None:
    with pytest.raises(SettingsError):
        make()


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot write to .*file/run"):
        fp.FedSOUL(linear_model()).fit(named(), rounds=1, out=tmp_path / "file" / "run")
    population = fp.FedSOUL(linear_model()).fit(named(), rounds=1)
    with pytest.raises(SettingsError, match="cannot write to"):
        population.save(tmp_path / "file" / "saved")


def test_a_resume_with_changed_settings(tmp_path: Path) -> None:
    fp.FedSOUL(linear_model()).fit(named(), rounds=2, out=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot resume.*local_steps: None then, 5 now.*another output folder"
    ):
        fp.FedSOUL(linear_model(), local_steps=5).fit(named(), rounds=2, out=tmp_path, resume=True)


def test_the_largest_number_that_fits_is_taken() -> None:
    model, largest = linear_model(), float(torch.finfo(torch.float32).max)
    clients = {"anna": (np.array([[largest, 0.0, 1.0]]), np.zeros(1))}
    assert float(federation_of(model, clients).train.x.max()) == largest


def test_questions_that_make_no_sense() -> None:
    population = fp.FedSOUL(linear_model()).fit(named(), rounds=1)
    x = torch.zeros(2, 3)
    with pytest.raises(DataError, match=r"no client 'dora'.*new_client"):
        population.predict("dora", x)
    with pytest.raises(DataError, match="row 1: x is NaN"):
        population.predict("anna", torch.tensor([[0.0] * 3, [float("nan")] * 3]))
    with pytest.raises(DataError, match=r"row 0: x holds 1e\+39"):
        population.predict("anna", np.full((1, 3), 1e39))
    with pytest.raises(DataError, match=r"shape \[\(4,\)\]"):
        population.predict("anna", torch.zeros(2, 4))
    for level in (0.0, 1.0, 95):
        with pytest.raises(SettingsError, match="credible level"):
            population.predict("anna", x).interval(level)


def test_every_error_is_a_fedpop_error_and_a_familiar_one() -> None:
    """Users may catch one class, or the built-in that they expect."""
    for error in (DataError, ModelError, SettingsError):
        assert issubclass(error, FedpopError)
        assert issubclass(error, ValueError)
    assert issubclass(CheckpointError, FedpopError)


def test_an_error_of_the_first_rounds_leaves_no_half_written_file(tmp_path: Path) -> None:
    """A callback of the user's own that fails: what is there can be resumed, nothing is temporary."""

    with pytest.raises(ZeroDivisionError):
        fp.FedSOUL(linear_model()).fit(
            named(), rounds=5, out=tmp_path, checkpoint_every=2, callbacks=[CrashAt(3, ZeroDivisionError)]
        )
    assert [p for p in tmp_path.rglob("*") if p.name.startswith(".") or p.suffix == ".tmp"] == []
    resumed = fp.FedSOUL(linear_model()).fit(named(), rounds=5, out=tmp_path, checkpoint_every=2, resume=True)
    assert len(resumed.history) == 5


def test_importing_the_package_is_light() -> None:
    """Nothing is imported at start-up that the command at hand does not need."""
    heavy = "{'matplotlib', 'arviz_stats', 'jinja2', 'tyro', 'scipy.stats'}"
    code = f"import sys, fedpop as fp; fp.FedSOUL, fp.mixed_model; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("method", "name"),
    [(fp.FedAvg, "local"), (fp.Ditto, "personal"), (fp.FedRep, "head"), (fp.FedAvgFT, "fine_tune")],
)
def test_how_clients_train_is_a_local_sgd(method: Any, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be a LocalSGD, not 3"):
        method(linear_model(), **{name: 3})
