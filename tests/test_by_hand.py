"""FedSOUL's round on the synthetic task equals the same arithmetic written down in one torch function."""

from __future__ import annotations

import torch

from benchmarks.small_rounds import STEPS, Hand, begun
from fedpop.data.synthetic import SyntheticTask


def test_rounds_are_those_by_hand() -> None:
    run = begun(SyntheticTask(b=12, k=6), STEPS)
    hand = Hand(run)
    for _ in range(5):
        run.train_round()
        hand.round()
    torch.testing.assert_close(run.server["phi"], hand.phi, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(run.server["beta"], hand.beta, rtol=2e-4, atol=2e-5)
