"""The area under the ROC curve against its definition, pair by pair, and against scipy's U."""

import math

import pytest
import torch
from scipy import stats

from fedpop.keys import Key
from research.ood import auroc


def scores(n: int, m: int, levels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, of which many agree where levels are few."""
    u = Key(seed, purpose="scores").uniform(torch.tensor([0]), (n + m,), torch.float64)[0]
    both = (u * levels).floor()
    return both[:n], both[n:] + levels // 3


@pytest.mark.parametrize(("n", "m", "levels"), [(1, 1, 2), (7, 30, 4), (40, 25, 10), (50, 50, 10**6)])
def test_every_pair_is_counted(n: int, m: int, levels: int) -> None:
    inside, outside = scores(n, m, levels, seed=n)
    above = (outside[:, None] > inside).double() + (outside[:, None] == inside).double() / 2
    # Sums of halves are exact; one division remains.
    assert auroc(inside, outside) == pytest.approx(float(above.mean()), rel=1e-15)
    assert auroc(outside, inside) == pytest.approx(1 - float(above.mean()), rel=1e-15, abs=1e-15)


def test_it_is_the_area_under_the_curve() -> None:
    """Which is Mann's and Whitney's U over the number of pairs."""
    inside, outside = scores(60, 80, 25, seed=3)
    known = stats.mannwhitneyu(outside.numpy(), inside.numpy()).statistic / (60 * 80)
    assert auroc(inside, outside) == pytest.approx(float(known), abs=1e-12)


def test_nothing_to_tell_apart() -> None:
    none, some = torch.zeros(0), torch.ones(2)
    assert math.isnan(auroc(none, some))
    assert math.isnan(auroc(some, none))
    assert math.isnan(auroc(some, torch.tensor([math.nan])))
