"""A table in a CSV or Parquet file as clients: columns of x, one of y, and one that says whose a row is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fedpop.checked import Checked, Factor, Range
from fedpop.data.download import digest_of_file
from fedpop.data.user_data import OwnData
from fedpop.errors import DataError, SettingsError
from fedpop.federation.cells import Columns, columns_of
from fedpop.federation.clients import Client, Federation
from fedpop.federation.reading import from_table, read_columns, width
from fedpop.keys import Key
from fedpop.models.composition import Composition
from fedpop.models.modules import blank
from fedpop.models.networks import redraw
from fedpop.questions.forms import agreed, check_form, table_of
from fedpop.questions.schema import Moments, sorted_levels
from fedpop.run.members import LocalMembers
from fedpop.site.study import Survey

CLASSES = ("categorical", "bernoulli")
"""Likelihoods whose y may be names."""


@dataclass(frozen=True)
class TableTask(Checked, OwnData):
    """Rows of a CSV or Parquet file as clients' examples.

    Columns of names become columns of zeros and ones, one for each level but the first. Columns of numbers
    are centred and scaled by the training rows' mean and standard deviation.

    Args:
        file: The table, .csv or .parquet.
        x: Columns that are predicted from.
        y: The column that is predicted.
        client: The column that says whose a row is.
        likelihood: Of y: "normal" (the default), "categorical" for classes, "bernoulli" or
            "poisson".
        features: The width of a hidden layer that all clients share; 0 (the default) is a linear model,
            all of it private.
        classes: How many classes y has (default: as many as are in the table).
        test: The share of each client's rows that it is judged on (default: 0.2).
        validation: The share that settings are chosen by (default: 0.2).
        categories: Those columns of x that have names; all others must be numbers (default: none).
        levels: Names in order, the first being the baseline, of columns that have some (default: those in the
            table, sorted).
        sets: A column that says train, validation or test in each row (default: shares are drawn).

    >>> TableTask("rows.csv", x=("age",), y="dose", client="hospital").likelihood
    'normal'
    """

    file: str
    x: tuple[str, ...]
    y: str
    client: str
    likelihood: str = "normal"
    features: Annotated[int, Range(least=0, most=1_000_000)] = 0
    classes: Annotated[int, Range(least=2)] | None = None
    test: Factor = 0.2
    validation: Factor = 0.2
    categories: tuple[str, ...] = ()
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sets: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.x:
            raise SettingsError("x is a list of the names of columns, one at least")
        check_form(self._asked, "")

    @property
    def _asked(self) -> dict[str, Any]:
        """This table as a form that is not yet complete."""
        levels = {c: list(names) for c, names in self.levels.items()}
        known = {"x": list(self.x), "y": self.y, "categories": list(self.categories), "levels": levels}
        # Scaled later, by the rows that clients train on; nothing here is a secret from anybody.
        more = {"standardise": False, "minimum": 0, "group": self.client}
        return known | more | ({"split": self.sets} if self.sets else {})

    def federation(self, seed: int) -> Federation:
        return self._read()[1]

    def _read(self) -> tuple[dict[str, Any], Federation]:
        """The form of the table, and its rows as examples, not scaled."""
        asked = self._asked
        columns = read_columns(Path(self.file), columns_of(asked))
        for column in (self.client, *self.categories, *self.levels):
            if "" in columns[column]:
                where = f"{columns.who}, {columns.rows[list(columns[column]).index('')]}"
                what = "client" if column == self.client else column
                raise DataError(f"{where}: no {what}; drop the row or give it one in {column!r}")
        form, _ = agreed(asked, LocalMembers(Survey(asked), {"here": table_of(columns, asked)}).asks)
        if not width(form):
            raise DataError(f"{columns.who}: every row says the same in {', '.join(self.x)}")
        names = self._names(columns)
        clients = from_table(columns, form | ({"classes": names} if names else {}))
        return form, replace(clients, labels=tuple(names))

    def _names(self, columns: Columns) -> list[str]:
        """What classes are called, where they are not numbers."""
        if self.likelihood not in CLASSES:
            return []
        found = sorted_levels(set(columns[self.y]))
        if "" in found:
            row = list(columns[self.y]).index("")
            raise columns.wrong(self.y, row, "nothing is there", "not a class; drop the row")
        try:
            numbers = [float(name) for name in found]
        except ValueError:
            return found
        for name, number in zip(found, numbers, strict=True):
            if number != number // 1 or number < 0:
                where = f"{columns.who}, {columns.rows[list(columns[self.y]).index(name)]}"
                raise DataError(f"{where}: the label {name!r} is not a whole number from 0 on, nor a name")
        return []

    def split(self, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        form, clients = self._read()
        known, apart = self.apart(clients, seed, new)
        scaled = self._scale(known, form)
        return known.map_x(scaled), [
            Client(scaled(c.x), c.y, *(p and (scaled(p[0]), p[1]) for p in (c.validation, c.test)))
            for c in apart
        ]

    def _scale(self, clients: Federation, form: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        """Columns of numbers standardised by what these clients train on."""
        x = clients.train.x
        assert isinstance(x, Tensor)
        centre, scale, at = torch.zeros(x.shape[1]), torch.ones(x.shape[1]), 0
        for column in self.x:
            if column in form["levels"]:
                at += len(form["levels"][column]) - 1
                continue
            moments = Moments.of(x[:, at].tolist())
            centre[at], scale[at] = moments.mean, moments.sd or 1.0
            at += 1
        return lambda v: (v - centre) / scale

    def contents(self) -> dict[str, Any]:
        return {"file": Path(self.file).name, "digest": digest_of_file(Path(self.file))}

    def model(self, seed: int, clients: Federation) -> Composition:
        """A linear model, or one hidden layer, with a keyed random start."""
        (inputs,) = clients.example.shapes[0]
        outputs = self._classes(clients) if self.likelihood == "categorical" else 1
        width = self.features or inputs
        backbone = None
        head = blank(nn.Linear, width, outputs)
        layers = nn.ModuleList([head])
        if self.features:
            layer = blank(nn.Linear, inputs, self.features)
            backbone = nn.Sequential(layer, nn.Tanh())
            layers.append(layer)
        redraw(layers, Key(seed, purpose="start"))
        return Composition(backbone, head, self.likelihood)

    def _classes(self, clients: Federation) -> int:
        """As many as were given, as have names, or as the largest number says."""
        largest = max(int(p.y.max()) for p in clients.splits.values() if len(p.y))
        return self.classes or len(clients.labels) or max(largest + 1, 2)
