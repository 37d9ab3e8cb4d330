"""The pictures of the documentation, each from a real run: ``make pictures``, or this file with their names
where the root of the checkout is on Python's path.

Those of the gallery are drawn from the variables that its examples leave behind, those of the tutorials from
the code on the pages; the rest are small runs of their own, or the committed results.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedpop as fp
from fedpop.report import side_by_side
from fedpop.report.results import Results
from fedpop.report.style import (
    BLACK,
    BLUE,
    GREY,
    METHODS,
    ORANGE,
    looks,
    new_axes,
    new_figure,
    styled,
    svg_of,
)

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
Names = dict[str, Any]


def example(name: str) -> tuple[Names, str]:
    """What an example of the gallery leaves behind, and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names = runpy.run_path(str(ROOT / "examples" / "gallery" / f"{name}.py"))
    return names, out.getvalue()


def page(name: str) -> Names:
    """What the code of a page leaves behind."""
    names: Names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text()):
            exec(compile(code, name, "exec"), names)
    return names


def bell(x: torch.Tensor, mean: float, sd: float) -> torch.Tensor:
    return torch.exp(-0.5 * ((x - mean) / sd) ** 2) / (sd * 2.5066)


# --- the gallery -----------------------------------------------------------------------------


def shrinkage(names: Names) -> str:
    """From what each client would say alone to what it says as one of a population."""
    with styled():
        figure, axes = new_axes(6.4, 4.2)
        order = sorted(names["alone"], key=lambda n: (len(names["clients"][n][1]), names["alone"][n]))
        for i, name in enumerate(order):
            alone, shared = names["alone"][name], names["shared"][name]
            first = i == 0
            axes.plot((alone, shared), (i, i), color="#cccccc", linewidth=1.2, zorder=1)
            axes.plot(alone, i, "o", color=ORANGE, ms=4, label="alone: least squares" if first else None)
            axes.plot(shared, i, "o", color=BLUE, ms=4, label="as one of the population" if first else None)
            axes.plot(names["truth"][name], i, "|", color=BLACK, ms=8, label="truth" if first else None)
        centre = float(names["population"].prior_mean)
        axes.axvline(centre, color=BLUE, linestyle=":", linewidth=1, label="the population's mean")
        sizes = [len(names["clients"][n][1]) for n in order]
        axes.set_yticks(range(len(order)), [str(s) for s in sizes], fontsize=7)
        axes.set_xlabel("slope")
        axes.set_ylabel("clients, by their number of examples")
        axes.grid(axis="y", visible=False)
        figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside upper center")
        return svg_of(figure)


def newcomer(names: Names) -> str:
    """Bands of a client never seen, with more and more examples of its own."""
    with styled():
        figure = new_figure(7.2, 2.9)
        panels = figure.subplots(1, len(names["bands"]), sharey=True)
        grid = names["grid"][:, 0]
        for axes, (n, (low, high)) in zip(panels, names["bands"].items(), strict=True):
            axes.fill_between(grid, low, high, color=BLUE, alpha=0.2, linewidth=0)
            axes.plot(grid, 2.2 + 0.5 * grid, color=BLACK, linewidth=1)
            axes.plot(names["x"][:n, 0], names["y"][:n], ".", color=BLACK, ms=6)
            axes.set_title(f"{n or 'no'} examples", fontsize=9)
            axes.set_xlabel("x")
        panels[0].set_ylabel("y: truth, and 90 % interval")
        return svg_of(figure)


def reliability(names: Names) -> str:
    """How often right, against how sure."""
    curves = {
        m: [(b.confidence, b.accuracy, b.count) for b in e.reliability] for m, e in names["judged"].items()
    }
    return side_by_side.reliabilities(curves, looks(curves))


