"""Moments and levels add up to those of all rows; small cells are suppressed."""

import numpy as np
import pytest

from fedpop.errors import DataError, SettingsError
from fedpop.questions.schema import Levels, Moments, Schema
from fedpop.run.members import LocalMembers
from fedpop.site.study import Survey

ROWS = {
    "age": np.array([30.0, 41.0, 52.5, 60.0, 71.0, 1e6]),
    "sex": np.array(["f", "m", "f", "f", "m", "x"]),
}


def parts(cuts, rows=ROWS):
    pieces = zip([0, *cuts], [*cuts, 6], strict=True)
    return {f"site {a}, {b}": {n: v[a:b] for n, v in rows.items()} for a, b in pieces}


def found(schema, tables):
    return schema.asked(LocalMembers(Survey(), tables).asks)


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3], [0, 6], [1, 2, 3, 4, 5]])
def test_the_sum_is_that_of_all_rows(cuts):
    summary = found(Schema(("age",), ("sex",), minimum=0), parts(cuts))
    assert summary["age"].count == 6
    assert summary["age"].mean == pytest.approx(ROWS["age"].mean(), rel=1e-14)
    assert summary["age"].sd == pytest.approx(ROWS["age"].std(ddof=1), rel=1e-12)
    assert summary["sex"].counts == {"f": 3, "m": 2, "x": 1}


def test_a_mean_far_from_zero_costs_no_digits():
    """1e9 plus fractions: sums of squares would have lost the deviation, which is a third."""
    far = {"age": 1e9 + np.array([0.25, -0.25, 0.5, -0.5, 0.125, -0.125])}
    summary = found(Schema(("age",), minimum=0), parts([2, 4], far))
    assert summary["age"].sd == pytest.approx(far["age"].std(ddof=1), rel=1e-12)


def test_small_cells_are_not_told():
    schema = Schema((), ("sex",), minimum=3)
    # Two and one at the first site, one and two at the second: all cells are small there.
    assert found(schema, parts([3]))["sex"] == Levels({}, 6)
    alone = Schema((), ("sex",), minimum=3, many=False)
    assert found(alone, parts([1, 2, 3, 4, 5]))["sex"] == Levels({"f": 3}, 3)


def test_a_site_with_few_rows_does_not_tell_its_mean():
    few = {"few": {"age": ROWS["age"][:2]}}
    assert found(Schema(("age",), minimum=5), few)["age"] == Moments()
    assert found(Schema(("age",), minimum=5, many=False), few)["age"].count == 2


def test_what_is_wrong_is_told():
    with pytest.raises(DataError, match="no column 'weight'"):
        found(Schema(("weight",)), parts([]))
    with pytest.raises(SettingsError, match="minimum"):
        Schema(minimum=-1)
