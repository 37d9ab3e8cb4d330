"""Dealing out examples: right classes, right sizes, nothing twice, the same for the same seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpop.errors import SettingsError
from fedpop.federation.partitions import ByClass

LABELS = torch.arange(6).repeat(100)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


@settings(max_examples=30, deadline=None)
@given(
    classes=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=15),
    seed=st.integers(0, 2**63),
)
def test_sizes_classes_and_disjointness(classes: int, sizes: list[int], seed: int) -> None:
    parts = ByClass(classes, sizes).deal(LABELS, seed)
    assert [len(r) for r in parts.rows] == sizes
    every = torch.cat([*parts.rows, parts.rest])
    assert torch.equal(every.sort().values, torch.arange(600))
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


def test_the_seed_decides() -> None:
    one, same, other = (ByClass(2, [7] * 5).deal(LABELS, s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.rows, same.rows, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.rows, other.rows, strict=True))


def test_validation_comes_from_what_no_client_holds() -> None:
    parts = ByClass(2, [7] * 5).deal(LABELS, 3)
    held = parts.draw(LABELS, 9, 3, "validation", among=parts.rest)
    trained = set(torch.cat(parts.rows).tolist())
    for rows, classes in zip(held.rows, parts.classes, strict=True):
        assert len(rows) == 9
        assert not trained & set(rows.tolist())
        assert set(LABELS[rows].tolist()) == set(classes)


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
