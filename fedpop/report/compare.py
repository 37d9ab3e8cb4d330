"""The table and the page of a comparison, made from its records and the files beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from rich.console import Console

from fedpop.evaluation.protocol import HIGH_IS_GOOD
from fedpop.experiments.comparison import Comparison
from fedpop.files import write_bytes
from fedpop.report import side_by_side
from fedpop.report.html import Figure, Section, Sheet, markdown, write_report
from fedpop.report.results import Record, Results, mean, values
from fedpop.report.terminal import fitted, rich_table
from fedpop.runtime.progress import human_bytes

REFERENCE = "FedSOUL"
NAMES = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "coverage": "90 % cov.",
    "width": "width",
}
PERCENT = ("accuracy", "coverage")
PROTOCOL = (
    "Every client is scored on its own test examples, whoever was active last; scores are averaged over "
    "clients, then over seeds (± their standard deviation over seeds). worst 10 %: mean over the worst tenth "
    "of the clients. last: mean over the last rounds of the run instead of the final model. new, own data: "
    "clients never in training, with their own few examples; new, none: without any (- where the method has "
    "nothing to offer). ECE: over all clients' predictions pooled. plug-in: no uncertainty about parameters. "
    "diverged: a prediction was not finite."
)
TOLD = {
    "unserved": "client(s) for whom it has no model, in none of its scores",
    "new_unserved": "new client(s) for whom it has no model, in none of its scores",
    "left_out": "update(s) that were not finite, left out of their rounds",
}
"""What a record counts beside its scores, over all seeds."""
COST = (
    "Means over seeds. passes: backbone example-passes (forward and backward of an example is one, a forward "
    "alone a third); head steps: example-steps of the head on features; seconds: of training, one machine, "
    "without evaluation. Methods that need everyone, or one client at a time, have their own rule of who is "
    "active."
)


def main_score(comparison: Comparison) -> str:
    """Accuracy for classes, RMSE for numbers."""
    classes = any("test_accuracy" in r["metrics"] for r in comparison.records)
    return "accuracy" if classes else "rmse"


def shown(records: Sequence[Record], metric: str, percent: bool) -> str:
    """Mean over seeds, with their standard deviation where there are several."""
    numbers = values(records, metric)
    if not numbers:  # not there, or not finite
        return "diverged" if any(metric in r["metrics"] for r in records) else "-"
    scale, digits = (100, 1) if percent else (1, 3)
    centre = scale * mean(numbers)
    text = f"{centre:.{digits}f}" if abs(centre) < 1e4 else f"{centre:.2g}"
    if len(numbers) > 1:
        spread = scale * stdev(numbers)
        text += f" ± {spread:.{digits}f}" if spread < 1e4 else f" ± {spread:.2g}"
    lost = sum(metric in r["metrics"] for r in records) - len(numbers)
    return text + (f" ({lost} diverged)" if lost else "")


def active(item: Record) -> str:
    """Who takes part in a round, in a word."""
    rule = item["config"]["participation"]
    kind = rule["kind"]
    if kind == "Everyone":
        return "all"
    if kind == "Uniform":
        return str(rule["size"])
    if kind == "Bernoulli":
        return "p_i" if isinstance(rule["p"], list) else f"p = {rule['p']:g}"
    return str(kind).lower()


def summary(comparison: Comparison) -> Sheet:
    """What is printed: scores and costs of each method in a row."""
    main = main_score(comparison)
    second, third = ("nll", "ece") if main == "accuracy" else ("nll", "coverage")
    new = any(f"new_{main}" in r["metrics"] for r in comparison.records)
    columns = ["method", "active", "rounds", NAMES[main], "worst 10 %", "last", NAMES[second], NAMES[third]]
    columns += ["new, own data", "new, none"] if new else []
    columns += ["sent", "passes", "sec."]
    rows = []
    for method in comparison.methods:
        records = comparison.of_method(method)
        percent = main in PERCENT
        row = [
            flagged(method, records),
            active(records[0]),
            _cost(records, "rounds"),
            shown(records, f"test_{main}", percent),
            shown(records, f"test_{main}_worst", percent),
            shown(records, f"last_{main}", percent),
            shown(records, f"test_{second}", False),
            shown(records, "test_pooled_ece" if third == "ece" else f"test_{third}", third in PERCENT),
        ]
        if new:
            row += [shown(records, f"{kind}_{main}", percent) for kind in ("new", "new_without")]
        sent = mean(values(records, "bytes_up", "cost")) + mean(values(records, "bytes_down", "cost"))
        row += [human_bytes(sent), _cost(records, "backbone_passes"), _cost(records, "seconds", 1)]
        rows.append(tuple(row))
    named = {NAMES["accuracy"]: "accuracy, %", NAMES["coverage"]: "90 % cov., %"}
    spare = ("sec.", "last", "sent", "rounds", "passes", "worst 10 %", "new, none")
    return Sheet([named.get(c, c) for c in columns], rows, highlights(comparison), spare)


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the table must know of single methods: missing seeds, clients without a model,
    updates that were left out."""
    seeds = len({r["seed"] for r in comparison.records})
    found = []
    for method in comparison.methods:
        records = comparison.of_method(method)
        if len(records) < seeds:
            found.append(f"{method}: {len(records)} of {seeds} seeds only; the rest is not run yet")
        for metric, told in TOLD.items():
            count = sum(values(records, metric))
            if count:
                found.append(f"{method}: {count:.0f} {told}")
    return found


