"""Models of tables with reference fits, and jobs: fits beside these references, nested factors among them, a
parametric bootstrap, and counties with half of their homes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpop.data.lookup import VARIABLE, roots
from fedpop.errors import DataError
from fedpop.files import read_json
from fedpop.keys import Key
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.model import mixed_model
from fedpop.mixed.table import pandas, read_csv
from fedpop.report.results import Record, record
from research.experiment import Asked, Job
from research.mixed import pooling

NAME = "mixed"
FOLDER = "grouped"
"""Of tables, in the folder of data."""
HOW: dict[str, dict[str, Any]] = {
    "exact": {},
    "chains": {"engine": "sampled"},
    "a fifth takes part": {"participation": 0.2},
    "QSGD": {"compressor": "qsgd"},
}
"""Settings of a fit; those but the first draw random numbers, and have seeds."""
UNITS = {"days": (0.0, 1.0), "days, centred": (4.5, 1.0), "hours": (0.0, 24.0)}
"""What sleepstudy's days are counted from, and in."""
BLOCKS, REPLICATES = 5, 40
"""Of the bootstrap: jobs, and data sets that each of them draws."""
SPLITS = 20
"""Ways to hold half of each county's homes out."""
LEVEL = 0.9

# --- models with references ------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceTask:
    """A model of a table, and the name of its reference among those beside the table."""

    data: str
    formula: str
    reference: str
    family: str = "gaussian"
    words: tuple[str, ...] = ()
    """Columns whose numbers are names of levels."""

    def table(self, data: Path | None) -> Any:
        frame = read_csv(file(f"{self.data}.csv", data))
        return frame.astype(dict.fromkeys(self.words, str))

    def truth(self, data: Path | None) -> dict[str, Any]:
        """The reference: estimates, standard errors, conditional modes."""
        saved = read_json(file(f"{self.data}.reference.json", data))
        found: dict[str, Any] = next(m for m in saved["models"] if m["model"] == self.reference)
        return found


@dataclass(frozen=True)
class NestedTask:
    """A model, most with factors in factors, whose references are by the method of fit."""

    data: str
    formula: str
    methods: tuple[str, ...] = ("ML", "REML")
    family: str = "gaussian"

    def table(self, data: Path | None) -> Any:
        words = self._saved(data)["data"]["factor_columns"]
        return read_csv(file(f"{self.data}.csv", data)).astype(dict.fromkeys(words, str))

    def truth(self, method: str, data: Path | None) -> dict[str, Any]:
        found: dict[str, Any] = self._saved(data)["fits"][method]
        return found

    def _saved(self, data: Path | None) -> dict[str, Any]:
        found: dict[str, Any] = read_json(file(f"{self.data}.json", data))
        return found


SLEEP = ReferenceTask("sleepstudy", "Reaction ~ Days + (Days | Subject)", "random_slope")
RADON = ReferenceTask("radon", "log_radon ~ floor + (1 | county)", "random_intercept")
CBPP = ReferenceTask(
    "cbpp",
    "cbind(incidence, size - incidence) ~ period + (1 | herd)",
    "agq25",
    "binomial",
    ("period",),
)
TASKS = (SLEEP, RADON, CBPP)
NESTED = (
    NestedTask("nested/pastes", "strength ~ 1 + (1 | batch/cask)"),
    NestedTask("nested/oats", "yield ~ nitro * Variety + (1 | Block/Variety)"),
    NestedTask("nested/sleepstudy", SLEEP.formula, ("REML",)),
    NestedTask(
        "nested/guimmun",
        "immun ~ kid2p + mom25p + ethn + momEd + rural + pcInd81 + (1 | comm/mom)",
        ("Laplace",),
        "binomial",
    ),
)


def file(name: str, data: Path | None) -> Path:
    """A file among grouped data, or an error that says where it was looked for."""
    places = [root.folder / FOLDER for root in roots(data)]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise DataError(
            f"no {FOLDER}/{name} in {', '.join(str(p.parent) for p in places)}; give the folder with "
            f"--data-dir or in {VARIABLE}"
        )
    return found


# --- jobs ------------------------------------------------------------------------------------


