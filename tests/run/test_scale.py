"""Many clients: a round touches those that are active, and holds one cohort at a time."""

import pytest
import torch

import fedpop as fp
from fedpop.federation.clients import Federation
from fedpop.keys import Key
from fedpop.methods.base import Algorithm
from fedpop.models.networks import build
from fedpop.questions.spectral import CrossProducts, SecondMoments
from fedpop.questions.targets import TargetSize
from fedpop.run.run import Run, Settings
from fedpop.site.plan import CONVOLVED_AT_ONCE, plan_for
from tests.helpers import federation_of, linear_model, ragged

MANY = 200_000


def table(clients: int) -> fp.Table:
    x = torch.linspace(-1, 1, clients * 3).reshape(clients, 3)
    return fp.Table(x, x.sum(1), torch.arange(clients))


def test_cohorts_are_made_one_at_a_time(monkeypatch):
    events = []
    questions = [(question, "answer") for question in (SecondMoments, CrossProducts, TargetSize)]
    for cls, name in ((Federation, "cohort"), (fp.FedSOUL, "local_round"), *questions):
        inner = getattr(cls, name)

        def outer(*args, inner=inner, name=name, **kwargs):
            events.append("cohort" if name == "cohort" else "work")
            return inner(*args, **kwargs)

        monkeypatch.setattr(cls, name, outer)
    model = linear_model()
    federation = federation_of(model, ragged((3, 2, 5, 1, 4)))
    run = Run(
        fp.FedSOUL(model, engine="sampled"), federation, Settings(2, 0, fp.participation.Everyone(), "1KiB")
    )
    run.execute(resume=False, progress=False)
    cohorts = len(run.plan.cut(torch.arange(5), federation.train.sizes))
    assert cohorts > 2
    assert events == ["cohort", "work"] * (5 * cohorts)  # three questions, two rounds


def test_a_cohort_of_everyone_is_kept_for_the_next_round():
    model = linear_model()
    federation = federation_of(model, ragged((3, 2, 5)))
    run = Run(fp.FedSOUL(model), federation, Settings(2, 0, fp.participation.Everyone(), "1GiB"))
    active = fp.participation.Everyone().draw(federation.roster, Key(0))
    assert run.sites._cohort(active.ids) is run.sites._cohort(active.ids)


@pytest.mark.parametrize(
    "participation",
    [fp.participation.Uniform(50), fp.participation.Bernoulli(0.0002)],
    ids=["uniform", "bernoulli"],
)
def test_a_round_draws_and_keeps_states_for_active_clients_only(participation, monkeypatch):
    words, bits = [], Key.bits

    def counted(self, clients, count, start=0):
        words.append(len(clients) * count)
        return bits(self, clients, count, start)

    model = linear_model()
    method = fp.FedSOUL(model, start="random", prior=fp.priors.Normal(scale=1.0), compressor="qsgd")
    federation = federation_of(model, table(MANY))
    run = Run(method, federation, Settings(9, 0, participation, "1GiB"))
    run.begin()
    monkeypatch.setattr(Key, "bits", counted)
    active = run.train_round()["active"] + run.train_round()["active"]
    assert 20 < active < 150
    assert sum(words) < 200 * active
    assert run.sites.store.used <= active
    assert all(len(t) <= 2 * active for t in run.sites.store.tensors.values())
    assert isinstance(run.algorithm, Algorithm)


def test_convolutions_keep_a_quarter_of_a_gibibyte_whatever_a_round_may_take() -> None:
    """On a CPU, where more saves no time; small vectors are planned by the budget alone."""
    model = build("cnn-cifar10", (3, 32, 32), 10)
    images = Federation.of([(torch.zeros(500, 3, 32, 32), torch.zeros(500).long()) for _ in range(4)])
    plan = plan_for(model, images, 2**30, 10, 1)
    groups = plan.cut(torch.arange(4), images.train.sizes)
    assert plan.budget == CONVOLVED_AT_ONCE
    assert len(groups) > 1
    assert all(len(g) * 500 * plan.per_row <= CONVOLVED_AT_ONCE for g in groups if len(g) > 1)
    assert plan_for(linear_model(), Federation.of(ragged()), 2**30, 10, 1).budget == 2**30
