"""Dealing out examples: right classes, right sizes, nothing twice, the same for the same seed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedpop as fp
from fedpop.data import IID, ByClass, ByKey, Dirichlet, Partition, Scheme, Shards, share_sizes
from fedpop.errors import SettingsError
from fedpop.federation.partitions.base import apportioned
from fedpop.federation.partitions.dirichlet import log_gamma_draws
from fedpop.keys import Key
from tests.helpers import generator

LABELS = torch.arange(6).repeat(100)[torch.randperm(600, generator=generator(0))]
SEEDS = st.integers(0, 2**63)
SCHEMES: list[Scheme] = [
    ByClass(2, [7] * 5),
    Shards(7, 3),
    Dirichlet(8, 0.4),
    IID(7),
    IID(3, (4, 0, 9)),
    ByKey((torch.arange(600) % 11).tolist()),
]


def whole(parts: Partition, n: int) -> None:
    """Every row once, with a client or left over."""
    every = torch.cat([*parts.rows, parts.rest])
    assert torch.equal(every.sort().values, torch.arange(n))


# --- what holds for all -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_every_row_goes_to_one_client_and_the_seed_decides(scheme: Scheme, seed: int) -> None:
    one, same, other = (scheme.deal(LABELS, s) for s in (seed, seed, seed + 1))
    whole(one, 600)
    assert all(torch.equal(a, b) for a, b in zip(one.rows, same.rows, strict=True))
    assert one.classes == same.classes
    differs = not all(torch.equal(a, b) for a, b in zip(one.rows, other.rows, strict=True))
    assert differs != isinstance(scheme, ByKey)
    for rows, classes in zip(one.rows, one.classes, strict=True):
        assert torch.equal(rows, rows.sort().values)
        assert set(LABELS[rows].tolist()) <= set(classes)
    assert one.counts(LABELS).sum(1).tolist() == list(one.sizes)


# --- so many classes, so many examples ----------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    classes=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=15),
    seed=SEEDS,
)
def test_sizes_classes_and_disjointness(classes: int, sizes: list[int], seed: int) -> None:
    parts = ByClass(classes, sizes).deal(LABELS, seed)
    assert list(parts.sizes) == sizes
    whole(parts, 600)
    for rows, held, n in zip(parts.rows, parts.classes, sizes, strict=True):
        assert len(set(held)) == classes
        counts = torch.bincount(LABELS[rows], minlength=6)
        assert {c for c in range(6) if counts[c]} <= set(held)
        own = counts[list(held)]
        assert int(own.max() - own.min()) <= (1 if n % classes else 0)


def test_classes_are_dealt_evenly() -> None:
    parts = ByClass(2, [5] * 30).deal(LABELS, 1)
    held = torch.bincount(torch.tensor([c for hand in parts.classes for c in hand]))
    assert held.tolist() == [10] * 6


def test_validation_comes_from_what_no_client_holds() -> None:
    parts = ByClass(2, [7] * 5).deal(LABELS, 3)
    held = parts.draw(LABELS, 9, 3, "validation", among=parts.rest)
    trained = set(torch.cat(parts.rows).tolist())
    for rows, classes in zip(held.rows, parts.classes, strict=True):
        assert len(rows) == 9
        assert not trained & set(rows.tolist())
        assert set(LABELS[rows].tolist()) == set(classes)


def test_the_papers_sizes() -> None:
    assert share_sizes(10, 0.9, 5, 25) == (5,) * 9 + (25,)
    assert share_sizes(3, 0, 5, 25) == (25, 25, 25)
    for wrong in ((0, 0.5, 5, 25), (10, 1.5, 5, 25), (10, 0.5, -1, 25)):
        with pytest.raises(SettingsError, match=r"share_sizes: (b|share_small|n_small) must be"):
            share_sizes(*wrong)


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(SettingsError, match="only 6"):
        ByClass(7, [7]).deal(LABELS, 0)
    with pytest.raises(SettingsError, match=r"class \d has 100 examples"):
        ByClass(1, [60] * 12).deal(LABELS, 0)
    with pytest.raises(SettingsError, match="classes must be a whole number, 1 or more"):
        ByClass(0, [1])
    with pytest.raises(SettingsError, match="size"):
        ByClass(1, [])
    with pytest.raises(SettingsError, match="draw from"):
        ByClass(1, [1]).deal(LABELS, 0).draw(LABELS, 101, 0, "test")


# --- FedRep's shards ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 40), classes=st.integers(1, 6), seed=SEEDS)
def test_shards_are_equal_and_classes_distinct(b: int, classes: int, seed: int) -> None:
    parts = Shards(b, classes).deal(LABELS, seed)
    whole(parts, 600)
    counts = parts.counts(LABELS)
    assert [len(set(hand)) for hand in parts.classes] == [classes] * b
    assert (counts > 0).sum(1).tolist() == [classes] * b
    holders = (counts > 0).sum(0)
    assert int(holders.sum()) == b * classes
    assert int(holders.max() - holders.min()) <= (1 if b * classes % 6 else 0)
    for c in range(6):
        shards = counts[:, c][counts[:, c] > 0]
        if len(shards):
            assert int(shards.sum()) == 100
            assert int(shards.max() - shards.min()) <= (1 if 100 % len(shards) else 0)
    assert len(parts.rest) == 100 * int((holders == 0).sum())


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 30), classes=st.integers(1, 6), seed=SEEDS)
def test_test_examples_are_dealt_alike(b: int, classes: int, seed: int) -> None:
    others = torch.arange(6).repeat(30)
    parts = Shards(b, classes).deal(LABELS, seed)
    test = parts.alike(LABELS, others, seed)
    whole(test, 180)
    assert test.classes == parts.classes
    train_counts, counts = parts.counts(LABELS), test.counts(others)
    # Each class in proportion, to the example: shards of 100 and of 30 may both be rounded.
    held = (train_counts > 0).sum(0).clamp(min=1)
    assert float((counts - (train_counts > 0) * 30 / held).abs().max()) < 1.3


def test_the_papers_shards_are_exact() -> None:
    labels, others = torch.arange(10).repeat(5000), torch.arange(10).repeat(1000)
    for classes in (2, 5):
        parts = Shards(100, classes).deal(labels, 0)
        assert set(parts.sizes) == {500}
        assert set(parts.counts(labels).flatten().tolist()) == {0, 500 // classes}
        test = parts.alike(labels, others, 0)
        assert set(test.sizes) == {100}
        assert torch.equal(test.counts(others) > 0, parts.counts(labels) > 0)


def test_hands_are_as_likely_as_in_a_random_deal() -> None:
    """Of 15 pairs of six classes each comes up equally often."""
    hands = [h for seed in range(150) for h in Shards(3, 2).deal(LABELS, seed).classes]
    counts = [hands.count((i, j)) for i in range(6) for j in range(i + 1, 6)]
    assert sum(counts) == 450
    # Three hands of one deal exclude each other, which makes counts less variable than independent ones.
    assert stats.chisquare(counts).pvalue > 1e-4


def test_shards_that_cannot_be() -> None:
    for wrong in (torch.zeros(0, dtype=torch.int64), torch.tensor([0, -1])):
        with pytest.raises(SettingsError, match="labels from 0 on"):
            Shards(1, 1).deal(wrong, 0)
    with pytest.raises(SettingsError, match="7 classes per client asked for, but there are only 6"):
        Shards(3, 7).deal(LABELS, 0)
    with pytest.raises(
        SettingsError, match=r"3 clients with 2 classes each need 6 .* there are 2; use fewer"
    ):
        Shards(3, 2).deal(torch.tensor([0, 1]), 0)
    with pytest.raises(SettingsError, match=r"class 1 has 1 examples for the 3 clients that hold it"):
        Shards(3, 2).deal(torch.tensor([0] * 9 + [1]), 0)
    for wrong in ((0, 2), (2, 0), (2.5, 2)):
        with pytest.raises(SettingsError):
            Shards(*wrong)


# --- Dirichlet ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 12), alpha=st.floats(0.05, 100), seed=SEEDS)
def test_all_examples_are_dealt_and_everybody_has_some(b: int, alpha: float, seed: int) -> None:
    parts = Dirichlet(b, alpha, least=0).deal(LABELS, seed)
    whole(parts, 600)
    assert not len(parts.rest)
    if alpha >= 0.5:
        assert min(Dirichlet(b, alpha, least=3).deal(LABELS, seed).sizes) >= 3


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 4.5])
def test_gamma_draws_have_their_law(shape: float) -> None:
    draws = log_gamma_draws(shape, 4000, Key(1, purpose="test"))
    assert bool(draws.isfinite().all())
    # One test in ten thousand of a right sampler fails.
    assert stats.kstest(draws.exp().numpy(), stats.gamma(shape).cdf).pvalue > 1e-4
    if shape < 1:  # most of them underflow as numbers, not as logarithms
        assert (
            stats.kstest((shape * draws).numpy(), lambda v: stats.loggamma(shape).cdf(v / shape)).pvalue
            > 1e-4
        )


def test_a_large_alpha_makes_clients_alike_and_a_small_one_does_not() -> None:
    alike, apart = (Dirichlet(6, a, least=0).deal(LABELS, 0).counts(LABELS).double() for a in (1e6, 0.05))
    assert float((alike - 100 / 6).abs().max()) <= 1
    assert float(apart.max(0).values.mean()) > 60  # most of a class at one client


def test_proportions_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="3 clients with at least 300 examples each need 900"):
        Dirichlet(3, 1.0, least=300).deal(LABELS, 0)
    with pytest.raises(SettingsError, match=r"in 100 draws with alpha=0\.01 some client of 50 always"):
        Dirichlet(50, 0.01, least=5).deal(LABELS, 0)
    for wrong in ({"b": 0, "alpha": 1.0}, {"b": 2, "alpha": 0.0}, {"b": 2, "alpha": math.inf}):
        with pytest.raises(SettingsError):
            Dirichlet(**wrong)
    with pytest.raises(SettingsError, match="least"):
        Dirichlet(2, 1.0, least=-1)


# --- alike, and by key --------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 60), seed=SEEDS)
def test_iid_clients_have_equal_sizes(b: int, seed: int) -> None:
    parts = IID(b).deal(LABELS, seed)
    assert max(parts.sizes) - min(parts.sizes) <= (1 if 600 % b else 0)
    assert sum(parts.sizes) == 600


def test_sizes_that_the_data_cannot_meet() -> None:
    assert IID(3, (4, 0, 9)).deal(LABELS, 0).sizes == (4, 0, 9)
    with pytest.raises(SettingsError, match="ask for 601 examples, but there are 600"):
        IID(2, (600, 1)).deal(LABELS, 0)
    with pytest.raises(SettingsError, match="600 examples are too few for 601 clients"):
        IID(601).deal(LABELS, 0)
    with pytest.raises(SettingsError, match="one size"):
        IID(2, (1,))


def test_keys_name_clients() -> None:
    keys = ["ben", "anna", "ben", "cleo"]
    scheme = ByKey(keys)
    parts = scheme.deal(torch.tensor([1, 0, 0, 1]), 0)
    assert scheme.names == ("ben", "anna", "cleo")
    assert [r.tolist() for r in parts.rows] == [[0, 2], [1], [3]]
    assert parts.classes == ((0, 1), (0,), (1,))
    assert ByKey(torch.tensor([5, 4, 5])).names == ("5", "4")
    with pytest.raises(SettingsError, match="4 examples but 3 keys"):
        ByKey(list("abc")).deal(torch.zeros(4, dtype=torch.int64), 0)
    with pytest.raises(SettingsError, match="one key"):
        ByKey([])


# --- what is made of partitions -----------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 0.95), b=st.integers(1, 30), seed=SEEDS)
def test_a_share_of_every_client_and_class_is_held_out(share: float, b: int, seed: int) -> None:
    parts = Dirichlet(b, 1.0, least=0).deal(LABELS, seed)
    kept, out = parts.held_out(LABELS, share, seed)
    for all_, mine, apart in zip(parts.rows, kept.rows, out.rows, strict=True):
        assert torch.equal(torch.cat((mine, apart)).sort().values, all_)
        assert len(apart) == min(round(share * len(all_)), max(len(all_) - 1, 0))
    exact = share * parts.counts(LABELS)
    # Rounded down or up from this client's own share, which itself is rounded to whole examples.
    assert float((out.counts(LABELS) - exact).abs().max()) < 2
    again = parts.held_out(LABELS, share, seed)[1]
    assert all(torch.equal(a, b) for a, b in zip(out.rows, again.rows, strict=True))
    with pytest.raises(SettingsError, match=r"\[0, 1\)"):
        parts.held_out(LABELS, 1.0, 0)


def test_classes_that_nobody_was_dealt_are_refused_or_left_over() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    parts = IID(2).deal(labels, 0)
    with pytest.raises(SettingsError, match="3 classes, those dealt 2"):
        parts.alike(labels, torch.tensor([0, 1, 2]), 0)
    few = ByClass(1, [1]).deal(torch.tensor([0, 1]), 0)
    (held,) = few.classes[0]
    assert few.alike(torch.tensor([0, 1]), torch.tensor([0, 0, 1]), 0).rest.tolist() == ([2], [0, 1])[held]


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(0, 1000),
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    seed=SEEDS,
)
def test_whole_numbers_in_proportion(total: int, weights: list[int], seed: int) -> None:
    found = apportioned(total, torch.tensor(weights), Key(seed))
    assert sum(found) == total
    for n, w in zip(found, weights, strict=True):
        assert abs(n - total * w / sum(weights)) < 1
        assert n == 0 or w > 0


def test_partitions_are_public() -> None:
    assert fp.data.Shards is Shards
