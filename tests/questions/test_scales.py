"""The median bin is that of the median site, whatever is added up, and few sites do not move it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedpop.questions.scales import SCALE_BINS, ColumnScales, bin_of, median_powers, power_of
from fedpop.run.members import LocalMembers
from fedpop.site.study import Survey


def histograms(tables: dict[str, dict[str, Any]], minimum: int = 1) -> torch.Tensor:
    return LocalMembers(Survey(), tables).asks(ColumnScales(("age",), minimum), {})["age"]


@pytest.mark.parametrize("sites", [1, 2, 5, 8])
def test_the_median_site_is_found(sites: int) -> None:
    """Against the medians of the sites' own numbers: a bin is a power of two wide."""
    generator = np.random.default_rng(sites)
    tables = {f"s{k}": {"age": generator.normal(3.0**k, 2.0**k, 31)} for k in range(sites)}
    size, spread = median_powers(histograms(tables))
    sizes = [np.log2(np.median(np.abs(t["age"]))) for t in tables.values()]
    spreads = [np.log2(np.abs(t["age"] - np.median(t["age"])).mean()) for t in tables.values()]
    assert size is not None
    assert spread is not None
    assert abs(size - np.median(sizes)) <= 0.5
    assert abs(spread - np.median(spreads)) <= 0.5


def test_one_site_of_three_in_another_unit_does_not_move_it() -> None:
    values = np.array([30.0, 40.0, 50.0, 60.0])
    same = median_powers(histograms({n: {"age": values} for n in "abc"}))
    odd = median_powers(histograms({"a": {"age": values}, "b": {"age": values}, "c": {"age": values * 1e4}}))
    assert same == odd


def test_of_two_sites_nobody_knows_which_is_right() -> None:
    values = np.array([32.0, 40.0, 48.0])
    size, _ = median_powers(histograms({"a": {"age": values}, "b": {"age": values * 2.0**14}}))
    assert size == power_of(bin_of(40.0)) + 7


def test_who_has_few_rows_or_no_spread_adds_nothing() -> None:
    assert float(histograms({"a": {"age": np.array([3.0, 4.0])}}, minimum=3).sum()) == 0
    flat = histograms({"a": {"age": np.array([3.0, 3.0, 3.0])}})
    assert flat.sum(1).tolist() == [1, 0]
    assert median_powers(flat)[1] is None


@pytest.mark.parametrize("value", [5e-324, 1e-30, 0.75, 1.0, 1.5, 2.0, 3e38, 1e308])
def test_bins_are_powers_of_two(value: float) -> None:
    assert 0 <= bin_of(value) < SCALE_BINS
    power = bin_of(value) - SCALE_BINS // 2
    assert power == min(max(math.floor(math.log2(value)), -SCALE_BINS // 2), SCALE_BINS // 2 - 1)
