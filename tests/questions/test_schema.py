"""Moments and levels add up to those of all rows; small cells are not told."""

import json

import numpy as np
import pytest

from fedpop.errors import DataError, SettingsError
from fedpop.questions.schema import Levels, Moments, Schema

ROWS = {
    "age": np.array([30.0, 41.0, 52.5, 60.0, 71.0, 1e6]),
    "sex": np.array(["f", "m", "f", "f", "m", "x"]),
}


def parts(cuts):
    return [{n: v[a:b] for n, v in ROWS.items()} for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3], [0, 6], [1, 2, 3, 4, 5]])
def test_the_sum_is_that_of_all_rows(cuts):
    schema = Schema(("age",), ("sex",), minimum=0)
    found = schema.finish([schema.answer(part) for part in parts(cuts)])
    assert found["age"].count == 6
    assert found["age"].mean == pytest.approx(ROWS["age"].mean(), rel=1e-14)
    assert found["age"].sd == pytest.approx(ROWS["age"].std(ddof=1), rel=1e-12)
    assert found["sex"].counts == {"f": 3, "m": 2, "x": 1}


def test_small_cells_are_not_told():
    schema = Schema((), ("sex",), minimum=3)
    one, other = (schema.answer(part, many=True) for part in parts([3]))
    assert one["sex"] == Levels({}, 3)  # two and one: both cells are small there
    assert schema.finish([one, other])["sex"] == Levels({}, 6)
    alone = [schema.answer(part) for part in parts([1, 2, 3, 4, 5])]
    assert schema.finish(alone)["sex"] == Levels({"f": 3}, 3)


def test_a_site_with_few_rows_does_not_tell_its_mean():
    schema = Schema(("age",), (), minimum=5)
    assert schema.answer(parts([2])[0], many=True)["age"] == Moments()
    assert schema.answer(parts([2])[0])["age"].count == 2


def test_answers_travel_as_plain_values():
    schema = Schema(("age",), ("sex",))
    answer = schema.answer(ROWS)
    assert schema.read(json.loads(json.dumps(schema.plain(answer)))) == answer


def test_what_is_wrong_is_told():
    with pytest.raises(DataError, match="no column 'weight'"):
        Schema(("weight",)).answer(ROWS)
    with pytest.raises(SettingsError, match="minimum"):
        Schema(minimum=-1)
