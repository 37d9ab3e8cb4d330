"""Mixed models under differential privacy: what groups add, the noise in the intervals, what is refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import FedpopWarning, PrivacyError
from fedpop.federation.participation import Everyone
from fedpop.mixed import private
from fedpop.mixed.private import Asked, Rounds, bounded_parts, gaussian_parts, marginal_parts
from fedpop.privacy import ledger
from fedpop.run.private import PrivateTerms
from tests.helpers import generator

pytest.importorskip("dp_accounting")
pd = pytest.importorskip("pandas")


def table(groups: int = 40, rows: int = 5, seed: int = 0, family: str = "gaussian") -> Any:
    """A random intercept of standard deviation 0.7 and a slope of 0.5."""
    g = generator(seed)
    effect = 0.7 * torch.randn(groups, generator=g, dtype=torch.float64)
    who = torch.arange(groups).repeat_interleave(rows)
    x = torch.randn(len(who), generator=g, dtype=torch.float64)
    eta = 1.0 + 0.5 * x + effect[who]
    y = eta + 0.9 * torch.randn(len(who), generator=g, dtype=torch.float64)
    if family == "bernoulli":
        y = (torch.rand(len(who), generator=g) < eta.sigmoid()).double()
    names = [f"g{i}" for i in who.tolist()]
    return pd.DataFrame({"y": y.numpy(), "x": x.numpy(), "g": names})


def given(**more: Any) -> fp.privacy.Gaussian:
    return fp.privacy.Gaussian(**{"epsilon": 4.0, "delta": 1e-6} | more)


def quiet(frame: Any, formula: str = "y ~ x + (1 | g)", **more: Any) -> Any:
    privacy = {} if "privacy" in more else {"privacy": given()}
    with pytest.warns(FedpopWarning) if len(frame) < 2000 else _nothing():
        return fp.mixed_model(formula, frame, **privacy, **more)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_what_groups_add_is_the_exact_score_and_the_expected_information() -> None:
    fit = fp.mixed_model("y ~ x + (x | g)", table(groups=30, rows=8))
    engine, members = fit.engine, fit.groups.local_members
    cohort = members.federation.cohort(torch.arange(30), torch.device("cpu"))
    x = engine.vector(fit.outcome.point) + 0.1
    score, information = gaussian_parts(cohort, engine.units, engine.factor, engine.point(x))
    for ids in (torch.arange(30), torch.tensor([3, 17])):
        assert torch.allclose(score[ids].sum(0), engine.score(x, ids), atol=1e-8)

    point, units = engine.point(x), engine.units  # of one group, through its marginal covariance
    from fedpop.mixed.design import coded

    cx, cz, *_ = coded(members.federation.cohort(torch.tensor([4]), torch.device("cpu")), units)

    def covariance(at: Tensor) -> Tensor:
        p = len(units.x_names)
        root = cz @ engine.factor.matrix(at[p:-1])
        return torch.exp(2 * at[-1]) * (torch.eye(len(cz), dtype=at.dtype) + root @ root.mT)

    slopes = torch.autograd.functional.jacobian(covariance, x).permute(2, 0, 1)
    inverse, p = torch.linalg.inv(covariance(x)), len(units.x_names)
    both = inverse @ slopes
    expected = 0.5 * torch.einsum("aij,bji->ab", both, both)
    expected[:p, :p] += cx.mT @ inverse @ cx
    assert torch.allclose(information[4], expected, atol=1e-8)
    assert point.sigma == pytest.approx(math.exp(float(x[-1])))


def test_other_families_add_scores_by_quadrature() -> None:
    fit = fp.mixed_model("y ~ x + (1 | g)", table(family="bernoulli"), family="bernoulli")
    engine, members = fit.engine, fit.groups.local_members
    cohort = members.federation.cohort(torch.arange(40), torch.device("cpu"))
    x = engine.vector(fit.outcome.point) + 0.1
    score, outer = marginal_parts(cohort, engine, engine.point(x))
    assert torch.allclose(score.sum(0), engine.score(x, torch.arange(40)), atol=1e-8)
    assert torch.allclose(outer[3], torch.outer(score[3], score[3]))


def test_no_group_adds_more_than_its_bounds() -> None:
    g = generator(1)
    score = torch.randn(50, 4, generator=g, dtype=torch.float64) * torch.logspace(-2, 6, 50).unsqueeze(1)
    score[7] = math.nan
    information = score.unsqueeze(2) * score.unsqueeze(1)
    white = torch.randn(4, 4, generator=g, dtype=torch.float64)
    asked = Asked(torch.zeros(4), white, 2.0, 3.0)
    for i in range(50):  # after everything that they are multiplied by
        one = bounded_parts(score[i : i + 1], information[i : i + 1], asked)
        assert float(one["score"].norm()) <= 2.0
        assert float(one["information"].norm()) <= 3.0
        assert abs(float(one["score bit"])) == abs(float(one["information bit"])) == 0.5
    small = bounded_parts(score[:1], information[:1], asked)
    assert torch.allclose(small["score"], score[0] @ white)


def rounds_of(sigma: float, rule: Any = None, share: float = 1.0) -> tuple[Rounds, Asked]:
    fit = fp.mixed_model("y ~ x + (1 | g)", table(groups=100))
    settings = given(noise=sigma)
    terms = PrivateTerms(settings, sigma, share, 100 * share, 100, 10, planned=10)
    x = fit.engine.vector(fit.outcome.point)
    asked = Asked(x, torch.eye(len(x), dtype=x.dtype), 3.0, 4.0)
    return Rounds(fit.engine, terms, rule or Everyone(), settings), asked


def test_noise_on_sums_is_the_ledgers() -> None:
    """One event: sum of sigma_v^-2 is sigma^-2, and each vector's noise is sigma_v times its bound."""
    assert sum(private.SHARES.values()) == pytest.approx(1.0)
    rounds, asked = rounds_of(6.0)
    answers = [rounds.ask(asked) for _ in range(150)]
    scores = torch.stack([a.score for a in answers])
    wide = 6.0 / math.sqrt(private.SHARES["score"]) * 3.0
    assert float(scores.std(0).mean()) == pytest.approx(wide, rel=0.1)
    lower = torch.stack([a.information for a in answers])[:, 0, 0]
    wide = 6.0 / math.sqrt(private.SHARES["information"]) * 4.0
    assert float(lower.std()) == pytest.approx(wide, rel=0.2)
    inside = torch.tensor([a.score_inside for a in answers])
    wide = 6.0 / math.sqrt(private.SHARES["score bit"]) * 0.5 / 100
    assert float(inside.std()) == pytest.approx(wide, rel=0.2)


