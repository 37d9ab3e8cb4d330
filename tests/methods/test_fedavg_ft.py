"""FedAvg with fine-tuning: FedAvg to the bit in training, then torch's own SGD for each client."""

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from tests.helpers import ragged, seeded

WIDE = torch.float64


def network() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(WIDE), 1)


def clients(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def test_training_is_fedavgs() -> None:
    net = network()
    model = fp.Composition(net[:2], net[2], "categorical")
    local = fp.LocalSGD(epochs=2, rate=0.1, batch=2)
    plain = fp.FedAvg(model, local=local).fit(clients(), rounds=3, progress=False)
    tuned = fp.FedAvgFT(model, local=local).fit(clients(), rounds=3, progress=False)
    assert torch.equal(plain.published["phi"], tuned.published["phi"])
    x = clients()[2][0].new_ones((5, 3))
    torch.testing.assert_close(plain.predict(2, x).probs, tuned.predict(2, x).probs)  # it has no data
    assert not torch.allclose(plain.predict(3, x).probs, tuned.predict(3, x).probs)


def test_tuning_is_gradient_descent_from_the_common_model(monkeypatch) -> None:
    net = network()
    model = fp.Composition(net[:2], net[2], "categorical")
    method = fp.FedAvgFT(model, local=fp.LocalSGD(rate=0.1), fine_tune=fp.LocalSGD(epochs=4, rate=0.3))
    for largest in (local_sgd.LARGEST_BATCHED, 0):
        monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
        population = method.fit(clients(), rounds=2, progress=False)
        own = network()
        size = model.phi_layout.size
        flat = torch.cat((population.published["phi"], population.published["z"]))
        body = model.phi_layout.views(flat[:size])
        head = model.z_layout.views(flat[size:])
        own.load_state_dict(
            {n.removeprefix("backbone."): t for n, t in body.items()}
            | {"2.weight": head["weight"], "2.bias": head["bias"]}
        )
        x, y = clients()[3]
        optimiser = torch.optim.SGD(own.parameters(), lr=0.3)
        for _ in range(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(x), y).backward()
            optimiser.step()
        torch.testing.assert_close(population.predict(3, x).probs, own(x).softmax(-1), rtol=1e-8, atol=1e-10)


def test_a_new_client_is_tuned_too() -> None:
    net = network()
    model = fp.Composition(net[:2], net[2], "categorical")
    population = fp.FedAvgFT(model).fit(clients(), rounds=2, progress=False)
    x, y = clients()[3]
    torch.testing.assert_close(population.new_client(x, y).predict(x).probs, population.predict(3, x).probs)


def test_its_validation_score_is_that_of_the_tuned_models() -> None:
    net = network()
    model = fp.Composition(net[:2], net[2], "categorical")
    data = [fp.Client(x, y, validation=(x, y)) for x, y in clients((4, 2, 7))]
    stop = fp.callbacks.EarlyStop(every=1, patience=100)
    population = fp.FedAvgFT(model).fit(data, rounds=2, callbacks=[stop], progress=False)
    expected = sum(float(population.predict(i, c.x).log_prob(c.y).sum()) for i, c in enumerate(data)) / 13
    scores = [h["validation_log_likelihood"] for h in population.history]
    assert abs(scores[-1] - expected) < 1e-6
