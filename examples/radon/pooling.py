"""Why partial pooling: radon in 85 counties, some with two homes, some with a hundred.
 ``python examples/radon/pooling.py FOLDER [OUT]`` reads ``FOLDER/radon.csv`` and writes
``OUT/pooling.svg`` and ``OUT/pooling.json`` (``results/mixed`` unless told). Half of each county's homes
are held out: intervals of their radon without pooling (each county's own least squares), with complete
pooling (one line for all) and with partial pooling (the mixed model) are judged by the homes that they
did not see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedpop as fp
from fedpop.files import write_json
from fedpop.report.looks import METHODS
from fedpop.report.style import new_figure, styled, svg_of

FORMULA = "log_radon ~ floor + (1 | county)"
LEVEL, Z = 0.9, 1.644854
SMALL = 5
"""Homes of a county up to which it counts as small."""


def halves(frame: Any) -> tuple[Any, Any]:
    """Every second home of each county to learn from, the others to be judged on."""
    place = frame.groupby("county").cumcount()
    return frame[place % 2 == 0], frame[place % 2 == 1]


def county_means(train: Any, fit: fp.mixed.fit.MixedFit) -> dict[str, Any]:
    """Means of counties at floor 0 with the width of their intervals, three ways; slope and noise are
    the mixed model's in all of them."""
    slope, sigma = fit.coefficients["floor"], float(fit.sigma or 0.0)
    left = train.log_radon - slope * train.floor
    groups = left.groupby(train.county)
    mean, size = groups.mean(), groups.size()
    names = [str(c) for c in mean.index]
    effects = fit.random_effects(LEVEL).xs("(Intercept)", level=1).loc[names]
    centre = fit.coefficients["(Intercept)"]
    spread = float(left.std())
    return {
        "size": size.to_numpy(),
        "no pooling": (mean.to_numpy(), sigma / np.sqrt(size.to_numpy()), sigma),
        "complete pooling": (
            np.full(len(mean), left.mean()),
            np.full(len(mean), spread / len(train) ** 0.5),
            spread,
        ),
        "partial pooling": (centre + effects["mean"].to_numpy(), effects["sd"].to_numpy(), sigma),
        "names": names,
    }


def judged(found: dict[str, Any], test: Any, slope: float) -> dict[str, dict[str, float]]:
    """Coverage of county means' intervals, judged by held-out means; and widths: in small counties and
    all."""
    out: dict[str, dict[str, float]] = {}
    left = test.log_radon - slope * test.floor
    place = {int(n): i for i, n in enumerate(found["names"])}
    seen = [c for c in left.groupby(test.county).groups if c in place]
    own = left.groupby(test.county).agg(["mean", "size"]).loc[seen]
    at = np.array([place[c] for c in seen])
    for how in ("no pooling", "complete pooling", "partial pooling"):
        mean, sd, sigma = found[how]
        # A held-out mean has noise of its own beside what is not known of the county.
        wide = Z * np.sqrt(sd[at] ** 2 + sigma**2 / own["size"].to_numpy())
        hit = np.abs(own["mean"].to_numpy() - mean[at]) < wide
        small = found["size"][at] <= SMALL
        out[how] = {
            "coverage": float(hit.mean()),
            "width": float(2 * Z * sd.mean()),
            "width in small counties": float(2 * Z * sd[found["size"] <= SMALL].mean()),
            "error": float(np.sqrt(np.square(own["mean"].to_numpy() - mean[at]).mean())),
            "error in small counties": float(
                np.sqrt(np.square((own["mean"].to_numpy() - mean[at])[small]).mean())
            ),
        }
    return out


def figure(found: dict[str, Any]) -> str:
    """Counties by their number of homes: own means scatter, partial pooling draws small ones to the
    middle."""
    jitter = found["size"] * (1 + 0.08 * np.sin(np.arange(len(found["size"]))))
    with styled():
        drawn = new_figure(8.0, 3.0)
        axes = drawn.subplots(1, 2, sharey=True)
        for axis, how, colour in (
            (axes[0], "no pooling", METHODS["FedRep"][0]),
            (axes[1], "partial pooling", METHODS["FedSOUL"][0]),
        ):
            mean, sd, _ = found[how]
            axis.errorbar(jitter, mean, Z * sd, fmt="o", markersize=2.5, linewidth=0.7, color=colour)
            axis.axhline(found["complete pooling"][0][0], color="#000000", linestyle="--", linewidth=1)
            axis.set_xscale("log")
            axis.set_xlabel("homes in the county")
            axis.set_title(f"{how} (dashed: complete pooling)", fontsize=9)
        axes[0].set_ylabel("log radon, basement")
        return svg_of(drawn)


def main(folder: Path, out: Path) -> dict[str, dict[str, float]]:
    frame = pd.read_csv(folder / "radon.csv")
    train, test = halves(frame)
    fit = fp.mixed_model(FORMULA, train)
    found = county_means(train, fit)
    numbers = judged(found, test, fit.coefficients["floor"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "pooling.svg").write_text(figure(found))
    write_json(out / "pooling.json", numbers)
    return numbers


if __name__ == "__main__":
    arguments = [Path(a) for a in sys.argv[1:]]
    made = main(
        arguments[0] if arguments else Path(), arguments[1] if len(arguments) > 1 else Path("results/mixed")
    )
    for how, row in made.items():
        sys.stdout.write(f"{how}: " + ", ".join(f"{n} {v:.3f}" for n, v in row.items()) + "\n")
