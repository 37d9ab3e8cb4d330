"""``FedSOUL.paper()`` finds its own step size, on conjugate models and on others, and records it."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.data.synthetic import SyntheticTask
from fedpop.keys import Key
from tests.crash import Crash, CrashAt


def softmax_clients():
    key, ids = Key(1, purpose="softmax"), torch.arange(20)
    x = key.at(purpose="x").normal(ids, (12, 4))
    logits = x @ key.at(purpose="w").normal(ids, (4, 3))
    return [(a, b) for a, b in zip(x, logits.argmax(-1), strict=True)]


@pytest.mark.parametrize("logistic", [False, True])
def test_a_rate_is_found_and_recorded(logistic):
    task = SyntheticTask(b=40, k=6, n_small=10, n_large=20, held_out=1, logistic=logistic)
    population = fp.FedSOUL.paper(task.model(0)).fit(task.make(0).clients, rounds=5)
    method = population.algorithm
    step = method.on_phi.optimiser
    assert step == method.on_beta.step
    assert 1e-6 <= step.rate <= 1
    assert method.rate() == step.rate
    assert method.describe()["phi_step"]["optimiser"]["rate"] == step.rate
    # Trial rounds are paid for.
    assert population.totals["bytes_up"] > 20 * 40 * 4 * (12 + 3)


def test_a_rate_is_found_for_classes_and_partial_participation():
    model = fp.Composition(nn.Linear(4, 3), nn.Linear(3, 3), "categorical")
    population = fp.FedSOUL.paper(model).fit(softmax_clients(), rounds=5, participation=0.5)
    assert population.algorithm.rate() > 0


def test_two_rates_of_ones_own_survive_a_resume(tmp_path):
    task = SyntheticTask(b=10, k=4, held_out=1)
    method = fp.FedSOUL(task.model(0), phi_step=fp.steps.SGD(1e-3), beta_step=fp.steps.SGD(1e-4))
    whole = method.fit(task.make(0).clients, rounds=8)

    settings = {"rounds": 8, "out": tmp_path, "checkpoint_every": 2}
    with pytest.raises(Crash):
        method.fit(task.make(0).clients, callbacks=[CrashAt(5)], **settings)
    resumed = method.fit(task.make(0).clients, resume=True, **settings)
    assert torch.equal(whole.published["beta"], resumed.published["beta"])