def clusters(names: Names) -> str:
    """Clients' z under the learned mixture."""
    population, z = names["population"], names["z"]
    line = torch.linspace(-4, 4, 121)
    y, x = torch.meshgrid(line, line, indexing="ij")
    prior, beta = population.algorithm.hierarchy.prior, population.published["beta"]
    density = prior.log_prob(beta, torch.stack((x, y), -1).reshape(-1, 2).to(beta)).exp().reshape(x.shape)
    with styled():
        figure, axes = new_axes(4.6, 3.6)
        axes.contour(line, line, density, levels=6, colors=METHODS["Mixture"][0], linewidths=0.9)
        axes.plot(*names["truth"].T, "o", mfc="none", color=GREY, ms=5, label="truth")
        axes.plot(*z.T, ".", color=BLUE, ms=5, label="posterior mean of a client")
        axes.set_xlabel("first coordinate of z")
        axes.set_ylabel("second coordinate of z")
        axes.set_ylim(-2.5, 4)
        axes.legend(frameon=False, fontsize=8)
        return svg_of(figure)


def culprit(names: Names) -> str:
    """How far the shared weights are from the truth, round by round."""
    with styled():
        figure, axes = new_axes(4.6, 2.9)
        for (name, path), shade in zip(names["paths"].items(), (BLUE, ORANGE), strict=True):
            axes.plot(range(1, len(path) + 1), path, color=shade, label=name, linewidth=1.6)
        axes.set_yscale("log")
        axes.set_xlabel("round")
        axes.set_ylabel("distance of the weights from the truth")
        axes.legend(frameon=False, fontsize=8)
        return svg_of(figure)


GALLERY: dict[str, Callable[[Names], str]] = {
    f.__name__: f for f in (shrinkage, newcomer, reliability, clusters, culprit)
}


# --- the pages -------------------------------------------------------------------------------


def population() -> str:
    """The population, and under it what a few of its clients know of their own z."""
    names, _ = example("shrinkage")
    found, x = names["population"], torch.linspace(-0.5, 4.5, 300)
    shown = sorted(names["clients"], key=lambda n: names["shared"][n])[::4]
    with styled():
        figure = new_figure(6.4, 4.0)
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        centre, sd = float(found.prior_mean), float(found.prior_sd)
        top.fill_between(x, bell(x, centre, sd), color=BLUE, alpha=0.25, linewidth=0)
        top.plot(
            [names["truth"][n] for n in names["truth"]], [0.02] * len(names["truth"]), "|", color=BLACK, ms=9
        )
        top.set_ylabel("population")
        top.set_yticks([])
        for i, name in enumerate(shown):
            own = found.posterior(name)
            curve = bell(x, float(own.mean), float(own.sd))
            below.fill_between(x, i, i + 0.8 * curve / curve.max(), color=BLUE, alpha=0.35, linewidth=0)
            below.plot(names["truth"][name], i + 0.04, "|", color=BLACK, ms=9)
        labels = [f"{len(names['clients'][n][1])} examples" for n in shown]
        below.set_yticks(range(len(shown)), labels, fontsize=8)
        below.set_ylabel("what some clients know of z")
        below.set_xlabel("z, a client's own slope (strokes: the true ones)")
        for axes in (top, below):
            axes.grid(axis="y", visible=False)
        return svg_of(figure)


