"""The walk-through of ``examples/hospitals``, over the Grid in this process."""

from __future__ import annotations

import csv
import runpy
import shutil
from pathlib import Path

from torch import nn

import fedpop as fp
from fedpop.cli import main
from fedpop.federation.reading import read_data
from fedpop.files import read_json, read_tensors
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.server_folder import ServerFolder
from fedpop.site.study import with_values
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import here, same_bits, transport_on

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"
SITES = ("city", "hill", "port", "lake")


def test_the_walk_through(tmp_path: Path) -> None:
    """Levels and scales are agreed on; theta has converged, and is what one machine would learn."""
    make = runpy.run_path(str(EXAMPLE / "make_data.py"))
    make["make"](tmp_path / "data")
    server = tmp_path / "server"
    main(["server", "init", str(server), "--name", "hospitals"])
    for file in ("federation.toml", "model.py"):
        shutil.copyfile(EXAMPLE / "app" / file, server / "app" / file)
    for name in SITES:
        ca, data = str(server / "tls" / "ca.crt"), str(tmp_path / "data" / f"{name}.csv")
        given = ["--name", name, "--server", "127.0.0.1:8000", "--ca", ca, "--data", data]
        main(["site", "enrol", str(tmp_path / name), *given])
    folder = ServerFolder(server)
    grid = LocalGrid(app, {name: tmp_path / name for name in SITES})
    population = run_deployment(folder.deployment(), transport_on(grid), folder.run)
    assert population.convergence is not None
    assert population.convergence.converged
    # What the walk-through shows.
    readme = (EXAMPLE / "README.md").read_text()
    for k in (0, 1, 29):
        assert f"round {k + 1}: 4 of 4 sites, loss {population.history[k]['loss']:.4g}\n" in readme
    form = read_json(folder.run / "agreed.json")["form"]
    assert form["levels"] == {"smoker": ["no", "yes"], "ward": ["heart", "medicine", "surgery"]}
    splits = {n: read_data(str(tmp_path / "data" / f"{n}.csv"), form, n).train for n in SITES}
    model = fp.Composition(None, nn.Linear(5, 1), fp.likelihoods.Normal())
    start = read_tensors(folder.run / "model.safetensors")
    method = fp.FedSOUL(with_values(model, start), prior="diagonal")
    same_bits(population.published, here(method, {n: (d.x, d.y) for n, d in splits.items()}, 30).published)
    out = tmp_path / "out.csv"
    new = str(tmp_path / "data" / "lake-new.csv")
    main(["site", "predict", str(tmp_path / "lake"), "--data", new, "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 3
    assert all(float(r["low"]) < float(r["mean"]) < float(r["high"]) for r in rows)