def distances(fit: MixedFit, truth: dict[str, Any]) -> dict[str, float]:
    """How far a fit is from its reference, the largest over terms: fixed effects in standard errors, modes in
    posterior standard deviations, scales in shares of themselves."""
    fixed, errors, sds = truth["fixed"], truth["fixed_se"], truth["random"][fit.group]["sd"]
    out = {
        "fixed": max(abs(fit.coefficients[n] - v) / errors[n] for n, v in fixed.items()),
        "standard_errors": max(abs(fit.standard_errors[n] / v - 1) for n, v in errors.items()),
        "sds": max(abs(fit.sd[n] / v - 1) for n, v in sds.items()),
        "log_likelihood": abs(fit.log_likelihood - truth.get("logLik_exact", truth["logLik"])),
    }
    if len(sds) > 1:
        known = torch.tensor(truth["random"][fit.group]["cor"]["matrix"], dtype=torch.float64)
        out["correlation"] = float((fit.correlation - known).abs().max())
    if fit.sigma is not None:
        out["sigma"] = abs(fit.sigma / truth["sigma"] - 1)
    modes = truth["conditional_modes"][fit.group]
    found = fit.random_effects()
    value = np.array([np.ravel(row) for row in modes["mode"]])
    mean, sd = (found[n].to_numpy().reshape(value.shape) for n in ("mean", "sd"))
    if fit.family.gaussian:  # of others R has modes, and we have means
        assert [str(v) for v in modes["levels"]] == fit.levels
        out["modes"] = float((np.abs(mean - value) / sd).max())
    return out


def agreement(task: ReferenceTask, how: str, seed: int, data: Path | None) -> list[Record]:
    frame, started = task.table(data), time.process_time()
    fit = mixed_model(task.formula, frame, task.family, seed=seed, **HOW[how])
    cpu = time.process_time() - started
    metrics = distances(fit, task.truth(data)) | {"converged": float(fit.converged), "cpu": cpu}
    return [_record(setting_of(task), how, seed, metrics, fit)]


def nested(task: NestedTask, method: str, data: Path | None) -> list[Record]:
    """Beside lme4's fit, and lmerTest's degrees of freedom."""
    frame, truth, started = task.table(data), task.truth(method, data), time.process_time()
    words: dict[str, Any] = {"method": method} if method != "Laplace" else {}
    fit = mixed_model(task.formula, frame, task.family, **words)
    degrees = fit.degrees
    cpu = time.process_time() - started
    errors, several = truth["se"], len(fit.factors) > 1
    sds = {
        f"{term}|{factor}" if several else term: value
        for factor, random in truth["random"].items()
        for term, value in random["sd"].items()
    }
    metrics = {
        "fixed": max(abs(fit.coefficients[n] - v) / errors[n] for n, v in truth["fixed"].items()),
        "standard_errors": max(abs(fit.standard_errors[n] / v - 1) for n, v in errors.items()),
        "sds": max(abs(fit.sd[n] / v - 1) for n, v in sds.items()),
        "log_likelihood": abs(fit.log_likelihood - truth["logLik"]),
        "converged": float(fit.converged),
        "cpu": cpu,
    }
    if fit.sigma is not None:
        metrics["sigma"] = abs(fit.sigma / truth["sigma"] - 1)
    if known := truth.get("satterthwaite"):
        metrics["degrees"] = max(abs(degrees[n] / v["df"] - 1) for n, v in known.items())
    return [_record(setting_of(task), method, 0, metrics, fit)]


def coordinates(unit: str, data: Path | None) -> list[Record]:
    """The same model with days in other units: by how much its likelihood differs."""
    frame, (zero, times) = SLEEP.table(data), UNITS[unit]
    fit = mixed_model(SLEEP.formula, frame.assign(Days=(frame.Days - zero) * times))
    off = abs(fit.log_likelihood - SLEEP.truth(data)["logLik"])
    return [_record({"data": "sleepstudy, coordinates"}, unit, 0, {"log_likelihood": off}, fit)]


def setting_of(task: ReferenceTask | NestedTask) -> dict[str, Any]:
    return {"data": task.data, "formula": task.formula, "family": task.family}


