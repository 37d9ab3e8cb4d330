"""Random intercepts of up to 100,000 groups of ten rows, against statsmodels' ``MixedLM`` on pooled rows.

``python -m benchmarks.mixed GROUPS`` is the part that runs in a separate process, to know its memory.
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
from benchmarks.timing import Advance, lap
from fedpop.keys import Key
from fedpop.report.results import Record, record

NAME = "mixed"
GROUPS, ROWS = (1_000, 10_000, 100_000), 10
POOLED = 10_000
"""Groups up to which statsmodels is measured: its time for more is minutes."""
MEMORY = 1.0
FORMULA = "y ~ x + (1 | g)"


def table(groups: int) -> Any:
    import pandas as pd

    key, ids = Key(0, purpose="bench.mixed"), torch.arange(groups)
    x = key.at(purpose="x").normal(ids, (ROWS,), torch.float64)
    u = key.at(purpose="u").normal(ids, (1,), torch.float64)
    noise = key.at(purpose="noise").normal(ids, (ROWS,), torch.float64)
    y = 1 + 0.5 * x + 0.7 * u + noise
    owner = ids.repeat_interleave(ROWS)
    return pd.DataFrame({"y": y.flatten().numpy(), "x": x.flatten().numpy(), "g": owner.numpy()})


def alone(groups: int) -> dict[str, float]:
    """In a separate process: seconds of a second fit (the first one imports), memory, and statsmodels'."""
    torch.set_num_threads(1)
    fp.mixed_model(FORMULA, table(100))
    frame, fits = table(groups), []
    second = lap(lambda: fits.append(fp.mixed_model(FORMULA, frame)))
    out = {"cpu": second.cpu, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    out |= {"rounds": float(fits[0].rounds), "log_likelihood": fits[0].log_likelihood}
    if groups <= POOLED:
        import statsmodels.formula.api as smf

        pooled = lap(lambda: fits.append(smf.mixedlm("y ~ x", frame, groups=frame.g).fit(reml=False)))
        out |= {"pooled_cpu": pooled.cpu, "pooled_log_likelihood": float(fits[1].llf)}
    return out


def measure(advance: Advance) -> list[Record]:
    out = []
    for i, groups in enumerate(GROUPS):
        command = [sys.executable, "-m", "benchmarks.mixed", str(groups)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
        metrics = json.loads(done.stdout)
        setting = {"benchmark": NAME, "clients": groups, "examples": ROWS}
        cost = {"rounds": metrics.pop("rounds")}
        out.append(record("bench", setting, "mixed_model", 0, metrics, cost, {}))
        advance((i + 1) / len(GROUPS))
    return out


def tables(records: list[Record]) -> list[Table]:
    shown = Table(
        title=f"{FORMULA}, {ROWS} rows to a group, one thread", caption="processor seconds of a fit"
    )
    for name in (
        "groups",
        "fedpop",
        "microseconds per group",
        "peak memory",
        "target",
        "statsmodels MixedLM",
    ):
        shown.add_column(name, justify="right")
    for r in records:
        m, groups = r["metrics"], r["setting"]["clients"]
        pooled = f"{m['pooled_cpu']:.1f}" if m.get("pooled_cpu") is not None else "-"
        each = f"{1e6 * m['cpu'] / groups:.0f}"
        memory = (f"{m['peak_gib']:.2f} GiB", f"{MEMORY:.2f} GiB")
        shown.add_row(f"{groups:,}", f"{m['cpu']:.2f}", each, *memory, pooled)
    return [shown]


if __name__ == "__main__":
    print(json.dumps(alone(int(sys.argv[1]))))
