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
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.table import pandas
from fedpop.questions import Question
from fedpop.questions.schema import sorted_levels
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
    """Posterior means and deviations of groups as ``random_effects`` has them, from their sites."""
    pd, to, names = pandas(), fit.units.random_map, fit.design.random_names
    every = []
    for site, frame in frames.items():
        stored, levels = states_at(root, site), sorted_levels({str(v) for v in frame[fit.group]})
        sd = (to @ stored["cov"] @ to.mT).diagonal(dim1=-2, dim2=-1).sqrt()
        index = pd.MultiIndex.from_product([levels, names], names=[fit.group, "effect"])
        columns = {"mean": (stored["mean"] @ to.mT).flatten().numpy(), "sd": sd.flatten().numpy()}
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
