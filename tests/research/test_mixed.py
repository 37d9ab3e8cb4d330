"""The experiment on mixed models: what its committed records say, and that its jobs make such records."""

from pathlib import Path

import pytest

pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

from fedpop.errors import DataError
from fedpop.report.results import Results, mean, values
from research.mixed import EXPERIMENT, page, pooling, run
from research.mixed.run import RADON, SLEEP, TASKS
from tests.mixed.conftest import FOLDER, need


@pytest.fixture
def committed() -> Results:
    return Results.open(EXPERIMENT.folder)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.data)
@pytest.mark.parametrize("how", run.HOW)
def test_fits_are_within_their_limits(task, how, committed):
    """Chains, few taking part and QSGD may be twice as far as the exact engine."""
    found = committed.of(run.setting_of(task), how)
    assert found
    for r in found:
        assert r["metrics"]["converged"]
        for measure, limit in page.LIMITS[task.family].items():
            if measure in r["metrics"]:
                assert r["metrics"][measure] <= limit * (1 if how == "exact" else 2), (r["seed"], measure)


@pytest.mark.parametrize("task", run.NESTED, ids=lambda t: t.data)
def test_nested_factors_and_degrees_are_rs(task, committed):
    for method in task.methods:
        (r,) = committed.of(run.setting_of(task), method)
        assert r["metrics"]["converged"]
        assert ("degrees" in r["metrics"]) == (method == "REML")
        for measure, limit in page.NESTED_LIMITS.items():
            assert r["metrics"].get(measure, 0.0) <= limit, (method, measure)


def test_other_coordinates_are_the_same_model(committed):
    for unit in run.UNITS:
        (r,) = (r for r in committed.of(method=unit))
        assert r["metrics"]["log_likelihood"] < 1e-3


def test_intervals_of_new_groups_cover(committed):
    whole, plain = (mean(values(committed.of(run.COVERAGE, n), "coverage")) for n in run.NEW)
    assert 0.88 <= whole <= 0.92
    assert 0.84 <= plain < whole


def test_small_counties_gain_by_pooling(committed):
    """Narrower than without pooling, better calibrated than complete pooling."""
    of = {how: committed.of(run.POOLING, how) for how in pooling.HOW}
    width = {how: mean(values(found, "width_small")) for how, found in of.items()}
    off = {how: abs(mean(values(found, "coverage_small")) - 0.9) for how, found in of.items()}
    assert width["partial pooling"] < 0.7 * width["no pooling"]
    assert off["partial pooling"] < off["complete pooling"]
    error = {how: mean(values(found, "error_small")) for how, found in of.items()}
    assert error["partial pooling"] == min(error.values())


def test_jobs_make_records_that_a_page_is_made_of(tmp_path):
    need("radon.csv")
    need("nested/pastes.csv")
    need("sleepstudy.csv")
    data, results = FOLDER.parent, Results(tmp_path)
    results.add(run.agreement(SLEEP, "exact", 0, data))
    results.add(run.nested(run.NESTED[0], "REML", data))
    results.add(run.pooled(0, data))
    results.add(run.coverage(0, data, replicates=1))
    EXPERIMENT.write(results)
    text = (tmp_path / "results.md").read_text()
    assert "| sleepstudy | exact | 1 |" in text
    assert "| pastes | REML |" in text
    assert "partial pooling" in (tmp_path / "report.html").read_text()
    assert RADON.formula in str(results.settings())


def test_data_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"no grouped/sleepstudy.csv in .*--data-dir"):
        SLEEP.table(tmp_path)


def test_the_page_tells_what_the_records_say(committed):
    text = (Path(__file__).parents[2] / "docs" / "mixed.md").read_text()
    for task in TASKS:
        found = [max(values(committed.of(run.setting_of(task), how), "fixed")) for how in run.HOW]
        assert f"| {task.data} | " + " | ".join(f"{v:.4f}" for v in found) + " |" in text
    for name in run.NEW:
        covered = mean(values(committed.of(run.COVERAGE, name), "coverage"))
        assert f"cover {100 * covered:.1f} %" in text
    small = [committed.of(run.POOLING, how) for how in pooling.HOW]
    none, whole, part = (f"{mean(values(found, 'width_small')):.2f}" for found in small)
    assert f"{none} wide without pooling, {part} with partial pooling and {whole} with complete" in text
