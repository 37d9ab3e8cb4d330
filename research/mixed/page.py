"""The report on mixed models: how near they are to R's, coverage, and the figure on pooling."""

from __future__ import annotations

import numpy as np

from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, values
from fedpop.report.style import METHODS, new_figure, styled, svg_of
from research.mixed import pooling, run
from research.mixed.run import TASKS, ReferenceTask
from research.seeds import interval95

MEASURES = {
    "fixed": ("fixed effects, standard errors", 1.0, ".4f"),
    "standard_errors": ("standard errors, %", 100.0, ".3f"),
    "sds": ("sds, %", 100.0, ".3f"),
    "correlation": ("correlation", 1.0, ".4f"),
    "sigma": ("residual sd, %", 100.0, ".4f"),
    "log_likelihood": ("log-likelihood", 1.0, ".5f"),
    "modes": ("modes, posterior sds", 1.0, ".4f"),
}
"""What is compared: title, times, digits."""
NESTED_MEASURES = {n: MEASURES[n] for n in ("fixed", "standard_errors", "sds", "sigma", "log_likelihood")} | {
    "degrees": ("degrees of freedom, %", 100.0, ".4f")
}
NESTED_LIMITS = {
    "fixed": 1e-3,
    "standard_errors": 1e-3,
    "sds": 1e-3,
    "sigma": 1e-4,
    "log_likelihood": 1e-5,
    "degrees": 1e-4,
}
"""As R's own numbers: its standard errors of counts are from a numerical Hessian."""
LIMITS: dict[str, dict[str, float]] = {
    "gaussian": {
        "fixed": 0.05,
        "standard_errors": 0.03,
        "sds": 0.02,
        "correlation": 0.05,
        "sigma": 0.005,
        "log_likelihood": 0.1,
        "modes": 0.1,
    },
    "binomial": {"fixed": 0.1, "sds": 0.05},
}
"""How far the exact engine may be from the reference, by family; the others twice as far."""
LEGEND = (
    "Largest distance from the maximum-likelihood reference (lme4; cbpp by 25 nodes of adaptive quadrature), "
    "over terms and seeds. Limits are for the exact engine; chains, a fifth of the groups in each round and "
    "QSGD may be twice as far."
)
NESTED = (
    "Largest distance from lme4's fit, over terms: gaussian models by both likelihoods, a binomial one by "
    "Laplace's approximation, as glmer has it; degrees of freedom are Satterthwaite's, from lmerTest."
)
COVERED = (
    f"{run.BLOCKS * run.REPLICATES} data sets drawn from the fit to sleepstudy: how often the 90 % interval "
    "of a new subject's reaction covers, on average over days 0 to 9, with Student's 95 % interval over "
    f"blocks of {run.REPLICATES}."
)
POOLED = (
    "Half of each county's homes to learn from, the other half's means to be judged by: means over "
    f"{run.SPLITS} splits. Small counties have up to {pooling.SMALL} homes to learn from. Width is that of "
    "the 90 % interval of the county's mean, error the root mean square of held-out means."
)


def _cell(found: list[float], measure: str) -> str:
    _, times, form = (MEASURES | NESTED_MEASURES)[measure]
    return f"{times * max(found):{form}}" if found else "-"


def _limits(task: ReferenceTask) -> tuple[str, ...]:
    own = LIMITS[task.family]
    cells = [f"{MEASURES[m][1] * own[m]:g}" if m in own else "-" for m in MEASURES]
    return (task.data, "limit", "", *cells, "", "")


def agreement(results: Results) -> Sheet:
    """One row for each data set and way to fit it, below what is allowed."""
    columns = ("data", "fit", "fits", *(title for title, _, _ in MEASURES.values()), "rounds", "cpu s")
    rows, strong = list[tuple[str, ...]](), list[int]()
    for task in TASKS:
        strong.append(len(rows))
        rows.append(_limits(task))
        for how in run.HOW:
            found = results.of(run.setting_of(task), how)
            if not found:
                continue
            cells = [_cell(values(found, m), m) for m in MEASURES]
            rounds = f"{mean(values(found, 'rounds', 'cost')):.0f}"
            rows.append(
                (task.data, how, str(len(found)), *cells, rounds, f"{mean(values(found, 'cpu')):.2f}")
            )
    return Sheet(columns, rows, frozenset(strong))


def nested(results: Results) -> Sheet:
    titles = (title for title, _, _ in NESTED_MEASURES.values())
    rows = []
    for task in run.NESTED:
        for method in task.methods:
            found = results.of(run.setting_of(task), method)
            cells = [_cell(values(found, m), m) for m in NESTED_MEASURES]
            cost = f"{mean(values(found, 'rounds', 'cost')):.0f}", f"{mean(values(found, 'cpu')):.2f}"
            rows += [(task.data.removeprefix("nested/"), method, *cells, *cost)] if found else []
    return Sheet(("data", "method", *titles, "rounds", "cpu s"), rows)


