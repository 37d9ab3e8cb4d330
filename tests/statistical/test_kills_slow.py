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
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import FedpopWarning
from fedpop.methods import METHODS
from tests.methods.conformance import four, made
from tests.run.test_resume import same_runs

ROOT = Path(__file__).parents[2]
ROUNDS = 60
KILLS = 6
"""Of each method; there are at least 17 of them."""
AHEAD = 3
"""Rounds that a run may be ahead of the one after which it is killed: it is always busy, and never over."""
NURSERY = """
import sys
from tests.statistical.test_kills_slow import nursery
nursery()
"""


class Slowly(fp.callbacks.Callback):
    """Says each round on standard output, and waits a moment: rounds of small models are over too soon. It
    goes on as long as it is allowed."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        print(run.round, flush=True)
        self.allowed -= 1
        time.sleep(0.005 if self.allowed else 3600)
        return False


def run(name: str, out: Path, allowed: int = 0) -> None:
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
            callbacks=[Slowly(allowed)] if allowed else [],
        )


def nursery() -> None:
    """A process that has imported all there is, and starts each run as a process of its own by a fork."""
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # torch.func imports it late, which would take most of a run's time
    for line in sys.stdin:
        name, allowed, out = line.rstrip("\n").split(" ", 2)
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            run(name, Path(out), int(allowed))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


@pytest.fixture(scope="module")
def started() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], text=True, env=environment, cwd=ROOT, **pipes
    ) as process:
        yield process
        process.kill()


def killed(process: subprocess.Popen[str], name: str, out: Path, chance: random.Random) -> int:
    """Start or resume, and kill after a few rounds; gives how it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    rounds = chance.randint(1, ROUNDS // KILLS - AHEAD - 1)
    process.stdin.write(f"{name} {rounds + AHEAD} {out}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    said = [process.stdout.readline() for _ in range(rounds)]
    assert not said[-1].startswith("ended"), "the run ended by itself"
    time.sleep(chance.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    while not said[-1].startswith("ended"):  # after rounds that it was ahead
        said.append(process.stdout.readline())
    return int(said[-1].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_resumes_to_the_same_bits(
    name: str, tmp_path: Path, started: subprocess.Popen[str]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    ends = [killed(started, name, tmp_path / "killed", chance) for _ in range(KILLS)]
    assert ends == [-signal.SIGKILL] * KILLS, f"seed {seed}"
    run(name, tmp_path / "killed")
    run(name, tmp_path / "whole")
    same_runs(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_there_are_a_hundred_kills() -> None:
    assert KILLS * len(METHODS) >= 100
