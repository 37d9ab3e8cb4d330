"""Mixed models by chains, with few taking part and with quantised messages; coverage of new groups.

The experiment on mixed models measures the same for the committed results; here it is done with other random
numbers than theirs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

from fedpop.report.results import values
from research.mixed import page, run
from research.mixed.run import TASKS, ReferenceTask
from tests.mixed.conftest import FOLDER, need

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", run.HOW)
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.data)
def test_chains_reach_twice_the_tolerances(task: ReferenceTask, how: str) -> None:
    need(f"{task.data}.csv")
    (found,) = run.agreement(task, how, 11, FOLDER.parent)
    assert found["metrics"]["converged"]
    for measure, limit in page.LIMITS[task.family].items():
        if measure in found["metrics"]:
            assert found["metrics"][measure] < limit * (1 if how == "exact" else 2), measure


def test_intervals_of_new_groups_cover() -> None:
    """The chance that an interval covers is known for each replicate, since the truth is normal, so that 200
    of them tell coverage to half a percent."""
    need("sleepstudy.csv")
    whole, plain = (values([r], "coverage")[0] for r in run.coverage(50, FOLDER.parent, 200))
    assert 0.88 <= whole <= 0.92
    assert 0.84 <= plain < whole
