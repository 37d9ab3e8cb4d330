"""FedPer: torch's SGD on body and head together, the bodies' weighted mean, heads that stay at home."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import DataError, SettingsError
from fedpop.methods.base import Facts
from tests.helpers import FRAME, answers, begun, cohort_of, ragged, seeded, states, train_key

WIDE = torch.float64
SIZES = (6, 2, 0)


def layers() -> tuple[nn.Linear, nn.Linear]:
    return seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2)


def model() -> fp.Composition:
    return fp.Composition(*layers(), "categorical")


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def descend(body: nn.Module, head: nn.Module, x: Tensor, y: Tensor, epochs: int, *trained: nn.Module) -> None:
    """torch's own full-batch epochs on these modules."""
    optimiser = torch.optim.SGD([p for m in trained for p in m.parameters()], lr=0.3)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(body(x)), y).backward()
        optimiser.step()


def reference(rounds: int, epochs: int) -> tuple[nn.Module, list[nn.Module]]:
    """The shared body and everyone's head, by modules."""
    body, heads = layers()[0], [layers()[1] for _ in SIZES]
    for _ in range(rounds):
        bodies = []
        for (x, y), head in zip(clients(), heads, strict=True):
            own = layers()[0]
            own.load_state_dict(body.state_dict())
            if len(y):
                descend(own, head, x, y, epochs, own, head)
            bodies.append(own.state_dict())
        shares = [n / sum(SIZES) for n in SIZES]
        body.load_state_dict(
            {k: sum(s * b[k] for s, b in zip(shares, bodies, strict=True)) for k in bodies[0]}
        )
    return body, heads


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_body_and_heads_are_those_of_torch(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    method = fp.FedPer(model(), local=fp.LocalSGD(epochs=2, rate=0.3))
    population = method.fit(clients(), rounds=3, progress=False)
    body, heads = reference(3, 2)
    torch.testing.assert_close(
        population.phi["backbone.weight"], body.weight.detach(), rtol=1e-10, atol=1e-12
    )
    x = clients((5,))[0][0]
    for i, head in enumerate(heads):  # each its own head, on the server's body
        expected = head(body(x)).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, rtol=1e-10, atol=1e-12)


def test_heads_are_never_in_the_message() -> None:
    method = fp.FedPer(model())
    cohort = cohort_of(method.model, clients((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert {n: t.numel() for n, t in done.total.plain.items()} == {"dphi": 8, "n": 1}
    assert method.private == ("z",)
    assert not torch.equal(done.local["z"], local["z"])
    after = method.server_round(server, done.total, Facts(1, 5), train_key())
    assert torch.equal(after["z"], method.model.initial_z())  # the server never hears of one
    assert not torch.equal(after["phi"], server["phi"])


def test_a_newcomer_trains_a_head_on_the_frozen_body() -> None:
    """From the head as it was given; several never-active clients at once as each alone."""
    method = fp.FedPer(model(), local=fp.LocalSGD(rate=0.3), newcomer=fp.LocalSGD(epochs=4, rate=0.3))
    population = method.fit(clients(), rounds=2, progress=False)
    body, _ = reference(2, 1)
    for x, y in clients((7, 4)):
        head = layers()[1]
        descend(body, head, x, y, 4, head)
        expected = head(body(x)).softmax(-1)
        found = population.new_client(x, y).predict(x).probs
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    cohort = cohort_of(method.model, clients((7, 4)))
    both = method.personalise(population.published, cohort, None, population.key)["z"]
    assert both.shape == (2, 9)
    torch.testing.assert_close(both[1], head_vector(method, head), rtol=1e-10, atol=1e-12)


def head_vector(method: fp.FedPer, head: nn.Linear) -> Tensor:
    return method.model.z_layout.flatten({"weight": head.weight.detach(), "bias": head.bias.detach()})


def test_without_data_there_is_no_head() -> None:
    population = fp.FedPer(model()).fit(clients(), rounds=1, progress=False)
    with pytest.raises(DataError, match="FedPer has no model for a client without data"):
        population.new_client()


def test_a_diverging_client_keeps_its_head() -> None:
    x = 1e200 * torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], dtype=WIDE)
    method = fp.FedPer(model(), local=fp.LocalSGD(epochs=3, rate=1e200))
    population = method.fit(
        {"far": (x, torch.tensor([0, 1])), "idle": (x[:0], torch.tensor([]).long())}, rounds=2, progress=False
    )
    assert [m["left_out"] for m in population.history] == [["far"], ["far"]]
    assert torch.equal(states(population, "z", 2)[0], method.model.initial_z())
    assert torch.equal(population.published["phi"], method.model.initial_phi())


def test_its_moves_may_be_compressed() -> None:
    compressor = fp.compressors.RandK(k=2)
    population = fp.FedPer(model(), compressor=compressor).fit(clients(), rounds=2, progress=False)
    each = len(compressor.encode(torch.ones(8, dtype=WIDE), train_key())) + FRAME + 8  # and n
    assert population.totals["bytes_up"] == 2 * 3 * each
    with pytest.raises(SettingsError):  # only the body is sent: 8 numbers
        fp.FedPer(model(), compressor=fp.compressors.RandK(k=9))


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.FedPer(model()).fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
