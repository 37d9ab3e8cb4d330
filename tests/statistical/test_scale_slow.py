"""The prior's scale from starts five times too small and too large, over examples and participation.

The oracle is that of ``tests/algorithms/test_scale.py``. Heads of 28 weights in all cells; those of 650, as a
network has them, with many examples only: with 5 or 25 of them the likelihood is flat over a factor of four.
"""

import pytest

from tests.algorithms.test_scale import TRUTH, bounded, ends_at_one_place, path, population

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "n"), [("categorical", 60), ("bernoulli", 15)])
def test_both_starts_end_at_one_place(family: str, n: int) -> None:
    ends_at_one_place(family, n)


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("n", [5, 25, 500])
@pytest.mark.parametrize("family", ["categorical", "bernoulli", "poisson"])
def test_small_heads(family: str, n: int, share: float) -> None:
    model, clients = population(
        family, n, clients=60, features=6, outputs=4 if family == "categorical" else 1
    )
    agree(model, clients, TRUTH[family], share)


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
def test_heads_of_a_network(share: float) -> None:
    model, clients = population("categorical", 500, clients=60, features=64, outputs=10)
    agree(model, clients, 1.0, share)


def agree(model, clients, truth: float, share: float) -> None:
    ends = []
    for start in (truth / 5, truth * 5):
        seen = path(model, clients, start, rounds=round(40 / share), share=share)
        assert bounded(seen, start, truth)
        ends.append(seen[-1])
    assert max(ends) / min(ends) < 1.2
