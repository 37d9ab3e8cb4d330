"""SCAFFOLD: its rule written out, and the optimum that FedAvg's local steps drift away from."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.run.members import active_units
from tests.helpers import cohort_of, linear_model, quadratics, ragged, states, train_key

WIDE = torch.float64
Q = quadratics()
LOCAL = fp.LocalSGD(epochs=10, rate=0.1)


class Watch(fp.callbacks.Callback):
    """The server's state after each round, and the clients' control variates."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        b = len(run.federation)
        c = torch.zeros(b, len(run.server["c"]), dtype=run.server["c"].dtype)
        known = run.sites.store.seen(torch.arange(b))
        if known.any():
            c[known] = run.sites.store.get(torch.arange(b)[known], torch.device("cpu"))["c"]
        self.seen.append((run.server["w"], run.server["c"], c))
        return False


def test_many_local_steps_reach_the_optimum_where_fedavg_does_not() -> None:
    """Everyone counts alike: the minimiser of (1/b) sum f_i, not of the pooled loss."""
    best = Q.minimum(torch.ones(3, dtype=WIDE))
    pooled = Q.minimum(torch.tensor([8.0, 5.0, 12.0], dtype=WIDE))
    found = fp.SCAFFOLD(Q.model, local=LOCAL).fit(Q.clients, rounds=60, progress=False).published["z"]
    torch.testing.assert_close(found, best, rtol=1e-9, atol=1e-9)
    drifted = fp.FedAvg(Q.model, local=LOCAL).fit(Q.clients, rounds=60, progress=False).published["z"]
    assert (drifted - pooled).norm() > 0.1
    assert (drifted - best).norm() > 0.1