def round() -> str:
    """One round on one dimension: the prior goes out, draws are made, averages come back."""
    rng = torch.Generator().manual_seed(6)
    slopes = 2 + 0.8 * torch.randn(12, generator=rng)
    clients = []
    for slope in slopes:
        x = torch.rand(4, 1, generator=rng) + 0.2
        clients.append((x, slope * x[:, 0] + 0.4 * torch.randn(4, generator=rng)))
    model = fp.Composition(None, nn.Linear(1, 1, bias=False), fp.likelihoods.Normal(0.16))
    prior = fp.priors.Normal(mean=0.5, scale=1.5)

    def after(rounds: int) -> fp.Population:
        method = fp.FedSOUL(model, prior=prior, engine="sampled", average=fp.steps.Averaging("last"))
        return method.fit(clients, rounds=rounds, seed=0)

    x, before, later = torch.linspace(-2.5, 5, 300), after(1), after(40)
    first = (0.5, 1.5)
    with styled():
        figure = new_figure(8.6, 3.0)
        a, b, c = figure.subplots(1, 3, sharex=True)
        a.fill_between(x, bell(x, *first), color=BLUE, alpha=0.25, linewidth=0)
        a.set_title("1  theta goes out:\nthe population so far", fontsize=9, loc="left")
        for i in range(5):
            own = before.posterior(i)
            draws = own.draws.reshape(-1)[:30]
            b.plot(draws, torch.full_like(draws, float(i)), "|", color=ORANGE, ms=8, alpha=0.6)
            b.plot(draws.mean(), i, "o", color=BLACK, ms=4)
        b.set_title("2  each client draws its own z,\nand keeps the draws", fontsize=9, loc="left")
        b.set_yticks(range(5), [f"client {i}" for i in range(5)], fontsize=8)
        for shade, (mean, sd), label in (
            (GREY, first, "before"),
            (BLUE, (float(before.prior_mean), float(before.prior_sd)), "after one round"),
            (BLACK, (float(later.prior_mean), float(later.prior_sd)), "after forty"),
        ):
            c.plot(x, bell(x, mean, sd), color=shade, label=label, linewidth=1.5)
        c.plot(slopes, [0.01] * len(slopes), "|", color=BLACK, ms=8)
        c.set_title("3  averages come back:\nthe population moves", fontsize=9, loc="left")
        c.legend(frameon=False, fontsize=7.5)
        for axes in (a, b, c):
            axes.set_xlabel("z")
            axes.grid(axis="y", visible=False)
        for axes in (a, c):
            axes.set_yticks([])
            axes.set_ylabel("density")
        return svg_of(figure)


