"""A fixed small noise variance traps the fit in a local optimum; a learned one finds the subspace."""

from statistics import median

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.evaluation.subspace import principal_angle
from tests.helpers import generator, seeded

pytestmark = pytest.mark.slow


def angle(variance: float | str, split: int) -> float:
    """The README's data with one example of each client held out: the angle to the truth, from a random
    start. From the spectral start such optima are rare (none in sixty of these splits)."""
    g = generator(0)
    shared = torch.randn(20, 2, generator=g)
    clients = {}
    for i in range(100):
        x, z = torch.randn(5, 20, generator=g), torch.randn(2, generator=g)
        clients[f"client-{i:02d}"] = (x, x @ shared @ z + 0.3 * torch.randn(5, generator=g))
    backbone, head = nn.Linear(20, 2, bias=False), nn.Linear(2, 1, bias=False)
    model = fp.Composition(seeded(backbone, 1), seeded(head, 2), fp.likelihoods.Normal(variance))
    federation = fp.hold_out(clients, test=0.2, seed=split)
    population = fp.FedSOUL(model, start="random", engine="sampled").fit(
        federation, rounds=300, progress=False
    )
    return float(principal_angle(shared.double(), population.phi["backbone.weight"].mT.double()))


def test_a_learned_noise_variance_escapes_where_a_fixed_small_one_does_not() -> None:
    """Over five splits: which of them has a trap on the way is chance, most have."""
    fixed, learned = ([angle(variance, split) for split in range(5)] for variance in (0.09, "learned"))
    assert median(fixed) > 0.3, fixed
    assert max(learned) < 0.1, learned
