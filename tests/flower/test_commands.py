"""The commands of a server and its sites: what they make, and what they say of bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.federation.inputs import Example
from fedpop.files import read_json, read_tensors
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment
from fedpop.site.study import Training
from tests.flower.commands import Made, fedpop, rows


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


# --- what they make ------------------------------------------------------------------------------


def test_others_read_nothing_of_what_commands_make(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the user's mask is: of one that shows files to everyone, too."""
    made.run_deployment()
    ours, at = os.umask(0o022), made.root / "at.csv"
    try:
        at.write_text("sex,age\nf,30\n")
        theta, data = made.server / "run" / "theta", made.root / "north.csv"
        fedpop("site", "personalise", made.root / "new", "--theta", theta, "--data", data)
        os.umask(0o022)
        fedpop("site", "predict", made.root / "new", "--data", at, "--out", made.root / "new" / "out.csv")
        os.umask(0o022)
        fedpop("server", "certificate", made.server)
        os.umask(0o022)
        fedpop("report", made.server)
    finally:
        os.umask(ours)
    for folder in (made.server, made.root / "north", made.root / "new"):
        assert not [p for p in [folder, *folder.rglob("*")] if p.stat().st_mode & 0o077]
    assert (made.server / "run" / "report.html").exists()


def test_what_init_and_enrol_make(made: Made) -> None:
    names = {str(p.relative_to(made.server)) for p in made.server.rglob("*") if p.is_file()}
    app_files = {"app/pyproject.toml", "app/federation.toml", "app/model.py"}
    assert names >= app_files | {"tls/ca.crt", "tls/server.crt", "version.json", "sites/north.pub"}
    for private in ("server/tls/ca.key", "server/tls/server.key", "north/node.key", "north/secret"):
        assert (made.root / private).stat().st_mode & 0o077 == 0
    assert (made.root / "north" / "secret").read_text() != (made.root / "south" / "secret").read_text()
    assert "federations" not in (made.server / "app" / "pyproject.toml").read_text()


def test_a_run_and_what_sites_do_with_it(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Agreed levels and scales, rounds, predictions offline, a brand-new site from theta alone, a report."""
    population = made.run_deployment()
    agreed = read_json(made.server / "run" / "agreed.json")["form"]
    assert agreed["levels"] == {"sex": ["f", "m"]}
    ages = torch.arange(30.0, 42.0).repeat(2)
    assert agreed["scale"]["age"] == pytest.approx([float(ages.mean()), float(ages.std())])
    fedpop("server", "status", made.server)
    output = capsys.readouterr().out
    assert "3 of 3 rounds" in output
    assert "north     last message in round 3" in output
    assert "log likelihood: " in output
    after = read_json(made.server / "run" / "afterwards.json")
    assert after["log_likelihood"]["value"] == pytest.approx(population.log_likelihood().value)
    assert after["diagnostics"]["chains"]["units"] == 2
    assert set(after) == {"diagnostics", "log_likelihood", "standard_errors"}
    at = made.root / "at.csv"
    at.write_text("sex,age\nf,30\nm,41\n")
    fedpop("site", "predict", made.root / "south", "--data", at, "--out", made.root / "out.csv")
    lines = (made.root / "out.csv").read_text().splitlines()
    assert lines[0] == "unit,mean,low,high"
    for line in lines[1:]:
        unit, mean, low, high = line.split(",")
        assert unit == "south"
        assert float(low) < float(mean) < float(high)
    fedpop(
        "site", "personalise", made.root / "new", "--theta", made.server / "run" / "theta",
        "--data", made.root / "north.csv", "--at", at, "--out", made.root / "new.csv",
    )  # fmt: skip
    assert len((made.root / "new.csv").read_text().splitlines()) == 3
    same = read_tensors(made.server / "run" / "theta" / "theta.safetensors")
    assert all(torch.equal(same[n], t) for n, t in population.published.items())
    fedpop("report", made.server / "run")
    assert (made.server / "run" / "report.html").exists()
    again = fp.load(made.server / "run" / "population")
    assert again.learned_from == 2


def test_predictions_are_those_of_the_sites_own_model(made: Made) -> None:
    """With the site's data, its secret and theta the same model comes out wherever it is made."""
    from fedpop.flower.offline import experiment_of, population_at, predicted

    made.run_deployment()
    (made.root / "at.csv").write_text("sex,age\nf,30\n")
    experiment = experiment_of(made.root / "south", None)
    found = [predicted(population_at(experiment), experiment, str(made.root / "at.csv")) for _ in range(2)]
    assert torch.equal(found[0][0][2].eta, found[1][0][2].eta)


NETWORK = """
import fedpop as fp
from torch import nn

def model(inputs):
    return fp.Composition(nn.Linear(inputs, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
"""


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16", "auto"])
def test_precision_is_a_word_of_the_settings(made: Made, precision: str | None) -> None:
    """Sites receive what to compute in; ``auto`` is no matter of a site's processor."""
    (made.server / "app" / "model.py").write_text(NETWORK)
    file = made.server / "app" / "federation.toml"
    if precision is not None:
        file.write_text(file.read_text().replace("[run]\n", f"[run]\nprecision = '{precision}'\n"))
    run = deployment(ServerFolder(made.server))
    example = Example(None, ((2,),), (torch.float32,))
    method = run.prepared(example)
    meant = "bfloat16" if precision == "bfloat16" else "float32"
    assert method.model.precision == meant
    description, _ = Training(method, example).description()
    assert description["method"]["precision"] == meant


def test_probabilities_by_site_are_a_table_of_the_settings(made: Made) -> None:
    file = made.server / "app" / "federation.toml"
    expected = "[run]\nparticipation = {north = 0.5, south = 1.0}\n"
    file.write_text(file.read_text().replace("[run]\n", expected))
    rule = deployment(ServerFolder(made.server)).settings.participation
    assert rule == fp.participation.Bernoulli({"north": 0.5, "south": 1.0})


def test_what_sites_are_asked_afterwards_is_said(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fedpop.server"):
        made.run_deployment()
    for number, words in ((1, "diagnostics"), (2, "log likelihood"), (3, "standard errors")):
        assert f"afterwards, {number} of 3: sites are asked for {words}" in caplog.text


WITHOUT_TORCH = """import sys
from fedpop.cli import main

for words in sys.stdin.read().splitlines():
    main(words.split())
    assert not {"torch", "flwr"} & set(sys.modules), words
"""


def test_commands_that_only_look_need_no_torch(tmp_path: Path) -> None:
    """They take a third of a second then, in place of two."""
    (tmp_path / "rows.csv").write_text(rows(0.0))
    enrolled = "--name north --server 127.0.0.1:8000 --ca server/tls/ca.crt --data rows.csv"
    typed = f"""server init server
site enrol north {enrolled}
server admit server north north/node.pub
server list server
server status server
server status server --json
server revoke server north
server certificate server
site ledger north"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=typed,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(fp.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "site north is admitted" in done.stdout
    assert "federation: not begun, 0 of 50 rounds" in done.stdout
    for module in ("metrics", "site_commands", "watch"):  # what goes on beside a site's node, or a run
        code = f"import fedpop.flower.{module}, sys; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0, module
