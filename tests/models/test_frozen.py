"""A frozen backbone: its features are computed once, and they are all that training sees."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from tests.helpers import federation_of, generator, ragged, seeded

NORMAL = fp.likelihoods.Normal(0.5)


class Counting(nn.Linear):
    """A linear layer that counts the examples that go through it."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.seen += x.shape[0]
        return super().forward(x)


def frozen() -> nn.Module:
    return seeded(Counting(3, 2), 1).requires_grad_(False)


METHODS: list[Any] = [
    lambda model: fp.FedSOUL(model),
    lambda model: fp.FedSOUL(model, start="random", kernel="hmc", local_steps=2),
    lambda model: fp.FedAvg(model),
    lambda model: fp.FedRep(model),
    lambda model: fp.FedRep(model, heads="exact"),
]


@pytest.mark.parametrize("method", METHODS, ids=["exact", "hmc", "fedavg", "fedrep", "fedrep-exact"])
def test_features_are_computed_once_whatever_the_rounds(method: Any) -> None:
    clients = ragged((3, 2, 4))
    Counting.seen = 0
    population = method(fp.Composition(frozen(), seeded(nn.Linear(2, 1), 2), NORMAL)).fit(clients, rounds=10)
    # Probes of two and three examples, those by themselves, a derivative, side by side; everyone's.
    assert Counting.seen == 12 + 9
    population.predict(1, torch.zeros(5, 3))
    assert Counting.seen == 12 + 9 + 5


@pytest.mark.parametrize("method", METHODS, ids=["exact", "hmc", "fedavg", "fedrep", "fedrep-exact"])
def test_training_equals_training_on_the_features(method: Any) -> None:
    clients, head = ragged((3, 2, 4)), seeded(nn.Linear(2, 1), 2)
    body = frozen()
    features = [(body(x), y) for x, y in clients]
    on_x = method(fp.Composition(body, head, NORMAL)).fit(clients, rounds=4)
    on_features = method(fp.Composition(None, head, NORMAL)).fit(features, rounds=4)
    torch.testing.assert_close(on_x.published, on_features.published)
    x = torch.randn(4, 3, generator=generator(3))
    torch.testing.assert_close(on_x.predict(2, x).mean, on_features.predict(2, body(x)).mean)


def test_a_split_whose_body_is_frozen_has_its_features_computed_once() -> None:
    net = nn.Sequential(frozen(), nn.Tanh(), seeded(nn.Linear(2, 1), 2))
    Counting.seen = 0
    fp.FedSOUL(fp.Split(net, "2.*", NORMAL), local_steps=1).fit(ragged((3, 2, 4)), rounds=5)
    assert Counting.seen == 2 + 12 + 9  # where does the module end, what comes out, everyone's


def test_a_backbone_with_dropout_is_not_frozen() -> None:
    """Its features change every round."""
    model = fp.Composition(nn.Sequential(frozen(), nn.Dropout(0.5)), nn.Linear(2, 1), NORMAL)
    Counting.seen = 0
    fp.FedSOUL(model).fit(ragged((3, 2, 4)), rounds=5)
    assert Counting.seen > 5 * 9


def test_a_learned_variance_is_still_learned_beside_a_frozen_backbone() -> None:
    model = fp.Composition(frozen(), seeded(nn.Linear(2, 1), 2), "normal")
    population = fp.FedSOUL(model).fit(ragged((3, 2, 4)), rounds=5)
    assert list(population.phi) == ["likelihood.log_variance"]
    assert float(population.phi["likelihood.log_variance"]) != 0


def test_validation_and_test_sets_are_embedded_too() -> None:
    body, head = frozen(), seeded(nn.Linear(2, 1), 2)
    clients = [fp.Client(x, y, validation=(x, y), test=(x, y)) for x, y in ragged((3, 2))]
    federation = federation_of(fp.Composition(body, head, NORMAL), clients)
    for split in ("train", "validation", "test"):
        torch.testing.assert_close(federation.splits[split].x, body(torch.cat([c.x for c in clients])))


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3)])
def test_a_site_whose_clients_have_no_examples_yet_is_one_of_the_rest(sizes):
    clients = [(torch.ones(n, 1), torch.ones(n)) for n in sizes]
    model = fp.Composition(None, nn.Linear(1, 1), "poisson")
    population = fp.FedSOUL(model).fit(clients, rounds=2, seed=0)
    assert population.prior_mean.isfinite().all()
