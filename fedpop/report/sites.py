"""How sites of a federation differ, from the histograms of columns' sizes and spreads that they agreed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpop.files import read_json, reading
from fedpop.report.html import Section, Sheet

TEXT = (
    "How large each column of numbers is at sites: the median of its absolute values, and how far values lie "
    "from their median in the mean, each as powers of two between which a site's lies. Numbers in brackets "
    "are sites. Sites with few rows are not counted."
)


def sites_section(folder: Path) -> Section | None:
    """A sheet with a row for each column; nothing where a run's sites agreed on no columns."""
    file = folder / "scales.json"
    if not file.exists():
        return None
    found = read_json(file)
    with reading(file, "how sites differ"):
        rows = [
            (column, _counts(both["size"]), _counts(both["spread"]))
            for column, both in found["columns"].items()
        ]
        stopped = [f"{name}: {why}." for name, why in sorted(found["stopped"].items())]
    text = TEXT + (f" Could not take part at the start: {' '.join(stopped)}" if stopped else "")
    return (
        Section("How sites differ", text, Sheet(("column", "median size", "spread"), rows)) if rows else None
    )


def _counts(powers: Mapping[str, Any]) -> str:
    """Ranges with how many sites are in each, the smallest first.

    >>> _counts({"3": 2, "-1": 1})
    '0.5 to 1 (1), 8 to 16 (2)'
    """
    each = sorted((int(power), int(count)) for power, count in powers.items())
    return ", ".join(f"{2.0**k:.4g} to {2.0 ** (k + 1):.4g} ({count})" for k, count in each) or "none"
