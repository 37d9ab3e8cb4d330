"""What every method with a model in one flat vector must do, whatever its rule."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.message import Total
from fedpop.methods import rebuild
from fedpop.methods.base import Facts
from tests.crash import Crash, CrashAt
from tests.helpers import answers, begun, cohort_of, ragged, seeded, train_key
from tests.methods.test_privacy import holds
from tests.test_devices import watched

WIDE = torch.float64
FACTS = Facts(4, 5)
SGD = fp.LocalSGD(epochs=2, rate=0.2, batch=3)
METHODS: dict[str, Any] = {
    "local": lambda m: fp.LocalOnly(m, local=SGD),
    "fedprox": lambda m: fp.FedProx(m, local=SGD, mu=0.3),
    "scaffold": lambda m: fp.SCAFFOLD(m, local=SGD, server_rate=0.8),
    "fedper": lambda m: fp.FedPer(m, local=SGD),
    "lg-fedavg": lambda m: fp.LGFedAvg(m, local=SGD),
    "ditto": lambda m: fp.Ditto(m, local=SGD, personal=SGD, lam=0.4),
    "apfl": lambda m: fp.APFL(m, local=SGD, alpha=0.3),
}
every_method = pytest.mark.parametrize("name", METHODS)


def method_of(name: str) -> Any:
    net = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3)).to(WIDE), 1)
    return METHODS[name](fp.Composition(net[:3], net[3], "categorical"))


def clients(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


@every_method
def test_the_cut_into_cohorts_does_not_matter(name: str) -> None:
    """All at once, and one client after the other: batches, dropout and all."""
    together = method_of(name).fit(clients(), rounds=3, progress=False)
    apart = method_of(name).fit(clients(), rounds=3, memory="1KiB", progress=False)
    x = clients()[3][0]
    for i in range(4):
        found, expected = apart.predict(i, x).probs, together.predict(i, x).probs
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert apart.totals["bytes_up"] == together.totals["bytes_up"]


class Score(fp.callbacks.Callback):
    value = 0.0

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        self.value = run.validation_score()
        return False


@every_method
def test_the_validation_score_is_that_of_the_predictions(name: str) -> None:
    data = [fp.Client(x, y, validation=(x, y)) for x, y in clients((4, 2, 7))]
    score = Score()
    population = method_of(name).fit(data, rounds=2, callbacks=[score], progress=False)
    expected = sum(float(population.predict(i, c.x).log_prob(c.y).sum()) for i, c in enumerate(data)) / 13
    assert score.value == pytest.approx(expected, rel=1e-10)
    assert all(m["loss"] > 0 for m in population.history)


@every_method
def test_private_state_is_in_no_message(name: str) -> None:
    method = method_of(name)
    cohort = cohort_of(method.model, clients((5,)))
    server, local = begun(method, cohort, FACTS, train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    total, new = done.total, done.local
    assert set(method.private) <= set(new) == set(local)
    assert not done.left_out
    for vector in (
        *total.plain.values(),
        *total.weighted.values(),
        *total.named.values(),
        *method.server_round(server, total, FACTS, train_key()).values(),
    ):
        for secret in method.private:
            assert not torch.equal(new[secret], local[secret])
            assert not holds(vector, new[secret])


@every_method
def test_a_round_without_anyone_changes_nothing(name: str) -> None:
    method = method_of(name)
    server = method.init(FACTS, train_key(), {})
    for ratio in (True, False):
        after = method.server_round(server, Total.of_nobody(4, ratio), FACTS, train_key())
        assert set(after) == set(server)
        assert all(torch.equal(after[n], server[n]) for n in server)


@every_method
def test_described_and_rebuilt(name: str) -> None:
    method = method_of(name)
    described = json.loads(json.dumps(method.describe()))
    assert rebuild(described, type(method).__name__, method.model) == method


@every_method
def test_a_run_is_resumed_to_the_same_bits(name: str, tmp_path: Any) -> None:
    settings = {"rounds": 4, "participation": 2, "checkpoint_every": 1, "progress": False}
    whole = method_of(name).fit(clients((4, 2, 7)), **settings)
    with pytest.raises(Crash):
        method_of(name).fit(clients((4, 2, 7)), out=tmp_path, callbacks=[CrashAt(2)], **settings)
    again = method_of(name).fit(clients((4, 2, 7)), out=tmp_path, resume=True, **settings)
    for i in range(3):
        x = clients()[3][0]
        assert torch.equal(again.predict(i, x).probs, whole.predict(i, x).probs)


@every_method
def test_every_tensor_says_where_it_lives(name: str) -> None:
    method = method_of(name)
    cohort = cohort_of(method.model, clients())
    newcomers = cohort_of(method.model, clients((3, 2)))
    with watched():
        server, local = begun(method, cohort, FACTS, train_key())
        done = answers(method, cohort, local, method.broadcast(server), train_key())
        published = method.publish(method.server_round(server, done.total, FACTS, train_key()))
        method.score(published, cohort, cohort, done.local, train_key())
        personal = method.personalise(published, newcomers, None, train_key())
        one = {n: t[1:] for n, t in personal.items()}
        assert method.predict(published, one, newcomers.x[3:], train_key()).probs.shape == (2, 3)