def test_with_next_to_no_noise_it_is_maximum_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table(groups=150, rows=6)
    exact = fp.mixed_model("y ~ x + (1 | g)", frame)
    monkeypatch.setattr(private, "SCORE_REACH", 1e3)
    monkeypatch.setattr(private, "INFORMATION_REACH", 1e3)
    found = fp.mixed_model("y ~ x + (1 | g)", frame, privacy=given(epsilon=None, noise=1e-7))
    for name, value in exact.coefficients.items():
        assert found.coefficients[name] == pytest.approx(value, abs=0.01 * exact.standard_errors[name])
        assert found.standard_errors[name] == pytest.approx(exact.standard_errors[name], rel=0.02)
    assert found.sd["(Intercept)"] == pytest.approx(exact.sd["(Intercept)"], rel=1e-3)
    assert found.sigma == pytest.approx(exact.sigma, rel=1e-3)


def test_noise_that_was_added_is_in_the_intervals() -> None:
    """Off the plain error by the known amount: leaving it out would be seen."""
    plain = fp.mixed_model("y ~ x + (1 | g)", table(groups=2000, rows=4))
    found = quiet(table(groups=2000, rows=4))
    wide = {n: found.standard_errors[n] / se for n, se in plain.standard_errors.items()}
    assert all(1.05 < w < 1.6 for w in wide.values())
    law, size = found.engine.law, len(found.engine.law)
    assert float(torch.linalg.eigvalsh(law)[0]) > 0
    assert size == 4
    sd, sigma = found.confint().iloc[0], found.confint().loc["sigma"]
    assert sd["lower"] < 0.7 < sd["upper"] or sd["upper"] - sd["lower"] < 0.2
    assert 0.0 < sigma["lower"] < sigma["upper"]


