"""Populations in files: theta, and each client's own model in a file of its own; never code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, SettingsError
from fedpop.files import read_tensors
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


def test_theta_and_each_client_have_files_of_their_own(population: fp.Population, tmp_path: Path) -> None:
    population.save(tmp_path)
    theta = read_tensors(tmp_path / "theta.safetensors")
    assert set(theta) == {"phi", "beta"}
    assert theta["phi"].numel() + theta["beta"].numel() == 9
    files = sorted((tmp_path / "clients").iterdir())
    assert len(files) == 9
    for i, file in enumerate(files):
        (draws,) = read_tensors(file).values()
        assert torch.equal(draws[0], population.posterior(i).draws)
        assert file.stat().st_size < draws.numel() * 4 + 1000  # nobody else's draws
    # What describes the run holds no number of any client.
    described = json.loads((tmp_path / "population.json").read_text())
    assert set(described) == {
        "version", "method", "algorithm", "model", "known", "theta", "seed", "purpose", "clients",
        "learned_from", "rounds", "drift", "totals", "convergence", "kept",
    }  # fmt: skip


def test_a_population_without_its_clients_files(
    population: fp.Population, clients: Clients, tmp_path: Path
) -> None:
    """What one would give away: theta answers for newcomers, and for no one else."""
    population.save(tmp_path)
    shutil.rmtree(tmp_path / "clients")
    bare = fp.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"'site-0'.*clients=\.\.\."):
        bare.predict("site-0", torch.zeros(1, 3))
    assert bare.new_client(*ragged((2,))[0]).predict(torch.zeros(1, 3)).mean.shape == (1,)
    assert bare.new_client().predict(torch.zeros(1, 3)).mean.shape == (1,)
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
    names = [p.stem for p in (tmp_path / "clients").iterdir()]
    assert names == ["00000006"] if posteriors == "computed" else len(names) == 9
    with pytest.raises(SettingsError, match="'auto', 'all' or 'computed'"):
        population.save(tmp_path, posteriors="some")


def test_saving_over_another_population_leaves_none_of_its_clients(
    population: fp.Population, tmp_path: Path
) -> None:
    population.save(tmp_path)
    small = fp.FedSOUL(linear_model()).fit(ragged((2, 2)), rounds=1)
    small.posterior(0)
    small.save(tmp_path, posteriors="computed")
    assert [p.stem for p in (tmp_path / "clients").iterdir()] == ["00000000"]
    assert torch.equal(fp.load(tmp_path).posterior(0).draws, small.posterior(0).draws)


def test_public_holds_theta_alone(population: fp.Population, tmp_path: Path) -> None:
    population.posterior("site-0")
    public = population.public()
    assert set(public.published) == {"phi", "beta"}
    assert public.federation is None
    assert public.store is None
    assert public._personal == {}
    assert public.history == []
    assert public.names == []
    for theta in (public, fp.load(public.save(tmp_path))):
        assert repr(theta) == f"Population(FedSOUL, theta alone, from {len(population)} clients, 120 rounds)"
        assert "theta alone, from" in str(theta).splitlines()[0]
        assert "0 clients" not in str(theta)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["population.json", "theta.safetensors"]
    x = torch.zeros(1, 3)
    data = ragged((3,))[0]
    assert torch.equal(public.new_client(*data).predict(x).mean, population.new_client(*data).predict(x).mean)
    assert torch.equal(public.new_client().predict(x).mean, population.new_client().predict(x).mean)


def test_saved_files_that_cannot_be_used(population: fp.Population, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no saved population"):
        fp.load(tmp_path)
    population.save(tmp_path)
    whole = (tmp_path / "theta.safetensors").read_bytes()
    (tmp_path / "theta.safetensors").write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match="truncated or edited"):
        fp.load(tmp_path)
    (tmp_path / "theta.safetensors").write_bytes(whole)
    client = tmp_path / "clients" / "00000003.safetensors"
    client.write_bytes(client.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"00000003\.safetensors"):
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
        fp.load(tmp_path, model=linear_model())


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
