"""Local epochs on phi: one full-batch step is J; with z frozen it is FedAvg on phi."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.kernels import Kernel, State, Transition
from fedpop.keys import Key
from fedpop.methods.base import Facts
from tests.crash import Crash, CrashAt
from tests.helpers import answers, cohort_of, linear_model, ragged, seeded, train_key

WIDE = torch.float64


def network(dropout: float = 0.0) -> fp.Composition:
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout))
    head = nn.Linear(4, 3)
    return fp.Composition(seeded(body.to(WIDE), 1), seeded(head.to(WIDE), 2), "categorical")


def labelled(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def counted(sizes: tuple[int, ...] = (4, 1, 0, 7)) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)).double()) for x, _ in ragged(sizes)]


def local_steps(
    optimiser: fp.steps.Optimiser | None = None,
    schedule: fp.steps.Schedule | None = None,
    epochs: int = 1,
    rate: float = 0.3,
    batch: int | None = None,
    momentum: float = 0.0,
) -> fp.steps.PhiStep:
    """Epochs on phi at every client."""
    local = fp.LocalSGD(epochs, rate, batch, momentum)
    return fp.steps.PhiStep(optimiser, local=local, schedule=schedule or fp.steps.Constant())


def message(method: fp.FedSOUK, clients: Any, round: int = 0) -> dict[str, Tensor]:
    cohort = cohort_of(method.model, clients)
    broadcast = method.broadcast(method.init(Facts(len(cohort), 10), Key(0), {}))
    local = method.enter(cohort.units, broadcast, train_key())
    return answers(method, cohort, local, broadcast, train_key(round)).total.plain


# --- D_i ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["categorical", "poisson"])
@pytest.mark.parametrize("rate", [1e-3, 0.7])
def test_one_full_batch_step_sends_the_gradient_itself(likelihood: str, rate: float) -> None:
    if likelihood == "categorical":
        model, clients = network(), labelled()
    else:
        parts = (seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 1).to(WIDE), 2, 0.1))
        model, clients = fp.Composition(*parts, "poisson"), counted()
    plain = fp.FedSOUL(model, prior=fp.priors.Normal(scale=0.5), phi_step=fp.steps.Adam())
    steps = plain.replace(phi_step=local_steps(fp.steps.Adam(), rate=rate))
    one, other = message(plain, clients), message(steps, clients)
    torch.testing.assert_close(other["J"], one["J"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(other["I"], one["I"], rtol=1e-9, atol=1e-11)
    assert float(other["examples"]) == 12


@pytest.mark.parametrize("likelihood", ["categorical", "normal"])
def test_weight_decay_adds_its_gradient_to_every_clients_step(likelihood: str) -> None:
    """One full-batch step of the mean loss with decay/2 norm(phi)^2 sends J_i - n_i decay phi; the noise of
    normal targets is no weight."""
    if likelihood == "categorical":
        model, clients = network(), labelled()
    else:
        parts = (seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 1).to(WIDE), 2, 0.1))
        model, clients = fp.Composition(*parts, "normal"), counted()
    method = fp.FedSOUL(model, engine="sampled", prior=fp.priors.Normal(scale=0.5), start="random")
    told = []
    for decay in (0.0, 0.7):
        local = fp.LocalSGD(rate=0.3, decay=decay)
        told.append(message(method.replace(phi_step=fp.steps.PhiStep(fp.steps.Adam(), local=local)), clients))
    phi = model.initial_phi()
    weights = torch.arange(len(phi)) < model.weights
    torch.testing.assert_close(told[1]["J"], told[0]["J"] - 12 * 0.7 * phi * weights, rtol=1e-9, atol=1e-11)


def test_more_steps_send_something_else() -> None:
    method = fp.FedSOUL(network(), prior=fp.priors.Normal(scale=0.5))
    one, two = (message(method.replace(phi_step=local_steps(epochs=e)), labelled())["J"] for e in (1, 2))
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
        chain=fp.chains.Chain(follow=False),
        prior=fp.priors.Normal(scale=0.5, learn_mean=False, learn_scale=False),
        phi_step=fp.steps.PhiStep(
            fp.steps.SGD(a / total) if server == "a over N" else fp.steps.MeanMove(), local=local
        ),
        average=fp.steps.Averaging("last"),
        start="random",
    )
    theirs = FixedHeads(model, body=local)
    cohort, facts = cohort_of(model, clients), Facts(4, 5)
    a_server, b_server = ours.init(facts, Key(0), {}), theirs.init(facts, Key(0), {})
    start = ours.enter(cohort.units, ours.broadcast(a_server), train_key())
    phi, z = model.initial_phi(), start["z"][:, 0]
    for k in range(3):
        key = train_key(k)
        sent = answers(ours, cohort, start, ours.broadcast(a_server), key).total
        a_server = ours.server_round(a_server, sent, facts, key)
        sent = answers(theirs, cohort, {"z": z}, theirs.broadcast(b_server), key).total
        b_server = theirs.server_round(b_server, sent, facts, key)
    assert float((a_server["phi"] - phi).norm()) > 0.1
    torch.testing.assert_close(a_server["phi"], b_server["phi"], rtol=1e-8, atol=1e-10)


RESTING = fp.priors.Normal(scale=0.5, learn_mean=False, learn_scale=False)
"""The local rate goes by the head's size, too."""


