"""What a client costs when there are many, and what a million clients cost who mostly sleep.

``python -m benchmarks.scale`` is the part that runs in a separate process, to know its memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import torch
from rich.table import Table

import fedpop as fp
from benchmarks.timing import Advance, Spread, in_turns, ratio, shown
from fedpop.data.synthetic import SyntheticTask
from fedpop.keys import Key
from fedpop.report.results import Record, record
from fedpop.run.run import Run, Settings

NAME = "scale"
ACTIVE, FLAT = (1_000, 10_000, 100_000), 1.2
MILLION, FEW, AWAKE, EXAMPLES, MEMORY = 1_000_000, 20_000, 10_000, 5, 3.0
SECONDS, LEAST = 40.0, 3


def packed(clients: int) -> fp.Table:
    """The synthetic task as one table: y = x' phi z_i + noise, drawn in blocks."""
    task, key = SyntheticTask(), Key(0, purpose="bench")
    phi = key.at(purpose="phi").normal(key.server(), (task.k, task.d))[0] / task.k**0.5
    x, y = torch.empty(clients, EXAMPLES, task.k), torch.empty(clients, EXAMPLES)
    for ids in torch.arange(clients).split(20_000):
        z = key.at(purpose="z").normal(ids, (task.d, 1))
        x[ids] = key.at(purpose="x").normal(ids, (EXAMPLES, task.k))
        noise = key.at(purpose="y").normal(ids, (EXAMPLES,))
        y[ids] = (x[ids] @ phi @ z).squeeze(-1) + task.variance**0.5 * noise
    return fp.Table(x.flatten(0, 1), y.flatten(), torch.arange(clients).repeat_interleave(EXAMPLES))


def begun(clients: int, participation: fp.participation.Uniform | fp.participation.Everyone) -> Run:
    federation = fp.Federation.of(packed(clients))
    method = fp.FedSOUL(SyntheticTask().model(seed=0), engine="sampled").prepared(federation.example)
    run = Run(method, method.model.checked(federation), Settings(10_000, 0, participation))
    run.begin()
    run.totals.clear()
    return run


def measure(advance: Advance) -> list[Record]:
    runs = {active: begun(active, fp.participation.Everyone()) for active in ACTIVE}

    def rounds(run: Run, count: int) -> None:
        for _ in range(count):
            run.train_round()

    # As many clients in every lap.
    repeats = {active: max(ACTIVE) // active for active in ACTIVE}
    programs = {str(a): lambda r=r, n=repeats[a]: rounds(r, n) for a, r in runs.items()}
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=lambda share: advance(share / 2))
    out = []
    for active, run in runs.items():
        each_lap = laps[str(active)]
        each = Spread.of([1e6 * lap.cpu / max(ACTIVE) for lap in each_lap]).metrics("microseconds_per_client")
        metrics = ratio(each_lap, laps[str(ACTIVE[0])]) | each | {"target": FLAT, "repeats": len(each_lap)}
        setting = {"benchmark": NAME, "clients": active, "active": active, "examples": EXAMPLES}
        out.append(record("bench", setting, "FedSOUL", 0, metrics, {"rounds": run.round}, {}))
    return [*out, million()]


def million() -> Record:
    """Peak memory of a federation of a million, and its rounds against those of a small one."""
    command = [sys.executable, "-m", "benchmarks.scale"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    metrics = json.loads(done.stdout) | {"target": FLAT, "memory_target": MEMORY}
    setting = {"benchmark": NAME, "clients": MILLION, "active": AWAKE, "examples": EXAMPLES}
    return record("bench", setting, "FedSOUL", 0, metrics, {"rounds": metrics.pop("rounds")}, {})


def alone() -> dict[str, Any]:
    """In a separate process: what ``million`` reports."""
    torch.set_num_threads(1)
    large = begun(MILLION, fp.participation.Uniform(AWAKE))
    for _ in range(3):
        large.train_round()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    small = begun(FEW, fp.participation.Uniform(AWAKE))
    laps = in_turns({"large": large.train_round, "small": small.train_round}, seconds=10.0, least=20)
    compared = ratio(laps["large"], laps["small"])
    return compared | {"peak_gib": peak, "repeats": len(laps["large"]), "rounds": large.round}


def tables(records: list[Record]) -> list[Table]:
    flat, asleep = records[:-1], records[-1]
    first = Table(
        title="The cost of a client in a round of the synthetic model",
        caption=f"All active, one thread; median and quartiles of {flat[0]['metrics']['repeats']} turns",
    )
    for name in ("active clients", "microseconds per client", f"relative to {ACTIVE[0]:,}", "target"):
        first.add_column(name, justify="right")
    for r in flat:
        m = r["metrics"]
        each = shown(m, "microseconds_per_client")
        first.add_row(f"{r['setting']['active']:,}", each, shown(m, "ratio"), f"{m['target']:.2f}")
    m = asleep["metrics"]
    second = Table(title=f"{AWAKE:,} active clients of {MILLION:,}, {EXAMPLES} examples each")
    for name in ("peak memory", "target", f"a round, relative to {AWAKE:,} of {FEW:,}", "target"):
        second.add_column(name, justify="right")
    peak, most = f"{m['peak_gib']:.2f} GiB", f"{m['memory_target']:.2f} GiB"
    second.add_row(peak, most, shown(m, "ratio"), f"{m['target']:.2f}")
    return [first, second]


if __name__ == "__main__":
    print(json.dumps(alone()))
