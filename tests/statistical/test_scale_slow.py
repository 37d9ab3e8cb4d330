"""A million clients in less than 3 GiB, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
import fedpop as fp
from benchmarks.scale import AWAKE, MILLION, begun
run = begun(MILLION, fp.participation.Uniform(AWAKE))
for _ in range(3):
    run.train_round()
assert len(run.federation) == 1_000_000 and run.sites.store.used > AWAKE
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_million_clients_fit_in_three_gib():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 3 * 2**20  # kilobytes
