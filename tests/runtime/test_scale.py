"""Many clients: a round touches those that are active, and holds one cohort at a time."""

import pytest
import torch

import fedpop as fp
from fedpop.algorithms.base import Algorithm
from fedpop.federation.clients import Federation
from fedpop.keys import Key
from fedpop.runtime.run import Run, Settings
from tests.helpers import linear_model, ragged

MANY = 200_000


def table(clients: int) -> fp.Table:
    x = torch.linspace(-1, 1, clients * 3).reshape(clients, 3)
    return fp.Table(x, x.sum(1), torch.arange(clients))


def test_cohorts_are_made_one_at_a_time(monkeypatch):
    events = []
    for cls, name in ((Federation, "cohort"), (fp.FedSOUL, "local_round")):
        inner = getattr(cls, name)

        def outer(*args, inner=inner, name=name, **kwargs):
            events.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(cls, name, outer)
    model = linear_model()
    federation = model.prepare(fp.Federation.of(ragged((3, 2, 5, 1, 4))))
    run = Run(fp.FedSOUL(model), federation, Settings(2, 0, fp.participation.Everyone(), "1KiB", 50), None, [])
    run.execute(resume=False, progress=False)
    assert len(events) > 8
    assert events == ["cohort", "local_round"] * (len(events) // 2)


def test_a_cohort_of_everyone_is_kept_for_the_next_round():
    model = linear_model()
    federation = model.prepare(fp.Federation.of(ragged((3, 2, 5))))
    run = Run(fp.FedSOUL(model), federation, Settings(2, 0, fp.participation.Everyone(), "1GiB", 50), None, [])
    active = fp.participation.Everyone().draw(3, Key(0))
    (first,) = run._cut(active)
    (second,) = run._cut(active)
    assert first is second


@pytest.mark.parametrize(
    "participation", [fp.participation.Uniform(50), fp.participation.Bernoulli(0.0002)], ids=["uniform", "bernoulli"]
)
def test_a_round_draws_and_keeps_states_for_active_clients_only(participation, monkeypatch):
    words, bits = [], Key.bits

    def counted(self, clients, count, start=0):
        words.append(len(clients) * count)
        return bits(self, clients, count, start)

    model = linear_model()
    method = fp.FedSOUL(model, start="random", prior=fp.priors.Normal(scale=1.0), compressor="qsgd")
    federation = model.prepare(fp.Federation.of(table(MANY)))
    run = Run(method, federation, Settings(9, 0, participation, "1GiB", 50), None, [])
    run._begin(resume=False)
    monkeypatch.setattr(Key, "bits", counted)
    active = run.train_round()["active"] + run.train_round()["active"]
    assert 20 < active < 150
    assert sum(words) < 200 * active
    assert run.store.used <= active
    assert all(len(t) <= 2 * active for t in run.store.tensors.values())
    assert isinstance(run.algorithm, Algorithm)
