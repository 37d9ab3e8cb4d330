"""What a site does with theta, offline: predictions, and a model for a site that took no part."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedpop.errors import CheckpointError, SchemaError, SettingsError
from fedpop.federation.cells import require_good_cells
from fedpop.federation.reading import (
    encoded,
    from_function,
    from_images,
    read_columns,
    read_data,
)
from fedpop.federation.table_format import USUAL_TABLE
from fedpop.files import (
    DAMAGED,
    read_bytes,
    read_sealed,
    read_tensors,
    writable_folder,
    write_bytes,
    writing,
)
from fedpop.flower.certificates import check_name
from fedpop.flower.formulas import fit_at, predicted_rows
from fedpop.flower.site import DESCRIPTION, SEALED, THETA, SiteExperiment, open_site, read_theta
from fedpop.flower.site_commands import checked_data, with_data
from fedpop.flower.site_folder import SETTINGS, make_secret, read_site
from fedpop.message import Tensors
from fedpop.mixed.study import FormulaStudy, table_at
from fedpop.models.predictive import Predictive
from fedpop.population import Population
from fedpop.site.store import LocalStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedpop.mixed.fit import MixedFit

Say = Callable[[str], None]
WHOLE = ("model.safetensors", "method.json", THETA, SEALED)
"""What a theta for sites that come later is made of; its seal last, as it says that all is there."""


def experiment_of(root: Path, name: str | None) -> SiteExperiment:
    """A site's experiment by name; the last one that was finished by default."""
    site = open_site(root.absolute())
    if name is not None:
        return SiteExperiment(site, name)
    folders = sorted(
        (f for f in (site.folder / "experiments").glob("*") if (f / THETA).exists()),
        key=lambda f: (f / THETA).stat().st_mtime,
    )
    if not folders:
        raise CheckpointError(f"site {site.name!r} has no theta yet: it comes at the end of a run")
    return SiteExperiment(site, folders[-1].name)


def _finished(experiment: SiteExperiment) -> SiteExperiment:
    """One that has all that the end of a run leaves."""
    if not (experiment.folder / THETA).exists():
        raise CheckpointError(f"site {experiment.site.name!r} has no theta yet: it comes at the end of a run")
    if not (experiment.folder / DESCRIPTION).exists():
        raise CheckpointError(f"{experiment.folder / DESCRIPTION} is missing; {DAMAGED}")
    return experiment


def population_at(experiment: SiteExperiment) -> Population:
    """The population that this site knows: theta, its data and its states."""
    method = experiment.method
    states = experiment.folder / "final.safetensors"
    store = LocalStore.restore(read_tensors(states)) if states.exists() else None
    device = method.model.initial_phi().device
    published: Tensors = {n: t.to(device) for n, t in read_theta(experiment.folder).items()}
    key = experiment.key(0, "site")
    return Population(method, published, key, experiment.federation, store)


def predict(root: Path, data: str, out: Path | None, level: float, name: str | None, say: Say) -> None:
    """Predictions for the rows of a table (or for images, or what a function returns), with intervals."""
    experiment = _finished(experiment_of(root, name))
    if isinstance(experiment.study, FormulaStudy):
        if not 0 < level < 1:
            raise SettingsError(f"the level of an interval lies between 0 and 1, not {level}")
        place = replace(experiment.site.data, where=str(Path(data).absolute()))
        found = predicted_rows(fit_at(experiment), table_at(place, experiment.study.na), level)
        _write_table(found.to_csv(index=False, float_format="%.6g"), out, say)
        return
    write_predictions(predicted(population_at(experiment), experiment, data), out, level, say)


def effects(
    root: Path, out: Path | None, plot: Path | None, level: float, name: str | None, say: Say
) -> None:
    """Posteriors of this site's groups, as a table and as a picture."""
    fit = _formula_at(root, name)
    _write_table(fit.random_effects(level).reset_index().to_csv(index=False, float_format="%.6g"), out, say)
    if plot is not None:
        _write_figure(fit.plot("effects", level), plot, say)


def residuals(
    root: Path, out: Path | None, plot: Path | None, kind: str | None, name: str | None, say: Say
) -> None:
    """What the fit leaves of this site's rows, by their places in its table."""
    fit = _formula_at(root, name)
    table = fit.fitted().to_frame().join(fit.residuals(kind)).rename_axis("row")
    _write_table(table.reset_index().to_csv(index=False, float_format="%.6g"), out, say)
    if plot is not None:
        _write_figure(fit.plot("residuals"), plot, say)


def _formula_at(root: Path, name: str | None) -> MixedFit:
    experiment = _finished(experiment_of(root, name))
    if not isinstance(experiment.study, FormulaStudy):
        raise SettingsError(f"{experiment.name} is not about a formula: fedpop site predict has its models")
    return fit_at(experiment)


