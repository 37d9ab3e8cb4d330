"""Clients' networks as modules of torch, and posteriors in less room."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from tests.helpers import seeded


def classes() -> fp.Composition:
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2))
    return fp.Composition(seeded(backbone, 1), seeded(nn.Linear(4, 3), 2), "categorical")


def split() -> fp.Split:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return fp.Split(seeded(module, 1), personal="0.*", likelihood="categorical")


def clients() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(8, 3, generator=rng), torch.randint(0, 3, (8,), generator=rng))
        for name in ("anna", "ben")
    }


X = torch.linspace(-1, 1, 15).reshape(5, 3)
METHODS = {
    "FedSOUL": lambda: fp.FedSOUL(classes()),
    "a split": lambda: fp.FedSOUL(split()),
    "FedAvg": lambda: fp.FedAvg(classes()),
    "Ditto": lambda: fp.Ditto(classes()),
    "FedRep": lambda: fp.FedRep(classes()),
}


@pytest.mark.parametrize("name", METHODS)
def test_over_all_draws_it_predicts_what_the_population_does(name: str) -> None:
    population = METHODS[name]().fit(clients(), rounds=2)
    state = population._model_of(0)
    draws = state["draws"].flatten(0, 2) if "draws" in state else state["z"]
    found = population.module("anna", draws=len(draws))(X)
    # Means of up to 1,000 float32 numbers in [0, 1], in two orders.
    torch.testing.assert_close(found, population.predict("anna", X).mean, atol=1e-5, rtol=0)
    if len(draws) == 1:
        torch.testing.assert_close(population.module("anna")(X).softmax(-1), found, atol=1e-6, rtol=0)


def test_at_the_posterior_mean_it_has_the_client_s_parameters() -> None:
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(0.1))
    data = {name: (x, x.sum(1)) for name, (x, _) in clients().items()}
    population = fp.FedSOUL(model).fit(data, rounds=5)
    network, own = population.module("ben"), population.personal("ben")
    torch.testing.assert_close(network[1].weight, own["weight"])  # type: ignore[index]
    # Linear: the mean of the outputs is the output at the mean.
    torch.testing.assert_close(network(X).squeeze(1), population.predict("ben", X).mean, atol=1e-4, rtol=1e-4)


def test_it_is_a_copy_and_weights_go_through_a_file(tmp_path: Path) -> None:
    population = fp.FedSOUL(classes()).fit(clients(), rounds=2)
    before, network = population.module("anna")(X), population.module("anna")
    torch.save(network.state_dict(), tmp_path / "anna.pt")
    again = nn.Sequential(*classes().modules()).eval()
    again.load_state_dict(torch.load(tmp_path / "anna.pt", weights_only=True))
    assert torch.equal(again(X), before)
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
    assert torch.equal(population.module("anna")(X), before)


def test_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    network = fp.FedSOUL(classes()).fit(clients(), rounds=2).module("anna")
    torch.onnx.export(network, (X,), tmp_path / "anna.onnx", dynamo=True)
    session = runtime.InferenceSession(tmp_path / "anna.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), network(X).detach(), atol=1e-5, rtol=1e-5)


def test_what_has_no_network() -> None:
    population = fp.FedSOUL(classes()).fit(clients(), rounds=2)
    with pytest.raises(SettingsError, match="draws is at most 1000"):
        population.module("anna", draws=1001)
    with pytest.raises(DataError, match="theta alone and has no clients"):
        population.public().module("anna")
    with pytest.raises(DataError, match="theta alone and has no clients"):
        population.public().predict(0, X)
    with pytest.raises(SettingsError, match="more than parameters of their own"):
        fp.FedDBE(classes()).fit(clients(), rounds=1).module("anna")


def test_a_number_of_draws_is_what_is_saved(tmp_path: Path) -> None:
    population = fp.FedSOUL(classes()).fit(clients(), rounds=2)
    all_of_them = population.posterior("anna").draws
    population.save(tmp_path, posteriors=100)
    kept = fp.load(tmp_path).posterior("anna").draws
    assert kept.shape == (4, 25, 15)
    assert torch.equal(kept[:, 0], all_of_them[:, 0])
    assert torch.equal(kept[:, -1], all_of_them[:, -1])
    with pytest.raises(SettingsError, match="posteriors must be"):
        population.save(tmp_path, posteriors=0)


def test_by_default_as_many_draws_as_take_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = fp.FedSOUL(classes()).fit(clients(), rounds=2)
    population.save(tmp_path / "all")
    assert fp.load(tmp_path / "all").posterior("anna").draws.shape == (4, 250, 15)
    monkeypatch.setattr("fedpop.population.saving.SAVED_BYTES", 2 * 400 * 15 * 4)
    population.save(tmp_path / "some")
    assert fp.load(tmp_path / "some").posterior("anna").draws.shape == (4, 100, 15)
    population.save(tmp_path / "asked", posteriors="all")
    assert fp.load(tmp_path / "asked").posterior("anna").draws.shape == (4, 250, 15)
    monkeypatch.setattr("fedpop.population.saving.SAVED_BYTES", 1)
    population.save(tmp_path / "least")
    assert fp.load(tmp_path / "least").posterior("anna").draws.shape == (4, 25, 15)


class Named(nn.Module):
    """Takes its parts by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, age: Tensor, word: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.cat((age, word), 1))
        return out


@pytest.mark.parametrize("draws", [None, 2])
def test_parts_of_x_by_name(draws: int | None) -> None:
    model = fp.Composition(seeded(Named(), 1), seeded(nn.Linear(4, 3), 2), "categorical")
    parts = {name: ({"age": x[:, :1], "word": x[:, 1:]}, y) for name, (x, y) in clients().items()}
    population = fp.FedSOUL(model).fit(parts, rounds=1)
    network = population.module("anna", draws=draws)
    assert torch.equal(network(age=X[:, :1], word=X[:, 1:]), network(word=X[:, 1:], age=X[:, :1]))
    assert torch.equal(network(age=X[:, :1], word=X[:, 1:]), network(X[:, :1], X[:, 1:]))


@pytest.mark.parametrize("name", METHODS)
def test_many_clients_at_once_are_told_what_each_is(name: str) -> None:
    population = METHODS[name]().fit(clients(), rounds=2)
    found = population.predict_many({"ben": X, "anna": X[:2]})
    assert list(found) == ["ben", "anna"]
    for client, x in (("ben", X), ("anna", X[:2])):
        alone = population.predict(client, x)
        torch.testing.assert_close(found[client].mean, alone.mean)
        torch.testing.assert_close(found[client].samples, alone.samples)
    assert population.predict_many({}) == {}
    with pytest.raises(DataError, match="no client 'carl'"):
        population.predict_many({"carl": X})
    with pytest.raises(DataError, match="does not accept examples"):
        population.predict_many({"anna": X[:, :2]})


def test_many_clients_take_one_pass_of_a_shared_network(monkeypatch: pytest.MonkeyPatch) -> None:
    population = fp.FedSOUL(classes()).fit(clients(), rounds=1).sample_all()
    rows: list[int] = []
    embed = fp.Composition.embed
    monkeypatch.setattr(
        fp.Composition, "embed", lambda self, phi, x, *more: rows.append(len(x)) or embed(self, phi, x, *more)
    )
    population.predict_many({"ben": X, "anna": X[:2]})
    assert rows == [7]
