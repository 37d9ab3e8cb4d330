"""Small data to try the settings files beside this one on: ``python make_data.py``, then ``fedpop compare``.

patients.csv, patients.parquet   doses of 12 doctors' patients, with two columns of names
shapes/CLASS/*.png               small grey pictures; who.csv says who drew each
drawings/PERSON/CLASS/*.png      the same, in a folder for each person
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SHAPES = ("bar", "cross", "slash")


def patients(random: np.random.Generator) -> dict[str, list[str | float]]:
    """Rows of a table: what doctors prescribe depends on the patient, and on the doctor."""
    rows: dict[str, list[str | float]] = {n: [] for n in ("doctor", "age", "weight", "sex", "smokes", "dose")}
    for doctor in range(12):
        own = random.normal(5, 1.5)
        for _ in range(15):
            age, weight = random.uniform(20, 90), random.normal(75, 12)
            sex, smokes = random.choice(["f", "m"]), random.choice(["no", "sometimes", "yes"])
            dose = own + 0.05 * weight - 0.02 * age + 0.5 * (smokes == "yes") + random.normal(0, 0.3)
            row = (
                f"doctor-{doctor}",
                round(age, 1),
                round(weight, 1),
                str(sex),
                str(smokes),
                round(dose, 2),
            )
            for held, value in zip(rows.values(), row, strict=True):
                held.append(value)
    return rows


def picture(shape: str, random: np.random.Generator) -> Image.Image:
    """A white line or two on noise, 16 x 16."""
    pixels = random.uniform(0, 90, (16, 16))
    at = int(random.integers(4, 12))
    if shape in ("bar", "cross"):
        pixels[at] = 255
    if shape == "cross":
        pixels[:, int(random.integers(4, 12))] = 255
    if shape == "slash":
        pixels[np.arange(16), np.arange(16)[::-1]] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def write(folder: Path) -> None:
    """All of it, into this folder."""
    random = np.random.default_rng(0)
    rows = patients(random)
    with (folder / "patients.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(rows), *zip(*rows.values(), strict=True)])
    pq.write_table(pa.table(rows), folder / "patients.parquet")
    who = [("image", "person")]
    for k in range(180):
        shape, person = SHAPES[k % 3], f"person-{k % 10}"
        image = picture(shape, random)
        for place in (folder / "shapes" / shape, folder / "drawings" / person / shape):
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{k:03d}.png")
        who.append((f"{shape}/{k:03d}.png", person))
    with (folder / "who.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(who)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