def test_the_clients_are_told_the_falling_rate_and_it_cancels_from_what_they_send() -> None:
    falling = local_steps(schedule=fp.steps.Cosine(), rate=0.4)
    method = fp.FedSOUL(network(), prior=RESTING, phi_step=falling)
    cohort, facts = cohort_of(method.model, labelled()), Facts(4, 10)
    server = method.init(facts, Key(0), {})
    assert float(method.broadcast(server)["phi_rate"]) == pytest.approx(0.4)
    local = method.enter(cohort.units, method.broadcast(server), train_key())
    for k in range(6):
        broadcast = method.broadcast(server)
        done = answers(method, cohort, local, broadcast, train_key(k))
        steady = method.replace(phi_step=local_steps(rate=1e-3))
        told = broadcast | {"phi_rate": torch.tensor(1e-3, dtype=WIDE)}
        same = answers(steady, cohort, local, told, train_key(k)).total.plain["J"]
        torch.testing.assert_close(done.total.plain["J"], same, rtol=1e-9, atol=1e-9)
        local, server = done.local, method.server_round(server, done.total, facts, train_key(k))
    assert float(method.broadcast(server)["phi_rate"]) == pytest.approx(0.4 * fp.steps.Cosine().factor(6, 10))


def test_backbone_passes_count_the_epochs_and_the_chain_s_own_forward_pass() -> None:
    fit = {"rounds": 3, "progress": False}
    method = fp.FedSOUL(
        network(), prior=fp.priors.Normal(scale=0.5), phi_step=local_steps(epochs=2, rate=0.1, batch=2)
    )
    assert method.fit(labelled(), **fit).totals["backbone_passes"] == pytest.approx(3 * 12 * (2 + 1 / 3))
    plain = method.replace(phi_step=fp.steps.Adam())
    assert plain.fit(labelled(), **fit).totals["backbone_passes"] == 36


def test_a_resumed_run_has_the_same_bits(tmp_path: Any) -> None:
    method = fp.FedSOUL(
        network(0.2),
        prior=fp.priors.Normal(scale=0.5),
        phi_step=local_steps(
            fp.steps.MeanMove(momentum=0.5), fp.steps.Cosine(), epochs=2, rate=0.01, batch=2
        ),
        chain=fp.chains.Chain(chains=2),
    )

    whole = method.fit(labelled(), rounds=6, out=tmp_path / "a", checkpoint_every=2, progress=False)
    with pytest.raises(Crash):
        method.fit(
            labelled(),
            rounds=6,
            out=tmp_path / "b",
            checkpoint_every=2,
            progress=False,
            callbacks=[CrashAt(4)],
        )
    again = method.fit(
        labelled(), rounds=6, out=tmp_path / "b", checkpoint_every=2, progress=False, resume=True
    )
    assert torch.equal(whole.published["phi"], again.published["phi"])
    assert torch.equal(whole.published["beta"], again.published["beta"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda: {"phi_step": local_steps(epochs=-1)}, "epochs"),
        (lambda: {"phi_step": local_steps(epochs=1.5)}, "epochs"),  # type: ignore[arg-type]
        (lambda: {"phi_step": local_steps(rate=0.0)}, "rate must be a positive"),
        (lambda: {"phi_step": local_steps(momentum=1.0)}, "momentum"),
        (lambda: {"phi_step": fp.steps.MeanMove()}, r"local=LocalSGD\(...\)"),
        (lambda: {"phi_step": fp.steps.PhiStep(fp.steps.MeanMove(), batch=2)}, r"local=LocalSGD\(...\)"),
        (lambda: {"phi_step": fp.steps.PhiStep(batch=2, local=fp.LocalSGD())}, "part of local"),
        (
            lambda: {"phi_step": local_steps(), "chain": fp.chains.Chain(rao_blackwell=True)},
            "exclude rao_blackwell",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Callable[[], dict[str, Any]], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        fp.FedSOUL(linear_model(), **settings())


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
