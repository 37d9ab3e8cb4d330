"""Intervals of private mixed models hold as often as they say."""

from __future__ import annotations

import pytest

import fedpop as fp
from tests.mixed.test_private import given, table

pytest.importorskip("dp_accounting")

DRAWS, GROUPS = 1000, 2000


@pytest.mark.slow
def test_coverage_of_95_percent_intervals() -> None:
    truth = {"(Intercept)": 1.0, "x": 0.5, "sd_(Intercept)|g": 0.7, "sigma": 0.9}
    hits = dict.fromkeys(truth, 0)
    for seed in range(DRAWS):
        frame = table(GROUPS, 6, seed)
        ends = fp.mixed_model("y ~ x + (1 | g)", frame, privacy=given(), seed=seed).confint()
        for name, value in truth.items():
            hits[name] += bool(ends.loc[name, "lower"] <= value <= ends.loc[name, "upper"])
    assert all(0.93 <= count / DRAWS <= 0.97 for count in hits.values()), hits
