"""Mixed models on pooled rows: ours, lme4's and lmerTest's where there is R, and statsmodels' ``MixedLM``.

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
    tested: bool = False
    """A fit by REML with degrees of freedom is measured too, beside lmerTest's."""


CASES = {
    "intercepts, 1,000 groups": Case("y ~ x + (1 | g)", 1_000, 10, pooled=True),
    "intercepts, 10,000 groups": Case("y ~ x + (1 | g)", 10_000, 10, pooled=True, tested=True),
    "intercepts, 100,000 groups": Case("y ~ x + (1 | g)", 100_000, 10),
    "slopes, 1,000 groups": Case("y ~ x + (x | g)", 1_000, 100, tested=True),
    "slopes, 100,000 groups": Case("y ~ x + (x | g)", 100_000, 10),
    "yes or no, 5,000 groups": Case("yes ~ x + (1 | g)", 5_000, 10, "binomial"),
    "nested, 1,000 hospitals": Case("y ~ x + (1 | hospital/g)", 100_000, 10, outer=1_000, tested=True),
}
MEMORY = 2.0
LME4 = """
suppressMessages(library(lme4)); d <- read.csv("{table}")
spent <- system.time(m <- {call}({formula}, d{more}))
cat(sum(spent[1:2]), format(as.numeric(logLik(m)), digits = 15))
"""


LMERTEST = """
suppressMessages(library(lmerTest)); d <- read.csv("{table}")
spent <- system.time({{ m <- lmer({formula}, d); s <- coef(summary(m)) }})
cat(sum(spent[1:2]), format(s[2, "df"], digits = 15))
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
    if case.tested:
        small_fit = fp.mixed_model(case.formula, table(small), REML=True)
        assert small_fit.degrees
        tested = lap(lambda: fits.append(fp.mixed_model(case.formula, frame, REML=True)))
        tested_df = lap(lambda: fits[-1].degrees)
        out |= {"reml_cpu": tested.cpu + tested_df.cpu, "df": fits[-1].degrees["x"]}
    if case.pooled:
        import statsmodels.formula.api as smf

        pooled = lap(lambda: fits.append(smf.mixedlm("y ~ x", frame, groups=frame.g).fit(reml=False)))
        out |= {"pooled_cpu": pooled.cpu, "pooled_log_likelihood": float(fits[-1].llf)}
    return out


def in_r(case: Case) -> dict[str, float]:
    """Processor seconds of R's fits alone, with default settings: lme4's by maximum likelihood, lmerTest's
    by REML with degrees of freedom; nothing where there is no R with these."""
    gaussian, r = case.family == "gaussian", shutil.which("Rscript")
    if r is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        table(case).to_csv(path, index=False)
        more = ", REML = FALSE" if gaussian else f", family = {case.family}, nAGQ = 25"
        call = "lmer" if gaussian else "glmer"
        program = LME4.format(table=path, call=call, formula=case.formula, more=more)
        out = _run(r, program, "lme4_cpu", "lme4_log_likelihood")
        if case.tested:
            program = LMERTEST.format(table=path, formula=case.formula)
            out |= _run(r, program, "lmertest_cpu", "lmertest_df")
    return out


def _run(r: str, program: str, *names: str) -> dict[str, float]:
    """The numbers that a program prints last, by name."""
    done = subprocess.run([r, "-e", program], capture_output=True, text=True, env=os.environ | THREADS)
    if done.returncode:
        return {}
    return dict(zip(names, map(float, done.stdout.split()[-len(names) :]), strict=True))


THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure(advance: Advance) -> list[Record]:
    out = []
    for i, (name, case) in enumerate(CASES.items()):
        command = [sys.executable, "-m", "benchmarks.mixed", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | THREADS)
        metrics = json.loads(done.stdout) | in_r(case)
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
    shown = Table(title="mixed models, one thread", caption="processor seconds of a fit; with df: by REML")
    shown.add_column("model", no_wrap=True)
    for name in (
        "rows",
        "fedpop",
        "peak memory",
        "target",
        "lme4",
        "share",
        "statsmodels",
        "with df",
        "lmerTest",
    ):
        shown.add_column(name, justify="right")
    for r in records:
        m, case = r["metrics"], CASES[r["setting"]["case"]]
        other, pooled = m.get("lme4_cpu"), m.get("pooled_cpu")
        memory = (f"{m['peak_gib']:.2f} GiB", f"{MEMORY:.2f} GiB")
        share = "-" if other is None else f"{m['cpu'] / other:.2f}"
        seconds = (other, pooled, m.get("reml_cpu"), m.get("lmertest_cpu"))
        beside = [f"{v:.{max(0, 1 - math.floor(math.log10(v)))}f}" if v else "-" for v in seconds]
        size = f"{case.groups * case.rows:,}"
        shown.add_row(r["setting"]["case"], size, f"{m['cpu']:.2f}", *memory, beside[0], share, *beside[1:])
    return [shown]


if __name__ == "__main__":
    print(json.dumps(alone(CASES[sys.argv[1]])))
