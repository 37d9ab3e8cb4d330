"""Four hospitals' tables: how long patients stay, in the style of public discharge records.

    python examples/hospitals/make_data.py FOLDER

Every hospital has its own mix of patients and its own way with them: the effect of age, of the body-mass
index and of smoking differs between hospitals around a common mean. ``lake`` is a cottage hospital with 20
patients. The numbers are drawn, with a fixed seed; no real patient is in them.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

HOSPITALS = {"city": (180, 58.0), "hill": (90, 64.0), "port": (120, 49.0), "lake": (20, 71.0)}
"""Patients, and their mean age."""
WARDS = ("medicine", "surgery", "heart")
MEAN = np.array([6.0, 0.9, 0.5, 1.2])
"""Days: of a typical patient, and per standard deviation of age and of BMI, and for smokers."""
SPREAD = np.array([1.0, 0.4, 0.2, 0.5])
EXTRA = {"medicine": 0.0, "surgery": 1.5, "heart": 2.5}


def make(folder: Path, seed: int = 7) -> None:
    """Write HOSPITAL.csv for each of them, and HOSPITAL-new.csv with patients whose stay is not known."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, (patients, mean_age) in HOSPITALS.items():
        own = MEAN + SPREAD * rng.standard_normal(4)
        rows = [patient(rng, mean_age, own) for _ in range(patients + 3)]
        write(folder / f"{name}.csv", rows[:patients], stay=True)
        write(folder / f"{name}-new.csv", rows[patients:], stay=False)


def patient(rng: np.random.Generator, mean_age: float, own: np.ndarray) -> dict[str, object]:
    age = float(np.clip(rng.normal(mean_age, 12), 18, 99))
    bmi = float(np.clip(rng.normal(26, 4), 15, 50))
    smoker, ward = bool(rng.random() < 0.3), str(rng.choice(WARDS, p=(0.5, 0.35, 0.15)))
    effects = own @ np.array([1.0, (age - 58) / 12, (bmi - 26) / 4, float(smoker)])
    stay = effects + EXTRA[ward] + rng.normal(0, 1.0)
    row = {"age": round(age, 1), "bmi": round(bmi, 1), "smoker": "yes" if smoker else "no", "ward": ward}
    return row | {"stay": round(float(stay), 2)}


def write(path: Path, rows: list[dict[str, object]], stay: bool) -> None:
    columns = ["age", "bmi", "smoker", "ward", *(["stay"] if stay else [])]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"))