COVERAGE = {"data": "sleepstudy, bootstrap", "formula": SLEEP.formula, "replicates": REPLICATES}
NEW = {"theta's uncertainty included": True, "plug-in": False}
"""Intervals of new groups."""


def coverage(block: int, data: Path | None, replicates: int = REPLICATES) -> list[Record]:
    """The chance that a new subject's reaction lies in its interval, with theta estimated from data that the
    fit to sleepstudy itself would give. That chance is known for each interval, the truth being normal, so
    that nothing of a new subject has to be drawn."""
    frame = SLEEP.table(data)
    truth = mixed_model(SLEEP.formula, frame)
    noise = float(truth.sigma or 0.0)
    b = torch.tensor(list(truth.coefficients.values()), dtype=torch.float64)
    x = torch.stack((torch.ones(len(frame)), torch.tensor(frame.Days.to_numpy())), 1).double()
    owner = torch.tensor([truth.levels.index(str(s)) for s in frame.Subject])
    days = pandas().DataFrame({"Days": np.arange(10.0)})
    at = torch.stack((torch.ones(10), torch.arange(10)), 1).double()
    mean = at @ b
    sd = (torch.einsum("ni,ij,nj->n", at, truth.covariance, at) + noise**2).sqrt()
    root = torch.linalg.cholesky(truth.covariance)
    found: dict[str, list[float]] = {name: [] for name in NEW}
    started = time.perf_counter()
    for replicate in range(block * replicates, (block + 1) * replicates):
        key = Key(replicate, purpose="bootstrap")
        z = key.at(purpose="z").normal(torch.arange(truth.n_groups), (2,), torch.float64) @ root.mT
        e = key.at(purpose="e").normal(torch.arange(len(x)), (), torch.float64)
        y = x @ b + (x * z[owner]).sum(1) + noise * e
        fit = mixed_model(SLEEP.formula, frame.assign(Reaction=y.numpy()), seed=replicate)
        for name, uncertain in NEW.items():
            ends = fit.predict(days, "new", level=LEVEL, theta_uncertainty=uncertain)
            low, high = (torch.special.ndtr((torch.tensor(ends[e].to_numpy()) - mean) / sd) for e in ENDS)
            found[name].append(float((high - low).mean()))
    cost = {"seconds": time.perf_counter() - started}
    return [
        record(NAME, COVERAGE, name, block, {"coverage": math.fsum(own) / len(own)}, cost, {})
        for name, own in found.items()
    ]


ENDS = ("lower", "upper")
POOLING = {"data": "radon, half of the homes", "formula": RADON.formula}


def pooled(split: int, data: Path | None) -> list[Record]:
    """Intervals of counties from half of their homes, three ways, judged by the other half."""
    found = pooling.judged(RADON.table(data), RADON.formula, split)
    return [
        record(NAME, POOLING, how, split, own.metrics, {}, own.counties if split == 0 else {})
        for how, own in found.items()
    ]


def _record(setting: dict[str, Any], how: str, seed: int, metrics: dict[str, float], fit: MixedFit) -> Record:
    cost = {"rounds": fit.rounds, "bytes_up": fit.groups.bytes_up, "seconds": fit.seconds}
    return record(NAME, setting, how, seed, metrics, cost, {})


def jobs(asked: Asked) -> list[Job]:
    data = asked.data
    out = []
    for task in TASKS:
        for how in HOW:
            for seed in range(asked.seeds if how != "exact" else 1):
                label = f"{task.data}, {how}, seed {seed}"
                out.append(Job(agreement, (task, how, seed, data), label, setting_of(task), seed, (how,)))
    for one in NESTED:
        for method in one.methods:
            label = f"{one.data}, {method}"
            out.append(Job(nested, (one, method, data), label, setting_of(one), 0, (method,)))
    for unit in UNITS:
        setting = {"data": "sleepstudy, coordinates"}
        out.append(Job(coordinates, (unit, data), f"sleepstudy in {unit}", setting, 0, (unit,)))
    for split in range(SPLITS):
        out.append(Job(pooled, (split, data), f"pooling, split {split}", POOLING, split, pooling.HOW))
    for block in range(BLOCKS):
        out.append(Job(coverage, (block, data), f"bootstrap, block {block}", COVERAGE, block, tuple(NEW)))
    return out
