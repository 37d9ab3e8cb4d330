"""Rounds per second of the demo's task, the paper's synthetic one, with ten local steps."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

import fedpop as fp
from benchmarks.timing import Advance, Spread, in_turns, ratio, shown
from fedpop.data.synthetic import SyntheticTask
from fedpop.methods.base import Algorithm
from fedpop.report.results import Record, record
from fedpop.run.run import Run, Settings
from fedpop.settings import describe

NAME = "rounds per second"
BLOCK, SECONDS, LEAST = 25, 15.0, 5


def begun(method: Algorithm, federation: fp.Federation) -> Run:
    run = Run(method, federation, Settings(10_000, 0, fp.participation.Everyone()))
    run.begin()
    run.totals.clear()
    return run


def measure(advance: Advance) -> list[Record]:
    task = SyntheticTask()
    federation = fp.Federation.of(task.make(seed=0).clients)
    model = task.model(seed=0).prepared(federation.example)
    federation = model.checked(federation)
    methods = (
        fp.FedSOUL(model, local_steps=10, engine="sampled"),
        fp.FedSOUL.paper(model, rate=1e-3, local_steps=10),
    )
    runs = {method.label: begun(method, federation) for method in methods}
    kernels = {method.label: describe(method.sampler.kernel) for method in methods}  # as resolved

    def rounds(run: Run) -> None:
        for _ in range(BLOCK):
            run.train_round()

    programs = {name: lambda run=run: rounds(run) for name, run in runs.items()}
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=advance)
    out = []
    for name, run in runs.items():
        speed = Spread.of([BLOCK / lap.cpu for lap in laps[name]]).metrics("rounds_per_second")
        wall = Spread.of([BLOCK / lap.wall for lap in laps[name]]).metrics("rounds_per_second_wall")
        metrics = speed | wall | ratio(laps[name], laps["FedSOUL"])
        setting = {"benchmark": NAME, "local_steps": 10} | {
            k: v for k, v in asdict(task).items() if k in ("b", "d", "k")
        }
        cost = run.totals | {"rounds": run.round}
        config = run.algorithm.describe() | {"kernel": kernels[name]}
        out.append(record("bench", setting, name, 0, metrics, cost, config))
    return out


def tables(records: list[Record]) -> list[Table]:
    table = Table(title="Rounds of the demo's task, ten local steps", caption="Median and quartiles")
    for name in ("method", "kernel", "rounds per second", "by the wall clock", "time, relative"):
        table.add_column(name, justify="left" if name in ("method", "kernel") else "right")
    for r in records:
        m, kernel = r["metrics"], r["config"]["kernel"]["kind"]
        speeds = (shown(m, "rounds_per_second", 0), shown(m, "rounds_per_second_wall", 0))
        table.add_row(r["method"], kernel, *speeds, shown(m, "ratio"))
    return [table]
