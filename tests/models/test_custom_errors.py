"""Functions that make no model, or cannot be used with these data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import ModelError, SettingsError
from tests.models.custom_models import Named, growth, growth_model, positive


def ones(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return z["a"] + 0 * y


MAKE: dict[str, tuple[dict[str, Any], str]] = {
    "no z": ({"log_likelihood": ones, "z": {}}, "z is empty.*at least one"),
    "clash": ({"log_likelihood": ones, "z": {"a": 0.0}, "phi": {"a": 1.0}}, "'a' is named in phi and in z"),
    "nothing": ({"z": {"a": 0.0}}, "needs log_likelihood, or outputs together with likelihood"),
    "outputs alone": ({"outputs": growth, "z": {"a": 0.0}}, "outputs together with likelihood"),
    "two likelihoods": (
        {"log_likelihood": ones, "outputs": growth, "likelihood": "normal", "z": {"a": 0.0}},
        "two likelihoods may disagree",
    ),
    "not a function": (
        {"log_likelihood": 3.0, "z": {"a": 0.0}},
        r"log_likelihood must be a function or None, not 3\.0",
    ),
    "arguments": ({"log_likelihood": growth, "z": {"a": 0.0}}, r"log_likelihood\(phi, z, x, y\): too many"),
    "outside its range": ({"log_likelihood": ones, "z": {"a": float("inf")}}, r"z\['a'\]: real\(inf\)"),
    "no entries": ({"log_likelihood": ones, "z": {"a": []}}, r"z\['a'\] is empty"),
    "a reserved name": ({"log_likelihood": ones, "z": {"likelihood.a": 0.0}}, "cannot be the name"),
    "unknown likelihood": ({"outputs": growth, "likelihood": "beta", "z": {"a": 0.0}}, "unknown likelihood"),
}


@pytest.mark.parametrize("case", MAKE)
def test_models_that_make_no_sense(case: str) -> None:
    arguments, match = MAKE[case]
    with pytest.raises((ModelError, SettingsError), match=match):
        fp.CustomModel(**arguments)


def total(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return ((y - z["a"]) ** 2).sum()


def square(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return -((y.unsqueeze(1) - z["a"] * y) ** 2)


def number(phi: Named, z: Named, x: Tensor, y: Tensor) -> float:
    return 1.0


def branch(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return y * z["a"] if z["a"] > 0 else -y * z["a"]


def noisy(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return y * z["a"] + torch.randn(len(y))


def root(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y - 2) * z["a"]


def steep(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y.clamp(min=2) - 2 + 0 * z["a"]) + z["a"]


def steep_phi(phi: Named, z: Named, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(y.clamp(min=2) - 2 + 0 * phi["b"]) + z["a"]


RUN: dict[str, tuple[Any, str]] = {
    "sum": (total, r"log_likelihood returned shape \(\) for 3 example.*shape \(3,\), not their sum"),
    "broadcast": (square, r"returned shape \(3, 3\) for 3"),
    "a number": (number, "must return a tensor of shape .*not float"),
    "a branch": (branch, "vmap.*torch.where"),
    "global noise": (noisy, "global generator"),
    "nan at the start": (root, r"client 'ben', row 1: the log-likelihood is nan at the initial values \(b 1"),
    "gradient in z": (steep, "client 'ben': the gradient in a is not finite"),
    "gradient in phi": (steep_phi, "client 'ben': the gradient in b is not finite"),
}


@pytest.mark.parametrize("case", RUN)
@pytest.mark.parametrize("method", [fp.FedSOUL, fp.FedAvg], ids=["FedSOUL", "FedAvg"])
def test_functions_that_cannot_be_used(case: str, method: Any, tmp_path: Path) -> None:
    function, match = RUN[case]
    model = fp.CustomModel(function, z={"a": 0.5}, phi={"b": positive(1.0)})
    x = torch.zeros(3, 1)
    clients = {
        "anna": (x, torch.tensor([3.0, 4.0, 5.0])),
        "none": (x[:0], torch.zeros(0)),
        "ben": (x, torch.tensor([3.0, 1.0, 5.0])),
    }
    with pytest.raises(ModelError, match=match):
        method(model).fit(clients, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_outputs_of_the_wrong_shape() -> None:
    model = fp.CustomModel(outputs=lambda phi, z, x: z["a"], likelihood="normal", z={"a": 0.5})
    with pytest.raises(ModelError, match=r"outputs returned shape \(\).*\(2,\) or \(2, outputs\)"):
        fp.FedSOUL(model).fit([(torch.zeros(2, 1), torch.zeros(2))], rounds=1)


def test_settings_that_need_a_linear_head_are_refused() -> None:
    model = growth_model()
    mixed, closed = fp.steps.BetaStep(form="mixed"), fp.chains.Chain(rao_blackwell=True)
    for options in ({"beta_step": mixed}, {"chain": closed}, {"start": "spectral"}):
        with pytest.raises(SettingsError):
            fp.FedSOUL(model, **options)
    with pytest.raises(SettingsError, match="exact heads"):
        fp.FedRep(model, heads="exact")