RULES: dict[str, Any] = {
    "everyone": None,
    "two of three": fp.participation.Uniform(2),
    "unequal": fp.participation.Bernoulli([0.9, 0.4, 0.6]),
}


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
@pytest.mark.parametrize("rule", RULES)
def test_its_rule_written_out(rule: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches, five steps each, a server's rate of its own; 1/p_i weights where p differs."""
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    method = fp.SCAFFOLD(Q.model, local=fp.LocalSGD(epochs=5, rate=0.1), server_rate=0.7)
    watch = Watch()
    method.fit(Q.clients, rounds=6, participation=RULES[rule], callbacks=[watch], progress=False)
    federation = fp.Federation.of(Q.clients)
    w, c, own = Q.start(), torch.zeros(3, dtype=WIDE), torch.zeros(3, 3, dtype=WIDE)
    for r in range(6):
        who = active_units(RULES[rule] or fp.participation.Everyone(), federation, Key(0), r)
        move, change = torch.zeros(3, dtype=WIDE), torch.zeros(3, dtype=WIDE)
        for i, weight in zip(who.ids.tolist(), who.weights.double(), strict=True):
            y = w
            for _ in range(5):
                y = y - 0.1 * (Q.gradient(i, y) - own[i] + c)
            new = own[i] - c + (w - y) / (5 * 0.1)
            move += weight * (y - w) / (len(who.ids) if who.ratio else 3)
            change += new - own[i]
            own[i] = new
        w, c = w + 0.7 * move, c + change / 3
        for found, expected in zip(watch.seen[r], (w, c, own), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # weights are float32
            if rule != "unequal":
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "rule", [fp.participation.Uniform(2), 0.3, fp.participation.Bernoulli([0.9, 0.2, 0.5, 0.4])]
)
def test_c_stays_the_mean_of_all_c_i(rule: Any) -> None:
    """Also of those who never took part, have no data, or diverged; with batches, and empty rounds."""
    far = (torch.full((2, 3), 1e200, dtype=WIDE), torch.ones(2, dtype=WIDE))
    none = (torch.zeros(0, 3, dtype=WIDE), torch.zeros(0, dtype=WIDE))
    watch = Watch()
    method = fp.SCAFFOLD(Q.model, local=fp.LocalSGD(epochs=2, rate=0.05, batch=3))
    population = method.fit(
        [*Q.clients[:2], none, far], rounds=12, participation=rule, callbacks=[watch], progress=False
    )
    assert {name for m in population.history for name in m["left_out"]} == {population.names[3]}
    for w, c, own in watch.seen:
        assert w.isfinite().all()
        torch.testing.assert_close(c, own.mean(0), rtol=1e-10, atol=1e-10)
        assert not own[2:].any()
    assert watch.seen[-1][2][:2].any()


@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
@pytest.mark.parametrize("batch", [None, 1, 2, 3, 100])
def test_a_clients_number_of_steps_is_its_own(
    batch: int | None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of length one, counted."""
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    cohort = cohort_of(linear_model(), ragged((5, 3, 0, 7)))
    sgd = fp.LocalSGD(epochs=3, rate=1.0, batch=batch)

    def straight(w: Tensor, *rest: object) -> Tensor:
        return -w.sum()

    start = torch.zeros(4, 1)
    walked = sgd.run(straight, start, start[:, :0], cohort.x, cohort, train_key()).w
    assert torch.equal(walked[:, 0].long(), sgd.updates(cohort))


def test_control_variates_are_mean_gradients_of_own_steps() -> None:
    """From c = c_i = 0 with one-example batches: ragged clients divide by their own numbers of steps."""
    q = quadratics((4, 9))
    watch = Watch()
    method = fp.SCAFFOLD(q.model, local=fp.LocalSGD(epochs=2, rate=1e-7, batch=1))
    method.fit(q.clients, rounds=1, callbacks=[watch], progress=False)
    for i in range(2):  # steps so small that every gradient is taken at the start: their mean is f_i's
        expected = q.gradient(i, q.start())
        torch.testing.assert_close(watch.seen[0][2][i], expected, rtol=1e-4, atol=1e-4)


def test_a_loaded_population_has_no_control_variates(tmp_path: Any) -> None:
    population = fp.SCAFFOLD(Q.model, local=LOCAL).fit(Q.clients, rounds=2, progress=False)
    assert states(population, "c", 3).any()
    again = fp.load(population.save(tmp_path))
    assert set(again.published) == {"phi", "z"}
    x = Q.clients[0][0]
    assert torch.equal(again.predict(1, x).mean, population.predict(0, x).mean)
    assert torch.equal(again.new_client().predict(x).mean, population.predict(0, x).mean)


def test_impossible_settings() -> None:
    with pytest.raises(SettingsError, match=r"plain local steps, not momentum 0\.5"):
        fp.SCAFFOLD(Q.model, local=fp.LocalSGD(momentum=0.5))
    with pytest.raises(SettingsError, match="server_rate must be a positive"):
        fp.SCAFFOLD(Q.model, server_rate=0.0)
    with pytest.raises(SettingsError, match="SCAFFOLD does not compress"):
        fp.SCAFFOLD(Q.model, compressor="natural")


@pytest.mark.parametrize("rule", RULES)
def test_clip_bounds_what_is_sent_and_c_stays_the_mean(rule: str) -> None:
    """Clients keep what the server has of them: c is the mean of all c_i, to rounding, however short."""
    clip, watch = 0.05, Watch()
    method = fp.SCAFFOLD(Q.model, local=fp.LocalSGD(epochs=5, rate=0.1), clip=clip)
    method.fit(Q.clients, rounds=12, participation=RULES[rule], callbacks=[watch])
    free = Watch()
    method.replace(clip=None).fit(Q.clients, rounds=12, participation=RULES[rule], callbacks=[free])
    assert not torch.equal(watch.seen[0][0], free.seen[0][0])  # it is short enough to matter
    before = torch.zeros_like(watch.seen[0][2])
    for w, c, own in watch.seen:
        assert torch.isfinite(w).all()
        torch.testing.assert_close(c, own.mean(0), rtol=0, atol=12 * 3 * 2**-52)
        assert float((own - before).norm(dim=1).max()) <= clip * (1 + 1e-12)
        before = own


def test_a_clip_that_nothing_reaches_changes_nothing() -> None:
    wide, free = (
        fp.SCAFFOLD(Q.model, local=LOCAL, clip=clip).fit(Q.clients, rounds=5, progress=False)
        for clip in (1e9, None)
    )
    torch.testing.assert_close(wide.published, free.published, rtol=1e-12, atol=1e-12)
