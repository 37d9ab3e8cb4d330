"""The one results format: every field there, files whole, records replaced rather than repeated."""

import json

import pytest

from fedpop.errors import CheckpointError
from fedpop.report.results import COSTS, FIELDS, Results, mean, record, values


def one(method="FedSOUL", seed=0, angle=0.1):
    return record("synthetic", {"b": 2}, method, seed, {"angle": angle}, {"rounds": 3}, {"method": method})


def test_a_record_has_every_field_and_every_cost():
    item = one()
    assert set(item) == set(FIELDS)
    assert set(item["cost"]) == set(COSTS)
    assert item["cost"]["rounds"] == 3.0
    assert item["cost"]["bytes_up"] == 0.0


def test_numbers_that_are_not_finite_become_null():
    assert one(angle=float("nan"))["metrics"]["angle"] is None


def test_adding_replaces_records_of_the_same_identity(tmp_path):
    results = Results.open(tmp_path)
    results.add([one(), one(seed=1)])
    results.add([one(angle=0.2)])
    again = Results.open(tmp_path)
    assert len(again.records) == 2
    assert sorted(values(again.records, "angle")) == [0.1, 0.2]
    assert mean(values(again.of(method="FedSOUL"), "angle")) == pytest.approx(0.15)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps([{"method": "FedSOUL"}]))
    with pytest.raises(
        CheckpointError, match=r"results\.json.*(not a list of records|not an object with the fields)"
    ):
        Results.open(tmp_path)
