"""Scores of class probabilities against values worked out by hand."""

import math

import pytest
import torch

from fedpop.errors import DataError
from fedpop.evaluation.calibration import brier, calibration_error, log_score, scores


def test_by_hand() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.25, 0.25, 0.5]])
    labels = torch.tensor([0, 0, 2])
    found = scores(probs, labels)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["log_score"] == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 3, rel=1e-6)
    expected = (0.3**2 + 0.2**2 + 0.1**2) + (0.7**2 + 0.6**2 + 0.1**2) + (0.25**2 * 2 + 0.5**2)
    assert found["brier"] == pytest.approx(expected / 3, rel=1e-6)
    # Each prediction in a bin of its own: |1 - .7|, |0 - .6|, |1 - .5|.
    assert found["ece"] == pytest.approx((0.3 + 0.6 + 0.5) / 3, rel=1e-5)


def test_a_calibrated_bin_has_no_error() -> None:
    probs = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
    assert calibration_error(probs, torch.tensor([0, 0, 0, 1])) == pytest.approx(0, abs=1e-6)


def test_sure_and_wrong() -> None:
    probs = torch.tensor([[1.0, 0.0]])
    assert brier(probs, torch.tensor([1])) == 2.0
    assert math.isfinite(log_score(probs, torch.tensor([1])))


def test_nothing_to_judge() -> None:
    with pytest.raises(DataError, match="no predictions"):
        calibration_error(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
