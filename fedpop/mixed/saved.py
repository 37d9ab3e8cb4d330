"""A fit in files: its study, its estimates, and what sites answered about them, so that whoever reads it back
can ask for intervals, tests and predictions without any site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from fedpop.run.members import Members

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
    about, tensors = described(fit)
    digest = write_tensors(folder / NUMBERS, tensors)
    write_sealed(folder / FIT, about | {"digest": digest})


def described(fit: MixedFit) -> tuple[dict[str, Any], Tensors]:
    """A fit in plain values and tensors, without rows and without groups' posteriors."""
    plain, tensors = fit.groups.study.description()
    found, outcome, kinds = fit.outcome.found, fit.outcome, fit.groups.kinds
    if found is None:
        raise SettingsError("a fit by chains is saved as its population: fit.population.save(path)")
    named: Tensors = {f"study.{n}": t for n, t in tensors.items()}
    named |= {f"groups.{n}": getattr(fit.groups, n) for n in COUNTED}
    named |= {"b": outcome.point.b, "factor": outcome.point.factor, "covariance": outcome.covariance}
    named |= {"x": found.x, "hessian": found.hessian}
    points = fit.points or ()
    if points:
        named |= {"points.b": torch.stack([p.b for p in points])}
        named |= {"points.factor": torch.stack([p.factor for p in points])}
        for name in ("sigma", "dispersion"):
            values = torch.tensor([getattr(p, name) for p in points], dtype=torch.float64)
            named |= {f"points.{name}": values}
    numbers = {n: getattr(fit.groups, n) for n in ("examples", "rounds", "bytes_up")}
    groups: dict[str, Any] = {"units": len(fit.groups), "counts": list(fit.groups.counts), **numbers}
    groups |= {"compared": fit.groups.compared}
    groups |= {"named": sorted(kinds.named), "left_out": kinds.left_out, "marks": kinds.marks}
    about = {
        "format": FIT_FORMAT,
        "study": plain,
        "dropped": list(fit.design.dropped),
        "method": fit.method,
        "seed": fit.seed,
        "seconds": fit.seconds,
        "groups": groups | {"missing": dict(kinds.missing)},
        "outcome": {n: getattr(outcome, n) for n in OUTCOME}
        | {"sigma": outcome.point.sigma, "dispersion": outcome.point.dispersion},
        "found": {n: getattr(found, n) for n in FOUND} | {"trace": list(found.trace)},
        "engine": {"kind": type(fit.engine).__name__} | _numbers(fit.engine),
    }
    return about, {n: t.detach().cpu().contiguous() for n, t in named.items()}


OUTCOME = ("log_likelihood", "log_likelihood_method", "converged", "words", "rounds", "engine")
FOUND = ("value", "promised", "converged", "words")


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
        journal = Journal.open(folder / ANSWERS) if (folder / ANSWERS).is_dir() else Journal()
        units = int(saved["groups"]["units"])
        return parts_of(saved, tensors, lambda study: JournaledMembers(study, journal, units=units))


def parts_of(
    saved: dict[str, Any], tensors: Tensors, members: Callable[[FormulaStudy], Members]
) -> dict[str, Any]:
    """What a fit is made of, out of its description, over these members."""
    of_study = {n.removeprefix("study."): t for n, t in tensors.items() if n.startswith("study.")}
    study = FormulaStudy.from_description(saved["study"], of_study)
    design, units = study.design, study.coordinates
    if design is None or units is None:
        raise CheckpointError("this is not a fit: its formula has no design yet")
    about, outcome, found = saved["groups"], saved["outcome"], saved["found"]
    missing = {str(n): int(v) for n, v in about["missing"].items()}
    kinds = Kinds(frozenset(about["named"]), int(about["left_out"]), missing, float(about["marks"]))
    sums = {n: tensors[f"groups.{n}"] for n in COUNTED}
    numbers = {n: int(about[n]) for n in ("examples", "rounds", "bytes_up")}
    counted: dict[str, Any] = {**sums, **numbers, "counts": tuple(map(int, about["counts"]))}
    counted["compared"] = about.get("compared")
    groups = Groups(members(study), study, kinds, **counted)
    settings = {n: v for n, v in saved["engine"].items() if n != "kind"}
    make: Callable[..., Engine] = ENGINES[saved["engine"]["kind"]]
    point = ThetaPoint(tensors["b"], tensors["factor"], float(outcome["sigma"]), float(outcome["dispersion"]))
    search = {n: found[n] for n in FOUND} | {"trace": tuple(map(float, found["trace"]))}
    result = SearchResult(x=tensors["x"], hessian=tensors["hessian"], **search)
    estimated = {n: outcome[n] for n in OUTCOME} | {"covariance": tensors["covariance"]}
    points: tuple[ThetaPoint, ...] | None = None
    if "points.b" in tensors:
        last = (tensors[f"points.{name}"].tolist() for name in ("sigma", "dispersion"))
        each = zip(tensors["points.b"], tensors["points.factor"], *last, strict=True)
        points = tuple(ThetaPoint(*one) for one in each)
    return {
        "design": replace(design, dropped=tuple(saved["dropped"])),
        "units": units,
        "groups": groups,
        "engine": make(groups=groups, units=units, **settings),
        "outcome": Estimates(point=point, found=result, **estimated),
        "method": str(saved["method"]),
        "seed": int(saved["seed"]),
        "seconds": float(saved["seconds"]),
        "points": points,
    }
