"""Rates of local steps that change over the rounds."""

import math

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client.local_sgd import LocalSGD
from fedpop.methods.base import Paced, Round
from tests.helpers import cohort_of, linear_model, ragged, train_key, two_classes

SLOW = 0.02
"""Twice this is the rate that a warm-up of two rounds halves in the first."""
FALLEN = fp.steps.Decay(constant=0.0)


PACED = {
    "FedAvg": lambda sgd, **more: fp.FedAvg(linear_model(), local=sgd, **more),
    "FedAvgFT": lambda sgd, **more: fp.FedAvgFT(linear_model(), local=sgd, **more),
    "FedProx": lambda sgd, **more: fp.FedProx(linear_model(), local=sgd, **more),
    "SCAFFOLD": lambda sgd, **more: fp.SCAFFOLD(linear_model(), local=sgd, **more),
    "Ditto": lambda sgd, **more: fp.Ditto(linear_model(), local=sgd, personal=sgd, **more),
    "APFL": lambda sgd, **more: fp.APFL(linear_model(), local=sgd, **more),
    "FedRep": lambda sgd, **more: fp.FedRep(linear_model(), head=sgd, body=sgd, **more),
    "FedPer": lambda sgd, **more: fp.FedPer(linear_model(), local=sgd, **more),
    "LGFedAvg": lambda sgd, **more: fp.LGFedAvg(linear_model(), local=sgd, **more),
    "LocalOnly": lambda sgd, **more: fp.LocalOnly(linear_model(), local=sgd, **more),
    "PerFedAvg": lambda sgd, **more: fp.PerFedAvg(linear_model(), local=sgd, **more),
    "PFedMe": lambda sgd, **more: fp.PFedMe(linear_model(), local=sgd, **more),
    "FedBABU": lambda sgd, **more: fp.FedBABU(linear_model(), local=sgd, **more),
    "PFedFDA": lambda sgd, **more: fp.PFedFDA(two_classes(), local=sgd, **more),
    "PFedVEM": lambda sgd, **more: fp.PFedVEM(linear_model(), head=sgd, body=sgd, **more),
    "PFedBayes": lambda sgd, **more: fp.PFedBayes(linear_model(), local=sgd, **more),
    "FedDBE": lambda sgd, **more: fp.FedDBE(linear_model(), local=sgd, **more),
    "FedBE": lambda sgd, **more: fp.FedBE(linear_model(), local=sgd, **more),
}


def below(kind: type) -> set[str]:
    """The library's own: other tests make some, too."""
    own = {kind.__name__} if kind.__module__.startswith("fedpop.") else set()
    return own.union(*map(below, kind.__subclasses__()))


def test_every_method_with_a_schedule_is_tried() -> None:
    assert set(PACED) == below(Paced) - {"Paced", "SharedPart"}


@pytest.mark.parametrize("name", PACED)
def test_a_round_has_the_rates_that_the_schedule_says(name: str) -> None:
    """The first of two rounds of warm-up, at twice the rate, is a round at the rate itself, to the bit."""
    clients, build = ragged((3, 5, 2)), PACED[name]
    if name == "PFedFDA":
        clients = [(x, (y > 0).long()) for x, y in clients]
    fast, slow = (LocalSGD(epochs=2, rate=rate) for rate in (2 * SLOW, SLOW))
    plain = build(slow).fit(clients, rounds=1, seed=3)
    warm = build(fast, schedule=fp.steps.Cosine(warm_up=2)).fit(clients, rounds=1, seed=3)
    for key, value in plain.published.items():
        assert torch.equal(warm.published[key], value), key
    assert plain.history[0]["loss"] == warm.history[0]["loss"]
    full = build(fast).fit(clients, rounds=1, seed=3)
    states = [p.store.state() for p in (plain, warm, full)]
    assert all(torch.equal(states[0][k], v) for k, v in states[1].items())
    changed = any(not torch.equal(plain.published[k], v) for k, v in full.published.items())
    assert changed or any(not torch.equal(states[0][k], v) for k, v in states[2].items())


def test_gradient_descent_with_decreasing_steps() -> None:
    """One client, all of its examples at once, a quadratic: every step by hand."""
    x, rate, rounds = torch.tensor([[1.0], [2.0]]), 0.1, 7
    y = torch.tensor([1.0, 4.0])
    head = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(head.weight)
    model = fp.Composition(None, head, fp.likelihoods.Normal(1.0))
    method = fp.FedAvg(model, local=LocalSGD(rate=rate), schedule=fp.steps.Cosine(end=0.1))
    found = method.fit([(x, y)], rounds=rounds).published["z"]
    w = 0.0
    for k in range(rounds):
        factor = 0.1 + 0.9 * (1 + math.cos(math.pi * k / rounds)) / 2
        w -= rate * factor * float((x[:, 0] * (x[:, 0] * w - y)).mean())
    torch.testing.assert_close(found, torch.tensor([w]))


def test_what_follows_training_has_the_rates_given() -> None:
    """A round is told its pace, which is in no setting: a newcomer's own epochs know nothing of it."""
    told = {"pace": torch.tensor(0.25, dtype=torch.float64)}
    assert Round(0, told, train_key(), train_key()).pace == 0.25
    assert Round(0, {}, train_key(), train_key()).pace == 1.0
    paced, plain = (PACED["Ditto"](LocalSGD(rate=0.5), **more) for more in ({"schedule": FALLEN}, {}))
    (x, y), published = ragged((5,))[0], plain.fit(ragged((3, 5)), rounds=1).published
    cohort = cohort_of(plain.model, [(x, y)])
    one, other = (m.personalise(published, cohort, None, train_key()) for m in (paced, plain))
    assert torch.equal(one["z"], other["z"])
    told["w"] = torch.cat((published["phi"], published["z"]))
    local = {"v": told["w"].unsqueeze(0)}
    slow = PACED["Ditto"](LocalSGD(rate=0.125)).local_round(
        Round(0, {"w": told["w"]}, train_key(), train_key()), cohort, local
    )
    fast = plain.local_round(Round(0, told, train_key(), train_key()), cohort, local)
    assert all(torch.equal(slow.vectors[n], v) for n, v in fast.vectors.items())
    assert torch.equal(slow.local["v"], fast.local["v"])


def test_a_schedule_goes_on_after_a_stop(tmp_path) -> None:
    """Interrupted half-way and resumed: the same bits as a run that was not."""
    clients = ragged((3, 5, 2))
    method = PACED["FedRep"](LocalSGD(rate=SLOW), schedule=fp.steps.Cosine())
    whole = method.fit(clients, rounds=6, seed=1)

    class Stop(fp.callbacks.Callback):
        def after_round(self, run, metrics):
            if metrics["round"] == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(clients, rounds=6, seed=1, out=tmp_path, callbacks=[Stop()])
    again = method.fit(clients, rounds=6, seed=1, out=tmp_path, resume=True)
    assert all(torch.equal(again.published[k], v) for k, v in whole.published.items())
