"""What a federation is about, described to everyone in it: a method on examples, or a formula on tables.

Members and sites hold a ``Study`` and ask it for all that depends on that: what goes to a site in plain
values and tensors, how a site reads its data, which units and rows these are, how many fit together. A
study may be followed by another: a ``Survey`` of what examples look like comes before ``Training``, and a
formula (``fedpop.mixed.study``) is sent again once levels, and then coordinates, are known.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.inputs import Example
from fedpop.federation.participation import Participation
from fedpop.federation.reading import read_data, read_table, table_notes
from fedpop.federation.table_format import USUAL_TABLE, TableFormat
from fedpop.message import Tensors
from fedpop.methods import rebuild
from fedpop.methods.base import Algorithm, ChecksData, Remembers, needs_everyone, role_of
from fedpop.models.base import Model
from fedpop.models.spec import model_from, model_named, model_spec
from fedpop.questions import Table
from fedpop.questions.forms import example_from, plain_example, table_of
from fedpop.settings import name_of
from fedpop.site.plan import Plan, plan_for
from fedpop.site.refusal import Code, Refusal

log = logging.getLogger("fedpop.site")


@dataclass(frozen=True)
class SiteData:
    """Where a site's data are: a file, a folder of images, or ``module:function``."""

    site: str
    where: str
    folder: Path | None = None
    """Modules in it come first."""
    table: TableFormat = USUAL_TABLE


@dataclass(frozen=True)
class UnitData:
    """Units with their rows: those of one site, or of all sites on one machine."""

    federation: Federation
    tables: Sequence[Table] | None = None
    """Each unit's columns, where it is not agreed yet what examples look like."""
    sites: Mapping[str, Sequence[str]] | None = None
    """Units of each site, where there are many sites with several units."""


class Study(ABC):
    """What a federation is about."""

    fixed: ClassVar[bool] = False
    """Whoever is there at the start is needed to the end, and nobody else: one that cannot take part is an
    error, and one that comes later stays outside."""

    @property
    def algorithm(self) -> Algorithm | None:
        """What rounds go by, where there are any."""
        return None

    @property
    def needs_everyone(self) -> bool:
        """No round or question makes sense without one of the members."""
        return self.fixed

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def keeps(self) -> tuple[str, ...]:
        """States of units that are right whether or not their message counted."""
        return ()

    @property
    def owner(self) -> Any:
        """Whose attributes a site puts into a question's fields that do not travel (``methods.asking``)."""
        return self

    def check(self, sites: Sequence[str]) -> None:
        """Raise early where it does not fit members of these names."""
        if self.algorithm is not None:
            self.algorithm.check(sites)

    def drawn(self, rule: Participation) -> bool:
        """Units are identified by hashes of their names, because a rule draws some of them."""
        return False

    def by(self, method: Algorithm) -> Study:
        """The same with another method."""
        raise SettingsError(f"{type(self).__name__} has no rounds, and no method to change")

    # --- what a site receives ------------------------------------------------------------------

    @abstractmethod
    def description(self) -> tuple[dict[str, Any], Tensors]:
        """In plain values, and tensors beside them: what a site makes the study of."""

    @classmethod
    @abstractmethod
    def from_description(cls, description: Mapping[str, Any], tensors: Tensors) -> Self:
        """The study at a site, from what it received."""

    # --- what a site makes of it ---------------------------------------------------------------

    @abstractmethod
    def read(self, place: SiteData) -> Any:
        """A site's data, or the error that says what does not fit."""

    @abstractmethod
    def unit_data(self, data: Any) -> UnitData:
        """Units and rows of data that were read."""

    def notes(self, place: SiteData) -> list[str]:
        """What a site should know of how its data are used; the words are for it alone."""
        return []

    def same_rows(self, other: Study) -> bool:
        """Whether units and rows of the same data are those that they were under another study."""
        return False

    def plan(self, federation: Federation, budget: int) -> Plan:
        """How many units are worked on together in so many bytes."""
        return Plan(0.0, 0.0, budget)


@dataclass(frozen=True)
class Survey(Study):
    """Data of which it is not agreed yet what examples look like: ``form`` is what the settings say of them,
    as ``questions.forms`` has it."""

    form: Mapping[str, Any] = field(default_factory=dict)

    def description(self) -> tuple[dict[str, Any], Tensors]:
        return {"form": dict(self.form)}, {}

    @classmethod
    def from_description(cls, description: Mapping[str, Any], tensors: Tensors) -> Survey:
        return cls(description["form"])

    def read(self, place: SiteData) -> Any:
        if "x" not in self.form:
            return read_data(place.where, self.form, place.site, place.folder)
        columns = read_table(Path(place.where), self.form, place.site, place.table)
        return {place.site: table_of(columns, self.form)}

    def unit_data(self, data: Any) -> UnitData:
        """Of examples, or of tables by the names of sites."""
        if isinstance(data, Federation):
            return UnitData(data)
        return UnitData(table_units(data), list(data.values()))


