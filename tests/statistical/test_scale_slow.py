"""The prior's scale from starts five times too small and too large, over examples and participation.

The oracle is that of ``tests/methods/test_scale.py``. Heads of 28 weights in all cells; those of 650, as a
network has them, meet with many examples only. With 5 or 25 of them the likelihood itself does not tell
scales above the truth apart, which is measured here too; there the scale stays within bounds, no more.
"""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from tests.methods.test_scale import TRUTH, bounded, ends_at_one_place, path, population

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "n"), [("categorical", 60), ("bernoulli", 15)])
def test_both_starts_end_at_one_place(family: str, n: int) -> None:
    ends_at_one_place(family, n)


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("n", [5, 25, 500])
@pytest.mark.parametrize("family", ["categorical", "bernoulli", "poisson"])
def test_small_heads(family: str, n: int, share: float) -> None:
    model, clients = population(family, n, clients=60, features=6, outputs=outputs_of(family))
    agree(model, clients, TRUTH[family], share, best(family, n))


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
def test_heads_of_a_network(share: float) -> None:
    """Where the truth is, up to chance: 60 x 650 weights are known to a percent."""
    model, clients = population("categorical", 500, clients=60, features=64, outputs=10)
    agree(model, clients, 1.0, share, (1.0, 0.01))


def outputs_of(family: str) -> int:
    return 4 if family == "categorical" else 1


def agree(model, clients, truth: float, share: float, best: tuple[float, float]) -> None:
    """Within a fifth of each other and of the likelihood's best, or two standard errors of that: with five
    examples, 28 weights and everyone in each of 40 rounds the larger start is at 1.24, .90 +- .19 being the
    best in the logarithm."""
    at, error = best
    ends = []
    for start in (truth / 5, truth * 5):
        seen = path(model, clients, start, rounds=round(40 / share), share=share)
        assert bounded(seen, start, truth)
        ends.append(seen[-1])
    assert max(ends) / min(ends) < 1.2
    assert all(abs(math.log(end / at)) < max(math.log(1.2), 2 * error) for end in ends)


@cache
def best(family: str, n: int) -> tuple[float, float]:
    """The scale of the largest marginal likelihood of small heads, where its derivative is zero, and the
    standard error of its logarithm."""
    _, clients = population(family, n, clients=60, features=6, outputs=outputs_of(family))
    scales = [TRUTH[family] * s for s in (0.5, 0.8, 1.25, 2.0)]
    slopes = [scale_score(family, clients, s) for s in scales]
    for (a, b), (low, high) in zip(pairwise(slopes), pairwise(scales), strict=True):
        if a > 0 >= b:
            width = math.log(high / low)
            return low * math.exp(width * a / (a - b)), math.sqrt(width / (a - b))
    raise AssertionError(slopes)


# --- few examples: what the likelihood itself says ------------------------------------------------

SCALES = (0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.4, 2.0, 3.0, 5.0)


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("n", [5, 25])
def test_few_examples_keep_within_bounds(n: int, share: float) -> None:
    model, clients = population("categorical", n, clients=60, features=64, outputs=10)
    for start in (0.2, 5.0):
        assert bounded(path(model, clients, start, rounds=round(40 / share), share=share), start, 1.0)


@pytest.mark.parametrize("n", [5, 25])
def test_with_few_examples_the_likelihood_does_not_tell_large_scales_apart(n: int) -> None:
    """By thermodynamic integration along the logarithm of the scale, with a sampler of the test's own: from
    .8 to 5 less than three nats for all 60 clients together, while .2 is more than four short."""
    _, clients = population("categorical", n, clients=60, features=64, outputs=10)
    level = [0.0]
    slopes = [scale_score("categorical", clients, s) for s in SCALES]
    for (a, b), (low, high) in zip(pairwise(slopes), pairwise(SCALES), strict=True):
        level.append(level[-1] + 0.5 * (a + b) * math.log(high / low))
    flat = level[SCALES.index(0.8) :]
    assert max(flat) - min(flat) < 3
    assert max(level) - level[0] > 4


def scale_score(
    family: str, clients: list[tuple[Tensor, Tensor]], scale: float, warmup: int = 200, draws: int = 600
) -> float:
    """The derivative of log p(D | scale) in log(scale), E[z . grad log p(D | z)], by HMC on z / scale."""
    g = torch.Generator().manual_seed(1)
    x = torch.stack([torch.cat((x, torch.ones(len(x), 1)), 1) for x, _ in clients])
    y = torch.stack([y for _, y in clients])
    y = one_hot(y).float() if family == "categorical" else y.reshape(*x.shape[:2], 1)

    def at(u: Tensor) -> tuple[Tensor, Tensor]:
        eta = torch.einsum("cnq,coq->cno", x, scale * u)
        if family == "categorical":
            value, mean = eta.log_softmax(-1) * y, eta.softmax(-1)
        elif family == "bernoulli":
            value, mean = eta * y - softplus(eta), eta.sigmoid()
        else:
            value, mean = eta * y - eta.exp(), eta.exp()
        slope = scale * torch.einsum("cno,cnq->coq", y - mean, x)
        return value.sum((1, 2)) - 0.5 * u.square().sum((1, 2)), slope

    u, step, total = (
        torch.randn(len(clients), y.shape[-1], x.shape[-1], generator=g),
        torch.full((len(clients), 1, 1), 0.15),
        0.0,
    )
    for k in range(warmup + draws):
        p = torch.randn(u.shape, generator=g)
        (value, slope), new = at(u), u
        energy = value - 0.5 * p.square().sum((1, 2))
        for _ in range(10):
            half = p + 0.5 * step * (slope - new)
            new = new + step * half
            value, slope = at(new)
            p = half + 0.5 * step * (slope - new)
        accepted = torch.rand(len(u), generator=g).log() < value - 0.5 * p.square().sum((1, 2)) - energy
        u = torch.where(accepted[:, None, None], new, u)
        if k < warmup:
            step = step * torch.where(accepted, 1.03, 0.92)[:, None, None]
        else:
            total += float((u * at(u)[1]).sum()) / draws
    return total
