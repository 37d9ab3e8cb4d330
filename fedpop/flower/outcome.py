"""What came of a run across sites, for reports: estimates under the names of columns, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpop.federation.reading import input_names
from fedpop.files import write_json
from fedpop.flower.server_folder import OUTCOME
from fedpop.methods.base import PopulationPrior, role_of
from fedpop.models.base import Model
from fedpop.models.links import LinkedLayout
from fedpop.models.modules import Layout
from fedpop.population import Population

FEDERATION = "federation.json"
SHOWN_ENTRIES = 60
"""A tensor with more of them is shown by its size."""
OF_ALL, OF_THE_MEAN = "all sites", "mean of sites"
ERRORS = "the prior's mean"
"""Under which ``standard_errors`` has those of z."""


def write_outcome(
    folder: Path, population: Population, form: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Into the run's folder; ``found`` is what was asked afterwards."""
    rows = estimates(population, form, found.get("standard_errors", {}).get("of", {}))
    write_json(folder / OUTCOME, {"estimates": rows, "warnings": warnings(population, found)})


def warnings(population: Population, found: Mapping[str, Any]) -> list[str]:
    """All that a reader of the estimates has to know, each once."""
    words = list(population.at_bound)
    verdict = population.convergence
    if verdict is not None and not verdict.converged:
        words.append(f"theta: {verdict.words}")
    known = {*words, *([] if verdict is None else [verdict.words])}
    words += [w for w in found.get("diagnostics", {}).get("warnings", ()) if w not in known]
    words += [
        f"{name.replace('_', ' ')}: {answer['words']}"
        for name, answer in found.items()
        if str(answer["words"]).startswith("not computed")
    ]
    biased = sum(m.get("unbiased") is False for m in population.history)
    if biased:
        words.append(
            f"in {biased} of {population.rounds} rounds messages out of all proportion were left out"
        )
    return words


def estimates(
    population: Population, form: Mapping[str, Any], errors: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """A row for each parameter: what is shared by all, then the mean of what differs between sites, with the
    spread between them (both of them on the free scale where a parameter has a link)."""
    if role_of(population.algorithm, PopulationPrior) is None:
        return []
    model, columns = population.model, input_names(form) if form.get("x") else []
    layout = model.phi_layout
    sure = {n: population.published["phi"].new_tensor(errors[n]) for n in layout.names if n in errors}
    rows = [
        row
        for name, value in population.phi.items()
        for row in _rows(name, value, OF_ALL, columns, model, {"error": sure.get(name)})
    ]
    z = model.z_layout
    mean = population.prior_mean
    about = {"spread": _views(z, population.prior_sd)}
    if ERRORS in errors and len(errors[ERRORS]) == mean.numel():
        about["error"] = _views(z, mean.new_tensor(errors[ERRORS]))
    for name, value in population.typical.items():
        beside = {key: views[name] for key, views in about.items()}
        rows += _rows(name, value, OF_THE_MEAN, columns, model, beside)
    return rows


def _views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    return Layout.views(layout, flat) if isinstance(layout, LinkedLayout) else layout.views(flat)


def _rows(
    name: str,
    value: Tensor,
    of: str,
    columns: Sequence[str],
    model: Model,
    beside: Mapping[str, Tensor | None],
) -> list[dict[str, Any]]:
    if value.numel() > SHOWN_ENTRIES:
        return [{"name": f"{name} ({value.numel()} numbers)", "of": of}]
    rows = []
    for at in product(*map(range, value.shape)):
        row = {
            "name": _name(name, at, tuple(value.shape), columns, model),
            "of": of,
            "estimate": float(value[at]),
        }
        rows.append(
            row | {key: float(t.reshape(value.shape)[at]) for key, t in beside.items() if t is not None}
        )
    return rows


def _name(
    name: str, at: tuple[int, ...], shape: tuple[int, ...], columns: Sequence[str], model: Model
) -> str:
    """An entry by its parameter's name, the output where there are several, and the column that it goes with,
    where the parameter is a matrix that meets the columns themselves."""
    meets = bool(columns) and len(shape) == 2 and shape[1] == len(columns) and _first(model, name)
    where = [str(i) for i, n in zip(at, shape, strict=True) if n > 1]
    if meets:
        where = [*([str(at[0])] if shape[0] > 1 else []), columns[at[1]]]
    return f"{name}[{', '.join(where)}]" if where else name


def _first(model: Model, name: str) -> bool:
    """Whether this is the first matrix that x meets: of the backbone where there is one."""
    matrices = [
        n for n, s in zip(model.phi_layout.names, model.phi_layout.shapes, strict=True) if len(s) == 2
    ]
    matrices = [n for n in matrices if not n.startswith("fixed.")] or [
        n for n, s in zip(model.z_layout.names, model.z_layout.shapes, strict=True) if len(s) == 2
    ]
    return bool(matrices) and name == matrices[0]
