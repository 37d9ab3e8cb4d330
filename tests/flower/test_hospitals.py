"""The walk-through of ``examples/hospitals``, over the Grid in this process."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

import fedpop as fp
from fedpop.cli import main
from fedpop.federation.reading import read_data
from fedpop.files import read_json, read_tensors
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.processes import free_port
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.site.study import with_values
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import here, same_bits, transport_on

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"
SITES = ("city", "hill", "port", "lake")


def code(page: str) -> str:
    """All that is typed, as one script."""
    return "".join(re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE))


@pytest.mark.flower
def test_the_walk_through_as_it_is_typed(tmp_path: Path) -> None:
    """Every line of the page, in one shell, with real processes."""
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "hospitals")
    port = str(free_port())
    settings = tmp_path / "examples" / "hospitals" / "app" / "federation.toml"
    settings.write_text(settings.read_text().replace("8000", port))
    page = (EXAMPLE / "README.md").read_text()
    script = "set -e\ntrap 'kill $(jobs -p) || true' EXIT\n" + code(page).replace("8000", port)
    bin, root = Path(sys.executable).parent, EXAMPLE.parents[1]
    env = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(root)}
    started = time.monotonic()
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=900)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)  # the hospitals, where it did not come to its end
    print(f"{time.monotonic() - started:.0f} s from an empty folder to the last line")
    assert shell.returncode == 0, output[-5000:]
    shown = re.findall(r"^round \d+: .*", page, re.MULTILINE)
    assert len(shown) == 3
    lines = [line.partition(" INFO ")[2] for line in output.splitlines()]
    assert [line for line in lines if line in shown] == shown
    assert len(re.findall(r"^lake(,[\d.]+){3}$", output, re.MULTILINE)) == 3
    assert len(re.findall(r"^site-fifth(,[\d.]+){3}$", output, re.MULTILINE)) == 3
    formula = page[page.index("Linear mixed model fit") : page.index("...\nsite,effect")]
    assert formula in output
    assert re.search(r"^lake,\(Intercept\),0\.772", output, re.MULTILINE)
    assert "lake-stays.csv is written" in output
    assert "none of them changed or missing" in output
    assert "weight[smoker = yes]" in (tmp_path / "server" / "run" / "report.html").read_text()


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
    population = run_deployment(deployment(folder), transport_on(grid), folder.run)
    assert population.convergence is not None
    assert population.convergence.converged
    # What the walk-through shows.
    readme = (EXAMPLE / "README.md").read_text()
    for k in (0, 1, 19):
        assert f"round {k + 1}: 4 of 4 sites, loss {population.history[k]['loss']:.4g}\n" in readme
    form = read_json(folder.run / "agreed.json")["form"]
    assert form["levels"] == {"smoker": ["no", "yes"], "ward": ["heart", "medicine", "surgery"]}
    splits = {n: read_data(str(tmp_path / "data" / f"{n}.csv"), form, n).train for n in SITES}
    model = fp.Composition(None, nn.Linear(5, 1), fp.likelihoods.Normal())
    start = read_tensors(folder.run / "model.safetensors")
    method = fp.FedSOUL(with_values(model, start), prior="diagonal")
    same_bits(population.published, here(method, {n: (d.x, d.y) for n, d in splits.items()}, 20).published)
    out = tmp_path / "out.csv"
    new = str(tmp_path / "data" / "lake-new.csv")
    main(["site", "predict", str(tmp_path / "lake"), "--data", new, "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 3
    assert all(float(r["low"]) < float(r["mean"]) < float(r["high"]) for r in rows)
