"""R-hat, effective draws and the gradient at the returned theta."""

import pytest
import torch

import fedpop as fp
from fedpop.evaluation.diagnostics import (
    ESS_CUTS,
    RHAT_CUTS,
    ChainsAndGradient,
    Diagnostics,
    ThetaDiagnostics,
    gradient_ratio,
    mixed,
    rhat_and_ess,
)
from fedpop.evaluation.verdict import Distance, LossTrend
from fedpop.keys import Key
from fedpop.message import Channel
from fedpop.questions import Units
from tests.helpers import cohort_of, generator, linear_model, ragged
from tests.tally import Tally


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


def answered(*draws: torch.Tensor) -> Diagnostics:
    """The diagnostics that clients with these final draws ``[chains, n, d]`` make together."""
    method = fp.FedSOUL(linear_model())
    cohort = cohort_of(method.model, ragged((2,) * len(draws)))
    theta = {"phi": method.model.initial_phi(), "beta": torch.zeros(3)}
    question = ChainsAndGradient(method.hierarchy, 0.0, (), whole=False)
    units = Units(cohort, {}, lambda: {"draws": torch.stack(draws)}, lambda split: cohort)
    tally = Tally(Channel(), Key(0))
    tally.add(question.answer(question.ask(theta), units, Key(0)), cohort.units, torch.ones(len(draws)))
    return question.finish(theta, tally.total(len(draws), ratio=False))


def test_chains_that_have_not_mixed_are_counted() -> None:
    """One client's chains are fine, one's disagree, one's hardly move; each is known at its own site."""
    g = generator(3)
    good = torch.randn(4, 250, 2, generator=g)
    apart = good + torch.tensor([0.0, 0.0, 0.0, 4.0])[:, None, None]
    slow = torch.randn(4, 1, 2, generator=g) + 1e-3 * torch.randn(4, 250, 2, generator=g).cumsum(1)
    each = [rhat_and_ess(draws) for draws in (good, apart, slow)]
    assert [mixed(*pair) for pair in each] == [True, False, False]
    report = answered(good, apart, slow)
    chains = report.chains
    assert (chains.units, chains.unmixed) == (3, 2)
    assert chains.rhat_below == {v: sum(r <= v for r, _ in each) for v in RHAT_CUTS}
    assert chains.ess_above == {v: sum(e >= v for _, e in each) for v in ESS_CUTS}
    assert report.warnings == ["chains of 2 client(s) have not mixed; Population.mixing tells whose"]
    assert "1 of 3 client(s) mixed (R-hat above 1.1, effective draws fewer than 100)" in str(report)
    assert "warning  chains of 2 client(s)" in str(report)


def test_chains_that_have_all_mixed_are_told_by_the_worst_of_them() -> None:
    """The levels between which everyone is: never better than the worst client's own numbers."""
    draws = [torch.randn(4, 250, 2, generator=generator(s)) for s in range(5)]
    each = [rhat_and_ess(own) for own in draws]
    rhat, ess = max(r for r, _ in each), min(e for _, e in each)
    report = answered(*draws)
    assert report.warnings == []
    least = min(v for v in RHAT_CUTS if v >= rhat)
    most = max(v for v in ESS_CUTS if v <= ess)
    assert f"R-hat at most {least:g}, effective draws at least {most:.0f}, over 5 client(s)" in str(report)


def test_a_chain_that_never_moved_has_not_mixed() -> None:
    assert answered(torch.ones(4, 250, 2)).chains.unmixed == 1


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
        (ThetaDiagnostics(1.0, 1.0, None, [], Distance(9.0, 0.0, 0, True)), "about 9 nats below a local"),
        (ThetaDiagnostics(1.0, 1.0, None, [], Distance(0.0, 0.0, 2, True)), "curves upwards in 2 direction"),
        (
            ThetaDiagnostics(1.0, 1.0, None, [], Distance(0.1, 0.2, 0, False)),
            "cannot be told from these draws",
        ),
        (ThetaDiagnostics(1.0, 1.0, None, [], LossTrend(0.2, 0.01, 1.0)), "the training loss still fell"),
        (ThetaDiagnostics(1.0, 1.0, None, ["the prior's scale is at its lower bound"]), "lower bound"),
    ],
)
def test_every_trouble_with_theta_has_its_sentence(theta: ThetaDiagnostics, message: str) -> None:
    assert len(theta.warnings) == 1
    assert message in theta.warnings[0]
    # the ratio and the drift are told, and judge nothing
    assert ThetaDiagnostics(9.0, 9.0, 0.2, [], Distance(0.01, 0.0, 0, True)).warnings == []
    assert ThetaDiagnostics(1.0, 1.0, 0.01, [], LossTrend(0.0, 0.001, 1.0)).warnings == []
    assert ThetaDiagnostics(None, None, None, []).warnings == []


@pytest.mark.parametrize(("chains", "draws"), [(1, 1), (1, 2), (2, 3), (2, 5)])
def test_few_draws_and_an_odd_number_of_them(chains: int, draws: int) -> None:
    """They cannot have mixed; that is told, not raised."""
    final = fp.chains.Final(chains, draws, burn_in=1)
    method = fp.FedSOUL(linear_model(), engine="sampled", kernel="hmc", final=final)
    found = method.fit(ragged(), rounds=2, progress=False).diagnostics()
    assert found.chains.unmixed > 0
    assert found.theta.phi_gradient is not None