def flagged(method: str, records: Sequence[Record]) -> str:
    return f"{method} *" if any(r["metrics"].get("plug_in") for r in records) else method


def highlights(comparison: Comparison) -> frozenset[int]:
    return frozenset(
        i for i, m in enumerate(comparison.methods) if _class_of(comparison, m) in ("FedSOUL", "FedSOUK")
    )


def _class_of(comparison: Comparison, method: str) -> str:
    return str(comparison.of_method(method)[0]["config"].get("class"))


def _cost(records: Sequence[Record], name: str, digits: int = 0) -> str:
    return f"{mean(values(records, name, 'cost')):,.{digits}f}"


def scores_table(comparison: Comparison) -> Sheet:
    """Every score: mean, spread over clients, worst tenth, last rounds, pooled."""
    main = main_score(comparison)
    names = (
        ("accuracy", "nll", "brier", "ece") if main == "accuracy" else ("rmse", "nll", "coverage", "width")
    )
    rows = []
    for name in names:
        for method in comparison.methods:
            records, percent = comparison.of_method(method), name in PERCENT
            cells = [
                shown(records, metric.format(name), percent)
                for metric in ("test_{}", "test_{}_sd", "test_{}_worst", "last_{}", "test_pooled_{}")
            ]
            rows.append((NAMES[name] + (", %" if percent else ""), method, kind_of(records), *cells))
    columns = ("score", "method", "predictive", "final", "sd over clients", "worst 10 %", "last", "pooled")
    many = len(comparison.methods)
    marked = frozenset(j * many + i for j in range(len(names)) for i in highlights(comparison))
    return Sheet(columns, rows, marked)


def kind_of(records: Sequence[Record]) -> str:
    return "plug-in" if any(r["metrics"].get("plug_in") for r in records) else "integrated"


def new_table(comparison: Comparison) -> Sheet | None:
    """Clients never in training."""
    main = main_score(comparison)
    names = (main, "nll", "ece" if main == "accuracy" else "coverage")
    if not any(k.startswith("new_") for r in comparison.records for k in r["metrics"]):
        return None
    rows = []
    for method in comparison.methods:
        records = comparison.of_method(method)
        cells = [shown(records, f"{k}_{n}", n in PERCENT) for k in ("new", "new_without") for n in names]
        rows.append((method, kind_of(records), *cells))
    columns = [f"{when}: {NAMES[n]}" for when in ("own data", "none") for n in names]
    return Sheet(("method", "predictive", *columns), rows, highlights(comparison))


def cost_table(comparison: Comparison) -> Sheet:
    columns = ("method", "active", "rounds", "up", "down", "passes", "head steps", "seconds")
    rows = []
    for method in comparison.methods:
        records = comparison.of_method(method)
        up, down = (mean(values(records, n, "cost")) for n in ("bytes_up", "bytes_down"))
        rows.append(
            (
                method,
                active(records[0]),
                _cost(records, "rounds"),
                human_bytes(up),
                human_bytes(down),
                _cost(records, "backbone_passes"),
                _cost(records, "head_steps"),
                _cost(records, "seconds", 1),
            )
        )
    return Sheet(columns, rows, highlights(comparison))


# --- figures ---------------------------------------------------------------------------------


def _curves(comparison: Comparison, x: Callable[[dict[str, Any]], float], score: str) -> dict[str, Any]:
    """For each method the mean over seeds of a score on the way; where seeds looked at different rounds, the
    first seed's."""
    scale = 100 if score in PERCENT else 1
    lines = {}
    for method in comparison.methods:
        runs = [d["points"] for (m, _), d in sorted(comparison.details.items()) if m == method]
        runs = [[p for p in run if p.get(score) is not None] for run in runs]
        runs = [run for run in runs if run]
        if not runs:
            continue
        same = [run for run in runs if [p["round"] for p in run] == [p["round"] for p in runs[0]]]
        lines[method] = [
            (mean([x(p) for p in at]), scale * mean([p[score] for p in at])) for at in zip(*same, strict=True)
        ]
    return lines


