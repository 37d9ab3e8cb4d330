"""Mixed models on pooled rows: ours, lme4's where there is R, and statsmodels' ``MixedLM``.

``python -m benchmarks.mixed NAME`` is the part that runs in a separate process, to know its memory.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import fedpop as fp
from benchmarks.timing import Advance, lap
from fedpop.keys import Key
from fedpop.report.results import Record, record

NAME = "mixed"


@dataclass(frozen=True)
class Case:
    """A model, and how many groups of how many rows its table has."""

    formula: str
    groups: int
    rows: int
    family: str = "gaussian"
    outer: int = 0
    """Hospitals that the groups are nested in."""
    pooled: bool = False
    """statsmodels is measured too: its time for more groups is minutes."""


CASES = {
    "intercepts, 1,000 groups": Case("y ~ x + (1 | g)", 1_000, 10, pooled=True),
    "intercepts, 10,000 groups": Case("y ~ x + (1 | g)", 10_000, 10, pooled=True),
    "intercepts, 100,000 groups": Case("y ~ x + (1 | g)", 100_000, 10),
    "slopes, 1,000 groups": Case("y ~ x + (x | g)", 1_000, 100),
    "slopes, 100,000 groups": Case("y ~ x + (x | g)", 100_000, 10),
    "yes or no, 5,000 groups": Case("yes ~ x + (1 | g)", 5_000, 10, "binomial"),
    "nested, 1,000 hospitals": Case("y ~ x + (1 | hospital/g)", 100_000, 10, outer=1_000),
}
MEMORY = 2.0
LME4 = """
suppressMessages(library(lme4)); d <- read.csv("{table}")
spent <- system.time(m <- {call}({formula}, d{more}))
cat(sum(spent[1:2]), format(as.numeric(logLik(m)), digits = 15))
"""


def table(case: Case) -> Any:
    import pandas as pd

    key, ids = Key(0, purpose="bench.mixed"), torch.arange(case.groups)
    x = key.at(purpose="x").normal(ids, (case.rows,), torch.float64)
    u = key.at(purpose="u").normal(ids, (2,), torch.float64)
    noise = key.at(purpose="noise").normal(ids, (case.rows,), torch.float64)
    eta = 1 + 0.5 * x + 0.7 * u[:, :1] + (0.3 * u[:, 1:] * x if "(x |" in case.formula else 0.0)
    hospital = ids % max(case.outer, 1)
    if case.outer:
        wide = key.at(purpose="hospital").normal(torch.arange(case.outer), (1,), torch.float64)
        eta = eta + 0.6 * wide[hospital]
    yes = key.at(purpose="yes").uniform(ids, (case.rows,), torch.float64) < torch.sigmoid(eta - 1)
    columns = {"y": eta + noise, "x": x, "yes": yes.long()}
    owners = {"g": ids, "hospital": hospital}
    whole = {name: v.flatten().numpy() for name, v in columns.items()}
    return pd.DataFrame(whole | {n: v.repeat_interleave(case.rows).numpy() for n, v in owners.items()})


def alone(case: Case) -> dict[str, float]:
    """In a separate process: seconds of a second fit (the first one imports), memory, and statsmodels'."""
    torch.set_num_threads(1)
    small = Case(case.formula, 100, 10, case.family, min(case.outer, 10))
    fp.mixed_model(case.formula, table(small), case.family)
    frame, fits = table(case), []
    second = lap(lambda: fits.append(fp.mixed_model(case.formula, frame, case.family)))
    out = {"cpu": second.cpu, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    out |= {"rounds": float(fits[0].rounds), "log_likelihood": fits[0].log_likelihood}
    if case.pooled:
        import statsmodels.formula.api as smf

        pooled = lap(lambda: fits.append(smf.mixedlm("y ~ x", frame, groups=frame.g).fit(reml=False)))
        out |= {"pooled_cpu": pooled.cpu, "pooled_log_likelihood": float(fits[1].llf)}
    return out


def lme4(case: Case) -> dict[str, float]:
    """Processor seconds of R's fit alone, with its default settings (those of maximum likelihood); nothing
    where there is no R with lme4."""
    gaussian = case.family == "gaussian"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        table(case).to_csv(path, index=False)
        more = ", REML = FALSE" if gaussian else f", family = {case.family}, nAGQ = 25"
        call = "lmer" if gaussian else "glmer"
        program = LME4.format(table=path, call=call, formula=case.formula, more=more)
        r = shutil.which("Rscript")
        if r is None:
            return {}
        done = subprocess.run([r, "-e", program], capture_output=True, text=True, env=os.environ | THREADS)
    if done.returncode:
        return {}
    cpu, value = map(float, done.stdout.split()[-2:])
    return {"lme4_cpu": cpu, "lme4_log_likelihood": value}


THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure(advance: Advance) -> list[Record]:
    out = []
    for i, (name, case) in enumerate(CASES.items()):
        command = [sys.executable, "-m", "benchmarks.mixed", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | THREADS)
        metrics = json.loads(done.stdout) | lme4(case)
        setting = {
            "benchmark": NAME,
            "clients": case.outer or case.groups,
            "examples": case.rows,
            "case": name,
        }
        cost = {"rounds": metrics.pop("rounds")}
        out.append(record("bench", setting, "mixed_model", 0, metrics, cost, {}))
        advance((i + 1) / len(CASES))
    return out


def tables(records: list[Record]) -> list[Table]:
    shown = Table(title="mixed models, one thread", caption="processor seconds of a fit")
    shown.add_column("model", no_wrap=True)
    for name in ("rows", "fedpop", "peak memory", "target", "lme4", "share", "statsmodels"):
        shown.add_column(name, justify="right")
    for r in records:
        m, case = r["metrics"], CASES[r["setting"]["case"]]
        other, pooled = m.get("lme4_cpu"), m.get("pooled_cpu")
        memory = (f"{m['peak_gib']:.2f} GiB", f"{MEMORY:.2f} GiB")
        share = "-" if other is None else f"{m['cpu'] / other:.2f}"
        beside = [f"{v:.{max(0, 1 - math.floor(math.log10(v)))}f}" if v else "-" for v in (other, pooled)]
        size = f"{case.groups * case.rows:,}"
        shown.add_row(r["setting"]["case"], size, f"{m['cpu']:.2f}", *memory, beside[0], share, beside[1])
    return [shown]


if __name__ == "__main__":
    print(json.dumps(alone(CASES[sys.argv[1]])))