def test_the_ledger_covers_all_rounds_and_is_told() -> None:
    found = quiet(table())
    rounds = private.CHAIN_ROUNDS + private.WARM_ROUNDS + private.SCORED_ROUNDS
    assert found.rounds == rounds
    sigma = ledger.noise_for(4.0, 1.0, rounds, 1e-6)
    assert f"({rounds} rounds at noise {sigma:.3g})" in found.convergence
    assert "epsilon 4" in found.convergence or "epsilon 3.99" in found.convergence
    assert "not computed" in str(found)
    assert math.isnan(found.log_likelihood)


def test_every_round_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter[str]()
    ask, run = Rounds.ask, private.run
    monkeypatch.setattr(Rounds, "ask", lambda self, a: asked.update(["scored"]) or ask(self, a))

    def counted(*args: Any, **more: Any) -> Any:
        population = run(*args, **more)
        asked["chains"] += population.rounds
        return population

    monkeypatch.setattr(private, "run", counted)
    found = quiet(table())
    assert asked.total() == found.rounds


def test_clipped_groups_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "SCORE_REACH", 0.2)
    with pytest.warns(FedpopWarning, match="no interval covers the bias"):
        found = fp.mixed_model("y ~ x + (1 | g)", table(groups=400), privacy=given(epsilon=None, noise=0.05))
    assert "scores that were shortened" in str(found)


@pytest.mark.parametrize(
    ("formula", "more", "words"),
    [
        ("y ~ x + (1 | g)", {"engine": "exact"}, "engine='exact' has sums"),
        ("y ~ x + (1 | g)", {"method": "REML"}, "REML needs the exact engine"),
        ("y ~ x + (1 | g)", {"compressor": "qsgd"}, "leave out compressor"),
        ("y ~ x + (1 | g)", {"weights": "w"}, "weights of rows"),
        ("y ~ x + (1 | g/k)", {}, "nested factors"),
        ("y ~ k + (1 | g)", {}, "levels of 'k' would be found"),
        ("y ~ scale(x) + (1 | g)", {}, "made by moments"),
        ("y ~ poly(x, 2) + (1 | g)", {}, "made by moments"),
        ("y ~ ns(x, 3) + (1 | g)", {}, "made by moments"),
        ("y ~ x + (1 | g)", {"privacy": given(against="server")}, "needs secure sums"),
        ("y ~ x + (1 | g)", {"privacy": given(delta=0.1)}, "one of 40 units"),
        ("y ~ x + (1 | g)", {"privacy": given(noise=2.0)}, "leave noise out"),
    ],
)
@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_what_looks_at_data_is_refused_with_the_reason(formula: str, more: Any, words: str) -> None:
    frame = table().assign(w=1.0)
    frame["k"] = ["a", "b", "c", "a", "b"] * 40
    with pytest.raises(PrivacyError, match=words):
        fp.mixed_model(formula, frame, **({"privacy": given()} | more))


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_levels_that_are_given_are_no_look_at_the_data() -> None:
    frame = table(groups=60)
    frame["k"] = ["a", "b", "c", "a", "b"] * 60
    found = fp.mixed_model("y ~ k + (1 | g)", frame, levels={"k": ["a", "b", "c"]}, privacy=given())
    assert list(found.coefficients) == ["(Intercept)", "kb", "kc"]


@pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
def test_some_groups_a_round_and_other_families_run() -> None:
    found = fp.mixed_model("y ~ x + (1 | g)", table(groups=300), participation=0.3, privacy=given())
    assert all(math.isfinite(v) for v in found.standard_errors.values())
    frame = table(groups=300, family="bernoulli")
    found = fp.mixed_model("y ~ x + (1 | g)", frame, family="bernoulli", privacy=given())
    assert all(math.isfinite(v) for v in found.standard_errors.values())
