"""Noise that sites add to secure sums: its law, the grid's bound, the corrections, ledgers, an attacker."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

import fedpop as fp
from fedpop.errors import PrivacyError
from fedpop.federation.participation import Active, Roster
from fedpop.keys import Key
from fedpop.message import Aggregate, Message, Total
from fedpop.message.fixed_point import FixedPoint
from fedpop.message.message import WEIGHT
from fedpop.privacy import ledger
from fedpop.privacy.gaussian import BIT, CLIP, bound_of
from fedpop.privacy.secure import Policy, threshold
from fedpop.privacy.site_noise import PrivateRound, discrete_gaussian, honest, planned, tau
from fedpop.run.private import PrivateTotals, private_method, terms
from fedpop.site.work import Sending
from tests.privacy.test_gaussian import clients, model, settings

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")


def law(width: float, reach: int = 60) -> np.ndarray:
    x = np.arange(-reach, reach + 1)
    p = np.exp(-(x**2) / (2 * width**2))
    return np.asarray(p / p.sum())


def added(width: float, count: int) -> np.ndarray:
    one = total = law(width)
    for _ in range(count - 1):
        total = np.convolve(total, one)
    return total


# --- its law -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.5, 2.0, 7.3])
def test_draws_have_the_discrete_gaussians_probabilities(width: float) -> None:
    found = discrete_gaussian(width, 200_000, os.urandom)
    reach = math.ceil(3 * width)
    p, seen = law(width), np.array([(found == k).sum() for k in range(-reach, reach + 1)])
    expected = 200_000 * p[60 - reach : 61 + reach]
    beside = np.array([200_000 - seen.sum(), 200_000 - expected.sum()])
    statistic = (
        (np.append(seen, beside[0]) - np.append(expected, beside[1])) ** 2
        / np.append(expected, max(beside[1], 1.0))
    ).sum()
    assert stats.chi2.sf(statistic, len(seen)) > 1e-6


def test_a_wide_one_has_its_variance_and_reads_whole_numbers_from_the_system() -> None:
    found = discrete_gaussian(1e6, 100_000, os.urandom)
    assert found.dtype == np.int64
    assert float(found.std()) == pytest.approx(1e6, rel=0.015)
    assert stats.kstest(found / 1e6, "norm").pvalue > 1e-6
    assert not np.array_equal(found, discrete_gaussian(1e6, 100_000, os.urandom))


# --- the corrections ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("count", [2, 6])
def test_sums_are_as_near_to_one_discrete_gaussian_as_the_correction_says(width: float, count: int) -> None:
    total = added(width, count)
    one = law(width * math.sqrt(count), (len(total) - 1) // 2)
    near = total > 1e-30
    apart = np.abs(np.log(total[near] / one[near])).max()
    assert apart <= tau(width, count)


def test_without_the_correction_the_ledger_would_be_too_small() -> None:
    """Six sites' parts half a step wide, a unit that moves the sum by one step: the exact divergence."""
    width, count = 0.5, 6
    total, order = added(width, count), 2
    moved = np.roll(total, 1)
    near = (total > 1e-150) & (moved > 1e-150)
    exact = math.log((moved[near] ** order * total[near] ** (1 - order)).sum()) / (order - 1)
    continuous = order / (2 * count * width**2)
    assert continuous < exact <= continuous + tau(width, count) * (2 * order - 1) / (order - 1)


def test_the_ledger_charges_the_correction() -> None:
    plain = ledger.renyi_epsilon(2.0, 1.0, 10, 1e-5)
    assert ledger.renyi_epsilon(2.0, 1.0, 10, 1e-5, 0.1) > plain + 0.2
    assert ledger.renyi_epsilon(2.0, 1.0, 10, 1e-5, 0.0) == plain


# --- the grid ----------------------------------------------------------------------------------

MULTIPLIERS, BOUNDS, SIZES = {"J": 3.0, "I": 4.0}, {"J": 10.0, "I": 2.0}, {"J": 5000, "I": 3}


