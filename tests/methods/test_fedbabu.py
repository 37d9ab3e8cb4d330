"""FedBABU: torch's SGD on the body under a head that stands still, then on both, or on the head."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, ragged, seeded, train_key

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
    for _ in range(epochs if len(y) else 0):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(body(x)), y).backward()
        optimiser.step()


def reference(rounds: int, epochs: int) -> nn.Module:
    """The shared body, by modules."""
    body, head = layers()
    for _ in range(rounds):
        bodies = []
        for x, y in clients():
            own = layers()[0]
            own.load_state_dict(body.state_dict())
            descend(own, head, x, y, epochs, own)
            bodies.append(own.state_dict())
        body.load_state_dict(
            {k: sum(n / sum(SIZES) * b[k] for n, b in zip(SIZES, bodies, strict=True)) for k in bodies[0]}
        )
    return body


def tuned_by_torch(x: Tensor, y: Tensor, tuned: str) -> nn.Sequential:
    body, head = layers()
    body.load_state_dict(reference(3, 2).state_dict())
    descend(body, head, x, y, 4, *((body, head) if tuned == "all" else (head,)))
    return nn.Sequential(body, head)


@pytest.mark.parametrize("tuned", ["all", "head"])
@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_body_and_tuned_models_are_those_of_torch(
    largest: int, tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    local, fine_tune = fp.LocalSGD(epochs=2, rate=0.3), fp.LocalSGD(epochs=4, rate=0.3)
    method = fp.FedBABU(model(), local=local, fine_tune=fine_tune, tuned=tuned)
    population = method.fit(clients(), rounds=3, progress=False)
    body = reference(3, 2)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(population.phi["backbone.weight"], body.weight.detach(), **close)
    x = clients((5,))[0][0]
    for i, own in enumerate(clients()):
        expected = tuned_by_torch(*own, tuned)(x).softmax(-1)
        torch.testing.assert_close(population.predict(i, x).probs, expected, **close)
    fresh = clients((7,))[0]
    expected = tuned_by_torch(*fresh, tuned)(x).softmax(-1)
    torch.testing.assert_close(population.new_client(*fresh).predict(x).probs, expected, **close)
    # Without data there is the body under the head that it was trained with.
    expected = layers()[1](body(x)).softmax(-1)
    torch.testing.assert_close(population.new_client().predict(x).probs, expected, **close)


def test_the_head_neither_moves_nor_travels() -> None:
    method = fp.FedBABU(model())
    cohort = cohort_of(method.model, clients((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert {n: t.numel() for n, t in done.total.plain.items()} == {"dphi": 8, "n": 1}
    after = method.server_round(server, done.total, Facts(1, 5), train_key())
    assert torch.equal(after["z"], method.model.initial_z())
    assert not torch.equal(after["phi"], server["phi"])


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.FedBABU(model(), tuned="head").fit(clients(), rounds=2, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
