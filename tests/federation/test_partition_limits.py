"""Partitions at their limits: checked before anything is made, and only classes that there are count."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from fedpop.data import IID, ByClass, ByKey, Dirichlet, Partition, Scheme, Shards, share_sizes
from fedpop.errors import FedpopError, SettingsError

LABELS = torch.arange(10).repeat(100)
OTHERS = torch.arange(10).repeat(20)
SCHEMES: list[Scheme] = [Shards(2, 1), ByClass(1, (1, 2)), Dirichlet(2, 1.0), IID(2)]
NAMES = [type(s).__name__ for s in SCHEMES]


# --- too much of it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", [Shards(2**31 - 1, 5), Shards(400, 5), IID(2**31 - 1)], ids=["shards", "fewer shards", "iid"]
)
def test_what_cannot_be_met_is_refused_at_once(scheme: Scheme) -> None:
    began = time.perf_counter()
    with pytest.raises(SettingsError, match=r"fewer clients|too few for"):
        scheme.deal(LABELS, 0)
    assert time.perf_counter() - began < 1


def test_clients_beyond_memory_are_refused() -> None:
    for make in (lambda: share_sizes(2**31 - 1, 0.5, 1, 2), lambda: Dirichlet(2**31 - 1, 1.0, least=0)):
        with pytest.raises(SettingsError, match="b must be"):
            make()


def test_many_clients_with_most_classes_are_dealt_in_seconds() -> None:
    began = time.perf_counter()
    parts = Shards(2000, 9).deal(torch.arange(10).repeat(6000), 0)
    assert time.perf_counter() - began < 30  # a minute and more when every swap looked at all hands
    assert {len(set(hand)) for hand in parts.classes} == {9}


# --- classes that there are ---------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_only_classes_that_occur_are_dealt(scheme: Scheme) -> None:
    gaps = torch.tensor([0, 3_000_000] * 20)
    other = scheme.deal(gaps, 3)
    assert sum(other.sizes) + len(other.rest) == 40
    assert {c for hand in other.classes for c in hand} <= {0, 3_000_000}
    test = other.alike(gaps, gaps[:10], 0)
    assert sum(test.sizes) + len(test.rest) == 10
    with pytest.raises(SettingsError, match="only 2"):
        Shards(2, 3).deal(gaps, 0)


def test_a_table_beyond_memory_is_refused() -> None:
    labels = torch.tensor([0, 2**40])
    with pytest.raises(SettingsError, match=r"too large for memory; number the classes 0, 1, 2"):
        IID(2).deal(labels, 0).counts(labels)


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
@pytest.mark.parametrize("wrong", [-1.0, 0.5, float("nan"), float("inf"), 1e300])
def test_labels_that_are_no_classes_are_told_with_their_row(scheme: Scheme, wrong: float) -> None:
    with pytest.raises(SettingsError, match=r"in whole numbers: that of row 2 is "):
        scheme.deal(torch.tensor([0.0, 1.0, wrong, 1.0], dtype=torch.float64), 0)


@pytest.mark.parametrize("form", [torch.float32, torch.uint8, torch.int32])
def test_labels_of_all_types_are_counted(form: torch.dtype) -> None:
    parts = Shards(10, 2).deal(LABELS.to(form), 0)
    assert torch.equal(parts.counts(LABELS.to(form)), Shards(10, 2).deal(LABELS, 0).counts(LABELS))
    truth = torch.tensor([True, False])
    assert IID(1).deal(truth, 0).counts(truth).tolist() == [[1, 1]]


# --- what is made of partitions -----------------------------------------------------------------


def test_a_client_with_nothing_is_dealt_nothing() -> None:
    parts = IID(2, (3, 0)).deal(LABELS, 0)
    assert parts.draw(LABELS, 5, 0, "test").sizes == (5, 0)
    assert parts.alike(LABELS, OTHERS, 0).sizes[1] == 0
    alone = Partition((torch.tensor([0]),), ((1,),), torch.tensor([1]))
    assert alone.alike(torch.tensor([1, 0]), torch.tensor([0, 0]), 0).sizes == (0,)
    assert IID(3, (1, 0, 0)).deal(torch.tensor([0]), 0).sizes == (1, 0, 0)


def test_plain_lists_and_arrays_will_do() -> None:
    parts = Shards(10, 2).deal(LABELS, 0)
    given: Any
    for given in (OTHERS.tolist(), OTHERS.numpy(), OTHERS.to(torch.uint8)):
        found = parts.alike(LABELS.tolist(), given, 0)  # type: ignore[arg-type]
        assert found.sizes == parts.alike(LABELS, OTHERS, 0).sizes


@pytest.mark.parametrize("wrong", [-1, 2.5, "a", None])
def test_wrong_numbers_are_refused_everywhere(wrong: Any) -> None:
    parts = Shards(10, 2).deal(LABELS, 0)
    calls = (
        lambda: parts.draw(LABELS, wrong, 0, "test"),
        lambda: parts.draw(LABELS, 5, wrong, "test"),
        lambda: parts.alike(LABELS, OTHERS, wrong),
        lambda: parts.held_out(LABELS, wrong, 0),
        lambda: parts.held_out(LABELS, 0.5, wrong),
    )
    for call in calls:
        with pytest.raises(SettingsError, match=r"(size|seed|share) must be"):
            call()


def test_labels_of_other_examples_are_refused() -> None:
    parts = Shards(10, 2).deal(LABELS, 0)
    for call in (
        lambda: parts.counts(LABELS[:100]),
        lambda: parts.alike(LABELS[:100], OTHERS, 0),
        lambda: parts.held_out(LABELS[:100], 0.5, 0),
    ):
        with pytest.raises(FedpopError, match=r"a client holds row \d+, but there are 100 labels"):
            call()


def test_a_set_that_cannot_be_drawn_names_its_setting() -> None:
    with pytest.raises(
        SettingsError, match=r"class \d has 100 .* for validation take 500.* smaller validation"
    ):
        Shards(10, 2).deal(LABELS, 0).draw(LABELS, 1000, 0, "validation")


def test_one_name_is_one_client() -> None:
    scheme = ByKey([1, "1", 2, np.int64(1)])
    assert scheme.names == ("1", "2")
    assert [r.tolist() for r in scheme.deal(torch.zeros(4), 0).rows] == [[0, 1, 3], [2]]


@pytest.mark.parametrize("alpha", [5e-324, 1e-310, 1e-300, 1e300])
def test_any_alpha_gives_whole_shares(alpha: float) -> None:
    parts = Dirichlet(3, alpha, least=0).deal(LABELS, 0)
    assert sum(parts.sizes) == 1000
    if alpha < 1:  # each class at one client
        assert set(parts.counts(LABELS).flatten().tolist()) == {0, 100}
