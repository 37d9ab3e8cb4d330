"""The area under the ROC curve against its definition, pair by pair, and against torchmetrics."""

import math

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from fedpop.evaluation.outliers import auroc
from fedpop.keys import Key


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
    inside, outside = scores(60, 80, 25, seed=3)
    labels = torch.cat((torch.zeros(60), torch.ones(80))).long()
    # torchmetrics takes scores within [0, 1] as they are.
    known = binary_auroc(torch.cat((inside, outside)).float() / 100, labels)
    assert auroc(inside, outside) == pytest.approx(float(known), abs=1e-6)


def test_nothing_to_tell_apart() -> None:
    none, some = torch.zeros(0), torch.ones(2)
    assert math.isnan(auroc(none, some))
    assert math.isnan(auroc(some, none))
    assert math.isnan(auroc(some, torch.tensor([math.nan])))
