"""The tables of a comparison, in words for people: scores, new clients, costs, and what to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any, Protocol

from rich.console import Console

from fedpop.report.html import Sheet, markdown
from fedpop.report.results import Record, mean, values
from fedpop.report.terminal import fitted, rich_table
from fedpop.run.progress import human_bytes

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
SAID_OF = {
    "worst 10 %": "worst 10 %: mean over the worst tenth of the clients.",
    "last": "last: mean over the last rounds of the run instead of the final model.",
    "new, own data": "new, own data: clients never in training, with their own few examples.",
    "new, none": "new, none: without any (- where the method has nothing to offer).",
    "theta too, %": "theta too: coverage of intervals that do not take theta for granted (- where its "
    "information cannot be had).",
    "ECE": "ECE: over all clients' predictions pooled.",
}
"""What a reader of the first table needs, by its columns."""
NOTED = {
    "unserved": "client(s) for whom it has no model, in none of its scores",
    "new_unserved": "new client(s) for whom it has no model, in none of its scores",
    "unsettled": "run(s) that had not settled (†): theta, or the training loss, still moved, and with more "
    "rounds scores may be others",
    "left_out": "update(s) that were not finite, left out of their rounds",
}
"""What a record counts beside its scores, over all seeds."""
COST = (
    "Means over seeds. passes: backbone example-passes (forward and backward of an example is one, a forward "
    "alone a third); head steps: example-steps of the head on features; training, evaluation: seconds on one "
    "machine, of rounds, and of scoring clients between and after them; the rest: seconds in which data were "
    "made and budgets counted. Methods that need everyone, or one client at a time, have their own rule of "
    "who is active."
)


class Compared(Protocol):
    """What is known of a comparison: ``fedpop.Comparison`` is one."""

    @property
    def records(self) -> Sequence[Record]: ...

    @property
    def details(self) -> Mapping[tuple[str, int], Mapping[str, Any]]:
        """Curves and clients by method and seed."""
        ...

    @property
    def methods(self) -> Sequence[str]: ...

    def of_method(self, method: str) -> list[Record]: ...

    def mean(self, method: str, metric: str, of: str = "metrics") -> float: ...


def main_score(comparison: Compared) -> str:
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


def summary(comparison: Compared) -> Sheet:
    """What is printed: scores and costs of each method in a row."""
    main = main_score(comparison)
    second, third = ("nll", "ece") if main == "accuracy" else ("nll", "coverage")
    new = any(f"new_{main}" in r["metrics"] for r in comparison.records)
    columns = ["method", "active", "rounds", NAMES[main], "worst 10 %", "last", NAMES[second], NAMES[third]]
    theta = any("theta_coverage" in r["metrics"] for r in comparison.records)
    columns += ["theta too, %"] if theta else []
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
        if theta:
            row.append(shown(records, "theta_coverage", percent=True))
        if new:
            row += [shown(records, f"{kind}_{main}", percent) for kind in ("new", "new_without")]
        sent = mean(values(records, "bytes_up", "cost")) + mean(values(records, "bytes_down", "cost"))
        row += [human_bytes(sent), _cost(records, "backbone_passes"), _cost(records, "seconds", 1)]
        rows.append(tuple(row))
    named = {NAMES["accuracy"]: "accuracy, %", NAMES["coverage"]: "90 % cov., %"}
    spare = ("sec.", "last", "sent", "rounds", "passes", "worst 10 %", "new, none")
    return Sheet([named.get(c, c) for c in columns], rows, highlights(comparison), spare)


def protocol(comparison: Compared) -> str:
    """How the first table was made, and what its columns and marks mean: those that are there."""
    sheet, records = summary(comparison), comparison.records
    over = "clients, then over seeds (± their standard deviation over seeds)"
    if len({r["seed"] for r in records}) == 1:
        over = "clients"
    said = [
        "Every client is scored on its own test examples, whoever was active last; scores are averaged over "
        f"{over}."
    ]
    said += [words for column, words in SAID_OF.items() if column in sheet.columns]
    if any(r["metrics"].get("plug_in") for r in records):
        said.append("*: a plug-in method, without uncertainty about parameters.")
    if any("diverged" in cell for row in sheet.rows for cell in row):
        said.append("diverged: a prediction was not finite.")
    return " ".join(said)


def notes(comparison: Compared) -> list[str]:
    """What a reader of the table must know of single methods: missing seeds, clients without a model,
    updates that were left out."""
    seeds = len({r["seed"] for r in comparison.records})
    found = []
    for method in comparison.methods:
        records = comparison.of_method(method)
        if len(records) < seeds:
            found.append(f"{method}: {len(records)} of {seeds} seeds only; the rest is not run yet")
        for metric, words in NOTED.items():
            count = sum(values(records, metric))
            if count:
                found.append(f"{method}: {count:.0f} {words}")
    return found


def flagged(method: str, records: Sequence[Record]) -> str:
    marks = {"plug_in": "*", "unsettled": "†"}
    found = "".join(m for name, m in marks.items() if any(r["metrics"].get(name) for r in records))
    return f"{method} {found}" if found else method


def highlights(comparison: Compared) -> frozenset[int]:
    return frozenset(
        i for i, m in enumerate(comparison.methods) if class_of(comparison, m) in ("FedSOUL", "FedSOUK")
    )


def class_of(comparison: Compared, method: str) -> str:
    return str(comparison.of_method(method)[0]["config"].get("class"))


def _cost(records: Sequence[Record], name: str, digits: int = 0) -> str:
    return f"{mean(values(records, name, 'cost')):,.{digits}f}"


def scores_sheet(comparison: Compared) -> Sheet:
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


def new_sheet(comparison: Compared) -> Sheet | None:
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


def _timed(records: Sequence[Record]) -> bool:
    """Whether all of them say what evaluation took; those of earlier versions do not."""
    return all("evaluation_seconds" in r["cost"] for r in records)


def time_spent(comparison: Compared) -> str:
    """Where the time of all runs together went."""
    if not _timed(comparison.records):
        return ""
    costs = {"training": "seconds", "evaluation": "evaluation_seconds", "the rest": "rest_seconds"}
    spent = {name: sum(r["cost"][cost] for r in comparison.records) for name, cost in costs.items()}
    total = sum(spent.values()) or 1.0
    shares = ", ".join(f"{name} {s:,.1f} s ({s / total:.0%})" for name, s in spent.items())
    return f"Time of all runs together: {shares}"


def cost_sheet(comparison: Compared) -> Sheet:
    columns = ["method", "active", "rounds", "up", "down", "passes", "head steps", "training"]
    timed = _timed(comparison.records)
    columns += ["evaluation", "the rest"] if timed else []
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
                *(
                    _cost(records, name, 1)
                    for name in (("evaluation_seconds", "rest_seconds") if timed else ())
                ),
            )
        )
    return Sheet(columns, rows, highlights(comparison))


def lead_of(comparison: Compared) -> str:
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
        "table": lambda: str(task["file"]),
        "folder": lambda: f"the images of {task['folder']}",
        "function": lambda: f"the clients of {task['entry']}",
    }.get(task.get("kind", ""), lambda: "the given clients")()
    return (
        f"{len(comparison.methods)} methods on {about}; {budget}; {seeds} seed{'s' * (seeds > 1)}. The same "
        "splits, the same "
        "participation draws and the same evaluation for all."
    )


def sheets(comparison: Compared) -> dict[str, Sheet]:
    """Every table, the one that is printed first."""
    out = {"The comparison": summary(comparison), "All scores": scores_sheet(comparison)}
    new = new_sheet(comparison)
    out |= {} if new is None else {"New clients": new}
    return out | {"Cost": cost_sheet(comparison)}


def text(comparison: Compared) -> str:
    """``results.md``."""
    lines = [f"# {lead_of(comparison)}", "", protocol(comparison), ""]
    lines += [f"- {note}" for note in notes(comparison)] + [""] * bool(notes(comparison))
    for title, sheet in sheets(comparison).items():
        lines += [f"## {title}", "", markdown(sheet)]
    return "\n".join(lines)


def show(comparison: Compared, console: Console) -> None:
    """The one table on the terminal."""
    sheet = summary(comparison)
    console.print(lead_of(comparison))
    console.print(rich_table(fitted(sheet, console.width)))
    if any(row[0].endswith(" *") for row in sheet.rows):
        console.print("* plug-in: predicts from a point estimate, without uncertainty about parameters")
    for note in (*notes(comparison), time_spent(comparison)):
        if note:
            console.print(note, markup=False, highlight=False)