def leaves() -> str:
    """Numbers that a client keeps, and numbers that it sends in a round, of a run of the README's model."""
    inputs, examples, draws = 20, 50, 10
    model = fp.Composition(
        nn.Linear(inputs, 2, bias=False), nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(0.1)
    )
    rng = torch.Generator().manual_seed(7)
    clients = [
        (torch.randn(examples, inputs, generator=rng), torch.randn(examples, generator=rng)) for _ in range(4)
    ]
    method = fp.FedSOUL(model, engine="sampled", local_steps=draws)
    found = method.fit(clients, rounds=10)
    before, after = (m["bytes_up"] for m in found.history[-2:])  # what was asked before the rounds is apart
    sent = (after - before) / len(clients)
    keeps = {
        "examples x": 4 * inputs * examples,
        "targets y": 4 * examples,
        "draws of z": 4 * 2 * draws,
    }
    bars = keeps | {"sums I and J": sent}
    with styled():
        figure, axes = new_axes(6.0, 2.3)
        for i, (name, size) in enumerate(bars.items()):
            leaves = name not in keeps
            axes.barh(i, size, color=ORANGE if leaves else BLUE, height=0.6)
            words = f"{size:,.0f} bytes " + ("leave, each round" if leaves else "stay")
            axes.annotate(
                words, (size, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(10, 1e5)
        axes.set_xlabel(f"bytes of one client with {examples} examples of {inputs} inputs")
        axes.grid(axis="y", visible=False)
        return svg_of(figure)


def families() -> str:
    """One client with four examples under each family of methods."""
    rng = torch.Generator().manual_seed(8)
    clients = []
    for _ in range(30):
        own = torch.tensor([1.0, 1.5]) + torch.tensor([1.0, 0.8]) * torch.randn(2, generator=rng)
        x = 2 * torch.rand(4, 1, generator=rng) - 1
        clients.append((x, own[0] + own[1] * x[:, 0] + 0.5 * torch.randn(4, generator=rng)))
    model = fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal(0.25))
    local = fp.LocalSGD(epochs=5, rate=0.1)
    methods = {
        "FedAvg": fp.FedAvg(model, local=local),
        "LocalOnly": fp.LocalOnly(model, local=local),
        "Ditto": fp.Ditto(model, local=local, personal=local, lam=1.0),
        "FedSOUL": fp.FedSOUL(model, prior=fp.priors.Normal("diagonal")),
    }
    grid = torch.linspace(-1.2, 1.2, 25)[:, None]
    with styled():
        figure, axes = new_axes(5.6, 3.4)
        for name, method in methods.items():
            p = method.fit(clients, rounds=60).predict(0, grid)
            shade, dash = looks(methods)[name]
            axes.plot(grid[:, 0], p.mean, dash, color=shade, label=name, linewidth=1.7)
            if name == "FedSOUL":
                low, high = p.interval(0.9, of="mean")
                axes.fill_between(grid[:, 0], low, high, color=shade, alpha=0.15, linewidth=0)
        axes.plot(clients[0][0][:, 0], clients[0][1], "o", color=BLACK, ms=5, label="the client's examples")
        axes.set_xlabel("x")
        axes.set_ylabel("y")
        axes.legend(frameon=False, fontsize=8)
        return svg_of(figure)


def clinics() -> str:
    """The tutorial's clinics: true slopes against their 90 % intervals."""
    names = page("tutorial")
    found, truth = names["population"], {n: float(v[1]) for n, v in names["truth"].items()}
    order = sorted(truth, key=truth.__getitem__)
    with styled():
        figure, axes = new_axes(6.4, 2.8)
        for i, name in enumerate(order):
            own = found.posterior(name)
            low, high = (float(v[0]) for v in own.interval(0.9))
            inside = low < truth[name] < high
            axes.vlines(i, low, high, color=BLUE, alpha=0.35, linewidth=2.5)
            axes.plot(i, float(own.mean[0]), "_", color=BLUE, ms=5)
            axes.plot(i, truth[name], ".", color=BLACK if inside else ORANGE, ms=5)
        axes.set_xlabel("clinics, in the order of their true slope")
        axes.set_ylabel("slope: truth, and 90 % interval")
        return svg_of(figure)


def calibration() -> str:
    """The second tutorial's comparison."""
    table = page("tutorial-classes")["table"]
    curves = {m: [tuple(b) for b in table.details[m, 0]["reliability"]] for m in table.methods}
    return side_by_side.reliabilities(curves, looks(curves))


def bias() -> str:
    """Out of the committed results: the bias of Langevin steps."""
    from research.theory import EXPERIMENT
    from research.theory.page import bias_section

    return bias_section(Results.open(EXPERIMENT.folder)).figures[0].svg


def defaults() -> str:
    """Out of the committed results: settings changed one at a time."""
    from research.defaults import EXPERIMENT

    sections = EXPERIMENT.page(Results.open(EXPERIMENT.folder)).sections
    return next(s for s in sections if s.figures).figures[1].svg


def pooling() -> str:
    """Out of the committed results: radon in counties, pooled and not."""
    from research.mixed import EXPERIMENT
    from research.mixed.page import pooling_figure

    figure = pooling_figure(Results.open(EXPERIMENT.folder))
    assert figure is not None
    return figure.svg


def holdings() -> None:
    """Ten classes dealt to twenty clients."""
    from fedpop.report.holdings import draw_holdings

    labels = torch.arange(10).repeat_interleave(200)
    dealt = fp.data.Dirichlet(20, alpha=0.3).deal(labels, 0)
    classes = [f"class {c}" for c in range(10)]
    draw_holdings(dealt.counts(labels), classes, "Dirichlet(20, alpha=0.3)", OUT / "holdings.svg")


PAGES: dict[str, Callable[[], str | None]] = {
    f.__name__: f
    for f in (population, round, leaves, families, clinics, calibration, bias, defaults, pooling, holdings)
}


def main(wanted: list[str]) -> None:
    OUT.mkdir(exist_ok=True)
    for name in wanted or [*GALLERY, *PAGES]:
        if name in GALLERY:
            names, printed = example(name)
            svg: str | None = GALLERY[name](names)
            (OUT / f"{name}.txt").write_text(printed)
        else:
            svg = PAGES[name]()
        if svg is not None:
            (OUT / f"{name}.svg").write_text(svg)
        print(OUT / f"{name}.svg")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
