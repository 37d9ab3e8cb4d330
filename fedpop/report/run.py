"""The report of a single run folder: its curves, from ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import DAMAGED, json_lines, read_bytes, read_json, reading
from fedpop.report import plots, terminal
from fedpop.report.html import Figure, Page, Section, Sheet, write_page
from fedpop.report.sites import sites_section
from fedpop.run.progress import human_bytes

CURVES = {
    "loss": "mean negative log-likelihood per example",
    "acceptance": "acceptance of the chains",
    "prior_sd": "scale of the population prior",
    "prior_mean_norm": "norm of the population mean",
    "validation_log_likelihood": "validation log-likelihood",
}


def run_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder, or into that of a saved population."""
    source = folder / "metrics.jsonl"
    if not source.exists():
        source = next(iter(sorted(folder.glob("history.*.jsonl"))), source)
    if not source.exists():
        raise CheckpointError(
            f"{folder} holds neither metrics.jsonl nor results.json, nor a population with its history; give "
            "the folder of a run, of a comparison or of a saved population"
        )
    history = json_lines(read_bytes(source), source)
    if not history:
        raise CheckpointError(f"{source} is empty: the run has not finished a round yet")
    with reading(source, "the rounds of a run"):
        curves = {
            label: [(int(m["round"]), float(m[metric])) for m in history if m.get(metric) is not None]
            for metric, label in CURVES.items()
        }
        rows = _rows(folder, history)
        last = int(history[-1]["round"])
    name = _name(folder)
    figures = [
        Figure(plots.curves({name: points}, "round", label, log_y=False), label)
        for label, points in curves.items()
        if points
    ]
    sections = [
        Section("The run", sheet=Sheet(("", ""), rows)),
        Section("Over the rounds", figures=figures),
    ]
    if (differ := sites_section(folder)) is not None:
        sections.append(differ)
    page = Page(f"fedpop: {name}", f"A run of {last} rounds.", sections)
    return write_page(folder / "report.html", page)


def _rows(folder: Path, history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    last, result, after = history[-1], _result(folder), _first(folder, "afterwards.json")
    best, verdict = result.get("best_round"), result.get("convergence")
    return [
        ("rounds run", str(last["round"])),
        *([] if best is None else [("round returned", f"{best}, the best on validation data")]),
        *([] if verdict is None else [("theta", str(verdict["words"]))]),
        *((name.replace("_", " "), str(found["words"])) for name, found in after.items()),
        ("sent up", human_bytes(last["bytes_up"])),
        ("sent down", human_bytes(last["bytes_down"])),
        ("seconds", f"{last['seconds']:.1f}"),
        ("clients left out", str(sum(len(m.get("left_out", [])) for m in history))),
    ]


def tell_run(folder: Path) -> None:
    """Write the report, and say where it is."""
    terminal.console().print(f"The report is in [bold]{run_report(folder)}[/bold].")


def _result(folder: Path) -> dict[str, Any]:
    """What a run, or the population that was saved, says of its end; nothing before it."""
    return _first(folder, "result.json", "population.json")


def _name(folder: Path) -> str:
    saved = _first(folder, "config.json", "population.json")
    if not saved:
        return folder.name
    with reading(folder, "a run's folder"):
        return str(saved["algorithm"]["method"])


def _first(folder: Path, *names: str) -> dict[str, Any]:
    """The first of these files that is there."""
    for path in (folder / name for name in names):
        if path.exists():
            found = read_json(path)
            if not isinstance(found, dict):
                raise CheckpointError(f"{path} is not a JSON object but {type(found).__name__}; {DAMAGED}")
            return found
    return {}