def _reliability(comparison: Comparison, method: str) -> list[tuple[float, float, int]]:
    """Bins of all seeds together."""
    sums: dict[int, list[float]] = {}
    for (m, _), d in comparison.details.items():
        if m == method:
            for confidence, accuracy, count in d["reliability"]:
                held = sums.setdefault(int(15 * confidence + 1e-9), [0.0, 0.0, 0.0])
                for j, v in enumerate((confidence * count, accuracy * count, count)):
                    held[j] += v
    return [(c / n, a / n, int(n)) for _, (c, a, n) in sorted(sums.items())]


def _pairs(comparison: Comparison, method: str, other: str, score: str) -> list[tuple[float, float]]:
    scale = 100 if score in PERCENT else 1
    out = []
    for (m, seed), d in comparison.details.items():
        there = comparison.details.get((other, seed))
        if m != method or there is None:
            continue
        theirs = dict(zip(there["clients"], there["scores"][score], strict=True))
        for name, value in zip(d["clients"], d["scores"][score], strict=True):
            if value is not None and theirs.get(name) is not None:
                out.append((scale * theirs[name], scale * value))
    return out


def on_the_way(comparison: Comparison) -> list[Figure]:
    """The main score against rounds, bytes and passes, and the log-score against rounds."""
    main = main_score(comparison)
    looks = side_by_side.looks(comparison.methods)
    label = {"accuracy": "test accuracy, %", "rmse": "test RMSE"}[main]
    good = main in HIGH_IS_GOOD
    figures = []
    axes: tuple[tuple[str, Callable[[dict[str, Any]], float], bool, str], ...] = (
        ("round", lambda p: p["round"], False, "Over the rounds."),
        (
            "megabytes sent, both ways",
            lambda p: (p["bytes_up"] + p["bytes_down"]) / 1e6,
            True,
            "Against what was sent, on a logarithmic scale.",
        ),
        ("backbone passes", lambda p: p["backbone_passes"], False, "Against backbone example-passes."),
    )
    for name, x, log, caption in axes:
        lines = _curves(comparison, x, main)
        lines = {m: [(a, b) for a, b in line if a > 0 or not log] for m, line in lines.items()}
        lines = {m: line for m, line in lines.items() if line}
        if lines and any(a > 0 for line in lines.values() for a, _ in line):
            svg = side_by_side.paths(lines, looks, name, label, log, good)
            figures.append(
                Figure(svg, f"{caption} Mean over clients; looks between rounds use short passes.")
            )
    lines = _curves(comparison, lambda p: p["round"], "nll")
    if lines:
        svg = side_by_side.paths(lines, looks, "round", "test NLL", False, False)
        figures.append(Figure(svg, "The log-score (lower is better), which also judges how sure they were."))
    return figures


def page(comparison: Comparison, path: Path) -> Path:
    """The page: scores on the way, clients, calibration, all tables."""
    main = main_score(comparison)
    looks = side_by_side.looks(comparison.methods)
    text = " ".join([PROTOCOL, "Methods with * are plug-in.", *(f"{note}." for note in notes(comparison))])
    sections = [Section("The comparison", text, summary(comparison))]
    sections.append(Section("On the way", figures=on_the_way(comparison)))
    sections += _clients(comparison, main, looks) + _calibration(comparison, main, looks)
    sections.append(Section("All scores", sheet=scores_table(comparison)))
    new = new_table(comparison)
    if new is not None:
        text = "Clients that took no part in training: with their own few examples, and without any."
        sections.append(Section("New clients", text, new))
    sections.append(Section("What it cost", COST, cost_table(comparison)))
    return write_report(path, "fedpop: a comparison", lead_of(comparison), sections)


def _clients(comparison: Comparison, main: str, looks: Any) -> list[Section]:
    known = [m for m in comparison.methods if _class_of(comparison, m) == REFERENCE]
    other = (known or list(comparison.methods))[0]
    panels = {m: _pairs(comparison, m, other, main) for m in comparison.methods if m != other}
    panels = {m: pairs for m, pairs in panels.items() if pairs}
    if not panels:
        return []
    score = {"accuracy": "accuracy, %", "rmse": "RMSE"}[main]
    better = "above" if main in HIGH_IS_GOOD else "below"
    caption = (
        f"Every dot is a client (of one seed): its {score.split(',')[0]} under {other}, across, and under "
        f"the panel's method, upwards. Dots {better} the dotted line are clients that fare better with the "
        "panel's method; those far outside sit on the edge."
    )
    svg = side_by_side.scatters(panels, looks, f"{other}: {score}", score)
    return [Section("Client by client", figures=[Figure(svg, caption)], wide=True)]


