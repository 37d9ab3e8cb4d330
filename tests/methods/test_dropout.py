"""Dropout in local training: on and keyed there, off in predictions."""

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.keys import unit_of
from fedpop.methods.base import Algorithm, Facts
from fedpop.models.base import Model
from fedpop.models.modules import RowKeys
from tests.helpers import answers, begun, cohort_of, generator, ragged, seeded, train_key

RATE = 0.1
NORMAL = fp.likelihoods.Normal(0.5)


def backbone_dropout() -> fp.Composition:
    backbone = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    return fp.Composition(seeded(backbone, 2), seeded(nn.Linear(8, 1), 3), NORMAL)


def head_dropout() -> fp.Composition:
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))
    return fp.Composition(seeded(nn.Linear(3, 8), 2), seeded(head, 3), NORMAL)


def split_dropout() -> fp.Split:
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return fp.Split(seeded(network, 2), "0.bias", NORMAL)


MODELS = {"backbone": backbone_dropout, "head": head_dropout, "split": split_dropout}


def sent(method: Algorithm, clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of what one round of everyone sends."""
    cohort = cohort_of(method.model, clients)
    server, local = begun(method, cohort, Facts(len(cohort), 1), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    return next(iter(done.total.plain.values()))


def masked_loss(model: Model, w: Tensor, x: Tensor, y: Tensor, unit: int, epoch: int) -> Tensor:
    """One client's mean loss with the masks that its key stands for, layer by layer, without vmap."""
    key = train_key().at(purpose=f"epoch-{epoch}")
    rows = RowKeys(key, torch.full((len(x),), unit), torch.arange(len(x)))
    size = model.phi_layout.size
    features = model.embed(w[:size], x, rows)
    eta = model.head_at(w[:size], w[size:], features, rows)
    return -model.likelihood.log_prob(eta, y.unsqueeze(1), {}).mean()


@pytest.mark.parametrize("name", list(MODELS))
def test_local_steps_of_fedavg_see_exactly_the_keyed_masks(name: str) -> None:
    model, clients = MODELS[name](), ragged((3, 5, 2))
    expected = torch.zeros(())
    start = torch.cat((model.initial_phi(), model.initial_z()))
    for i, (x, y) in enumerate(clients):
        w = start
        for epoch in range(2):
            w = w.detach().requires_grad_()
            (grad,) = torch.autograd.grad(masked_loss(model, w, x, y, unit_of(f"client-{i}"), epoch), w)
            w = w.detach() - RATE * grad
        expected = expected + len(x) * (w - start)
    method = fp.FedAvg(model, local=fp.LocalSGD(epochs=2, rate=RATE))
    torch.testing.assert_close(sent(method, clients), expected)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep], ids=["FedAvg", "FedRep"])
def test_dropout_is_on_in_rounds_and_off_in_predictions(name: str, method: type[Algorithm]) -> None:
    clients, x = ragged((3, 5, 2)), torch.randn(4, 3, generator=generator(9))
    runs = [method(MODELS[name]()).fit(clients, rounds=2, seed=s) for s in (0, 0, 1)]
    first, same, other = (run.published["phi"] for run in runs)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    population = runs[0]
    assert torch.equal(population.predict(0, x).mean, population.predict(0, x).mean)
    z = population._model_of(0)["z"]
    expected = population.model.outputs_at(population.published["phi"], z, x)[0, :, 0]
    torch.testing.assert_close(population.predict(0, x).mean, expected)


def test_masks_do_not_depend_on_the_cohort() -> None:
    clients = ragged((3, 5, 2))
    method = fp.FedAvg(backbone_dropout(), local=fp.LocalSGD(epochs=2, rate=RATE, batch=2))
    together = sent(method, clients)
    alone = torch.zeros_like(together)
    cohort = cohort_of(method.model, clients)
    broadcast = method.broadcast(method.init(Facts(3, 1), train_key(), {}))
    for i in range(3):
        one = cohort.select(torch.tensor([i]))
        alone = alone + answers(method, one, {}, broadcast, train_key()).total.plain["dw"]
    torch.testing.assert_close(alone, together)


def test_fedreps_final_heads_are_fitted_without_dropout() -> None:
    population = fp.FedRep(head_dropout()).fit(ragged((6, 4)), rounds=1)
    cohort = population._cohort(torch.tensor([0]))
    method, key = population.algorithm, population.key
    assert isinstance(method, fp.FedRep)
    z = population.published["z"].unsqueeze(0)
    phi = population.published["phi"]
    off = method.fit_head(phi, cohort, z, key)
    for layer in method.model.modules()[1].modules():
        if hasattr(layer, "p"):
            layer.p = 0.0
    torch.testing.assert_close(off, method.fit_head(phi, cohort, z, key, dropout=True))
