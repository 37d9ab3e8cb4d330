"""A prior of the user's own that says less than kernels and EM need is refused; it gets nobody else's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError

MODEL = fp.Composition(None, nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(1.0))


def density(self: Any, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    e = (z - beta[: self.dimension(beta)]) / beta[-1].exp()
    return (-e - 2 * nn.functional.softplus(-e)).sum(-1), -torch.tanh(e / 2) / beta[-1].exp()


SAID: dict[str, Any] = {
    "component": None,
    "em": False,
    "forms": ("left",),
    "score": lambda self, beta, z, g, form, guess=None: z.mean(1),
    "sd": lambda self, beta: beta[-1:].exp(),
    "sample": lambda self, beta, noise: noise,
}


def prior(base: type = fp.priors.Normal, **members: Any) -> Any:
    kinds = {"em": ClassVar[bool], "forms": ClassVar[tuple[str, ...]]}
    body = {
        "value_and_grad": density,
        "__annotations__": {n: kinds[n] for n in members if n in kinds},
    } | members
    return dataclass(frozen=True)(type("Own", (base,), body))


@pytest.mark.parametrize("left_out", SAID)
def test_what_goes_with_a_density_has_to_be_said(left_out: str) -> None:
    own = prior(**{n: v for n, v in SAID.items() if n != left_out})
    with pytest.raises(
        SettingsError, match=rf"Own has a density of its own .* from Normal .*say too: {left_out}"
    ):
        own()


def test_all_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(
        SettingsError, match=r"component = None.*em = False.*forms.*score\(\).*sd\(\).*sample\(\)"
    ):
        prior()()


def test_what_says_all_is_taken() -> None:
    assert prior(**SAID)().name == "Normal"
    drawn = {n: v for n, v in SAID.items() if n != "sample"}
    prior(**drawn, draw=lambda self, beta, units, key, chains: beta)()


def test_steps_of_em_and_closed_forms_that_are_promised_have_to_be_there() -> None:
    with pytest.raises(SettingsError, match=r"em_step\(\), since it says em = True"):
        prior(**SAID | {"em": True})()
    with pytest.raises(
        SettingsError, match=r"expected_score\(\), since it says that posteriors are Gaussian"
    ):
        prior(**SAID | {"component": fp.priors.Normal()})()


def test_a_prior_that_changes_no_density_inherits_as_before() -> None:
    @dataclass(frozen=True)
    class Named(fp.priors.Normal):
        name: ClassVar[str] = "Named"

    assert Named().em


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "exponential"}, "Exponential is exact for priors made of Normals.*use HMC"),
        ({"kernel": "mixture-draw"}, "MixtureDraw needs"),
        ({"beta_step": fp.steps.EM()}, "EM"),
        ({"beta_step": fp.steps.BetaStep(form="right")}, "the right form of I"),
        ({"beta_step": fp.steps.BetaStep(form="mixed")}, "the mixed form of I"),
        ({"chain": fp.chains.Chain(rao_blackwell=True)}, "rao_blackwell needs closed-form"),
        ({"engine": "exact"}, "exact"),
    ],
    ids=str,
)
def test_kernels_and_steps_ask_for_what_they_need(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fp.FedSOUL(MODEL, prior=prior(**SAID)(scale=1.0), **settings).fit(
            [(torch.ones(3, 2), torch.ones(3))] * 2, rounds=1
        )