@pytest.mark.parametrize("bits", [16, 32])
def test_widths_are_of_the_grids_bound_and_sums_fit(bits: int) -> None:
    units, sites = 40, 10
    sizes = SIZES if bits == 32 else {"J": 20, "I": 3}
    steps, widths, correction = planned(MULTIPLIERS, BOUNDS, sizes, units, sites, bits)
    for name, step in steps.items():
        wide = BOUNDS[name] + 2.0**step * math.sqrt(sizes[name])
        assert wide > BOUNDS[name]
        # What the honest sites that are surely heard add together is what the ledger counts.
        assert widths[name] * 2.0**step * math.sqrt(honest(sites)) == pytest.approx(MULTIPLIERS[name] * wide)
        largest = units * BOUNDS[name] + 12 * widths[name] * 2.0**step * math.sqrt(sites)
        assert largest < 2.0 ** (bits - 1 + step)
    assert correction == sum(sizes[n] * tau(widths[n], honest(sites)) for n in sizes)


@pytest.mark.parametrize("sites", [3, 4, 10, 99])
def test_any_sum_that_can_be_opened_has_the_honest_sites_that_noise_was_shared_for(sites: int) -> None:
    colluders = Policy().colluders(sites)
    assert threshold(sites, colluders) - colluders == honest(sites) >= 1


