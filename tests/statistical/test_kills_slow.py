"""Every method, killed at random moments in a process of its own, resumes to the same bits: 100 kills.

Each is a real SIGKILL: between rounds, in the midst of one, or while a checkpoint is being written.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.algorithms import METHODS
from fedpop.errors import FedpopWarning
from tests.algorithms.conformance import four, made
from tests.runtime.test_resume import same_runs

ROOT = Path(__file__).parents[2]
ROUNDS = 60
KILLS = 6
"""Of each method; there are at least 17 of them."""
RUN = """
import sys
from pathlib import Path
from tests.statistical.test_kills_slow import run
run(sys.argv[1], Path(sys.argv[2]), tell=True)
"""


class Slowly(fp.callbacks.Callback):
    """Says each round on standard output, and waits a moment: rounds of small models are over too soon."""

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        print(run.round, flush=True)
        time.sleep(0.005)
        return False


def run(name: str, out: Path, tell: bool = False) -> None:
    torch.set_num_threads(1)
    method = made(name, "softmax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)
        method.fit(
            four("softmax"),
            rounds=ROUNDS,
            seed=11,
            participation=0.7 if method.participation == "any" else None,
            out=out,
            resume=True,
            checkpoint_every=2,
            callbacks=[Slowly()] if tell else [],
        )


def killed(name: str, out: Path, chance: random.Random) -> bool:
    """Start or resume, and kill after a few rounds; False where the run was over before that."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, name, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(chance.randint(1, ROUNDS // KILLS - 1)):
        if not process.stdout.readline():
            break
    time.sleep(chance.uniform(0, 0.02))
    process.kill()
    ended = process.wait()
    assert ended in (0, -signal.SIGKILL), process.stderr.read()
    return ended == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    kills = sum(killed(name, tmp_path / "killed", chance) for _ in range(KILLS))
    run(name, tmp_path / "killed")
    run(name, tmp_path / "whole")
    same_runs(tmp_path / "killed", tmp_path / "whole")
    assert kills == KILLS, f"seed {seed}: a run was over before it could be killed"


@pytest.mark.slow
def test_there_are_a_hundred_kills() -> None:
    assert KILLS * len(METHODS) >= 100
