"""The natural size of phi's coordinates, and other random starts of the same size."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.server.optimisers import natural_units, redrawn
from tests.helpers import generator, linear_model, seeded, train_key


def test_a_tensors_unit_is_its_root_mean_square() -> None:
    model = fp.Composition(seeded(nn.Linear(3, 2), 1), nn.Linear(2, 1), fp.likelihoods.Normal(0.5))
    phi = model.initial_phi()
    unit = natural_units(model, phi)
    weight, bias = phi[:6], phi[6:]
    torch.testing.assert_close(unit[:6], weight.square().mean().sqrt().expand(6))
    torch.testing.assert_close(unit[6:], bias.square().mean().sqrt().expand(2))


def test_a_tensor_of_zeros_has_the_unit_of_all_and_log_variances_have_one() -> None:
    backbone = seeded(nn.Linear(3, 2), 1)
    with torch.no_grad():
        backbone.bias.zero_()
    model = fp.Composition(backbone, nn.Linear(2, 1), "normal")
    phi = model.initial_phi()
    unit = natural_units(model, phi)
    torch.testing.assert_close(unit[6:8], phi.square().mean().sqrt().expand(2))
    assert float(unit[8]) == 1.0


@pytest.mark.parametrize("size", [0, 6])
def test_nothing_to_go_by_is_one(size: int) -> None:
    model = linear_model() if size else fp.Composition(None, nn.Linear(2, 1), fp.likelihoods.Normal(0.5))
    assert natural_units(model, torch.zeros(size)).tolist() == [1.0] * size


def test_a_redrawn_start_has_the_mean_and_the_spread_of_the_first() -> None:
    """Within five standard errors, tensor by tensor; what has one entry only stays as it is."""
    backbone = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 2))
    with torch.no_grad():
        backbone[0].weight.copy_(3 + 0.2 * torch.randn(50, 40, generator=generator(1)))
        backbone[2].weight.copy_(-1 + 4 * torch.randn(2, 50, generator=generator(2)))
    model = fp.Composition(backbone, nn.Linear(2, 1), "normal")
    phi = model.initial_phi()
    new = redrawn(model, phi, train_key().at(purpose="restart-1"))
    spans = model.phi_layout.spans()
    for name in ("backbone.0.weight", "backbone.2.weight"):
        old, own = phi[spans[name]], new[spans[name]]
        n, sd = len(old), float(old.std())
        assert abs(float(own.mean() - old.mean())) < 5 * sd / n**0.5
        assert abs(float(own.std()) / sd - 1) < 5 / (2 * n) ** 0.5
        assert not bool((own == old).any())
    alone = spans["likelihood.log_variance"]
    assert torch.equal(new[alone], phi[alone])


def test_a_redrawn_start_is_keyed() -> None:
    model = linear_model()
    phi = model.initial_phi()
    one, same, other = (redrawn(model, phi, train_key().at(purpose=p)) for p in ("a", "a", "b"))
    assert torch.equal(one, same)
    assert not bool((one == other).any())
