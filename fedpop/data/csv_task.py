"""A table in a CSV file as clients: columns of x, one of y, and one that says whose a row is."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from fedpop.checked import Checked, Factor, Range, Whole
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.federation.held_out import hold_out
from fedpop.files import csv_text
from fedpop.keys import Key
from fedpop.kinds import did_you_mean
from fedpop.models.composition import Composition
from fedpop.models.networks import redraw


@dataclass(frozen=True)
class CsvTask(Checked):
    """Rows of ``file`` as clients, with shares of each one's rows set aside; ``features`` is the width of a
    hidden layer that all share (0: a linear model, all of it private).

    x is centred and scaled by the training rows' mean and standard deviation.
    """

    file: str
    x: tuple[str, ...]
    y: str
    client: str
    likelihood: str = "normal"
    features: Whole = 0
    classes: Annotated[int, Range(least=2)] = 2
    test: Factor = 0.2
    validation: Factor = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.x:
            raise SettingsError("x is a list of the names of columns, one at least")

    def split(self, seed: int, new: int = 0) -> tuple[Federation, list[Client]]:
        """Clients with their three sets, and ``new`` of them that take no part."""
        rows = self._rows()
        names = sorted(rows)
        if not 0 <= new < len(names):
            raise SettingsError(f"{new} new clients asked for, but there are {len(names)} in all")
        key = Key(seed, purpose="csv.new")
        order = key.uniform(key.server(), (len(names),))[0].argsort().tolist()
        apart = {names[i] for i in order[:new]}
        known = {n: self._pair(rows[n]) for n in names if n not in apart}
        federation = hold_out(known, test=self.test, validation=self.validation, seed=seed)
        x = federation.train.x
        assert isinstance(x, torch.Tensor)
        centre, scale = x.mean(0), x.std(0).clamp(min=1e-12)
        federation = federation.map_x(lambda v: (v - centre) / scale)
        newcomers = []
        for name in sorted(apart):
            x, y = self._pair(rows[name])
            half = len(y) // 2  # half to learn from, half to be judged on
            x = (x - centre) / scale
            newcomers.append(Client(x[:half], y[:half], test=(x[half:], y[half:])))
        return federation, newcomers

    def model(self, seed: int) -> Composition:
        """A linear model, or one hidden layer, with a keyed random start."""
        outputs = self.classes if self.likelihood == "categorical" else 1
        width = self.features or len(self.x)
        backbone = None
        head = nn.utils.skip_init(nn.Linear, width, outputs)
        layers = nn.ModuleList([head])
        if self.features:
            layer = nn.utils.skip_init(nn.Linear, len(self.x), self.features)
            backbone = nn.Sequential(layer, nn.Tanh())
            layers.append(layer)
        redraw(layers, Key(seed, purpose="start"))
        return Composition(backbone, head, self.likelihood)

    def _pair(self, rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.tensor(rows)
        y = table[:, -1]
        return table[:, :-1], y.long() if self.likelihood == "categorical" else y  # whole, as _rows has seen

    def _rows(self) -> dict[str, list[list[float]]]:
        path = Path(self.file)
        out: dict[str, list[list[float]]] = {}
        with csv_text(path) as file:
            reader = csv.DictReader(file)
            missing = [c for c in (*self.x, self.y, self.client) if c not in (reader.fieldnames or [])]
            if missing:
                told = ", ".join(reader.fieldnames or []) or "nothing"
                meant = did_you_mean(missing[0], reader.fieldnames or [])
                raise DataError(f"{path} has no column {missing[0]!r}; it has {told}{meant}")
            for row in reader:
                line = f"{path}, line {reader.line_num}"
                if None in row:
                    raise DataError(f"{line}: more values than the {len(reader.fieldnames or [])} columns")
                if not (row[self.client] or "").strip():
                    raise DataError(f"{line}: no client; drop the row or give it one in {self.client!r}")
                numbers = []
                for column in (*self.x, self.y):
                    try:
                        numbers.append(float(row[column]))
                    except (TypeError, ValueError):
                        numbers.append(math.nan)
                    if not math.isfinite(numbers[-1]):
                        raise DataError(f"{line}: {column} is {row[column]!r}, not a number")
                if self.likelihood == "categorical" and numbers[-1] != round(numbers[-1]):
                    raise DataError(f"{line}: the label {row[self.y]!r} is not a whole number")
                out.setdefault(row[self.client], []).append(numbers)
        return out
