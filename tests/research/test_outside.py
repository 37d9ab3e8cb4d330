"""Entropies of examples from elsewhere: those of the predictions themselves, client by client."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import DataError
from fedpop.population import posterior
from research.ood import auroc, evaluate_outside
from tests.helpers import seeded


@pytest.fixture(scope="module")
def clients() -> dict[str, fp.Client]:
    x = torch.linspace(-2, 2, 12).unsqueeze(1)
    y = (x[:, 0] > 0).long()
    return {name: fp.Client(x, y, test=(x + shift, y)) for name, shift in (("anna", 0.1), ("ben", 0.2))}


def fitted(method: type[fp.FedSOUL] | type[fp.LocalOnly], clients: dict[str, fp.Client]) -> fp.Population:
    model = fp.Composition(None, seeded(nn.Linear(1, 2)), "categorical")
    own = {} if method is fp.FedSOUL else {"local": fp.LocalSGD(epochs=40, rate=1.0)}
    return method(model, **own).fit(clients, rounds=2, seed=1, progress=False)


def test_entropies_are_those_of_the_predictions(clients: dict[str, fp.Client]) -> None:
    population = fitted(fp.FedSOUL, clients)
    elsewhere = [torch.tensor([[0.0], [0.3], [9.0]]), torch.tensor([[5.0]])]
    found = evaluate_outside(population, elsewhere)
    assert [f.name for f in found] == ["anna", "ben"]
    for f, x, client in zip(found, elsewhere, clients.values(), strict=True):
        assert client.test is not None
        inside, outside = (population.predict(f.name, v).entropy for v in (client.test[0], x))
        torch.testing.assert_close(f.inside, inside.total)
        torch.testing.assert_close(f.outside, outside.total)
        assert f.auroc == auroc(inside.total, outside.total)
        assert f.auroc_epistemic == auroc(inside.epistemic, outside.epistemic)
        assert 0 <= f.auroc <= 1


def test_point_estimates_have_no_epistemic_part(clients: dict[str, fp.Client]) -> None:
    found = evaluate_outside(fitted(fp.LocalOnly, clients), [torch.zeros(2, 1)] * 2)
    assert [f.auroc_epistemic for f in found] == [None, None]
    # Halfway between the classes is where a linear rule is least sure.
    assert all(f.auroc > 0.9 for f in found)


def test_everybody_needs_examples(clients: dict[str, fp.Client]) -> None:
    with pytest.raises(DataError, match="2 clients, but examples from elsewhere for 1"):
        evaluate_outside(fitted(fp.LocalOnly, clients), [torch.zeros(2, 1)])


def test_entropies_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.linspace(-4, 4, 9).unsqueeze(1), torch.tensor([0, 1, 0, 1, 1, 1, 0, 1, 1])
    model = fp.Composition(None, nn.Linear(1, 2), "categorical")
    population = fp.FedSOUL(model).fit([fp.Client(x, y, test=(x, y))] * 2, rounds=2)
    elsewhere = [x[:2], x[2:5]]
    whole = evaluate_outside(population, elsewhere)
    monkeypatch.setattr(posterior, "PREDICTED_ENTRIES_AT_ONCE", 1)
    parts = evaluate_outside(population, elsewhere)
    assert [own.name for own in parts] == [own.name for own in whole]
    for one, other in zip(parts, whole, strict=True):
        assert one.auroc == pytest.approx(other.auroc)
