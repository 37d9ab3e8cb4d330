"""R-hat, effective draws and the gradient at the returned theta."""

import pytest
import torch

from fedpop.evaluation.diagnostics import (
    ChainDiagnostics,
    Diagnostics,
    ThetaDiagnostics,
    gradient_ratio,
    rhat_and_ess,
)
from tests.helpers import generator


def test_independent_draws_have_mixed() -> None:
    draws = torch.randn(4, 250, 3, generator=generator(0))
    rhat, ess = rhat_and_ess(draws)
    assert rhat < 1.02
    assert 500 < ess < 2000


def test_the_worst_coordinate_counts() -> None:
    """One coordinate whose chains disagree is enough."""
    draws = torch.randn(4, 250, 3, generator=generator(0))
    draws[:, :, 1] += torch.tensor([0.0, 0.0, 0.0, 4.0])[:, None]
    rhat, ess = rhat_and_ess(draws)
    assert rhat > 1.5
    assert ess < 30


def test_autocorrelation_costs_effective_draws() -> None:
    """An AR(1) chain has (1 - r) / (1 + r) effective draws per draw."""
    r, g = 0.9, generator(1)
    z = torch.randn(4, 1, generator=g)
    chain = []
    for _ in range(2000):
        z = r * z + (1 - r * r) ** 0.5 * torch.randn(4, 1, generator=g)
        chain.append(z)
    _, ess = rhat_and_ess(torch.stack(chain, 1))
    assert ess == pytest.approx(4 * 2000 * (1 - r) / (1 + r), rel=0.3)


def test_chains_that_have_not_mixed_are_named() -> None:
    chains = ChainDiagnostics(
        ["a", "b", "c"], torch.tensor([1.0, 1.2, 1.0]), torch.tensor([900.0, 900.0, 20.0])
    )
    assert chains.unmixed == ["b", "c"]
    theta = ThetaDiagnostics(1.0, 1.0, 0.0, [])
    report = Diagnostics(chains, theta)
    assert report.warnings == ["chains of 2 client(s) have not mixed: b, c"]
    assert "R-hat at most 1.200" in str(report)
    assert "effective draws at least 20" in str(report)


def test_the_gradient_ratio_is_about_one_at_a_maximum_and_grows_away_from_it() -> None:
    """Its square is chi-square over its degrees: about one, and norm(truth) over the error elsewhere."""
    noise = torch.randn(8, 500, generator=generator(2))
    assert gradient_ratio(noise) == pytest.approx(1.0, abs=0.2)
    shift = torch.zeros(500)
    shift[0] = 100.0
    assert gradient_ratio(noise + shift) == pytest.approx(100 / (500 / 8) ** 0.5, rel=0.15)
    assert gradient_ratio(torch.zeros(8, 0)) == 0.0


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        (ThetaDiagnostics(9.0, 1.0, None, []), "the gradient in phi is 9.0 times"),
        (ThetaDiagnostics(1.0, 9.0, None, []), "the gradient in beta is 9.0 times"),
        (ThetaDiagnostics(1.0, 1.0, 0.2, []), "theta still moved by 20.0 %"),
        (ThetaDiagnostics(1.0, 1.0, None, ["the prior's scale is at its lower bound"]), "lower bound"),
    ],
)
def test_every_trouble_with_theta_has_its_sentence(theta: ThetaDiagnostics, message: str) -> None:
    assert len(theta.warnings) == 1
    assert message in theta.warnings[0]
    assert ThetaDiagnostics(1.0, 1.0, 0.01, []).warnings == []
    assert ThetaDiagnostics(None, None, None, []).warnings == []
