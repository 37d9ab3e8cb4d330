"""The report of ``fedpop experiment clusters``."""

from __future__ import annotations

from pathlib import Path

import torch

from fedpop.experiments.clusters import NAMES, SHOTS, TASK, density_in_true_coordinates
from fedpop.population import load
from fedpop.report import plots
from fedpop.report.html import Figure, Section, Sheet, write_report
from fedpop.report.results import Results, interval95, mean, values

PAIRS = (("Mixture", "Normal"), ("Energy", "Normal"), ("Energy", "Mixture"), ("Truth", "Mixture"))
LEGEND = (
    "Predictive log-likelihood per held-out example, mean over seeds: of clients in training (known), and of "
    "clients never seen, without data and with a few examples of their own. 90 % cov.: share of held-out "
    "observations of new clients without data inside their 90 % interval. Truth: the population that the "
    "data came from."
)
PAIRED = (
    "Differences within a seed: their mean over seeds and Student's 95 % interval of it, in nats per example."
)


def summary_table(results: Results) -> Sheet:
    """Means over seeds, prior by prior."""
    columns = (
        "prior",
        "seeds",
        "known",
        *(f"new, {shots}" for shots in SHOTS),
        "90 % cov.",
        "kB up",
        "sec.",
    )
    rows = []
    for name in NAMES:
        records = results.of(method=name)
        if not records:
            continue
        cells = [f"{mean(values(records, 'log_likelihood')):.3f}"]
        cells += [f"{mean(values(records, f'log_likelihood_{shots}')):.3f}" for shots in SHOTS]
        cost = [mean(values(records, key, "cost")) for key in ("bytes_up", "seconds")]
        cells += [f"{100 * mean(values(records, 'coverage90_0')):.1f} %"]
        cells += [f"{cost[0] / 1e3:.0f}", f"{cost[1]:.1f}"] if cost[0] else ["-", "-"]
        rows.append((name, str(len(records)), *cells))
    return Sheet(columns, rows)


def differences(results: Results, metric: str, first: str, second: str) -> list[float]:
    """Of one metric, seed by seed."""
    one, two = (
        {r["seed"]: r["metrics"][metric] for r in results.of(method=name)} for name in (first, second)
    )
    return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def difference_table(results: Results) -> Sheet:
    columns = ("difference", "seeds", *(f"new clients, {shots} examples" for shots in SHOTS))
    rows = []
    for first, second in PAIRS:
        cells = []
        for shots in SHOTS:
            found = differences(results, f"log_likelihood_{shots}", first, second)
            centre, low, high = interval95(found)
            cells.append(f"{centre:+.4f} [{low:+.4f}, {high:+.4f}]")
        rows.append((f"{first} - {second}", str(len(found)), *cells))
    return Sheet(columns, rows, frozenset({0, 1}))


def prior_figure(folder: Path) -> Figure | None:
    """The learned priors of seed 0 in the truth's coordinates, over the z of the clients trained on."""
    if not all((folder / "populations" / name).exists() for name in NAMES):
        return None
    data, _ = TASK.split(0)
    line = torch.linspace(-4, 4, 161, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    points = torch.stack((x, y), -1).reshape(-1, 2)
    panels = {}
    for name in NAMES:
        population = load(folder / "populations" / name)
        panels[name] = density_in_true_coordinates(population, data.phi, points).reshape(x.shape).tolist()
    dots = [(float(z[0]), float(z[1])) for z in data.z]
    svg = plots.contours(panels, line.tolist(), line.tolist(), dots)
    return Figure(
        svg,
        "Seed 0: true z of the clients trained on (dots), and the regions that hold 50 and 90 % of each "
        "learned prior, brought to the same coordinates through phi.",
    )


def further_tables(results: Results) -> dict[str, Sheet]:
    return {"Paired differences, with 95 % intervals": difference_table(results)}


def experiment_report(results: Results, path: Path) -> Path:
    """The page."""
    folder = path.parent
    groups = {
        f"{shots} examples": {n: values(results.of(method=n), f"log_likelihood_{shots}") for n in NAMES}
        for shots in SHOTS
    }
    spread = Figure(
        plots.spread(groups, "log-likelihood per example", log_y=False),
        "Every dot is a seed, the line the median.",
    )
    learned = prior_figure(folder)
    sections = [
        Section("What each prior learned", figures=[learned] if learned else [], wide=True),
        Section("New clients", LEGEND, sheet=summary_table(results)),
        Section("Differences", PAIRED, sheet=difference_table(results)),
        Section("Seed by seed", figures=[spread], wide=True),
    ]
    lead = (
        f"{TASK.b} clients, most with {TASK.n_small} examples, whose z come from two clusters; {TASK.new} "
        "further clients take no part in training. Three priors are learned by the same rounds of FedSOUL."
    )
    return write_report(path, "fedpop: a population with two clusters", lead, sections)
