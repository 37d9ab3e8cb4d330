"""The synthetic settings over seeds: the sheet and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedpop.experiments.synthetic.run import METHODS, TASKS, name_of, setting_of
from fedpop.report import plots
from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, middle, values

LEGEND = (
    "setting: (b, d, k), with 90 % of the clients having N = 5 examples and the rest 10, unless another "
    "share or N is given. angle: principal-angle distance to the truth, and as a ratio to the exact's. "
    "z error: mean error of z after alignment. log-lik.: held-out predictive log-likelihood per example. "
    "90 % cov.: coverage of the 90 % intervals, mean over seeds, beside the exact optimum's; these plug-in "
    "intervals ignore the uncertainty of theta, 'theta too' includes it. local: seeds that ended in a local "
    "optimum."
)


SETTING = "setting: clients b, dimensions d of z, inputs k"


def medians(results: Results) -> Sheet:
    """Medians over seeds, setting by setting and method by method."""
    columns = (
        "setting",
        "method",
        "seeds",
        "angle",
        "/ exact",
        "z error",
        "log-lik.",
        "90 % cov.",
        "exact's",
        "theta too",
        "local",
    )
    rows = []
    for setting in ordered_settings(results):
        for method in ("Exact", *METHODS):
            records = results.of(setting, method)
            if records:
                rows.append((name_of(setting), method, *_cells(records)))
    return Sheet(columns, rows, frozenset(i for i, r in enumerate(rows) if r[1] == "FedSOUL"))


def _cells(records: Sequence[Record]) -> tuple[str, ...]:
    ratios = [
        r["metrics"]["principal_angle"] / r["metrics"]["principal_angle_exact"]
        for r in records
        if r["metrics"]["principal_angle"] is not None
    ]
    theta = values(records, "coverage90_theta")
    local = values(records, "local_optimum")
    return (
        str(len(records)),
        f"{middle(values(records, 'principal_angle')):.3f}",
        f"{middle(ratios):.3f}",
        f"{middle(values(records, 'z_error')):.3f}",
        f"{middle(values(records, 'log_likelihood')):.3f}",
        f"{100 * mean(values(records, 'coverage90')):.1f} %",
        f"{100 * mean(values(records, 'coverage90_exact')):.1f} %",
        f"{100 * mean(theta):.1f} %" if theta else "-",
        f"{sum(local):.0f}" if local else "-",
    )


def ordered_settings(results: Results) -> list[dict[str, Any]]:
    """Settings in the experiment's own order."""
    known = [setting_of(task) for task in TASKS]
    present = results.settings()
    return [s for s in known if s in present] + [s for s in present if s not in known]


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Over seeds": medians(results)}


def page(results: Results) -> Page:
    settings = ordered_settings(results)
    groups = {
        name_of(s).replace(" ", "\n"): {
            m: values(results.of(s, m), "principal_angle") for m in ("Exact", *METHODS)
        }
        for s in settings
    }
    errors = {
        name: {m: values(results.of(s, m), "z_error") for m in ("Exact", *METHODS)}
        for name, s in zip(groups, settings, strict=True)
    }
    figures = [
        Figure(
            plots.spread(groups, SETTING, "principal-angle distance"),
            "Every dot is a seed, the line the median.",
        ),
        Figure(
            plots.spread(errors, SETTING, "error of z"),
            "Mean error of the clients' own parameters after alignment.",
        ),
    ]
    sections = [
        Section("Distance to the truth", figures=figures, wide=True),
        Section("Medians over seeds", LEGEND, medians(results)),
    ]
    lead = (
        "The paper's synthetic task in all its settings. FedSOUL is the default preset, which takes the "
        "exact engine here, FedSOUL-sampled the same without it; FedSOUL-paper is Algorithm 1 to the letter; "
        "FedRep has exact local heads, from a random start and from FedSOUL's own (spectral)."
    )
    return Page("fedpop: the synthetic experiments", lead, sections)
