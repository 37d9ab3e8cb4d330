"""Local epochs on phi: one full-batch step is J; with z frozen it is FedAvg on phi; antithetic chains."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms.base import Facts
from fedpop.channel import Channel
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.kernels import Kernel, State, Transition
from fedpop.keys import Key
from tests.helpers import cohort_of, linear_model, ragged, seeded, train_key

WIDE = torch.float64


def network(dropout: float = 0.0) -> fp.Composition:
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout))
    head = nn.Linear(4, 3)
    return fp.Composition(seeded(body.to(WIDE), 1), seeded(head.to(WIDE), 2), "categorical")


def labelled(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def counted(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)).double()) for x, _ in ragged(sizes)]


def message(method: fp.FedSOUK, clients: Any, round: int = 0) -> dict[str, Tensor]:
    cohort = cohort_of(method.model, clients)
    server = method.init(Facts(len(cohort), 10), Key(0))
    broadcast = method.broadcast("train", server)
    local = method.enter(cohort.ids, broadcast, train_key())
    return method.local_round("train", broadcast, cohort, local, Channel(), train_key(round))[1].sums


# --- D_i ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["categorical", "poisson"])
@pytest.mark.parametrize("rate", [1e-3, 0.7])
def test_one_full_batch_step_sends_the_gradient_itself(likelihood: str, rate: float) -> None:
    if likelihood == "categorical":
        model, clients = network(), labelled()
    else:
        parts = (seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 1).to(WIDE), 2, 0.1))
        model, clients = fp.Composition(*parts, "poisson"), counted()
    plain = fp.FedSOUL(model, prior=fp.NormalPrior(scale=0.5), phi_epochs=0, phi_step=fp.Adam())
    steps = plain.but(phi_epochs=1, phi_rate=rate, phi_batch=None, phi_momentum=0.0)
    one, other = message(plain, clients), message(steps, clients)
    torch.testing.assert_close(other["J"], one["J"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(other["I"], one["I"], rtol=1e-9, atol=1e-11)
    assert float(other["examples"]) == 12


def test_more_steps_send_something_else() -> None:
    method = fp.FedSOUL(
        network(), prior=fp.NormalPrior(scale=0.5), phi_epochs=1, phi_rate=0.3, phi_batch=None
    )
    one, two = (message(method.but(phi_epochs=e), labelled())["J"] for e in (1, 2))
    assert float((one - two).norm() / one.norm()) > 0.01


@dataclass(frozen=True)
class Frozen(Kernel):
    """z never moves."""

    name: ClassVar[str] = "Frozen"
    adjusted: ClassVar[bool] = True

    def prepare(self, target: Any, z: Tensor, tuning: Any, round: int) -> None:
        return None

    def step(self, target: Any, plan: Any, state: State, noise: Any, m: int) -> Transition:
        ones = torch.ones_like(state.value)
        return Transition(state, ones, torch.zeros_like(ones))


class FixedHeads(fp.FedRep):
    """FedAvg on phi: every client keeps the head it is given."""

    def fit_head(self, phi: Tensor, cohort: Any, z: Tensor, key: Key, **_: Any) -> Tensor:
        return z


@pytest.mark.parametrize("server", ["a over N", "average"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_with_frozen_z_it_is_fedavg_on_phi(server: str, momentum: float) -> None:
    model, clients, a = network(dropout=0.3), labelled(), 0.2
    total = sum(len(y) for _, y in clients)
    local = fp.LocalSGD(epochs=3, rate=a, batch=2, momentum=momentum)
    ours = fp.FedSOUK(
        model,
        kernel=Frozen(),
        prior=fp.NormalPrior(scale=0.5, learn_mean=False, learn_scale=False),
        phi_epochs=3,
        phi_rate=a,
        phi_batch=2,
        phi_momentum=momentum,
        phi_step=fp.SGD(a / total) if server == "a over N" else fp.Average(),
        average=fp.Averaging("last"),
        start="random",
    )
    theirs = FixedHeads(model, body=local)
    start = ours.enter(torch.arange(4), ours.broadcast("train", ours.init(Facts(4, 5), Key(0))), train_key())
    phi, z = model.initial_phi(), start["z"][:, 0]
    cohort, facts = cohort_of(model, clients), Facts(4, 5)
    a_server = ours.init(facts, Key(0))
    b_server = theirs.init(facts, Key(0))
    for k in range(3):
        key = train_key(k)
        local_a = {**start, "z": z.unsqueeze(1)}
        _, sent, _ = ours.local_round(
            "train", ours.broadcast("train", a_server), cohort, local_a, Channel(), key
        )
        a_server = ours.server_round("train", a_server, sent, facts, key)
        _, sent, _ = theirs.local_round(
            "train", theirs.broadcast("train", b_server), cohort, {"z": z}, Channel(), key
        )
        b_server = theirs.server_round("train", b_server, sent, facts, key)
    assert float((a_server["phi"] - phi).norm()) > 0.1
    torch.testing.assert_close(a_server["phi"], b_server["phi"], rtol=1e-8, atol=1e-10)


def test_the_clients_are_told_the_falling_rate_and_it_cancels_from_what_they_send() -> None:
    method = fp.FedSOUL(
        network(),
        prior=fp.NormalPrior(scale=0.5),
        phi_epochs=1,
        phi_batch=None,
        phi_schedule=fp.Cosine(),
        phi_rate=0.4,
    )
    facts = Facts(4, 10)
    server = method.init(facts, Key(0))
    assert float(method.broadcast("train", server)["phi_rate"]) == pytest.approx(0.4)
    cohort = cohort_of(method.model, labelled())
    local = method.enter(cohort.ids, method.broadcast("train", server), train_key())
    for k in range(6):
        broadcast = method.broadcast("train", server)
        local, sent, _ = method.local_round("train", broadcast, cohort, local, Channel(), train_key(k))
        server = method.server_round("train", server, sent, facts, train_key(k))
    assert float(method.broadcast("train", server)["phi_rate"]) == pytest.approx(
        0.4 * fp.Cosine().factor(6, 10)
    )


def test_backbone_passes_count_the_epochs_and_the_chain_s_own_forward_pass() -> None:
    fit = {"rounds": 3, "progress": False}
    method = fp.FedSOUL(network(), prior=fp.NormalPrior(scale=0.5), phi_epochs=2, phi_batch=2, phi_rate=0.1)
    assert method.fit(labelled(), **fit).totals["backbone_passes"] == pytest.approx(3 * 12 * (2 + 1 / 3))
    plain = method.but(phi_epochs=0, phi_batch=None, phi_step=fp.Adam())
    assert plain.fit(labelled(), **fit).totals["backbone_passes"] == 36


def test_a_resumed_run_has_the_same_bits(tmp_path: Any) -> None:
    method = fp.FedSOUL(
        network(0.2),
        prior=fp.NormalPrior(scale=0.5),
        phi_epochs=2,
        phi_batch=2,
        phi_step=fp.Average(momentum=0.5),
        phi_schedule=fp.Cosine(),
        chains=2,
        antithetic=True,
    )

    class Stop(fp.Callback):
        def after_round(self, run: Any, metrics: Any) -> bool:
            if run.round == 4:
                raise InterruptedError
            return False

    whole = method.fit(labelled(), rounds=6, out=tmp_path / "a", checkpoint_every=2, progress=False)
    with pytest.raises(InterruptedError):
        method.fit(
            labelled(), rounds=6, out=tmp_path / "b", checkpoint_every=2, progress=False, callbacks=[Stop()]
        )
    again = method.fit(
        labelled(), rounds=6, out=tmp_path / "b", checkpoint_every=2, progress=False, resume=True
    )
    assert torch.equal(whole.published["phi"], again.published["phi"])
    assert torch.equal(whole.published["beta"], again.published["beta"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"phi_epochs": -1}, "phi_epochs"),
        ({"phi_epochs": 1.5}, "phi_epochs"),
        ({"phi_epochs": 1, "phi_rate": 0.0}, "phi_rate"),
        ({"phi_epochs": 0, "phi_step": fp.Average()}, "phi_epochs"),
        ({"antithetic": True, "chains": 3}, "pairs"),
        ({"phi_epochs": 1, "phi_momentum": 1.0}, "momentum"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        fp.FedSOUL(linear_model(), **settings)


# --- one client at a time or all together --------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 2, 3])
def test_large_models_are_trained_like_small_ones(batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(dropout=0.4)
    sgd = fp.LocalSGD(epochs=3, rate=0.3, batch=batch, momentum=0.6, decay=0.01)
    method = fp.FedAvg(model, local=sgd)

    def end() -> Tensor:
        return method.fit(labelled(), rounds=2, progress=False).published["phi"]

    together = end()
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", 0)
    torch.testing.assert_close(end(), together, rtol=1e-10, atol=1e-12)


def test_dropout_is_on_in_local_training_and_differs_by_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(p: float, epochs: int) -> Tensor:
        method = fp.FedAvg(network(p), local=fp.LocalSGD(epochs=epochs, rate=1e-6))
        return (
            method.fit(labelled(), rounds=1, progress=False).published["phi"] - network().initial_phi()
        ) / 1e-6

    assert float((move(0.5, 1) - move(0.0, 1)).norm()) > 1e-2
    # Two tiny epochs are twice one, unless the second epoch has masks of its own.
    torch.testing.assert_close(move(0.0, 2), 2 * move(0.0, 1), rtol=1e-3, atol=1e-3)
    assert float((move(0.5, 2) - 2 * move(0.5, 1)).norm()) > 1e-2


# --- antithetic chains ---------------------------------------------------------------------------


def test_antithetic_exact_draws_have_the_posterior_mean_as_their_mean() -> None:
    model = linear_model(variance=0.5)
    method = fp.FedSOUL(model, chains=2, antithetic=True, local_steps=3, prior=fp.NormalPrior(scale=1.0))
    cohort = cohort_of(model, ragged())
    server = method.init(Facts(4, 10), Key(0))
    broadcast = method.broadcast("train", server)
    local = method.enter(cohort.ids, broadcast, train_key())
    torch.testing.assert_close(local["z"].mean(1), torch.zeros(4, 2))  # the prior's mean
    target = method.target(server["phi"], server["beta"], model.features(server["phi"], cohort), cohort)
    draws = method._chain(target, local, server["beta"], cohort, train_key()).draws
    mean, _ = target.moments()
    torch.testing.assert_close(draws.mean(2), mean.unsqueeze(1).expand(-1, 3, -1), rtol=1e-4, atol=1e-5)
    assert float((draws[:, :, 0] - draws[:, :, 1]).norm()) > 0.1


def test_the_first_of_a_pair_is_what_it_is_without_the_second() -> None:
    model = network()
    pair = fp.FedSOUL(model, chains=2, antithetic=True, local_steps=3, prior=fp.NormalPrior(scale=1.0))
    free = pair.but(antithetic=False)
    cohort, facts = cohort_of(model, labelled()), Facts(4, 10)
    ends = []
    for method in (pair, free):
        server = method.init(facts, Key(0))
        local = method.enter(cohort.ids, method.broadcast("train", server), train_key())
        target = method.target(server["phi"], server["beta"], model.features(server["phi"], cohort), cohort)
        ends.append(method._chain(target, local, server["beta"], cohort, train_key()).draws)
    assert torch.equal(ends[0][:, :, 0], ends[1][:, :, 0])
    assert not torch.equal(ends[0][:, :, 1], ends[1][:, :, 1])
