"""A nonlinear mixed model: theophylline in twelve subjects (Boeckmann, Sheiner and Beal, 1994).
 One compartment, first-order absorption; ka and clearance differ between subjects, ke is shared, errors
are normal. ``python examples/theophylline/fit.py FOLDER`` reads ``FOLDER/theoph.csv`` (columns Subject,
Dose, Time, conc) and, where it is there, compares with ``FOLDER/theoph.reference.json``, exact maximum
likelihood by quadrature.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

import fedpop as fp

Named = dict[str, Tensor]


def subjects(path: Path) -> dict[str, tuple[Named, Tensor]]:
    """Dose and time of each subject, and the concentrations measured."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    out = {}
    for name in sorted({row["Subject"] for row in rows}, key=int):
        own = [row for row in rows if row["Subject"] == name]
        dose, time, level = (
            torch.tensor([float(r[k]) for r in own], dtype=torch.float64) for k in ("Dose", "Time", "conc")
        )
        out[name] = ({"dose": dose, "time": time}, level)
    return out


def concentration(phi: Named, z: Named, x: Named) -> Tensor:
    """What one compartment predicts: phi is everyone's, z the subject's own."""
    ke, ka, cl = phi["ke"], z["ka"], z["cl"]
    share = (torch.exp(-ke * x["time"]) - torch.exp(-ka * x["time"])) / (ka - ke)
    return x["dose"] * ke * ka / cl * share


def fitted(data: dict[str, tuple[Named, Tensor]], rounds: int = 1200) -> fp.Population:
    """Links keep rates positive: standard deviations are those of logarithms."""
    positive = fp.links.positive
    model = fp.CustomModel(
        outputs=concentration,
        likelihood="normal",
        phi={"ke": positive(0.1)},
        z={"ka": positive(1.0), "cl": positive(0.04)},
    )
    return fp.FedSOUL(model).fit(data, rounds=rounds, progress=False)


def estimates(population: fp.Population) -> dict[str, float]:
    """On the scale of the reference: logarithms of rates."""
    mean, sd = population.prior_mean.tolist(), population.prior_sd.tolist()
    return {
        "lKe": math.log(float(population.phi["ke"])),
        "lKa": mean[0],
        "lCl": mean[1],
        "sd lKa": sd[0],
        "sd lCl": sd[1],
        "sigma": math.exp(0.5 * float(population.phi["likelihood.log_variance"])),
    }


def reference(path: Path) -> dict[str, float]:
    saved = json.loads(path.read_text())
    exact = next(m for m in saved["models"] if m["model"].startswith("exact_ml") and "diag" in m["model"])
    sd = exact["random"]["Subject"]["sd"]
    fixed: dict[str, float] = exact["fixed"]
    return fixed | {"sd lKa": sd["lKa"], "sd lCl": sd["lCl"], "sigma": exact["sigma"]}


def main(folder: Path) -> str:
    """A table: what was found, beside the reference where there is one."""
    found = estimates(fitted(subjects(folder / "theoph.csv")))
    known = folder / "theoph.reference.json"
    truth = reference(known) if known.exists() else {}
    lines = [f"{'':8}{'fedpop':>10}{'exact ML':>10}"]
    for name, value in found.items():
        beside = f"{truth[name]:10.4f}" if name in truth else ""
        lines.append(f"{name:8}{value:10.4f}{beside}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