def units(results: Results) -> Sheet:
    rows = []
    for unit in run.UNITS:
        found = [r for r in results.of(method=unit) if r["setting"]["data"] == "sleepstudy, coordinates"]
        rows += [(unit, f"{v:.1e}") for v in values(found, "log_likelihood")]
    return Sheet(("Days in", "log-likelihood from the reference"), rows)


def covered(results: Results) -> Sheet:
    rows = []
    for name in run.NEW:
        found = values(results.of(run.COVERAGE, name), "coverage")
        centre, low, high = interval95(found)
        rows.append((name, f"{100 * centre:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %"))
    return Sheet(("intervals of new groups", "coverage", "95 % interval"), rows)


def pooled(results: Results) -> Sheet:
    columns = ("", *(f"{m}, {w}" for w in ("small counties", "all") for m in ("coverage", "width", "error")))
    rows = []
    for how in pooling.HOW:
        found, cells = results.of(run.POOLING, how), list[str]()
        for where in ("_small", ""):
            cells.append(f"{100 * mean(values(found, f'coverage{where}')):.1f} %")
            cells += [f"{mean(values(found, f'{m}{where}')):.3f}" for m in ("width", "error")]
        rows.append((how, *cells))
    return Sheet(columns, rows, frozenset({len(rows) - 1}))


def _of_counties(results: Results) -> dict[str, Record]:
    """The first split's records by the way of pooling, which hold counties' means."""
    found = {how: results.of(run.POOLING, how) for how in pooling.HOW}
    return {how: r for how, own in found.items() for r in own if r["seed"] == 0 and r["config"]}


def pooling_figure(results: Results) -> Figure | None:
    """Counties by their number of homes, and what the three ways cost and cover in small ones."""
    counties = _of_counties(results)
    if len(counties) < len(pooling.HOW):
        return None
    shades = dict(zip(pooling.HOW, (METHODS["FedRep"][0], "#000000", METHODS["FedSOUL"][0]), strict=True))
    with styled():
        drawn = new_figure(9.6, 3.0)
        axes = drawn.subplots(1, 3, width_ratios=(3, 3, 2))
        for axis, how in zip(axes[:2], ("no pooling", "partial pooling"), strict=True):
            own = {n: np.array(v) for n, v in counties[how]["config"].items()}
            apart = own["size"] * (1 + 0.08 * np.sin(np.arange(len(own["size"]))))
            reach = pooling.Z * own["sd"]
            axis.errorbar(
                apart, own["mean"], reach, fmt="o", markersize=2.5, linewidth=0.7, color=shades[how]
            )
            level = counties["complete pooling"]["config"]["mean"][0]
            axis.axhline(level, color="#000000", linestyle="--", linewidth=1)
            axis.set_xscale("log")
            axis.set_xlabel("homes in the county")
            axis.set_title(f"{how} (dashed: complete)", fontsize=9)
        axes[1].sharey(axes[0])
        axes[0].set_ylabel("log radon, basement")
        for how in pooling.HOW:
            found = results.of(run.POOLING, how)
            width, share = (values(found, f"{m}_small") for m in ("width", "coverage"))
            axes[2].plot(width, [100 * v for v in share], ".", color=shades[how], markersize=3, alpha=0.4)
            axes[2].plot(mean(width), 100 * mean(share), "o", color=shades[how], label=how)
        axes[2].axhline(90, color="#999999", linewidth=1)
        axes[2].set_xlabel("width of the interval")
        axes[2].set_title("small counties: coverage, %", fontsize=9)
        axes[2].legend(frameon=False, fontsize=7)
        return Figure(
            svg_of(drawn),
            "Left and middle: means of counties at floor 0 with 90 % intervals, from half of their homes "
            "(the first split). Right: how wide the intervals of small counties are, and how often they "
            "cover the mean of the homes that were held out; small dots are splits.",
        )


def sheets(results: Results) -> dict[str, Sheet]:
    return {
        "Distance from the reference": agreement(results),
        "Nested factors, REML, degrees of freedom": nested(results),
        "The same model in other coordinates": units(results),
        "90 % intervals of new groups": covered(results),
        "Radon: three ways to pool": pooled(results),
    }


def page(results: Results) -> Page:
    figure = pooling_figure(results)
    titles = sheets(results)
    texts = (
        LEGEND,
        NESTED,
        "By how much its log-likelihood differs from the reference's, in nats.",
        COVERED,
        POOLED,
    )
    drawn = ((), (), (), (), (figure,) if figure else ())
    sections = [
        Section(title, text, sheet, figures, wide=bool(figures) or i < 2)
        for i, ((title, sheet), text, figures) in enumerate(zip(titles.items(), texts, drawn, strict=True))
    ]
    lead = (
        "Linear and generalised linear mixed models over groups that keep their rows, beside R's on pooled "
        "ones; new groups' intervals in a parametric bootstrap; and radon in Minnesota's counties, where "
        "partial pooling is narrower than none and better calibrated than complete."
    )
    return Page("fedpop: mixed models", lead, sections)
