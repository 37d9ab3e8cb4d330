"""Numbers over seeds, lines through them: exact cases, and intervals that cover as often as they say."""

import math
from statistics import mean, stdev

import pytest

from research.seeds import fit_line, interval95, interval_of, middle_of, slope_over_seeds, student
from tests.oracles import gaussian_noise


def test_a_line_and_what_it_explains():
    fit = fit_line([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 1.0, 2.0])
    assert fit.slope == pytest.approx(0.2)
    assert fit.at(1.5) == pytest.approx(1.5)
    assert fit.r2 == pytest.approx(0.2)


def test_a_power_law_is_found_exactly():
    xs = [0.1, 0.2, 0.4, 0.8]
    slope = slope_over_seeds(xs, [[-s * x**1.5 for x in xs] for s in (1.0, 2.0, 3.0)], log=True)
    assert slope.value == pytest.approx(1.5)
    assert slope.high - slope.low < 1e-9


def test_intervals_of_slopes_cover_as_often_as_they_say():
    """400 repetitions: a share of 95 % has a standard error of .011, so five of them are .055."""
    xs = [0.0, 1.0, 2.0, 3.0]
    noise = gaussian_noise(3, 400, 10, 4)
    inside = 0
    for repetition in noise:
        rows = [[2 * x + float(e) for x, e in zip(xs, row, strict=True)] for row in repetition]
        slope = slope_over_seeds(xs, rows)
        inside += slope.low <= 2 <= slope.high
    assert abs(inside / 400 - 0.95) < 0.055


@pytest.mark.parametrize(("degrees", "exact"), [(3, 3.182), (9, 2.262), (30, 2.042)])
def test_students_quantiles(degrees, exact):
    assert student(degrees) == pytest.approx(exact, abs=5e-4)


def test_an_interval_is_students():
    numbers = [0.3, 0.1, 0.4, 0.2, 0.6]
    centre, low, high = interval95(numbers)
    half = 2.7764451 * stdev(numbers) / 5**0.5  # t with four degrees, from a table
    assert (centre, low, high) == pytest.approx((mean(numbers), centre - half, centre + half))


def test_medians_with_runs_that_never_got_there():
    assert middle_of([1.0, None, None]) == math.inf
    assert middle_of([1.0, 2.0, None]) == 2.0
    assert math.isnan(middle_of([]))


@pytest.mark.parametrize(("n", "low"), [(3, 1), (6, 1), (9, 2), (10, 2), (20, 6)])
def test_intervals_of_medians_are_the_usual_order_statistics(n, low):
    assert interval_of([float(i + 1) for i in range(n)]) == (low, n + 1 - low)


def test_intervals_of_medians_may_be_open():
    assert interval_of([1.0, None, 2.0]) == (1.0, math.inf)
