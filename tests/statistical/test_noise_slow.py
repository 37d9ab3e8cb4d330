"""A fixed small noise variance traps the fit in a local optimum; a learned one finds the subspace."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.evaluation.subspace import principal_angle
from tests.helpers import generator, seeded

pytestmark = pytest.mark.slow


def angle(variance: float | str) -> float:
    """The README's data with one example of each client held out: the angle to the truth."""
    g = generator(0)
    shared = torch.randn(20, 2, generator=g)
    clients = {}
    for i in range(100):
        x, z = torch.randn(5, 20, generator=g), torch.randn(2, generator=g)
        clients[f"client-{i:02d}"] = (x, x @ shared @ z + 0.3 * torch.randn(5, generator=g))
    backbone, head = nn.Linear(20, 2, bias=False), nn.Linear(2, 1, bias=False)
    model = fp.Composition(seeded(backbone, 1), seeded(head, 2), fp.likelihoods.Normal(variance))
    population = fp.FedSOUL(model).fit(fp.hold_out(clients, test=0.2, seed=0), rounds=300, progress=False)
    return float(principal_angle(shared.double(), population.phi["backbone.weight"].mT.double()))


def test_a_learned_noise_variance_escapes_where_a_fixed_small_one_does_not() -> None:
    assert angle(0.09) > 0.5
    assert angle("learned") < 0.1
