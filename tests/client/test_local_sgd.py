"""Epochs on linear heads by their closed-form gradient are the epochs that vmap makes."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client.losses import head_loss
from fedpop.models.local import LinearLikelihood
from tests.helpers import cohort_of, generator, seeded, train_key

WIDE = torch.float64
SIZES = (3, 0, 5, 1, 7)
HEADS = {
    "normal": (fp.likelihoods.Normal(0.5), 2, True),
    "learned variance": (fp.likelihoods.Normal(), 1, False),
    "categorical": ("categorical", 3, True),
    "bernoulli": ("bernoulli", 2, True),
    "poisson": ("poisson", 1, True),
}
STEPS = {
    "whole": fp.LocalSGD(3, 0.05),
    "batches": fp.LocalSGD(2, 0.05, batch=2, momentum=0.9, decay=0.1),
    "one batch of many": fp.LocalSGD(1, 0.05, batch=50),
}


def targets(name: str, n: int, outputs: int, g: torch.Generator) -> torch.Tensor:
    if name == "categorical":
        return torch.randint(outputs, (n,), generator=g)
    y = torch.randn(n, outputs, generator=g, dtype=WIDE)
    if name == "bernoulli":
        y = (y > 0).to(WIDE)
    elif name == "poisson":
        y = y.abs().round()
    return y if outputs > 1 else y[:, 0]


@pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed effects"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("head", HEADS)
def test_the_same_steps(head: str, steps: str, fixed: bool) -> None:
    likelihood, outputs, bias = HEADS[head]
    beside = seeded(nn.Linear(4, outputs), 4).to(WIDE) if fixed else None
    model = fp.Composition(
        seeded(nn.Linear(4, 3), 1).to(WIDE),
        seeded(nn.Linear(3, outputs, bias=bias), 2).to(WIDE),
        likelihood,
        fixed=beside,
    )
    g = generator(0)
    clients = [(torch.randn(n, 4, generator=g, dtype=WIDE), targets(head, n, outputs, g)) for n in SIZES]
    cohort, sgd = cohort_of(model, clients), STEPS[steps]
    phi, z = model.initial_phi(), torch.randn(len(SIZES), model.z_layout.size, generator=g, dtype=WIDE)
    features = model.features(phi, cohort).detach()
    local = model.bind(phi, features, cohort)
    assert isinstance(local, LinearLikelihood)
    by_vmap = sgd.run(head_loss(model, phi), z, z[:, :0], features, cohort, train_key(), dropout=False).w
    torch.testing.assert_close(sgd.run_heads(local, z, cohort, train_key()), by_vmap, rtol=1e-10, atol=1e-12)
    assert not torch.equal(by_vmap[0], z[0])
    assert torch.equal(by_vmap[1], z[1])  # no example, no step
