"""Populations in files: theta, and clients' own models side by side; never code."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop import files
from fedpop.errors import CheckpointError, SettingsError
from fedpop.files import read_tensors
from fedpop.keys import PUBLIC, Key
from fedpop.population import saving
from tests.helpers import generator, linear_model, ragged, seeded
from tests.population.conftest import NOISE, Clients


def test_save_and_load(population: fp.Population, tmp_path: Path) -> None:
    population.save(tmp_path)
    loaded = fp.load(tmp_path)
    x = torch.randn(3, 3, generator=generator(5))
    for client in ("site-0", "empty", 4):
        assert torch.equal(loaded.predict(client, x).mean, population.predict(client, x).mean)
        assert torch.equal(loaded.predict(client, x).samples, population.predict(client, x).samples)
    newcomer = population.new_client(*ragged((3,))[0])
    assert torch.equal(loaded.new_client(*ragged((3,))[0]).predict(x).mean, newcomer.predict(x).mean)
    assert torch.equal(loaded.new_client().predict(x).mean, population.new_client().predict(x).mean)
    assert loaded.algorithm.describe() == population.algorithm.describe()
    assert loaded.names == population.names
    assert loaded.rounds == 120
    assert loaded.history == population.history
    assert "FedSOUL population: 9 clients" in str(loaded)


def files_of(folder: Path, stem: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{stem}.*.*"))


def test_theta_and_clients_are_in_few_files_of_their_own(population: fp.Population, tmp_path: Path) -> None:
    population.save(tmp_path)
    stems = sorted(p.name.split(".")[0] for p in tmp_path.iterdir())
    assert stems == ["clients-0000", "history", "population", "private", "theta"]
    theta = read_tensors(files_of(tmp_path, "theta")[0])
    assert set(theta) == {"phi", "beta", "sets", "ball"}  # and what theta was kept in
    assert theta["phi"].numel() + theta["beta"].numel() == 9
    models = read_tensors(files_of(tmp_path, "clients-0000")[0])
    assert models["clients"].tolist() == list(range(9))
    for i in range(9):
        assert torch.equal(models["model.draws"][i], population.posterior(i).draws)
    # What describes the run holds no number of any client, nor what the sites draw with.
    described = json.loads((tmp_path / "population.json").read_text())
    assert set(described) == {
        "format", "version", "method", "algorithm", "model", "known", "theta", "models", "private", "history",
        "clients", "learned_from", "rounds", "drift", "totals", "convergence", "best_round", "how",
        "decisions", "files", "seal",
    }  # fmt: skip
    assert set(described["files"]) == {p.name for p in tmp_path.iterdir()} - {"population.json"}


def test_many_clients_are_cut_into_pieces(
    population: fp.Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = population.posterior(0).draws
    monkeypatch.setattr(saving, "PIECE_BYTES", 2 * draws.numel() * draws.element_size())
    population.save(tmp_path)
    assert len(files_of(tmp_path, "clients-*")) == 5  # nine clients, two in each
    again = fp.load(tmp_path)
    assert all(torch.equal(again.posterior(n).draws, population.posterior(n).draws) for n in again.names)


def test_clients_under_other_names_are_noticed(
    population: fp.Population, clients: Clients, tmp_path: Path
) -> None:
    population.save(tmp_path, posteriors="computed")
    renamed = {("dora" if name == "site-3" else name): data for name, data in clients.items()}
    with pytest.raises(CheckpointError, match=r"'dora' is not among the 9 clients.*new_client"):
        fp.load(tmp_path, clients=renamed)
    bare = fp.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"'site-0'.*clients=\.\.\."):
        bare.predict("site-0", torch.zeros(1, 3))
    with_data = fp.load(tmp_path, clients=clients)
    expected = population.posterior("site-0").draws
    torch.testing.assert_close(with_data.posterior("site-0").draws, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep])
def test_point_methods_save_and_load(method: Any, tmp_path: Path) -> None:
    population = method(linear_model()).fit(ragged((4, 3)), rounds=2)
    population.save(tmp_path)
    x = torch.randn(3, 3, generator=generator(5))
    loaded = fp.load(tmp_path)
    for i in range(2):
        assert torch.equal(loaded.predict(i, x).mean, population.predict(i, x).mean)


@pytest.mark.parametrize("posteriors", ["computed", "all"])
def test_whose_posteriors_are_saved(population: fp.Population, tmp_path: Path, posteriors: str) -> None:
    population.posterior("site-6")
    population.save(tmp_path, posteriors=posteriors)
    (file,) = files_of(tmp_path, "clients-*")
    assert sorted(read_tensors(file)["clients"].tolist()) == (
        [6] if posteriors == "computed" else list(range(9))
    )
    with pytest.raises(SettingsError, match="posteriors must be one of auto, all, computed"):
        population.save(tmp_path, posteriors="some")


def test_saving_over_another_population_leaves_none_of_its_clients(
    population: fp.Population, tmp_path: Path
) -> None:
    population.save(tmp_path)
    small = fp.FedSOUL(linear_model()).fit(ragged((2, 2)), rounds=1)
    small.posterior(0)
    small.save(tmp_path, posteriors="computed")
    described = json.loads((tmp_path / "population.json").read_text())
    assert {p.name for p in tmp_path.iterdir()} == {"population.json", *described["files"]}
    assert len(files_of(tmp_path, "clients-*")) == 1
    assert torch.equal(fp.load(tmp_path).posterior(0).draws, small.posterior(0).draws)


def test_public_holds_theta_alone(population: fp.Population, tmp_path: Path) -> None:
    population.posterior("site-0")
    public = population.public()
    assert set(public.published) == {"phi", "beta", "sets", "ball"}
    assert public.federation is None
    assert public.store is None
    assert public._personal == {}
    assert public.history == []
    assert public.names == []
    for theta in (public, fp.load(public.save(tmp_path))):
        assert repr(theta) == f"Population(FedSOUL, theta alone, from {len(population)} clients, 120 rounds)"
        assert "theta alone, from" in str(theta).splitlines()[0]
        assert "0 clients" not in str(theta)
    assert [p.name.split(".")[0] for p in sorted(tmp_path.iterdir())] == ["population", "theta"]
    x = torch.zeros(1, 3)
    data = ragged((3,))[0]
    assert torch.equal(public.new_client(*data).predict(x).mean, population.new_client(*data).predict(x).mean)
    assert torch.equal(public.new_client().predict(x).mean, population.new_client().predict(x).mean)


class Died(BaseException):
    """What a test throws in place of a power cut."""


def test_dying_half_way_leaves_the_population_that_was_there(
    population: fp.Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before the n-th rename, for every rename: each time the old one is whole, and nothing else is."""
    small = fp.FedSOUL(linear_model()).fit(ragged((2, 2)), rounds=1, seed=3)
    small.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    (tmp_path / "notes.txt").write_text("mine")
    real = os.replace
    for stop in range(5):
        left = [stop]

        def replace(source: Any, target: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1
            real(source, target)

        monkeypatch.setattr(files.os, "replace", replace)
        with pytest.raises(Died):
            population.save(tmp_path)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before | {"notes.txt": b"mine"}
        assert fp.load(tmp_path).names == small.names
    monkeypatch.setattr(files.os, "replace", real)
    # A process that was killed could not even tidy up: the next one does.
    (tmp_path / "clients-0003.0123456789abcdef.safetensors").write_bytes(b"half")
    (tmp_path / ".theta.0123456789abcdef.safetensors.77.tmp").write_bytes(b"half")
    population.save(tmp_path)
    described = json.loads((tmp_path / "population.json").read_text())
    assert {p.name for p in tmp_path.iterdir()} == {"population.json", "notes.txt", *described["files"]}
    assert fp.load(tmp_path).names == population.names


def test_what_is_given_away_does_not_hold_the_sites_key(population: fp.Population, tmp_path: Path) -> None:
    """The key that sites draw with stays where clients' own draws may be seen; newcomers' is anybody's."""
    secret = dataclasses.replace(population, key=Key(0x5EC2E7, purpose="site"))
    assert fp.load(secret.save(tmp_path / "whole", posteriors="computed")).key == secret.key
    public = secret.public()
    folder = public.save(tmp_path / "public")
    assert public.key == fp.load(folder).key == PUBLIC
    text = b"".join(p.read_bytes() for p in folder.iterdir())
    assert str(secret.key.seed).encode() not in text
    # It says nothing of the secret: another one gives the same.
    assert dataclasses.replace(population, key=Key(7, purpose="site")).public().key == public.key
    draws = [p.new_client().predict(torch.zeros(1, 3)).samples for p in (secret, public, fp.load(folder))]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_layouts_of_other_versions_are_told_by_their_version(
    population: fp.Population, tmp_path: Path
) -> None:
    population.public().save(tmp_path)
    about = tmp_path / "population.json"
    plain = json.loads(about.read_text())
    del plain["seal"]
    files.write_sealed(about, plain | {"format": 9, "version": "0.9.0"})
    with pytest.raises(CheckpointError, match=r"population\.json has layout 9, made by fedpop 0\.9\.0"):
        fp.load(tmp_path)
    old = {"version": "0.2.0", "known": {}, "theta": "0" * 64}
    about.write_text(json.dumps(old))
    with pytest.raises(CheckpointError, match=r"fedpop 0\.2\.0 in its own layout.*not migrate: fit it again"):
        fp.load(tmp_path)


class Unusual(nn.Module):
    """A module that no file describes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


def test_a_model_of_the_users_own_is_given_again(tmp_path: Path) -> None:
    model = fp.Composition(seeded(Unusual(), 1), seeded(nn.Linear(2, 1), 2), fp.likelihoods.Normal(NOISE))
    population = fp.FedSOUL(model).fit(ragged((3, 4)), rounds=2)
    population.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model=\.\.\."):
        fp.load(tmp_path)
    x = torch.ones(2, 3)
    assert torch.equal(fp.load(tmp_path, model=model).predict(0, x).mean, population.predict(0, x).mean)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        fp.load(tmp_path, model=fp.Composition(*linear_model().modules(), model.likelihood))


@pytest.mark.parametrize(
    "model",
    [
        fp.Composition(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1)), nn.Linear(4, 1), "normal"),
        fp.Composition(None, nn.Linear(3, 1, bias=False).double(), "poisson"),
        fp.Composition(
            nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.ELU(0.5), nn.Linear(2, 1)), "bernoulli"
        ),
        fp.Split(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1)), ["2.*"], "normal"),
    ],
    ids=["network", "double", "network head", "split"],
)
def test_models_of_torchs_layers_are_rebuilt_from_the_file(model: Any, tmp_path: Path) -> None:
    clients = [(x, (y > 0).float()) for x, y in ragged((3, 2))]
    population = fp.FedSOUL(model, local_steps=1).fit(clients, rounds=1)
    population.save(tmp_path, posteriors="computed")
    loaded = fp.load(tmp_path)
    x = torch.randn(4, 3, generator=generator(6))
    torch.testing.assert_close(loaded.new_client().predict(x).mean, population.new_client().predict(x).mean)
    assert repr(loaded.model) == repr(population.model)
    assert loaded.published["phi"].dtype == population.published["phi"].dtype
