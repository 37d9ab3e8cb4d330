"""What examples look like at all sites: agreed on before the first round, without a row being sent.

A federation of tables names its columns in the settings (``[data]``); levels of columns with names, and means
and deviations of columns of numbers, come from ``questions.schema``: sums and counts, in which cells of a few
rows are suppressed. Other data (images, functions) are asked for the shape of an example alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from fedpop.checked import Count, OneOf, Range, Whole, require
from fedpop.errors import SettingsError
from fedpop.federation.cells import DROP, ERROR, OTHER, Columns, numeric_columns
from fedpop.federation.inputs import Example
from fedpop.federation.reading import width
from fedpop.federation.table_format import MINIMUM
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions.base import Question, Table, Units
from fedpop.questions.scales import ColumnScales
from fedpop.questions.schema import Ask, Levels, Moments, Schema

KNOWN: dict[str, Any] = {
    "x": Sequence[str],
    "y": str,
    "categories": Sequence[str],
    "levels": Mapping[str, Sequence[str]],
    "standardise": bool,
    "minimum": Whole,
    "group": str,
    "split": str,
    "classes": Sequence[str],
    "size": tuple[Count, Count, Count],
    "range": Mapping[str, tuple[float, float]],
    "unit": Mapping[str, str],
    "missing": Annotated[str, OneOf(ERROR, DROP)],
    "scale_tolerance": Annotated[float, Range(least=2, why="sites are compared by powers of two")],
}
"""Settings of a ``[data]`` table, and what they take."""


COMPARED = ("range", "unit", "scale_tolerance")
"""Those that are about columns of a formula, too."""


def check_columns(data: Mapping[str, Any], columns: Collection[str], where: str) -> dict[str, Any]:
    """What settings say of columns that a formula names; raises where they say anything else."""
    for key in data:
        if key not in COMPARED:
            raise SettingsError(
                f"{where}unknown setting {key!r}; where [model] has a formula there are {', '.join(COMPARED)}"
            )
        require(KNOWN[key], **{f"{where}{key}": data[key]})
    for setting in ("range", "unit"):
        for column in data.get(setting, {}):
            if column not in columns:
                raise SettingsError(f"{where}{setting}: {column!r} is not a column that the formula names")
    _require_ranges(data, where)
    return dict(data)


def check_form(data: Mapping[str, Any], where: str = "[data]: ") -> None:
    """Raise unless these are settings of a ``[data]`` table, or of another that holds the same."""
    for key in data:
        if key not in KNOWN:
            raise SettingsError(f"{where}unknown setting {key!r}; known are {', '.join(KNOWN)}")
        require(KNOWN[key], **{f"{where}{key}": data[key]})
    if ("x" in data) != ("y" in data):
        raise SettingsError(f"{where}tables need both x, a list of columns, and y, a column")
    roles = [*data.get("x", []), *(data[name] for name in ("y", "group", "split") if data.get(name))]
    for column in roles:
        if roles.count(column) > 1:
            raise SettingsError(f"{where}column {column!r} is used twice, as x, y, group or split")
    for column, names in data.get("levels", {}).items():
        if len(set(names)) < len(names):
            raise SettingsError(f"{where}levels of {column!r} are named twice: {', '.join(names)}")
    strange = [
        c for c in (*data.get("categories", []), *data.get("levels", {})) if c not in data.get("x", [])
    ]
    if strange:
        raise SettingsError(f"{where}{strange[0]!r} has levels but is not a column of x")
    numeric = numeric_columns(data)
    for setting in ("range", "unit"):
        for column in data.get(setting, {}):
            if column not in numeric:
                raise SettingsError(f"{where}{setting}: {column!r} is not a column of numbers, of x or y")
    _require_ranges(data, where)


def _require_ranges(data: Mapping[str, Any], where: str) -> None:
    for column, (least, most) in data.get("range", {}).items():
        if not least < most:
            raise SettingsError(
                f"{where}range of {column!r} goes from the least to the most, not {least} to {most}"
            )


def schema_of(data: Mapping[str, Any]) -> Schema:
    """What has to be asked about the columns of x: not what the settings give already."""
    given, named = data.get("levels", {}), (*data.get("categories", []), *data.get("levels", {}))
    numeric = tuple(c for c in data.get("x", []) if c not in named) if data.get("standardise", True) else ()
    asked = tuple(c for c in data.get("categories", []) if c not in given)
    return Schema(numeric, asked, int(data.get("minimum", MINIMUM)))


def table_of(columns: Columns, data: Mapping[str, Any]) -> Table:
    """The columns that have to be asked about: those of numbers as numbers, others as texts."""
    schema = schema_of(data)
    numeric = schema.numeric if columns.users_table else numeric_columns(data)
    table: dict[str, Any] = {c: columns.numbers(c) for c in numeric}
    return table | {c: list(columns[c]) for c in schema.categorical}


@dataclass(frozen=True)
class ExampleShape(Question[Example]):
    """What an example looks like: units are counted under their form, of which there is to be one."""

    name: ClassVar[str] = "example"
    varied: ClassVar[bool] = True

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort = units.cohort
        form = json.dumps(plain_example(Example.of(cohort.x)))
        everyone = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
        return Answer(everyone, sums={form: torch.tensor([float(len(cohort))])})

    def finish(self, known: Tensors, total: Total) -> Example:
        forms = [(json.loads(form), round(float(count))) for form, count in sorted(total.plain.items())]
        if len(forms) != 1:
            counts = ", ".join(f"of {count} unit(s) {form['shapes']}" for form, count in forms)
            raise SettingsError(
                f"examples have different shapes, those {counts}: check the size of images, or what the "
                "functions return; the server's log has what each site answered"
            )
        return example_from(forms[0][0])


def scales_of(data: Mapping[str, Any]) -> ColumnScales:
    """What is asked of columns of numbers before any moment is."""
    return ColumnScales(tuple(numeric_columns(data)), int(data.get("minimum", MINIMUM)))


def agreed(data: Mapping[str, Any], ask: Ask) -> tuple[dict[str, Any], Example]:
    """The form of all sites' data, and of an example, from what everyone answers."""
    if "x" not in data:
        return dict(data), ask(ExampleShape(), {})
    levels, scale = dict(data.get("levels", {})), dict[str, list[float]]()
    for column, found in schema_of(data).asked(ask).items():
        if isinstance(found, Levels):
            levels[column] = [*found.names, *([OTHER] if found.suppressed else [])]
            if not found.names:
                raise SettingsError(
                    f"column {column!r}: every level has too few rows and is suppressed; list its levels"
                )
        elif isinstance(found, Moments):
            scale[column] = [found.mean, found.sd]
    form = dict(data) | {"levels": levels, "scale": scale}
    return form, Example(None, ((width(form),),), (torch.float32,))


def example_from(plain: Mapping[str, Any]) -> Example:
    """An example's form out of plain values.

    >>> example_from({"names": None, "shapes": [[3]], "dtypes": ["float32"]}).shapes
    ((3,),)
    """
    names = None if plain["names"] is None else tuple(plain["names"])
    shapes = tuple(tuple(int(n) for n in shape) for shape in plain["shapes"])
    return Example(names, shapes, tuple(getattr(torch, str(kind)) for kind in plain["dtypes"]))


def plain_example(example: Example) -> dict[str, Any]:
    """An example's form in plain values.

    >>> plain_example(Example.of(torch.zeros(5, 3)))
    {'names': None, 'shapes': [[3]], 'dtypes': ['float32']}
    """
    return {
        "names": None if example.names is None else list(example.names),
        "shapes": [list(shape) for shape in example.shapes],
        "dtypes": [str(kind).removeprefix("torch.") for kind in example.dtypes],
    }
