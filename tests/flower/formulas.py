"""A formula's fit over sites: on the Grid in this process, or each group a site that only bytes leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.site_state import SiteState
from fedpop.keys import Key
from fedpop.message import Aggregate, Channel, Tensors, Total
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.model import FitSettings, fitted_over
from fedpop.mixed.nesting import RowOrder, spans
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.table import pandas
from fedpop.questions import Question
from fedpop.run.settings import Settings
from fedpop.site.plan import WHOLE
from fedpop.site.sites import Sites
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import enrol, transport_on

SITES = ("north", "south", "west")
CPU = torch.device("cpu")


def by_site(frame: Any, group: str, sites: int) -> dict[str, Any]:
    """Rows at so many sites, each with about as many groups."""
    groups = list(dict.fromkeys(frame[group].tolist()))
    place = {name: i * sites // len(groups) for i, name in enumerate(groups)}
    at = np.array([place[name] for name in frame[group].tolist()])
    return {SITES[i]: frame[at == i].reset_index(drop=True) for i in range(sites)}


def members_on(grid: LocalGrid, study: FormulaStudy, experiment: str = "test") -> RemoteMembers:
    settings, terms = Settings(None, 0, fp.participation.Everyone()), RoundTerms(sites=len(grid.nodes))
    return RemoteMembers(study, transport_on(grid), experiment, replace(terms, timeout=60.0), settings)


def over(grid: LocalGrid, formula: str, family: str = "gaussian", **settings: Any) -> MixedFit:
    """The fit of the tables of a grid's sites."""
    about = {name: settings.pop(name) for name in ("weights", "missing") if name in settings}
    study = FormulaStudy.from_text(formula, family, **about)
    return fitted_over(members_on(grid, study), study, FitSettings(**settings))


def grid_of(root: Path, frames: Mapping[str, Any]) -> LocalGrid:
    return LocalGrid(app, enrol(root, frames))


def states_at(root: Path, site: str) -> Tensors:
    """What the groups of a site keep."""
    memory = SiteState.read(root / site / "experiments" / "test" / "chain.safetensors")
    return memory.after.get(torch.arange(len(memory.after.slots)), CPU)


def effects_at(root: Path, frames: Mapping[str, Any], fit: MixedFit) -> Any:
    """Posterior means and deviations of groups as ``random_effects`` has them, from their sites: of units as
    they are stored, of groups within them from rows and theta."""
    pd, to, study, every = pandas(), fit.units.random_map, fit.groups.study, list[Any]()
    for site, frame in frames.items():
        rows = study.rows(frame)
        federation, names = study.unit_data(rows).federation, RowOrder.of(rows).names
        stored = states_at(root, site)
        found = [(stored["mean"], stored["cov"])]
        if len(names) > 1:
            whole = federation.cohort(torch.arange(len(federation)), CPU, fit._split)
            paths = fit.engine.paths(whole, fit.outcome.point)
            found = list(zip(paths.mean, paths.covariance, strict=True))
            torch.testing.assert_close(found[-1], (stored["mean"], stored["cov"]))
        levels = zip(fit.factors, spans(fit.units.widths), names, found, strict=True)
        for factor, span, groups, (mean, cov) in levels:
            width, part = span.stop - span.start, to[span, span]
            sd = (part @ cov[:, :width, :width] @ part.mT).diagonal(dim1=-2, dim2=-1).sqrt()
            each = [groups, fit.design.random_names[span]]
            index = pd.MultiIndex.from_product(each, names=[factor, "effect"])
            if len(names) > 1:
                index = pd.MultiIndex.from_product([[factor], *each], names=["factor", "group", "effect"])
            columns = {"mean": (mean[:, :width] @ part.mT).flatten().numpy(), "sd": sd.flatten().numpy()}
            every.append(pd.DataFrame(columns, index=index))
    return pd.concat(every)


@dataclass
class Alone:
    """Groups, or tables, each at a separate site: what the server sees is decoded from bytes."""

    study: FormulaStudy
    frames: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.size: dict[str, Tensor] = {}
        """Of the last question, sums over sites of absolute values."""
        self.sites = {}
        for name, frame in self.frames.items():
            stored = self.study.unit_data(self.study.rows(frame))
            self.sites[name] = Sites.one(name, stored.federation, CPU, tables=stored.tables)

    def ask(self, question: Question[Any], known: Tensors) -> tuple[Any, Total]:
        asked, aggregate, self.size = question.ask(known), Aggregate(), {}
        for site in self.sites.values():
            (work,) = site.question_work(question, asked, Key(0), WHOLE, encode=True)
            message = Channel().receive(replace(work.message, vectors={}, checked=False), torch.float64)
            aggregate.add(message, torch.ones(1))
            work.settle(message.received)
            site.commit(entered=False)
            for vector, values in message.vectors.items():
                self.size[vector] = self.size.get(vector, 0) + values[0].abs()
        total = aggregate.total(sum(len(s.federation) for s in self.sites.values()), False)
        return question.finish(known, total), total
