"""Directions that a model cannot tell apart: moving along them changes no prediction."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.evaluation.marginal import closed_form
from fedpop.priors.normal import Normal
from fedpop.server.averaging import Gauge, aligner
from tests.helpers import cohort_of, generator, ragged, seeded

WIDE = torch.float64


def model(backbone_bias: bool = False, head_bias: bool = False, outputs: int = 1) -> fp.Composition:
    return fp.Composition(
        seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=backbone_bias)).to(WIDE), 1),
        seeded(nn.Linear(2, outputs, bias=head_bias).to(WIDE), 2),
        fp.likelihoods.Normal(0.3),
    )


def theta(m: fp.Composition, prior: Normal, seed: int = 3) -> tuple[Tensor, Tensor]:
    d = m.z_layout.size
    beta = torch.randn(prior.size(d), generator=generator(seed), dtype=WIDE) * 0.5
    return m.initial_phi(), beta


def rotation(angle: float, flip: bool = False) -> Tensor:
    a = torch.tensor(angle, dtype=WIDE)
    out = torch.stack((torch.stack((a.cos(), -a.sin())), torch.stack((a.sin(), a.cos()))))
    return out * torch.tensor([1.0, -1.0], dtype=WIDE) if flip else out


CASES = {
    "isotropic": (Normal(), {}, 1.7 * rotation(0.9)),
    "isotropic, mirrored": (Normal(), {}, 0.4 * rotation(0.9, flip=True)),
    "isotropic, backbone bias": (Normal(), {"backbone_bias": True}, 1.7 * rotation(0.9)),
    "isotropic, head bias": (Normal(), {"head_bias": True}, rotation(0.9)),
    "isotropic, two outputs": (Normal(), {"outputs": 2}, 1.7 * rotation(0.9)),
    "full": (Normal("full"), {}, torch.tensor([[1.0, 0.3], [-0.8, 0.5]], dtype=WIDE)),
}
cases = pytest.mark.parametrize("case", CASES)


def marginal(m: fp.Composition, prior: Normal, phi: Tensor, beta: Tensor) -> Tensor:
    """Each client's exact marginal log-likelihood: all that theta says about data."""
    outputs = m.outputs
    clients = [(x, y.unsqueeze(1).expand(-1, outputs)) for x, y in ragged((3, 2, 4))]
    cohort = cohort_of(m, clients)
    return closed_form(fp.FedSOUL(m, prior=prior).hierarchy.target_at(phi, beta, cohort))


@cases
def test_a_transform_changes_no_prediction(case: str) -> None:
    prior, options, a = CASES[case]
    m = model(**options)
    phi, beta = theta(m, prior)
    gauge = Gauge.of(m, prior)
    assert gauge is not None
    moved_phi, moved_beta = gauge.transform(phi, beta, a)
    assert not torch.allclose(moved_phi, phi)
    torch.testing.assert_close(marginal(m, prior, moved_phi, moved_beta), marginal(m, prior, phi, beta))


@cases
def test_alignment_recovers_the_reference(case: str) -> None:
    prior, options, a = CASES[case]
    m = model(**options)
    reference = torch.cat(theta(m, prior))
    size = m.phi_layout.size
    gauge = Gauge.of(m, prior)
    assert gauge is not None
    moved = torch.cat(gauge.transform(reference[:size], reference[size:], a))
    torch.testing.assert_close(aligner(m, prior)(moved, reference), reference)


@cases
def test_alignment_changes_no_prediction_wherever_the_reference_is(case: str) -> None:
    prior, options, _ = CASES[case]
    m = model(**options)
    phi, beta = theta(m, prior)
    other = torch.cat((seeded_like(phi), theta(m, prior, seed=4)[1]))
    aligned = aligner(m, prior)(torch.cat((phi, beta)), other)
    size = m.phi_layout.size
    found = marginal(m, prior, aligned[:size], aligned[size:])
    torch.testing.assert_close(found, marginal(m, prior, phi, beta))


def seeded_like(v: Tensor) -> Tensor:
    return torch.randn(v.shape, generator=generator(5), dtype=v.dtype)


def test_a_fixed_scale_leaves_rotations_only() -> None:
    prior = Normal(learn_scale=False, scale=1.0)
    m = model()
    phi, beta = theta(m, prior)
    beta[-1] = 0.0
    other = torch.cat((3 * phi, beta))
    aligned = aligner(m, prior)(torch.cat((phi, beta)), other)
    assert float(aligned[-1]) == pytest.approx(0.0)
    torch.testing.assert_close(aligned[: phi.shape[0]].norm(), phi.norm())


@pytest.mark.parametrize(
    ("prior", "backbone", "head_bias"),
    [
        (Normal("diagonal"), nn.Linear(3, 2), False),
        (Normal("full"), nn.Linear(3, 2), True),
        (Normal(mean=1.0, learn_mean=False), nn.Linear(3, 2), False),
        (Normal(), nn.Sequential(nn.Linear(3, 2), nn.ReLU()), False),
    ],
    ids=["diagonal", "full with a bias", "a fixed mean", "a nonlinearity at the end"],
)
def test_models_without_this_freedom_are_left_alone(
    prior: Normal, backbone: nn.Module, head_bias: bool
) -> None:
    m = fp.Composition(backbone, nn.Linear(2, 1, bias=head_bias), fp.likelihoods.Normal(0.3))
    assert Gauge.of(m, prior) is None
    size = m.phi_layout.size + prior.size(m.z_layout.size)
    v = torch.randn(size, generator=generator(6))
    assert torch.equal(aligner(m, prior)(v, torch.zeros(size)), v)
