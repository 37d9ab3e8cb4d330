"""The report of a single run folder: its curves, from ``metrics.jsonl``, and how the sites of a federation
differ, from the histograms of columns that they agreed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpop.errors import CheckpointError
from fedpop.files import DAMAGED, json_lines, read_bytes, read_json, reading
from fedpop.report import plots, terminal
from fedpop.report.html import Figure, Page, Section, Sheet, write_page
from fedpop.run.progress import human_bytes, privacy_words

ESTIMATES = (
    "What is of all sites is shared; of what differs between sites the estimate is the mean over the "
    "population of sites, and the spread its standard deviation. Columns that were standardised are counted "
    "in their deviations."
)
DIFFER = (
    "How large each column of numbers is at sites: the median of its absolute values, and how far values lie "
    "from their median in the mean, each as powers of two between which a site's lies. Numbers in brackets "
    "are sites. Sites with few rows are not counted."
)
CURVES = {
    "loss": "mean negative log-likelihood per example",
    "acceptance": "acceptance of the chains",
    "prior_sd": "scale of the population prior",
    "prior_mean_norm": "norm of the population mean",
    "validation_log_likelihood": "validation log-likelihood",
}


def run_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder, or into that of a saved population; of a federation's folder
    it is that of its run."""
    if (folder / "run" / "metrics.jsonl").exists():
        folder = folder / "run"
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
        last = int(history[-1]["round"])
        heard = _participation(history)
        estimates, warnings = _outcome(folder)
        rows = _rows(folder, history, () if estimates is None else ("standard_errors",))
    name, lead = _name(folder), f"A run of {last} rounds."
    if heard is not None:
        method, name = name, str(_first(folder, "federation.json").get("name", name))
        lead = f"A federation of {len(heard.rows)} sites: {method}, {last} rounds."
    figures = [
        Figure(plots.curves({name: points}, "round", label, log_y=False), label)
        for label, points in curves.items()
        if points
    ]
    sections = [
        *([] if warnings is None else [Section("Warnings", sheet=warnings)]),
        Section("The run", sheet=Sheet(("", ""), rows)),
        *([] if (fit := _printed(folder)) is None else [fit]),
        *([] if estimates is None else [Section("Estimates", ESTIMATES, estimates)]),
        *([] if heard is None else [Section("Sites", sheet=heard)]),
        Section("Over the rounds", figures=figures),
    ]
    if (differ := sites_section(folder)) is not None:
        sections.append(differ)
    page = Page(f"fedpop: {name}", lead, sections)
    return write_page(folder / "report.html", page)


def _printed(folder: Path) -> Section | None:
    """What a formula's fit prints."""
    file = folder / "fit.txt"
    return Section("The fit", printed=read_bytes(file).decode()) if file.exists() else None


def _participation(history: list[dict[str, Any]]) -> Sheet | None:
    """Of a run across sites, each site: how often its message counted, and why it did not."""
    if not any("heard" in m for m in history):
        return None
    heard, missed, first, last = Counter[str](), dict[str, Counter[str]](), dict[str, int](), dict[str, int]()
    for m in history:
        heard.update(m.get("heard", []))
        last |= dict.fromkeys(m.get("heard", []), int(m["round"]))
        for name, why in m.get("reasons", {}).items():
            missed.setdefault(name, Counter())[str(why)] += 1
        for name in (*m.get("heard", []), *m.get("reasons", {})):
            first.setdefault(name, int(m["round"]))
    late = history[-1].get("late_from", {})
    rows = []
    for name in sorted(first):
        asked = heard[name] + sum(missed.get(name, Counter()).values())
        why = "; ".join(f"{words} ({times})" for words, times in missed.get(name, Counter()).most_common(3))
        spoke = f"{heard[name]} of {asked}"
        rows.append(
            (name, why or "-", spoke, str(first[name]), str(last.get(name, "never")), str(late.get(name, 0)))
        )
    columns = ("site", "left out because (rounds)", "heard, of rounds asked", "first", "last", "late replies")
    return Sheet(columns, rows)


def _outcome(folder: Path) -> tuple[Sheet | None, Sheet | None]:
    """Estimates under their names, and warnings, where a run across sites has written them."""
    found = _first(folder, "outcome.json")
    cells = [
        (
            str(row["name"]),
            str(row["of"]),
            *(
                f"{row[key]:.4g}" if row.get(key) is not None else "-"
                for key in ("estimate", "error", "spread")
            ),
        )
        for row in found.get("estimates", [])
    ]
    columns = ("parameter", "of", "estimate", "standard error", "spread between sites")
    words = [(str(w),) for w in found.get("warnings", [])]
    return Sheet(columns, cells) if cells else None, Sheet(("",), words) if words else None


def _rows(folder: Path, history: list[dict[str, Any]], elsewhere: Sequence[str]) -> list[tuple[str, str]]:
    last, result, after = history[-1], _result(folder), _first(folder, "afterwards.json")
    best, verdict = result.get("best_round"), result.get("convergence")
    return [
        ("rounds run", str(last["round"])),
        *([] if best is None else [("round returned", f"{best}, the best on validation data")]),
        *([] if verdict is None else [("theta", str(verdict["words"]))]),
        *((n.replace("_", " "), str(found["words"])) for n, found in after.items() if n not in elsewhere),
        *([("privacy", privacy_words(last))] if last.get("epsilon") is not None else []),
        ("sent up", human_bytes(last["bytes_up"])),
        ("sent down", human_bytes(last["bytes_down"])),
        ("seconds", f"{last['seconds']:.1f}"),
        ("clients left out", str(sum(len(m.get("left_out", [])) for m in history))),
    ]


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
    text = DIFFER + (f" Could not take part at the start: {' '.join(stopped)}" if stopped else "")
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