def _calibration(comparison: Comparison, main: str, looks: Any) -> list[Section]:
    if main == "accuracy":
        curves = {m: _reliability(comparison, m) for m in comparison.methods}
        if not any(curves.values()):
            return []
        text = (
            "Predictions in bins of equal confidence, all clients and seeds together: how sure, how often "
            "right. Below the dotted line is overconfident; larger dots are more predictions; bins with "
            "less than half a per cent of them are left out."
        )
        ece = {m: 100 * mean(values(comparison.of_method(m), "test_pooled_ece")) for m in comparison.methods}
        figures = [
            Figure(side_by_side.reliabilities(curves, looks), "Reliability of the final models."),
            Figure(
                side_by_side.ranked(ece, looks, "expected calibration error, %"),
                "Expected calibration error, all examples pooled (lower is better).",
            ),
        ]
        return [Section("How far to trust it", text, figures=figures)]
    cover = {m: 100 * comparison.mean(m, "test_coverage") for m in comparison.methods}
    width = {m: comparison.mean(m, "test_width") for m in comparison.methods}
    text = "Intervals of plug-in methods hold the noise only, so they are too narrow where data are few."
    figures = [
        Figure(
            side_by_side.ranked(cover, looks, "coverage, %", ("90 %", 90.0)),
            "Share of test observations inside their 90 % interval.",
        ),
        Figure(side_by_side.ranked(width, looks, "mean width"), "Mean width of the 90 % intervals."),
    ]
    return [Section("How far to trust it", text, figures=figures)]


def lead_of(comparison: Comparison) -> str:
    """What was compared on what, in words."""
    setting = comparison.records[0]["setting"]
    seeds = len({r["seed"] for r in comparison.records})
    task = setting["task"]
    budget = (
        f"{setting['passes']:,.0f} backbone passes for each method"
        if "passes" in setting
        else f"{setting['rounds']} rounds for each method"
    )
    about = {
        "synthetic": lambda: f"the synthetic task, {task['b']} clients, d = {task['d']}, k = {task['k']}",
        "images": lambda: (
            f"{task['images']}, {task['classes']} classes per client, {task['small']} clients with "
            f"{task['n_small']} images and {task['large']} with {task['n_large']}"
        ),
        "csv": lambda: f"{Path(task['file']).name}",
    }.get(task.get("kind", ""), lambda: "the given clients")()
    return (
        f"{len(comparison.methods)} methods on {about}; {budget}; {seeds} seed{'s' * (seeds > 1)}. The same "
        "splits, the same "
        "participation draws and the same evaluation for all."
    )


# --- files -----------------------------------------------------------------------------------


def tables(comparison: Comparison) -> dict[str, Sheet]:
    """For results.md."""
    out = {"The comparison": summary(comparison), "All scores": scores_table(comparison)}
    new = new_table(comparison)
    out |= {} if new is None else {"New clients": new}
    return out | {"Cost": cost_table(comparison)}


def write_files(comparison: Comparison, folder: Path) -> Path:
    """``results.md`` and ``report.html`` beside ``results.json``."""
    lines = [f"# {lead_of(comparison)}", "", PROTOCOL, ""]
    lines += [f"- {note}" for note in notes(comparison)] + [""] * bool(notes(comparison))
    for title, table in tables(comparison).items():
        lines += [f"## {title}", "", markdown(table)]
    write_bytes(folder / "results.md", "\n".join(lines).encode())
    return page(comparison, folder / "report.html")


def show_and_write(results: Results, console: Console) -> None:
    """The one table on the terminal; the rest in files."""
    comparison = Comparison.of(results)
    table = summary(comparison)
    console.print(lead_of(comparison))
    console.print(rich_table(fitted(table, console.width)))
    if any(row[0].endswith(" *") for row in table.rows):
        console.print("* plug-in: predicts from a point estimate, without uncertainty about parameters")
    for note in notes(comparison):
        console.print(note, markup=False, highlight=False)
    path = write_files(comparison, results.folder)
    console.print(f"The report is in [bold]{path}[/bold].")


def summary_table(results: Results) -> Sheet:
    return summary(Comparison.of(results))


def experiment_report(results: Results, path: Path) -> Path:
    return page(Comparison.of(results), path)
