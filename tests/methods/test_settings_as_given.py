"""Settings are stored as given and resolved when they are used; data never change a model that was given."""

from __future__ import annotations

import torch
from torch import nn

import fedpop as fp
from tests.helpers import linear_model, ragged, seeded


def softmax() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3), 2), "categorical")


def test_another_model_asks_for_its_own_kernel_and_burn_in() -> None:
    curved = fp.Composition(None, nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)), "categorical")
    method = fp.FedSOUL(linear_model())
    assert isinstance(method.sampler.kernel, fp.kernels.Exponential)
    assert isinstance(method.replace(model=softmax()).sampler.kernel, fp.kernels.HMC)
    assert (method.sampler.burn_in, method.replace(model=curved).sampler.burn_in) == (0, 100)


def test_another_prior_asks_for_its_own_kernel_and_step() -> None:
    method = fp.FedSOUL(linear_model())
    other = method.replace(prior="mixture")
    assert isinstance(other.sampler.kernel, fp.kernels.MixtureDraw)
    energy = method.replace(prior="energy")
    assert isinstance(energy.sampler.kernel, fp.kernels.JumpHMC)
    assert isinstance(energy.on_beta.on(energy.hierarchy), fp.steps.Adam)


def test_what_was_given_is_what_is_told() -> None:
    told = fp.FedSOUL(linear_model(), prior="full").describe()
    assert (told["prior"], told["kernel"], told["phi_step"]) == ("full", None, None)


class Late(nn.Module):
    """The last layer that is registered is not the last one that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.body = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_data_do_not_change_the_model() -> None:
    model = fp.Split(Late(), personal="head.*", likelihood=fp.likelihoods.Normal(1.0))
    before = dict(vars(model))
    population = fp.FedSOUL(model).fit(ragged((4, 3)), rounds=1, progress=False)
    assert vars(model) == before
    assert population.model is not model
    assert population.model.linear
    assert not model.linear
