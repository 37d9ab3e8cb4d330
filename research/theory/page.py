"""What the paper's theorem says, beside what was measured: the sheet and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedpop.report.html import Figure, Page, Section, Sheet
from fedpop.report.results import Record, Results, mean, values
from research.figures import points
from research.seeds import Slope, interval_of, middle_of, slope_over_seeds
from research.theory import run as theory

PAPER, TRIAL = theory.PAPER, theory.TRIAL


def of_part(results: Results, part: str, **setting: Any) -> list[Record]:
    """Records of a part whose setting has these values, by seed."""
    wanted = setting | {"part": part}
    found = [r for r in results.records if wanted.items() <= r["setting"].items()]
    return sorted(found, key=lambda r: r["seed"])


def cell(numbers: Sequence[float | None], form: str = ".4f") -> str:
    """A median with its interval."""
    low, high = interval_of(numbers)
    return f"{_number(middle_of(numbers), form)} ({_number(low, form)} to {_number(high, form)})"


def _number(value: float, form: str) -> str:
    return "never" if math.isinf(value) else f"{value:{form}}"


def slope_of(results: Results, metric: str) -> Slope:
    """The power of c with which a metric of the bias grows, over the seeds that have all points."""
    by_seed: dict[int, dict[float, float]] = {}
    for r in of_part(results, "bias", decay=0.0):
        by_seed.setdefault(r["seed"], {})[r["setting"]["c"]] = r["metrics"][metric]
    rows = [[row[c] for c in theory.STEPS] for row in by_seed.values() if len(row) == len(theory.STEPS)]
    return slope_over_seeds(theory.STEPS, rows, log=True)


# --- the bias --------------------------------------------------------------------------------


def bias_section(results: Results) -> Section:
    measured, roots = (
        {c: [abs(v) for v in values(of_part(results, "bias", c=c, decay=0.0), name)] for c in theory.STEPS}
        for name in ("log_scale", "log_scale_root")
    )
    gaps, gap_roots = (
        {c: values(of_part(results, "bias", c=c, decay=0.0), name) for c in theory.STEPS}
        for name in ("gap", "gap_root")
    )
    c, decay = theory.DECREASING
    last, end = of_part(results, "bias", c=c, decay=decay), f"log_scale@{theory.MARKS[-1]}"
    paths = {
        "constant": _path(of_part(results, "bias", c=c, decay=0.0), "log_scale"),
        "decreasing": _path(last, "log_scale"),
    }
    alpha, exact = slope_of(results, "log_scale"), slope_of(results, "log_scale_root")
    text = (
        "Unadjusted Langevin steps with gamma_i = c / L_i spread too widely, so the learned scale of the "
        f"population is too large: log sigma by C c^alpha with alpha = {alpha}, where the exact root of "
        f"the mean field has {exact.value:.2f}. The log-likelihood, which the theorem bounds, is flat at its "
        f"optimum: the gap at that root falls with the power {slope_of(results, 'gap_root').value:.2f}. With "
        f"c_k = {c} (1 + k)^-{decay} the bias is {cell(values(last, end))} over the second half of "
        f"{theory.MARKS[-1]} rounds and goes on falling, where a constant c = {c} leaves "
        f"{middle_of(list(measured[c])):.3f}. The private intercept is what fixes the scale: in a model "
        "without one, phi and sigma can trade their scales without any change of the likelihood, and a "
        "constant gamma pushes log sigma up for ever."
    )
    figures = [
        Figure(
            points(
                {PAPER: measured},
                {"exact root of the mean field": _medians(roots)},
                "c = gamma L",
                "bias of log sigma",
            ),
            "Distance of the learned log-scale from the exact optimum's: each seed a dot, medians larger; "
            "dashed, the root of the mean field, computed without any sampling.",
        ),
        Figure(
            points(
                {PAPER: gaps},
                {"exact root of the mean field": _medians(gap_roots)},
                "c = gamma L",
                "log-likelihood below the optimum",
            ),
            "The same in the log-likelihood: A(gamma).",
        ),
        Figure(
            points(
                {f"{name} gamma": path for name, path in paths.items()},
                {},
                "round",
                "bias of log sigma",
                log_y=False,
                joined=True,
            ),
            "From the optimum on, with a constant and with a decreasing step of the chains: means over the "
            "rounds k/2 to k. Chains start from the prior; the first rounds pay for it.",
        ),
    ]
    return Section("The bias of Langevin steps, A(gamma)", text, figures=figures)


def _medians(groups: dict[float, list[float]]) -> list[tuple[float, float]]:
    return [(x, middle_of(list(numbers))) for x, numbers in groups.items()]


def _path(records: Sequence[Record], metric: str) -> dict[float, list[float]]:
    """Values along the rounds, from metrics called ``metric@round``."""
    names = sorted(
        {n for r in records for n in r["metrics"] if n.startswith(metric + "@")},
        key=lambda n: int(n.split("@")[1]),
    )
    return {float(n.split("@")[1]): values(records, n) for n in names}


# --- the noise -------------------------------------------------------------------------------


def noise_section(results: Results) -> Section:
    kinds: dict[str, dict[float, list[float]]] = {"participation": {}, "compression": {}, "both": {}}
    for kept, p in theory.KEPT:
        kind = "participation" if kept == theory.TASK.k else "compression" if p == 1 else "both"
        setting = theory.noise_setting(kept, p, 0.0)
        kinds[kind].setdefault(setting["excess"], []).extend(values(results.of(setting), "error"))
    line = noise_line(results)
    reach = [0.0, max(excess(k, p) for k, p in theory.KEPT)]
    expected = {(k, p): proportional(results, k, p) for k, p in theory.VANISHING}
    end = f"error@{theory.NOISE_MARKS[-1]}"
    paths = {
        f"{name} eta, excess {excess(k, p):g}": _path(results.of(theory.noise_setting(k, p, power)), "error")
        for k, p in theory.VANISHING
        for name, power in (("constant", 0.0), ("decreasing", theory.POWER))
    }
    ends = [
        (cell(values(results.of(theory.noise_setting(k, p, theory.POWER)), end)), expected[k, p][-1][1])
        for k, p in theory.VANISHING
    ]
    text = (
        "beta is fixed; clients join with probability p and 1/p weights, and send rand-k of J. With a "
        "constant server step the squared distance of phi from where it is heading, relative to its norm, is "
        f"{line.line.intercept:.2e} + {line.value:.2e} ((omega + 1)/p - 1), the slope between {line.low:.2e} "
        f"and {line.high:.2e}, R2 = {line.line.r2:.3f}. With steps eta_0 (1 + k)^-{theory.POWER} it falls "
        f"with eta_k: over the second half of {theory.NOISE_MARKS[-1]} rounds it is {ends[0][0]} with "
        f"everyone and no compression and {ends[-1][0]} at the largest excess, where the constant step's "
        f"error in proportion to eta_k is {ends[0][1]:.4f} and {ends[-1][1]:.4f}."
    )
    figures = [
        Figure(
            points(
                kinds,
                {"least squares": [(x, line.line.at(x)) for x in reach]},
                "(omega + 1) / p - 1",
                "error of phi, relative",
                log_x=False,
                log_y=False,
            ),
            "Stationary squared error of phi with a constant step: each seed a dot, medians larger.",
        ),
        Figure(
            points(
                paths,
                {f"in proportion to eta_k, {excess(k, p):g}": line for (k, p), line in expected.items()},
                "round",
                "error of phi, relative",
                joined=True,
            ),
            "Mean error over the rounds k/2 to k; the broken lines are the constant step's final error in "
            "proportion to eta_k.",
        ),
    ]
    return Section("The noise of participation and compression", text, figures=figures)


def noise_line(results: Results) -> Slope:
    """Error against excess, by least squares over the settings; settings of equal excess are both there."""
    settings = [theory.noise_setting(k, p, 0.0) for k, p in theory.KEPT]
    by_seed: dict[int, list[float]] = {}
    for setting in settings:
        for r in results.of(setting):
            by_seed.setdefault(r["seed"], []).append(r["metrics"]["error"])
    rows = [row for row in by_seed.values() if len(row) == len(settings)]
    return slope_over_seeds([s["excess"] for s in settings], rows)


def excess(kept: int, p: float) -> float:
    """(omega + 1)/p - 1."""
    return float(theory.noise_setting(kept, p, 0.0)["excess"])


def proportional(results: Results, kept: int, p: float) -> list[tuple[float, float]]:
    """The constant step's error in proportion to eta_k, at the marks of the decreasing one."""
    constant = middle_of(list(values(results.of(theory.noise_setting(kept, p, 0.0)), "error")))
    marks = theory.NOISE_MARKS
    etas = [theory.FALLING_RATE * (1 + k) ** -theory.POWER for k in range(marks[-1])]
    return [(float(k), constant * mean(etas[k // 2 : k]) / theory.NOISE_RATE) for k in marks]


# --- local steps -----------------------------------------------------------------------------


def local_section(results: Results) -> Section:
    rounds, left = (
        {
            name: {
                float(m): _all(results.of(theory.local_setting(m), name), metric) for m in theory.LOCAL_STEPS
            }
            for name in theory.METHODS
        }
        for metric in ("rounds", "left")
    )
    first, last = theory.LOCAL_STEPS[0], theory.LOCAL_STEPS[-1]
    ends = {name: {m: rounds_cell(results, name, m) for m in (first, last)} for name in theory.METHODS}
    floors = {
        m: cell(values(results.of(theory.local_setting(m), "FedAvg"), "left"), ".3f") for m in (first, last)
    }
    text = (
        f"Rounds until at most {100 * theory.NEAR:.0f} % of the start's gap to the optimum is left, for "
        "good. The gap is that of the marginal log-likelihood for FedSOUL and of the pooled squared error "
        f"for FedAvg, each to its own optimum. FedSOUL-paper (c = {theory.LOCAL_C}, eta_0 = "
        f"{theory.LOCAL_RATE} for every M) needs {ends[PAPER][first]} rounds with M = {first} and "
        f"{ends[PAPER][last]} with M = {last}: {verdict(results, PAPER)}. With the eta_0 that trial rounds "
        f"find for each M, larger where draws are less noisy, it needs {ends[TRIAL][first]} and "
        f"{ends[TRIAL][last]}: {verdict(results, TRIAL)}. FedAvg with as many local steps of rate "
        f"{theory.FEDAVG_RATE} needs {ends['FedAvg'][first]} and {ends['FedAvg'][last]}; local "
        f"steps save it rounds until it drifts, and it stops with a share of {floors[first]} of the gap "
        f"at M = {first}, {floors[last]} at M = {last}. The default FedSOUL ({theory.ROUNDS['FedSOUL']} "
        "rounds in all) is shown without a claim: the theorem does not cover it."
    )
    figures = [
        Figure(
            points(rounds, {}, "M, local steps per round", "rounds to within 5 %", joined=True),
            "Each seed a dot, medians larger. A seed that never got there has no dot and counts as infinite.",
        ),
        Figure(
            points(
                left,
                {"5 %": [(first, theory.NEAR), (last, theory.NEAR)]},
                "M, local steps per round",
                "share of the gap left at the end",
                joined=True,
            ),
            "Where it stops: for FedAvg the floor of its drift; for FedSOUL the bias of gamma, and what its "
            "decreasing steps have not covered yet.",
        ),
    ]
    return Section("Local steps", text, figures=figures)


def _all(records: Sequence[Record], metric: str) -> list[float]:
    """A metric of every record, infinite where there is none."""
    found = (r["metrics"][metric] for r in records)
    return [math.inf if v is None else v for v in found]


def rounds_of(results: Results, name: str, steps: int) -> list[float | None]:
    return [r["metrics"]["rounds"] for r in results.of(theory.local_setting(steps), name)]


def rounds_cell(results: Results, name: str, steps: int) -> str:
    return cell(rounds_of(results, name, steps), ".0f")


def verdict(results: Results, name: str) -> str:
    """Whether the median rounds rise with M."""
    medians = [middle_of(rounds_of(results, name, m)) for m in theory.LOCAL_STEPS]
    worst = max((b - a, m) for a, b, m in zip(medians, medians[1:], theory.LOCAL_STEPS[1:], strict=False))
    if worst[0] <= 0:
        return "the median never rises with M"
    if medians[-1] <= medians[0]:
        return (
            f"it does not rise overall; the largest rise between neighbours is {worst[0]:g} at M = {worst[1]}"
        )
    return "it rises, against the paper's claim"


# --- the whole -------------------------------------------------------------------------------


def every_number(results: Results) -> Sheet:
    """Every number of the figures: medians over seeds with distribution-free intervals."""
    rows = []
    for c, decay in theory.BIAS_POINTS:
        records = of_part(results, "bias", c=c, decay=decay)
        end = "log_scale" if decay == 0 else f"log_scale@{theory.MARKS[-1]}"
        name = f"c = {c}" if decay == 0 else f"c = {c} (1+k)^-{decay}"
        rows.append(
            _row("bias of log sigma", name, PAPER, values(records, end), values(records, "log_scale_root"))
        )
    for kept, p, power in theory.NOISE_POINTS:
        setting = theory.noise_setting(kept, p, power)
        name = f"excess {setting['excess']:.3g} (rand-{kept}, p = {p})" + (", decreasing" if power else "")
        metric = "error" if power == 0 else f"error@{theory.NOISE_MARKS[-1]}"
        rows.append(_row("error of phi", name, PAPER, values(results.of(setting), metric)))
    for method in theory.METHODS:
        for m in theory.LOCAL_STEPS:
            records = results.of(theory.local_setting(m), method)
            rounds = rounds_cell(results, method, m) if records else ""
            rows.append(("rounds to 5 %", f"M = {m}", method, str(len(records)), rounds, "-"))
            rows.append(_row("gap left", f"M = {m}", method, values(records, "left")))
    columns = ("quantity", "setting", "method", "seeds", "median (95 % interval)", "exact")
    return Sheet(columns, [row for row in rows if row[3] != "0"])


def _row(
    what: str, setting: str, method: str, numbers: Sequence[float], exact: Sequence[float] = ()
) -> tuple[str, ...]:
    expected = f"{middle_of(list(exact)):.4f}" if exact else "-"
    return (what, setting, method, str(len(numbers)), cell(list(numbers)) if numbers else "", expected)


def sections_of() -> list[tuple[Callable[[Results], Section], list[tuple[dict[str, Any], str]]]]:
    """Each part with its points: without two seeds of all of them it has no intervals, and no section yet."""
    return [
        (bias_section, [(theory.bias_setting(*point), PAPER) for point in theory.BIAS_POINTS]),
        (noise_section, [(theory.noise_setting(*point), PAPER) for point in theory.NOISE_POINTS]),
        (local_section, [(theory.local_setting(m), n) for m in theory.LOCAL_STEPS for n in theory.METHODS]),
    ]


def complete(results: Results, points: Sequence[tuple[dict[str, Any], str]]) -> int:
    """How many seeds have a record at every point."""
    seeds = [{r["seed"] for r in results.of(setting, method)} for setting, method in points]
    return len(set.intersection(*seeds))


def sheets(results: Results) -> dict[str, Sheet]:
    return {"Over seeds": every_number(results)}


def page(results: Results) -> Page:
    task = theory.TASK
    lead = (
        f"{task.b} clients with {task.n_small} or {task.n_large} examples of y = a_i + w_i x' phi + noise, "
        f"{task.k} inputs, z_i = (w_i, a_i) from a Normal population. FedSOUL-paper is the paper's "
        "Algorithm 1; its optimum and its mean field are known in closed form. Intervals are at 95 %, over "
        "seeds."
    )
    sections = [
        *(section(results) for section, points in sections_of() if complete(results, points) > 1),
        Section("Every number", sheet=every_number(results)),
    ]
    return Page("fedpop: the theory, measured", lead, sections)