def _write_figure(figure: Figure, to: Path, say: Say) -> None:
    with writing(to):
        figure.savefig(to)
    say(f"{to} is written")


def _write_table(text: str, out: Path | None, say: Say) -> None:
    if out is None:
        sys.stdout.write(text)
    else:
        write_bytes(out, text.encode())
        say(f"{out} is written")


Predicted = list[tuple[str, Sequence[int], Predictive]]
"""Unit, its rows in the file, and what is predicted for them."""


def predicted(population: Population, experiment: SiteExperiment, data: str) -> Predicted:
    """What personal models predict; a unit that is new at this site gets the population's."""
    form, site = experiment.form, experiment.site.name
    if ":" in data or Path(data).is_dir():
        folder = experiment.site.folder
        found = from_function(data, site, folder) if ":" in data else from_images(Path(data), form, site)
        sizes = found.train.sizes.tolist()
        parts = [found.cohort(torch.tensor([i]), population.device).x for i in range(len(found))]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        rows = {n: list(range(s, s + k)) for n, s, k in zip(found.names, starts, sizes, strict=True)}
        inputs = dict(zip(found.names, parts, strict=True))
    elif not form.get("x"):
        raise SchemaError(f"the federation's data are not tables: {data} has no columns to predict from")
    else:
        group = form.get("group")
        columns = read_columns(
            Path(data), [*form["x"], *([group] if group else [])], site, experiment.site.table
        )
        require_good_cells(columns, form)
        x = encoded(columns, form)
        owners = [f"{site}/{g}" for g in columns[group]] if group else [population.names[0]] * len(x)
        rows = {}
        for i, owner in enumerate(owners):
            rows.setdefault(owner, []).append(i)
        inputs = {n: x[numbers] for n, numbers in rows.items()}
    known = set(population.names)
    return [
        (
            n,
            rows[n],
            population.predict(n, inputs[n]) if n in known else population.new_client().predict(inputs[n]),
        )
        for n in rows
    ]


def write_predictions(found: Predicted, out: Path | None, level: float, say: Say) -> None:
    """A table, in the order of the rows: unit, mean, and an interval; or the probability of each class."""
    if not 0 < level < 1:
        raise SettingsError(f"the level of an interval lies between 0 and 1, not {level}")
    first = found[0][2]
    classes = first.likelihood.classes(first.eta.shape[-1])
    head = [f"p{k}" for k in range(first.probs.shape[-1])] if classes else ["mean", "low", "high"]
    lines: dict[int, list[str]] = {}
    for unit, rows, p in found:
        values = p.probs if classes else torch.stack((p.mean, *p.interval(level)), -1)
        for i, row in zip(rows, values.tolist(), strict=True):
            lines[i] = [unit, *(f"{v:.6g}" for v in row)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["unit", *head])
    writer.writerows(lines[i] for i in sorted(lines))
    _write_table(file.getvalue(), out, say)


def personalise(
    root: Path, theta: Path, data: str, at: str | None, out: Path | None, level: float, say: Say
) -> None:
    """A brand-new site from theta alone: its model is made of its data, and nothing is sent."""
    method = _require_theta(theta)
    known = read_site(root.absolute()) if (root / SETTINGS).exists() else None
    name = root.absolute().name if known is None else known.name
    check_name(name)
    modules = None if known is None else known.folder
    where = checked_data(data, name, modules)
    table = USUAL_TABLE if known is None else known.table
    read_data(where, method["study"]["form"], name, modules, table)  # an error comes before anything is made
    if known is None:
        folder = writable_folder(root)
        make_secret(folder)
        text = f"name = {json.dumps(name)}\ndata = {json.dumps(where)}\n"
        write_bytes(folder / SETTINGS, text.encode())
    else:
        with_data(known, where)
    experiment = _adopted(root, theta, str(method["experiment"]))
    population = population_at(_finished(experiment)).sample_all()
    say(f"a model for {', '.join(population.names)}: {experiment.federation}")
    if at is not None:
        write_predictions(predicted(population, experiment, at), out, level, say)


def _adopted(root: Path, theta: Path, name: str) -> SiteExperiment:
    """An experiment at a site that took no part, from a federation's folder ``run/theta``."""
    experiment = SiteExperiment(open_site(root.absolute()), name)
    sealed = experiment.folder / SEALED
    if not sealed.exists() or sealed.read_bytes() != (theta / SEALED).read_bytes():
        for file in WHOLE:
            write_bytes(experiment.folder / file, read_bytes(theta / file))
    return experiment


def _require_theta(theta: Path) -> dict[str, Any]:
    """The method's description; raises unless all of theta is there, and as it was written."""
    if not (theta / "method.json").exists():
        raise CheckpointError(f"{theta} holds no theta of a federation: it is the server's folder run/theta")
    found = read_sealed(theta / "method.json", "a method's description")
    read_tensors(theta / "model.safetensors", str(found.get("digest")))
    read_theta(theta)
    return found