def test_rounding_moves_a_unit_by_less_than_a_step_an_entry() -> None:
    """The bound C + step sqrt(d): it is needed, and it holds, whatever else is in the sum."""
    size, step = 400, -3
    unit = torch.full((1, size), 0.4 / math.sqrt(size), dtype=torch.float64)
    longest = 0.0
    for seed in range(20):
        rest = torch.randn(1, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        private = PrivateRound(steps={"J": step}, widths={"J": 1e-9})
        key, site = Key(seed), torch.tensor([5])
        with_it, without = (
            FixedPoint().private_words(Message(site, torch.ones(1).long(), {"J": v}), private, 0, key)
            for v in (rest + unit, rest)
        )
        longest = max(longest, float((with_it.vectors["J"] - without.vectors["J"]).norm()))
    assert 0.4 < longest <= 0.4 + 2.0**step * math.sqrt(size)


def test_too_coarse_a_grid_is_refused() -> None:
    with pytest.raises(PrivacyError, match="a grid that is too coarse"):
        planned(MULTIPLIERS, BOUNDS, SIZES, 4000, 10, 16)
    with pytest.raises(PrivacyError, match="steps wide"):
        planned({"J": 1e-4}, {"J": 10.0}, {"J": 4}, 40, 10, 16)


# --- messages ----------------------------------------------------------------------------------


def test_the_sum_is_the_vectors_with_the_parts_of_all_sites() -> None:
    steps, widths, _ = planned({"J": 3.0}, {"J": 10.0}, {"J": 2000}, 10, 10, 32)
    private = PrivateRound(steps=steps, widths=widths, sharing=honest(10))
    vectors = torch.randn(10, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    message = Message(torch.arange(10), torch.ones(10).long(), {"J": vectors})
    sending = Sending(fp.FedAvg(model()).channel, Key(0), secure=FixedPoint(), private=private, weigh=True)
    sent = sending.sent(message, torch.ones(10), torch.ones(10))
    aggregate = Aggregate()
    aggregate.add(sent, torch.ones(10))
    noise = aggregate.total(10, ratio=True).plain["J"] - vectors.sum(0)
    assert float(noise.std()) == pytest.approx(widths["J"] * 2.0 ** steps["J"] * math.sqrt(10), rel=0.08)
    assert stats.kstest((noise / noise.std()).numpy(), "norm").pvalue > 1e-6
    assert WEIGHT not in sent.words  # a count of who was fit would have no noise


def test_who_is_not_finite_cannot_be_told_from_who_adds_nothing() -> None:
    data = clients(12)
    data["c3"] = fp.Client(torch.ones(6, 3) * 1e38, torch.zeros(6))
    for secure in (False, True):
        population = fp.FedAvg(model()).fit(data, rounds=3, privacy=settings(), secure=secure)
        assert all(m["left_out"] == [] for m in population.history)
        assert all(bool(torch.isfinite(t.double()).all()) for t in population.published.values())


def test_no_count_of_units_is_a_denominator() -> None:
    """Two totals of the same sums over other numbers of units make the same step."""
    method, given = private_method(fp.FedAvg(model())), settings(insecure_seed=1)
    size = method.footprint.compressed
    broadcast = {"w": torch.zeros(size), f"{CLIP}dw": torch.tensor(10.0).double()}
    sums = {"dw": torch.ones(size), f"{BIT}dw": torch.zeros(1)}
    found = []
    for count in (2, 7):
        rule = fp.participation.Bernoulli(0.2)
        totals = PrivateTotals(terms(given, rule, Roster.numbered(20), 10), method, None)
        total = Total(sums, sums, {}, count, float(count), 20, True)
        found.append(totals.noised(total, method, broadcast, 0))
    assert found[0].weighted["dw"].equal(found[1].weighted["dw"])
    assert found[0].mean("dw", "n").equal(found[1].mean("dw", "n"))


# --- runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "FedRep"])
def test_runs_say_both_ledgers(name: str) -> None:
    rounds, sigma = 6, 2.0
    given = settings(noise=sigma, insecure_seed=2)
    population = getattr(fp, name)(model()).fit(
        clients(), rounds=rounds, participation=0.5, privacy=given, secure=True
    )
    last = population.history[-1]
    assert last["epsilon"] == pytest.approx(ledger.renyi_epsilon(sigma, 0.5, rounds, 1e-3), rel=1e-6)
    ran = [ledger.renyi_epsilon(sigma, 1.0, k, 1e-3) for k in range(rounds + 1)]
    assert min(abs(last["epsilon_server"] - e) for e in ran) < 1e-6
    assert last["epsilon_server"] > last["epsilon"]
    assert "a unit being in" in str(population)


def test_with_next_to_no_noise_it_learns_what_plain_sums_learn() -> None:
    given = fp.privacy.Gaussian(noise=1e-3, delta=1e-3, clip=1.0, quantile=None, insecure_seed=4)
    runs = [fp.FedAvg(model()).fit(clients(), rounds=4, privacy=given, secure=s) for s in (False, True)]
    for a, b in zip(runs[0].published.values(), runs[1].published.values(), strict=True):
        assert torch.allclose(a, b, atol=5e-3)


def test_a_budget_against_the_server_ends_the_run_before_it_is_overspent() -> None:
    given = fp.privacy.Gaussian(epsilon=3.0, noise=4.0, delta=1e-3, against="server", insecure_seed=6)
    population = fp.FedAvg(model()).fit(clients(), rounds=60, participation=0.5, privacy=given, secure=True)
    most = max(k for k in range(60) if ledger.renyi_epsilon(4.0, 1.0, k, 1e-3) <= 3.0)
    assert population.history[-1]["epsilon_server"] <= 3.0
    assert 2 * most * 0.5 < population.rounds < 60
    found = fp.privacy.Gaussian(epsilon=3.0, delta=1e-3, against="server")
    whole = fp.FedAvg(model()).fit(clients(), rounds=12, participation=0.5, privacy=found, secure=True)
    assert whole.rounds >= 10
    assert whole.history[-1]["epsilon_server"] <= 3.0


def test_so_few_sites_that_no_sum_is_opened_look_like_any_others() -> None:
    method = private_method(fp.FedAvg(model()))
    given = terms(settings(), fp.participation.Bernoulli(0.1), Roster.numbered(20), 10, FixedPoint())
    totals = PrivateTotals(given, method, None)
    assert totals.unopened(2)
    assert not totals.unopened(3)
    size = method.footprint.compressed
    broadcast = {"w": torch.zeros(size), f"{CLIP}dw": torch.tensor(10.0).double()}
    nobody = Active(torch.zeros(0).long(), torch.zeros(0), True)
    found = totals.noised(Total.of_nobody(20), method, broadcast, 0, nobody, Roster.numbered(20), 0)
    assert float(found.weighted["dw"].std()) > 0
    assert totals.charged == 1


def test_entries_of_both_ledgers_are_in_the_file_with_the_total(tmp_path) -> None:
    class Killed(BaseException):
        pass

    def fit(where, **more):
        given = settings(insecure_seed=5)
        return fp.FedAvg(model()).fit(
            clients(), rounds=7, participation=0.5, privacy=given, secure=True, out=where, **more
        )

    whole, step = fit(tmp_path / "whole"), fp.FedAvg.server_round

    def killed(self, server, total, facts, key):
        if key.round == 4:
            raise Killed
        return step(self, server, total, facts, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp.FedAvg, "server_round", killed)
        with pytest.raises(Killed):
            fit(tmp_path / "cut", checkpoint_every=3)
    again = fit(tmp_path / "cut", checkpoint_every=3, resume=True)
    for name in ("epsilon", "epsilon_server"):
        assert again.history[-1][name] == whole.history[-1][name]
    for name, tensor in whole.published.items():
        assert again.published[name].equal(tensor)


# --- an attacker -------------------------------------------------------------------------------

DELTA, RUNS, SITES = 0.01, 60_000, 9


def told_apart(change: float = 1.0) -> tuple[float, float]:
    """What a server proves that sees sums, with a third of the sites: whether a unit with vectors as long as
    they may be is among the others, whose vectors are zero (Clopper-Pearson at 1e-4); and the ledger's."""
    method = private_method(fp.FedSOUK(model()))
    size = method.model.phi_layout.size
    sigma = ledger.noise_for(1.0, 1.0, 1, DELTA, ledger.renyi_epsilon)
    multipliers = settings(quantile=None).multipliers(sigma, ("I", "J"))
    beta = method.hierarchy.prior.init(torch.zeros(2), 1.0)
    broadcast = {"beta": beta, f"{CLIP}J": torch.tensor(10.0)}
    sizes = {"I": 3, "J": size}
    bounds = {n: bound_of(n, d, broadcast) for n, d in sizes.items()}
    steps, widths, correction = planned(multipliers, bounds, sizes, 9, SITES, 32)
    out, inside = np.zeros(RUNS), np.zeros(RUNS)
    for name, bound in bounds.items():
        signal = round(bound * 2.0 ** -steps[name])
        width = widths[name] * change
        for seen, there in ((out, 0), (inside, signal)):
            noise = sum(discrete_gaussian(width, RUNS, os.urandom) for _ in range(honest(SITES)))
            seen += (noise + there) * signal / (width**2 * honest(SITES))
    best = 0.0
    for level in (0.02, 0.05, 0.1, 0.2):
        limit = np.quantile(out[: RUNS // 3], 1 - level)
        false, hits = (int((s[RUNS // 3 :] > limit).sum()) for s in (out, inside))
        count = RUNS - RUNS // 3
        most_false = stats.beta.ppf(1 - 1e-4, false + 1, count - false)
        least_hits = stats.beta.ppf(1e-4, hits, count - hits + 1) if hits else 0.0
        if least_hits > DELTA:
            best = max(best, math.log((least_hits - DELTA) / most_false))
    return best, ledger.renyi_epsilon(sigma, 1.0, 1, DELTA, correction)


def test_what_a_server_with_a_third_of_the_sites_proves_is_below_its_ledger_and_above_half_of_it() -> None:
    proved, claimed = told_apart()
    assert claimed / 2 < proved < claimed


def test_noise_shared_by_more_sites_than_are_honest_is_found() -> None:
    proved, claimed = told_apart(change=math.sqrt(honest(SITES) / SITES) / 1.2)
    assert proved > claimed
