"""Local only: torch's SGD for each client alone, and nothing on the wire."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import DataError, SettingsError
from fedpop.keys import Key
from fedpop.run.members import active_units
from tests.helpers import quadratics, ragged, seeded, states

WIDE = torch.float64
SIZES = (4, 1, 6)


def network() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(WIDE), 1)


def model() -> fp.Composition:
    net = network()
    return fp.Composition(net[:2], net[2], "categorical")


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def alone(x: Tensor, y: Tensor, epochs: int, rate: float) -> nn.Sequential:
    """The network after torch's own full-batch epochs."""
    net = network()
    optimiser = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_everyone_trains_alone_and_sends_nothing(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    method = fp.LocalOnly(model(), local=fp.LocalSGD(epochs=2, rate=0.3))
    population = method.fit(clients(), rounds=3, progress=False)
    for i, (x, y) in enumerate(clients()):
        expected = alone(x, y, 6, 0.3)(x).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, rtol=1e-10, atol=1e-12)
    assert population.totals["bytes_up"] == population.totals["bytes_down"] == 0
    assert population.totals["backbone_passes"] == 3 * 2 * sum(SIZES)


def test_a_client_goes_on_from_where_it_stood() -> None:
    """One client a round: each has trained as often as it was drawn, however long ago."""
    rounds, rule = 7, fp.participation.Uniform(1)
    federation = fp.Federation.of(clients())
    every = [[int(active_units(rule, federation, Key(s), r).ids) for r in range(rounds)] for s in range(20)]
    # A seed that draws everyone, and not one after the other.
    seed = next(s for s, d in enumerate(every) if len(set(d)) == 3 and d != sorted(d))
    drawn = every[seed]
    method = fp.LocalOnly(model(), local=fp.LocalSGD(epochs=2, rate=0.3))
    population = method.fit(clients(), rounds=rounds, seed=seed, participation=rule, progress=False)
    for i, (x, y) in enumerate(clients()):
        expected = alone(x, y, 2 * drawn.count(i), 0.3)(x).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, rtol=1e-10, atol=1e-12)


def test_newcomers_train_alone_with_epochs_of_their_own() -> None:
    method = fp.LocalOnly(model(), newcomer=fp.LocalSGD(epochs=5, rate=0.2))
    population = method.fit(clients(), rounds=1, progress=False)
    x, y = clients((7,))[0]
    expected = alone(x, y, 5, 0.2)(x).softmax(-1)
    torch.testing.assert_close(population.new_client(x, y).predict(x).probs, expected, rtol=1e-10, atol=1e-12)


def test_without_data_there_is_nothing_to_predict_with() -> None:
    population = fp.LocalOnly(model()).fit(clients(), rounds=1, progress=False)
    with pytest.raises(DataError, match="Local has no model for a client without data"):
        population.new_client()
    # The same for a client of the federation that has no data and was never drawn.
    rule = fp.participation.Uniform(1)
    federation = fp.Federation.of(clients((0, 4)))
    seed = next(s for s in range(50) if int(active_units(rule, federation, Key(s), 0).ids) == 1)
    few = fp.LocalOnly(model()).fit(clients((0, 4)), rounds=1, seed=seed, participation=rule, progress=False)
    few.predict(1, clients()[0][0])
    with pytest.raises(DataError, match="Local has no model for a client without data"):
        few.predict(0, clients()[0][0])


def test_a_diverging_client_is_named_and_keeps_its_state() -> None:
    """Squares of its inputs overflow; the others are as if it were not there."""
    q = quadratics()
    bad = [*q.clients, (torch.full((2, 3), 1e200, dtype=WIDE), torch.ones(2, dtype=WIDE))]
    names = ["a", "b", "c", "far"]
    method = fp.LocalOnly(q.model, local=fp.LocalSGD(rate=0.1))
    population = method.fit(dict(zip(names, bad, strict=True)), rounds=2, progress=False)
    assert [m["left_out"] for m in population.history] == [["far"], ["far"]]
    assert torch.equal(states(population, "w", 4)[3], q.start())
    without = method.fit(dict(zip(names[:3], q.clients, strict=True)), rounds=2, progress=False)
    torch.testing.assert_close(states(population, "w", 4)[:3], states(without, "w", 3), rtol=1e-12, atol=0)
    losses = [[m["loss"] for m in p.history] for p in (population, without)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert "not finite were left out, of far" in str(population)


def test_there_is_nothing_to_compress() -> None:
    with pytest.raises(SettingsError, match="LocalOnly does not compress"):
        fp.LocalOnly(model(), compressor="qsgd")
