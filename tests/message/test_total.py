"""What the server makes of sums: scaled, of nobody, of what was never sent."""

from dataclasses import replace

import pytest
import torch

from fedpop.message import Total


def total(count: int = 4, ratio: bool = True) -> Total:
    weighted = {"J": torch.arange(6.0), "n": torch.tensor([8.0])}
    plain = {"J": torch.ones(6), "n": torch.tensor([2.0])}
    return Total(weighted, plain, {"memory": torch.full((6,), 3.0)}, count, 7.0, 10, ratio)


def test_b_over_a_or_nothing() -> None:
    """b/|A| under ratio weights, one where weights are 1/p_i, defined where nobody was heard."""
    assert total().scale == 10 / 4
    assert total(ratio=False).scale == 1.0
    assert Total.of_nobody(10).scale == 10.0
    assert Total.of_nobody(10, ratio=False).scale == 1.0


def test_an_estimate_is_the_scaled_sum_in_the_shape_that_is_wanted() -> None:
    wanted = torch.zeros(2, 3)
    assert torch.equal(total().estimate("J", wanted), 2.5 * torch.arange(6.0).reshape(2, 3))
    assert torch.equal(total(ratio=False).estimate("J", wanted), torch.arange(6.0).reshape(2, 3))
    assert float(total().estimate("n", torch.zeros(()))) == 20.0
    assert torch.equal(total().plain_sum("J", torch.zeros(6)), torch.ones(6))
    assert torch.equal(total().named_sum("memory", torch.zeros(6)), torch.full((6,), 3.0))
    with pytest.raises(RuntimeError):
        total().estimate("J", torch.zeros(5))


@pytest.mark.parametrize("ratio", [True, False])
def test_nobody_says_zeros_of_any_shape(ratio: bool) -> None:
    nobody = Total.of_nobody(10, ratio)
    assert (nobody.count, nobody.weight, nobody.of) == (0, 0.0, 10)
    for like in (torch.ones(3), torch.ones(2, 4, dtype=torch.float64), torch.ones(())):
        for found in (nobody.estimate("J", like), nobody.plain_sum("J", like), nobody.named_sum("J", like)):
            assert found.shape == like.shape
            assert found.dtype == like.dtype
            assert not bool(found.any())
    assert nobody.mean("J", "n") is None


def test_what_was_never_sent_is_zero() -> None:
    assert not bool(total().estimate("curvature", torch.ones(3)).any())


def test_silence_is_nobody_under_ratio_weights() -> None:
    """Under 1/p_i weights a round of nobody still says something: the hyperprior makes its step."""
    assert Total.of_nobody(10).no_step
    assert not Total.of_nobody(10, ratio=False).no_step
    assert not total().no_step
    assert not total(ratio=False).no_step
    assert replace(total(), count=0).no_step


def test_a_mean_is_a_ratio_of_sums() -> None:
    found = total().mean("J", "n")
    assert found is not None
    torch.testing.assert_close(found, torch.arange(6.0) / 8)
    without = replace(total(), weighted={"J": torch.ones(2), "n": torch.zeros(1)})
    assert without.mean("J", "n") is None
