"""The report of a single run folder: its curves, from ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import read_json
from fedpop.report import plots, terminal
from fedpop.report.html import Figure, Page, Section, Sheet, write_page
from fedpop.runtime.progress import human_bytes

CURVES = {
    "loss": "mean negative log-likelihood per example",
    "acceptance": "acceptance of the chains",
    "prior_sd": "scale of the population prior",
    "prior_mean_norm": "norm of the population mean",
    "validation_log_likelihood": "validation log-likelihood",
}


def run_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder."""
    source = folder / "metrics.jsonl"
    if not source.exists():
        source = folder / "history.jsonl"
    if not source.exists():
        raise CheckpointError(f"{folder} holds neither metrics.jsonl nor history.jsonl nor results.json")
    history = [json.loads(line) for line in source.read_text().splitlines()]
    if not history:
        raise CheckpointError(f"{source} is empty: the run has not finished a round yet")
    name = _name(folder)
    figures = []
    for metric, label in CURVES.items():
        points = [(m["round"], m[metric]) for m in history if m.get(metric) is not None]
        if points:
            figures.append(Figure(plots.curves({name: points}, "round", label, log_y=False), label))
    last = history[-1]
    result = _result(folder)
    kept, verdict = result.get("kept"), result.get("convergence")
    rows = [
        ("rounds run", str(last["round"])),
        *([] if kept is None else [("round kept", f"{kept}, the best on validation data")]),
        *([] if verdict is None else [("theta", str(verdict["words"]))]),
        ("sent up", human_bytes(last["bytes_up"])),
        ("sent down", human_bytes(last["bytes_down"])),
        ("seconds", f"{last['seconds']:.1f}"),
        ("clients left out", str(sum(len(m.get("left_out", [])) for m in history))),
    ]
    sections = [
        Section("The run", sheet=Sheet(("", ""), rows)),
        Section("Over the rounds", figures=figures),
    ]
    page = Page(f"fedpop: {name}", f"A run of {last['round']} rounds.", sections)
    return write_page(folder / "report.html", page)


def tell_run(folder: Path) -> None:
    """Write the report, and say where it is."""
    terminal.console().print(f"The report is in [bold]{run_report(folder)}[/bold].")


def _result(folder: Path) -> dict[str, Any]:
    """What a run, or the population that was saved, says of its end; nothing before it."""
    for file in ("result.json", "population.json"):
        if (folder / file).exists():
            found: dict[str, Any] = read_json(folder / file)
            return found
    return {}


def _name(folder: Path) -> str:
    for file in ("config.json", "population.json"):
        if (folder / file).exists():
            saved: dict[str, Any] = read_json(folder / file)
            return str(saved["algorithm"]["method"])
    return folder.name
