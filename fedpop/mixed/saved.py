"""A fit in files: its study, its estimates, and what sites answered about them, so that whoever reads it back
can ask for intervals, tests and predictions without any site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpop.errors import CheckpointError, FedpopError, SettingsError
from fedpop.files import (
    DAMAGED,
    read_sealed,
    read_tensors,
    reading,
    writable_folder,
    write_sealed,
    write_tensors,
)
from fedpop.message import Tensors
from fedpop.mixed.engine import Engine, Estimates, SearchResult, ThetaPoint
from fedpop.mixed.gaussian import GaussianEngine
from fedpop.mixed.groups import Groups
from fedpop.mixed.laplace import LaplaceEngine
from fedpop.mixed.quadrature import QuadratureEngine
from fedpop.mixed.study import FormulaStudy, Kinds
from fedpop.run.journal import Journal, JournaledMembers

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit

FIT, NUMBERS, ANSWERS = "mixed.json", "mixed.safetensors", "answers"
"""A fit's description, its tensors, and what was answered about it."""
FIT_FORMAT = 1
ENGINES: dict[str, type[Engine]] = {
    engine.__name__: engine for engine in (GaussianEngine, QuadratureEngine, LaplaceEngine)
}
COUNTED = ("response_sums", "means", "products")
"""Sums over all rows that a fit has."""


def completed(fit: MixedFit) -> list[str]:
    """Have everyone answer what may be asked of a fit once sites are gone; says what could not be found."""
    asked: dict[str, Callable[[], Any]] = {
        "degrees of freedom": lambda: fit.degrees,
        "intervals": lambda: fit.confint(),
        "the law of theta": lambda: fit.theta_points,
    }
    without = []
    for what, ask in asked.items():
        try:
            ask()
        except FedpopError as error:
            without.append(f"{what}: {error}")
    return without


def save(fit: MixedFit, path: str | Path) -> Path:
    """Write a fit to a folder; ``fedpop.load`` reads it back.

    Rows, and posteriors of groups, stay where they are.
    """
    if fit.outcome.found is None:
        raise SettingsError("a fit by chains is saved as its population: fit.population.save(path)")
    folder = writable_folder(path)
    journal = Journal.open(folder / ANSWERS)
    members = JournaledMembers(fit.groups.study, journal, fit.groups.members)
    groups = replace(fit.groups, members=members)
    engine: Any = fit.engine
    asked = replace(fit, groups=groups, engine=replace(engine, groups=groups))
    completed(asked)
    write_fit(asked, folder)
    return folder


def write_fit(fit: MixedFit, folder: Path) -> None:
    """A fit's own files; the answers about it are in its members' journal."""
    plain, tensors = fit.groups.study.description()
    found, outcome, engine = fit.outcome.found, fit.outcome, fit.engine
    assert found is not None
    named: Tensors = {f"study.{n}": t for n, t in tensors.items()}
    named |= {f"groups.{n}": getattr(fit.groups, n) for n in COUNTED}
    named |= {"b": outcome.point.b, "factor": outcome.point.factor, "covariance": outcome.covariance}
    named |= {"x": found.x, "hessian": found.hessian}
    kinds = fit.groups.kinds
    about = {
        "format": FIT_FORMAT,
        "study": plain,
        "dropped": list(fit.design.dropped),
        "method": fit.method,
        "seed": fit.seed,
        "seconds": fit.seconds,
        "groups": {
            "units": len(fit.groups),
            "examples": fit.groups.examples,
            "counts": list(fit.groups.counts),
            "rounds": fit.groups.rounds,
            "bytes_up": fit.groups.bytes_up,
            "named": sorted(kinds.named),
            "left_out": kinds.left_out,
            "missing": dict(kinds.missing),
            "marks": kinds.marks,
        },
        "outcome": {
            "sigma": outcome.point.sigma,
            "log_likelihood": outcome.log_likelihood,
            "log_likelihood_method": outcome.log_likelihood_method,
            "converged": outcome.converged,
            "words": outcome.words,
            "rounds": outcome.rounds,
            "engine": outcome.engine,
        },
        "found": {
            "value": found.value,
            "promised": found.promised,
            "converged": found.converged,
            "words": found.words,
            "trace": list(found.trace),
        },
        "engine": {"kind": type(engine).__name__} | _numbers(engine),
    }
    digest = write_tensors(folder / NUMBERS, {n: t.detach().cpu() for n, t in named.items()})
    write_sealed(folder / FIT, about | {"digest": digest})


def _numbers(engine: Engine) -> dict[str, float | int | bool]:
    """An engine's fields beside its groups and their coordinates."""
    assert is_dataclass(engine)
    return {f.name: getattr(engine, f.name) for f in fields(engine) if f.name not in ("groups", "units")}


def read_fit(folder: Path) -> dict[str, Any]:
    """What a saved fit is made of."""
    saved = read_sealed(folder / FIT, "a fit of a mixed model")
    if saved.get("format") != FIT_FORMAT:
        raise CheckpointError(f"{folder / FIT} has format {saved.get('format')}, this is {FIT_FORMAT}")
    with reading(folder / FIT, "a fit of a mixed model", DAMAGED):
        tensors = read_tensors(folder / NUMBERS, str(saved["digest"]))
        of_study = {n.removeprefix("study."): t for n, t in tensors.items() if n.startswith("study.")}
        study = FormulaStudy.from_description(saved["study"], of_study)
        about, outcome, found = saved["groups"], saved["outcome"], saved["found"]
        kinds = Kinds(
            frozenset(about["named"]), int(about["left_out"]), dict(about["missing"]), float(about["marks"])
        )
        journal = Journal.open(folder / ANSWERS) if (folder / ANSWERS).is_dir() else Journal()
        members = JournaledMembers(study, journal, units=int(about["units"]))
        sums = {n: tensors[f"groups.{n}"] for n in COUNTED}
        numbers = {n: int(about[n]) for n in ("examples", "rounds", "bytes_up")}
        counts: dict[str, Any] = {**sums, **numbers, "counts": tuple(map(int, about["counts"]))}
        groups = Groups(members, study, kinds, **counts)
        assert study.design is not None and study.coordinates is not None
        design, units = replace(study.design, dropped=tuple(saved["dropped"])), study.coordinates
        settings = {n: v for n, v in saved["engine"].items() if n != "kind"}
        make: Callable[..., Engine] = ENGINES[saved["engine"]["kind"]]
        engine = make(groups=groups, units=units, **settings)
        point = ThetaPoint(tensors["b"], tensors["factor"], float(outcome["sigma"]))
        search = SearchResult(
            tensors["x"],
            float(found["value"]),
            tensors["hessian"],
            float(found["promised"]),
            bool(found["converged"]),
            str(found["words"]),
            tuple(map(float, found["trace"])),
        )
        estimates = Estimates(
            point,
            search,
            float(outcome["log_likelihood"]),
            str(outcome["log_likelihood_method"]),
            tensors["covariance"],
            bool(outcome["converged"]),
            str(outcome["words"]),
            int(outcome["rounds"]),
            str(outcome["engine"]),
        )
        return {
            "design": design,
            "units": units,
            "groups": groups,
            "engine": engine,
            "outcome": estimates,
            "method": str(saved["method"]),
            "seed": int(saved["seed"]),
            "seconds": float(saved["seconds"]),
        }
