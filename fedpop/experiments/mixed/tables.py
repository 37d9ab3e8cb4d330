"""Grouped data with reference fits: where they are, and which models are fitted to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpop.data.lookup import VARIABLE, roots
from fedpop.errors import DataError
from fedpop.files import read_json
from fedpop.mixed.table import read_csv

FOLDER = "grouped"


@dataclass(frozen=True)
class ReferenceTask:
    """A model of a table, and the name of its reference among those beside the table."""

    data: str
    formula: str
    reference: str
    family: str = "gaussian"
    words: tuple[str, ...] = ()
    """Columns whose numbers are names of levels."""

    def table(self, data: Path | None) -> Any:
        frame = read_csv(file(f"{self.data}.csv", data))
        return frame.astype(dict.fromkeys(self.words, str))

    def truth(self, data: Path | None) -> dict[str, Any]:
        """The reference: estimates, standard errors, conditional modes."""
        saved = read_json(file(f"{self.data}.reference.json", data))
        found: dict[str, Any] = next(m for m in saved["models"] if m["model"] == self.reference)
        return found


SLEEP = ReferenceTask("sleepstudy", "Reaction ~ Days + (Days | Subject)", "random_slope")
RADON = ReferenceTask("radon", "log_radon ~ floor + (1 | county)", "random_intercept")
CBPP = ReferenceTask(
    "cbpp",
    "cbind(incidence, size - incidence) ~ period + (1 | herd)",
    "agq25",
    "binomial",
    ("period",),
)
TASKS = (SLEEP, RADON, CBPP)


def file(name: str, data: Path | None) -> Path:
    """A file among grouped data, or an error that says where it was looked for."""
    places = [root.folder / FOLDER for root in roots(data)]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise DataError(
            f"no {FOLDER}/{name} in {', '.join(str(p.parent) for p in places)}; give the folder with "
            f"--data-dir or in {VARIABLE}"
        )
    return found
