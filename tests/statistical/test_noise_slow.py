"""A fixed small noise variance traps the fit in a local optimum; annealed or learned it does not."""

from statistics import median

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.evaluation.subspace import principal_angle
from tests.helpers import generator, seeded

pytestmark = pytest.mark.slow


def angle(variance: float | str, split: int, anneal: fp.steps.Anneal) -> float:
    """The README's data with one example of each client held out: the angle to the truth, from a random
    start, since from the spectral one such optima are rare here."""
    g = generator(0)
    shared = torch.randn(20, 2, generator=g)
    clients = {}
    for i in range(100):
        x, z = torch.randn(5, 20, generator=g), torch.randn(2, generator=g)
        clients[f"client-{i:02d}"] = (x, x @ shared @ z + 0.3 * torch.randn(5, generator=g))
    backbone, head = nn.Linear(20, 2, bias=False), nn.Linear(2, 1, bias=False)
    model = fp.Composition(seeded(backbone, 1), seeded(head, 2), fp.likelihoods.Normal(variance))
    federation = fp.hold_out(clients, test=0.2, seed=split)
    population = fp.FedSOUL(model, start="random", engine="sampled", anneal=anneal).fit(
        federation, rounds=300, progress=False
    )
    return float(principal_angle(shared.double(), population.phi["backbone.weight"].mT.double()))


@pytest.mark.filterwarnings("ignore::fedpop.errors.ConvergenceWarning")  # a trapped run says so
def test_a_fixed_small_noise_variance_is_a_trap_unless_it_is_annealed_or_learned() -> None:
    """Over five splits: which of them has a trap on the way is chance, most have."""
    plain, usual = fp.steps.Anneal(rounds=0), fp.steps.Anneal()
    fixed = [angle(0.09, split, plain) for split in range(5)]
    annealed = [angle(0.09, split, usual) for split in range(5)]
    learned = [angle("learned", split, usual) for split in range(5)]
    assert median(fixed) > 0.3, fixed
    assert median(annealed) < 0.1, annealed
    assert max(learned) < 0.1, learned