def table_units(tables: Mapping[str, Table]) -> Federation:
    """Tables as units whose rows are not examples yet."""
    sizes = torch.tensor([len(next(iter(t.values()), ())) for t in tables.values()], dtype=torch.int64)
    rows = torch.zeros(int(sizes.sum()))
    packed = Packed(rows.unsqueeze(1)[:, :0], rows, torch.cumsum(sizes, 0) - sizes, sizes)
    return Federation(list(tables), {"train": packed})


@dataclass(frozen=True)
class Training(Study):
    """A method on examples."""

    method: Algorithm
    example: Example | None = None
    """What an example looks like; sites receive it."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """The form of their data that sites agreed on."""
    entry: str = ""
    """``module:name`` that makes the model, where it is not made of torch's layers alone."""

    @property
    def algorithm(self) -> Algorithm:
        return self.method

    @property
    def needs_everyone(self) -> bool:
        return needs_everyone(self.method)

    @property
    def device(self) -> torch.device:
        return self.method.model.initial_phi().device

    @property
    def keeps(self) -> tuple[str, ...]:
        remembers = role_of(self.method, Remembers)
        return () if remembers is None else remembers.keeps

    @property
    def owner(self) -> Algorithm:
        return self.method

    def drawn(self, rule: Participation) -> bool:
        return not rule.everyone

    def by(self, method: Algorithm) -> Training:
        return replace(self, method=method)

    def description(self) -> tuple[dict[str, Any], Tensors]:
        model, example = self.method.model, self.example
        spec = model_spec(model)
        known = spec is not None and spec["kind"] != "CustomModel"
        method = {
            "class": name_of(type(self.method)),
            "algorithm": self.method.describe(),
            "model": spec,
            "known": model.known(),
            "precision": model.chosen_precision(),
            "entry": "" if known else self.entry,
            "example": None if example is None else plain_example(example),
        }
        return {"method": method, "form": dict(self.form)}, values_of(model)

    @classmethod
    def from_description(cls, description: Mapping[str, Any], tensors: Tensors) -> Training:
        """The server's method on this site's copy of the model."""
        method = description["method"]
        example = None if method["example"] is None else example_from(method["example"])
        model = with_values(_model(method, example), tensors).knowing(method["known"])
        model = model.at_precision(method["precision"])
        made = rebuild(method["algorithm"], method["class"], model)
        return cls(made, example, description["form"], method["entry"])

    def read(self, place: SiteData) -> Federation:
        """A site's examples, checked against the form and the model."""
        found = read_data(place.where, self.form, place.site, place.folder, place.table)
        model = self.method.model.prepared(found.example)
        if model.known() != self.method.model.known():
            raise Refusal(
                "the site's examples do not fit the model: their shape is not the federation's", Code.DATA
            )
        checked = model.checked(found)
        if checks := role_of(self.method, ChecksData):
            checks.check_data(checked)
        return checked

    def notes(self, place: SiteData) -> list[str]:
        if "x" not in self.form:
            return []
        return table_notes(read_table(Path(place.where), self.form, place.site, place.table), self.form)

    def unit_data(self, data: Any) -> UnitData:
        return UnitData(data)

    def same_rows(self, other: Study) -> bool:
        return isinstance(other, Training)

    def plan(self, federation: Federation, budget: int) -> Plan:
        foot = self.method.footprint
        return plan_for(self.method.model, federation, budget, foot.draws, foot.phi_copies)


def _model(method: Mapping[str, Any], example: Example | None) -> Model:
    if not method["entry"]:
        return model_from(method["model"])
    assert example is not None
    try:
        return model_named(str(method["entry"]), example)
    except SettingsError as error:
        log.error("the model %r: %s", method["entry"], error)
        words = f"the site cannot make the model {method['entry']!r}; its log says more"
        raise Refusal(words, Code.MODEL) from error


def values_of(model: Model) -> Tensors:
    """What a model's modules hold: where phi and z start, and weights that do not learn."""
    return {
        f"{i}.{name}": value.detach()
        for i, module in enumerate(model.modules())
        for name, value in module.state_dict().items()
    }


def with_values(model: Model, values: Tensors) -> Model:
    """Set what the modules hold; raises a Refusal where they are not the modules that the server has."""
    for i, module in enumerate(model.modules()):
        received = {n.removeprefix(f"{i}."): t for n, t in values.items() if n.startswith(f"{i}.")}
        expected = {n: tuple(t.shape) for n, t in module.state_dict().items()}
        if expected != {n: tuple(t.shape) for n, t in received.items()}:
            raise Refusal(
                "the site's model is not the server's: its parameters have other names or shapes", Code.MODEL
            )
        module.load_state_dict(received)
    return model
