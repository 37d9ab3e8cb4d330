"""The table and the page of a search: every trial, and what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from fedpop.errors import SettingsError
from fedpop.evaluation.protocol import HIGH_IS_GOOD
from fedpop.experiments.tune import choose, metric_of
from fedpop.files import write_bytes
from fedpop.report import plots
from fedpop.report.html import Figure, Section, Sheet, markdown, write_report
from fedpop.report.results import Results, mean, values
from fedpop.report.terminal import rich_table


def _told(settings: dict[str, Any]) -> str:
    """Settings in a line, ``local.rate 0.01``."""
    parts = []
    for name, value in settings.items():
        if isinstance(value, dict):
            parts += [f"{name}.{part}" for part in _told(value).split(", ") if part]
        else:
            parts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


def summary_table(results: Results) -> Sheet:
    """One row per method: what was chosen, out of how many trials."""
    metric = metric_of(results)
    columns = ("method", "chosen settings", "trial", "of", "failed", f"validation {metric}", "as written")
    rows = []
    for method in results.methods():
        trials = _scores(results, method, metric)
        lost = sum(v is None for v in trials.values())
        first = trials.get(0)
        written = "-" if first is None else f"{first:.4g}"
        try:
            best = choose(results.records, method, metric)
        except SettingsError:
            rows.append((method, "none", "-", str(len(trials)), str(lost), "-", written))
            continue
        told = _told(dict(best.settings)) or "as they are"
        rows.append(
            (method, told, str(best.trial), str(len(trials)), str(lost), f"{best.score:.4g}", written)
        )
    return Sheet(columns, rows)


def _scores(results: Results, method: str, metric: str) -> dict[int, float | None]:
    out: dict[int, float | None] = {}
    for t in sorted({r["setting"]["trial"] for r in results.of(method=method)}):
        own = [r for r in results.of(method=method) if r["setting"]["trial"] == t]
        numbers = values(own, f"validation_{metric}")
        out[t] = mean(numbers) if len(numbers) == len(own) else None
    return out


def trials_table(results: Results) -> Sheet:
    """Every trial."""
    metric = metric_of(results)
    rows = []
    for method in results.methods():
        for t, score in _scores(results, method, metric).items():
            own = next(r for r in results.of(method=method) if r["setting"]["trial"] == t)
            told = _told(own["config"]["settings"]) or "as they are"
            rows.append((method, told, str(t), "-" if score is None else f"{score:.4g}"))
    return Sheet(("method", "settings", "trial", f"validation {metric}"), rows)


def show_and_write(results: Results, console: Console) -> None:
    """The table on the terminal; all trials in files."""
    table = summary_table(results)
    console.print(rich_table(table, "Chosen on validation examples"))
    tables = (table, trials_table(results))
    write_bytes(results.folder / "results.md", "\n".join(map(markdown, tables)).encode())
    path = experiment_report(results, results.folder / "report.html")
    console.print(f"The report is in [bold]{path}[/bold].")


def experiment_report(results: Results, path: Path) -> Path:
    """The page."""
    metric = metric_of(results)
    groups = {
        m: [v for v in _scores(results, m, metric).values() if v is not None] for m in results.methods()
    }
    groups = {m: v for m, v in groups.items() if v}
    better = "higher" if metric in HIGH_IS_GOOD else "lower"
    figures = []
    if groups:
        best = {m: min(v, key=lambda s: -s if metric in HIGH_IS_GOOD else s) for m, v in groups.items()}
        near = sorted(best.values())[len(best) // 2]
        # Trials far off would hide the differences that matter.
        seen = {
            m: [s for s in v if abs(s - near) <= 4 * abs(near) + 1] or [best[m]] for m, v in groups.items()
        }
        figures.append(
            Figure(
                plots.dots(seen, f"validation {metric} ({better} is better)"),
                "Every dot is a trial, the stroke their mean; trials far off are left out.",
            )
        )
    sections = [
        Section("Chosen", sheet=summary_table(results), figures=figures, wide=True),
        Section("All trials", sheet=trials_table(results)),
    ]
    lead = (
        "Settings searched for at random, the same number of trials for every method that has something to "
        "search for, judged on validation examples; no trial saw a test example."
    )
    return write_report(path, "fedpop: a search", lead, sections)
