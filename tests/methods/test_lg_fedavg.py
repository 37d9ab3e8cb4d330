"""LG-FedAvg: torch's SGD on body and head together, the heads' weighted mean, bodies that stay at home."""

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


def reference(rounds: int, epochs: int) -> tuple[list[nn.Module], nn.Module]:
    """Everyone's body and the shared head, by modules."""
    bodies, head = [layers()[0] for _ in SIZES], layers()[1]
    for _ in range(rounds):
        heads = []
        for (x, y), body in zip(clients(), bodies, strict=True):
            own = layers()[1]
            own.load_state_dict(head.state_dict())
            if len(y):
                descend(body, own, x, y, epochs, body, own)
            heads.append(own.state_dict())
        shares = [n / sum(SIZES) for n in SIZES]
        head.load_state_dict({k: sum(s * h[k] for s, h in zip(shares, heads, strict=True)) for k in heads[0]})
    return bodies, head


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_bodies_and_head_are_those_of_torch(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    method = fp.LGFedAvg(model(), local=fp.LocalSGD(epochs=2, rate=0.3))
    population = method.fit(clients(), rounds=3, progress=False)
    bodies, head = reference(3, 2)
    x = clients((5,))[0][0]
    for i, body in enumerate(bodies):  # each its own body, under the server's head
        expected = head(body(x)).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, rtol=1e-10, atol=1e-12)
    shared = method.model.z_layout.views(population.published["z"])
    torch.testing.assert_close(shared["weight"], head.weight.detach(), rtol=1e-10, atol=1e-12)


def test_bodies_are_never_in_the_message() -> None:
    method = fp.LGFedAvg(model())
    cohort = cohort_of(method.model, clients((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert {n: t.numel() for n, t in done.total.plain.items()} == {"dz": 9, "n": 1}
    assert method.private == ("phi",)
    assert not torch.equal(done.local["phi"], local["phi"])
    after = method.server_round(server, done.total, Facts(1, 5), train_key())
    assert torch.equal(after["phi"], method.model.initial_phi())  # the server never hears of one
    assert not torch.equal(after["z"], server["z"])


def test_a_newcomer_trains_a_body_under_the_shared_head() -> None:
    """From the body as it was given, the head fixed; several at once as each alone."""
    method = fp.LGFedAvg(model(), local=fp.LocalSGD(rate=0.3), newcomer=fp.LocalSGD(epochs=4, rate=0.3))
    population = method.fit(clients(), rounds=2, progress=False)
    _, head = reference(2, 1)
    cohort = cohort_of(method.model, clients((7, 4)))
    together = method.personalise(population.published, cohort, None, population.key)
    for i, (x, y) in enumerate(clients((7, 4))):
        body = layers()[0]
        descend(body, head, x, y, 4, body)
        expected = head(body(x)).softmax(-1)
        found = population.new_client(x, y).predict(x).probs
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        flat = torch.cat((body.weight.detach().flatten(), body.bias.detach()))
        torch.testing.assert_close(together["phi"][i], flat, rtol=1e-10, atol=1e-12)
    assert torch.equal(together["z"], population.published["z"].expand(2, -1))


def test_without_data_there_is_no_body() -> None:
    population = fp.LGFedAvg(model()).fit(clients(), rounds=1, progress=False)
    with pytest.raises(DataError, match="LG-FedAvg has no model for a client without data"):
        population.new_client()


def test_a_clients_head_is_the_servers_newest() -> None:
    """A client that was last active long ago predicts with its body of then and the head of now."""
    rule = fp.participation.Uniform(1)
    method = fp.LGFedAvg(model(), local=fp.LocalSGD(rate=0.3))
    population = method.fit(clients((6, 2)), rounds=6, participation=rule, progress=False)
    bodies, head = states(population, "phi", 2), population.published["z"]
    x = clients((5,))[0][0]
    for i in range(2):
        views = method.model.phi_layout.views(bodies[i])
        z = method.model.z_layout.views(head)
        hidden = x @ views["backbone.weight"].T + views["backbone.bias"]
        expected = (hidden @ z["weight"].T + z["bias"]).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, rtol=1e-12, atol=1e-14)


def test_its_moves_may_be_compressed() -> None:
    compressor = fp.compressors.RandK(k=2)
    population = fp.LGFedAvg(model(), compressor=compressor).fit(clients(), rounds=2, progress=False)
    each = len(compressor.encode(torch.ones(9, dtype=WIDE), train_key())) + FRAME + 8  # and n
    assert population.totals["bytes_up"] == 2 * 3 * each
    with pytest.raises(SettingsError):  # only the head is sent: 9 numbers
        fp.LGFedAvg(model(), compressor=fp.compressors.RandK(k=10))


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.LGFedAvg(model()).fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
    assert again.algorithm.label == "LG-FedAvg"
