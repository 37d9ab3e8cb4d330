"""A reader who follows one fit of a mixed model meets few files."""

from __future__ import annotations

import fedpop as fp
from tests.followed import files_of

MOST = 35


def test_one_fit_runs_code_of_few_files(simulated):
    frame, fit = simulated([6] * 10), fp.mixed_model
    found, _ = files_of(lambda: fit("y ~ x + w + s + (w | g)", frame))
    assert {"mixed/gaussian.py", "run/members.py", "site/sites.py", "message/channel.py"} <= found
    assert len(found) <= MOST, sorted(found)
