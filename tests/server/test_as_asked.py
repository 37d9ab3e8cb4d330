"""What is asked for by name is what runs; what runs by default has a name and settings of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.server.beta_step import Turn
from fedpop.server.optimisers import Stage
from tests.helpers import generator, linear_model, ragged, seeded


def frozen(outputs: int = 1) -> fp.Composition:
    """A head on x itself: no backbone learns, and no posterior is closed-form."""
    return fp.Composition(None, seeded(nn.Linear(3, outputs), 2), "bernoulli")


def network() -> fp.Composition:
    body = seeded(nn.Sequential(nn.Linear(3, 160), nn.Tanh()), 1)
    return fp.Composition(body, seeded(nn.Linear(160, 1), 2), "bernoulli")


def clients(b: int = 6) -> list[tuple[Tensor, Tensor]]:
    g = generator(0)
    return [(torch.randn(5, 3, generator=g), (torch.rand(5, generator=g) < 0.6).float()) for _ in range(b)]


def ends(model: fp.Composition, data: Any = None, rounds: int = 8, **settings: Any) -> dict[str, Tensor]:
    average = fp.steps.Averaging("last")
    method = fp.FedSOUL(model, average=average, **settings)
    return method.fit(clients() if data is None else data, rounds=rounds, progress=False).published


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[n], other[n]) for n in ("phi", "beta"))


# --- the prior ---------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal"])
def test_the_default_is_em_and_adam_by_name(covariance: str) -> None:
    usual = ends(frozen(), prior=covariance)
    assert alike(usual, ends(frozen(), prior=covariance, beta_step=fp.steps.EMAdam()))
    assert alike(usual, ends(frozen(), prior=covariance, beta_step=fp.steps.BetaStep(fp.steps.EMAdam())))
    assert not alike(usual, ends(frozen(), prior=covariance, beta_step=fp.steps.EM()))
    quick = fp.steps.EMAdam(scale=fp.steps.Adam(0.01, fp.steps.Constant()))
    assert not alike(usual, ends(frozen(), prior=covariance, beta_step=quick))


@pytest.mark.parametrize(
    ("model", "prior"),
    [(linear_model(), "normal"), (frozen(), "full"), (frozen(), "mixture"), (network(), "normal")],
    ids=["closed form", "full", "mixture", "network"],
)
def test_elsewhere_it_is_em(model: fp.Composition, prior: str) -> None:
    data = ragged((4, 3)) if model.likelihood.name == "normal" else None
    usual = ends(model, data, prior=prior, engine="sampled", rounds=4)
    assert alike(usual, ends(model, data, prior=prior, beta_step=fp.steps.EM(), rounds=4))


def test_em_by_name_moves_the_scale_by_em() -> None:
    """One step by hand: 2 log sigma changes by log(1 + rate I_scale / d), the mean's move apart."""
    method = fp.FedSOUL(frozen(), beta_step=fp.steps.EM(1.0, 1.0))
    assert method.on_beta.init(method.hierarchy, torch.zeros(5)) == {}
    score = torch.tensor([0.0, 0.0, 0.0, 0.0, -2.0])
    turn = Turn(50, Stage(0, 100), clients=200, active=200.0)
    new, state = method.on_beta.move(method.hierarchy, torch.zeros(5), 200 * score, {}, turn)
    assert state == {}
    assert float(new[4]) == pytest.approx(0.5 * math.log(1 - 2.0 / 4))


def test_rounds_of_few_take_the_share_that_was_asked_for() -> None:
    method = fp.FedSOUL(frozen())
    score, turn = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), Turn(30, Stage(0, 100), clients=1000, active=5.0)

    def moved(**settings: Any) -> float:
        step = fp.steps.BetaStep(fp.steps.EM(1.0, 1.0, **settings))
        return float(step.move(method.hierarchy, torch.zeros(5), 1000 * score, {}, turn)[0][0])

    assert moved() == pytest.approx(0.5 * 10 / 40)
    assert moved(few=5) == pytest.approx(5 / 35)
    assert moved(many=10) == pytest.approx(0.5)
    assert moved(many=1) == 1.0


@pytest.mark.parametrize(
    ("prior", "words"), [("full", "isotropic or diagonal"), ("energy", "EM steps cannot")]
)
def test_what_cannot_be_is_said(prior: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        fp.FedSOUL(frozen(), prior=prior, beta_step=fp.steps.EMAdam())


# --- phi ---------------------------------------------------------------------------------------


def test_the_default_of_networks_by_name() -> None:
    assert network().weights > 500
    usual = ends(network(), rounds=4)
    assert alike(usual, ends(network(), rounds=4, phi_step=fp.steps.NetworkAdam()))
    decay = fp.steps.NetworkAdam().for_weights(network().weights, 30).decay  # type: ignore[attr-defined]
    asked = fp.steps.AdamW(0.03, fp.steps.Cosine(warm_up=10), decay=decay)
    assert decay == 1.0
    assert alike(usual, ends(network(), rounds=4, phi_step=asked))
    for other in (fp.steps.NetworkAdam(worth=10), fp.steps.NetworkAdam(least=1000), fp.steps.Adam(0.03)):
        assert not alike(usual, ends(network(), rounds=4, phi_step=other))


def test_a_large_heads_local_rate_is_a_setting() -> None:
    local = fp.LocalSGD(rate=0.1)
    assert fp.steps.PhiStep(local=local).rate(0, 10, head=2.0) == pytest.approx(0.1 / 16)
    assert fp.steps.PhiStep(local=local, head=1.0).rate(0, 10, head=2.0) == pytest.approx(0.1 / 4)
    assert fp.steps.PhiStep(local=local, head=None).rate(0, 10, head=2.0) == 0.1


def test_fedrep_takes_a_networks_step_with_its_decay() -> None:
    """The number of examples is known to the server, not to the settings."""
    made = [
        fp.FedRep(network(), phi_step=step).fit(clients(), rounds=2, progress=False).published["phi"]
        for step in (
            fp.steps.NetworkAdam(),
            fp.steps.AdamW(0.03, fp.steps.Cosine(warm_up=10), decay=1.0),
            fp.steps.NetworkAdam(worth=0),
        )
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
