"""FedSOUL's round on the synthetic task equals the same arithmetic written down in one torch function."""

from __future__ import annotations

import pytest
import torch

from benchmarks.small_rounds import ANNEALED, STEPS, Hand, begun
from fedpop.data.synthetic import SyntheticTask


@pytest.mark.parametrize("first", [0, ANNEALED - 2], ids=["annealed", "from annealed to plain"])
def test_rounds_are_those_by_hand(first: int) -> None:
    """From the first round on; and over the end of the annealing, from where the run stands by then."""
    run = begun(SyntheticTask(b=12, k=6), STEPS)
    hand = Hand(run)
    for _ in range(first):
        run.train_round()
    hand.at(run)
    for _ in range(5):
        run.train_round()
        hand.round()
    torch.testing.assert_close(run.server["phi"], hand.phi, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(run.server["beta"], hand.beta, rtol=2e-4, atol=2e-5)
