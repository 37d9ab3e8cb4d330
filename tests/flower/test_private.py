"""Differential privacy across sites: the ledger, what sites send, what is refused, and a killed server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import PrivacyError
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.remote import RoundTerms
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment as deployment_in
from fedpop.flower.server_settings import deployment_of
from fedpop.flower.status import standing
from fedpop.privacy import ledger
from fedpop.report.run import run_report
from fedpop.run.settings import Settings
from tests.flower.commands import Made, fedpop
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, transport_on
from tests.helpers import generator, linear_model

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")


def data(units: int = 12) -> dict[str, Any]:
    """Two sites of several clients each."""
    g, out = generator(0), {}
    for site in ("ada", "bea"):
        xs = [torch.randn(5, 3, generator=g) for _ in range(units)]
        out[site] = {f"{site}{i}": (x, x.sum(1)) for i, x in enumerate(xs)}
    return out


def private(method: Any, root: Path, share: float = 0.5, **more: Any) -> tuple[fp.Population, LocalGrid]:
    given = {"noise": 1.0, "delta": 1e-3, "insecure_seed": 3} | more
    folders = root / "sites"
    grid = LocalGrid(app, enrol(folders, data()) if not folders.exists() else
                     {n: folders / n for n in ("ada", "bea")})  # fmt: skip
    rule = fp.participation.Bernoulli(share)
    made = deployment(method, 4, terms=RoundTerms(sites=2))
    settings = Settings(4, 0, rule, checkpoint_every=1, privacy=fp.privacy.Gaussian(**given))
    made = type(made)(made.experiment, made.method, settings, made.terms)
    return run_deployment(made, transport_on(grid), root / "run"), grid


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_across_sites_the_ledger_is_the_simulators_and_so_is_theta(share: float, tmp_path: Path) -> None:
    population, _ = private(fp.FedAvg(linear_model()), tmp_path, share)
    everyone = {name: client for site in data().values() for name, client in site.items()}
    sites = {site: list(of) for site, of in data().items()}
    here = fp.FedAvg(linear_model()).fit(
        everyone,
        rounds=4,
        participation=share,
        sites=sites,
        precision="float32",
        privacy=fp.privacy.Gaussian(noise=1.0, delta=1e-3, insecure_seed=3),
    )
    last, simulated = population.history[-1], here.history[-1]
    assert last["epsilon"] == simulated["epsilon"] == ledger.epsilon(1.0, share, 4, 1e-3)
    assert last["epsilon_end"] == last["epsilon"]
    assert last["epsilon_server"] == "none: it sees each message"
    if share == 1.0:  # else sites do not tell their units' names, and others take part
        for name, tensor in here.published.items():
            assert torch.allclose(population.published[name], tensor, atol=1e-5)


def test_sites_send_bounded_vectors_and_nothing_else(tmp_path: Path) -> None:
    private(fp.FedSOUL(linear_model()), tmp_path)
    ledgers = [json.loads(line) for name in ("ada", "bea")
               for line in (tmp_path / "sites" / name / "ledger.jsonl").read_text().splitlines()]  # fmt: skip
    trained = [entry for entry in ledgers if entry.get("kind") == "train"]
    assert trained
    names = {name for entry in trained for name in (*entry.get("vectors", {}), *entry.get("numbers", {}))}
    assert names == {"I", "J", "bit.J"}


def test_a_killed_server_takes_noise_and_entry_from_the_file(tmp_path: Path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    step, seen = fp.FedAvg.server_round, []

    def killed(self, server, total, facts, key):
        if key.round == 2:
            seen.append(total.weighted["dw"])
            if len(seen) == 1:
                raise Killed
        return step(self, server, total, facts, key)

    monkeypatch.setattr(fp.FedAvg, "server_round", killed)
    with pytest.raises(Killed):
        private(fp.FedAvg(linear_model()), tmp_path, insecure_seed=None)
    assert (tmp_path / "run" / "privacy" / "round-00000002.safetensors").exists()
    population, _ = private(fp.FedAvg(linear_model()), tmp_path, insecure_seed=None)
    assert seen[0].equal(seen[1])
    assert population.history[-1]["epsilon"] == ledger.epsilon(1.0, 0.5, 4, 1e-3)


def test_rounds_that_close_on_a_quorum_are_not_amplified(tmp_path: Path) -> None:
    rule = fp.participation.Bernoulli(0.5)
    settings = Settings(3, 0, rule, checkpoint_every=1, privacy=fp.privacy.Gaussian(noise=1.0, delta=1e-3))
    made = deployment(fp.FedAvg(linear_model()), 3)
    terms = RoundTerms(sites=2, quorum=0.5)
    made = type(made)(made.experiment, made.method, settings, terms)
    population = run_deployment(made, transport_on(LocalGrid(app, enrol(tmp_path, data()))))
    assert population.history[-1]["epsilon"] == ledger.epsilon(1.0, 1.0, 3, 1e-3)


# --- settings files ----------------------------------------------------------------------------

PRIVATE = """[privacy]
epsilon = 4
delta = 1e-3
"""


def with_privacy(made: Made, text: str = PRIVATE) -> Path:
    path = made.server / "app" / "federation.toml"
    path.write_text(path.read_text() + text)
    return path


def changed(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_what_looks_at_data_is_refused_by_name_before_anybody_is_asked(tmp_path: Path) -> None:
    made = Made(tmp_path)
    path = with_privacy(made)
    changed(path, "rounds = 3", 'rounds = 3\nafterwards = ["diagnostics"]\nearly_stop = {every = 2}')
    with pytest.raises(PrivacyError) as caught:
        deployment_in(ServerFolder(made.server))
    for word in ("early_stop", "afterwards", "diagnostics", "standardise = false", "levels of sex"):
        assert word in str(caught.value)


def test_a_private_federation_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path)
    path = with_privacy(made)
    changed(path, "minimum = 2", 'minimum = 2\nstandardise = false\nlevels = {sex = ["f", "m"]}')
    population = made.run_deployment()
    assert population.history[-1]["epsilon"] <= 4
    found = standing(ServerFolder(made.server))
    assert "server: none" in found["privacy"]
    capsys.readouterr()
    fedpop("server", "status", made.server)
    assert "privacy   epsilon" in capsys.readouterr().out
    assert "epsilon" in run_report(made.server / "run").read_text()


def test_words_of_the_table_are_checked(tmp_path: Path) -> None:
    made = Made(tmp_path)
    path = with_privacy(made, "[privacy]\nepsilonn = 3\n")
    with pytest.raises(fp.errors.SettingsError, match="unknown setting 'epsilonn'"):
        deployment_in(ServerFolder(made.server))
    path.write_text(path.read_text().replace("epsilonn = 3", "delta = 1e-6"))
    with pytest.raises(PrivacyError, match="needs epsilon"):
        deployment_in(ServerFolder(made.server))


def test_a_formula_is_refused_with_the_reason(tmp_path: Path) -> None:
    plain = {"model": {"formula": "y ~ x + (1 | g)"}, "privacy": {"epsilon": 4}}
    with pytest.raises(PrivacyError, match="exact engine, whose sums have no bound"):
        deployment_of(tmp_path / "federation.toml", plain, "x")
