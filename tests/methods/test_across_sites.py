"""One machine or many: the same result with sites of one and with sums over three; and what was not heard did
not happen. Asked of every method, and of their variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.message import Aggregate, Channel, Message, Tensors
from fedpop.message.guard import Guard
from fedpop.methods import METHODS
from fedpop.methods.base import Remembers
from fedpop.run.run import Run
from tests.apart import Apart
from tests.helpers import generator
from tests.methods.conformance import (
    CPU,
    EVERYONE,
    NAMES,
    Stage,
    able,
    clients,
    every,
    made,
)


def keeps(name: str) -> set[str]:
    """Local state of a method that is right in any case."""
    cls = METHODS[name]
    return set(cls.keeps) if issubclass(cls, Remembers) else set()


# --- one machine or many -----------------------------------------------------------------------

ALONE = {"FSGLD": "a relay: one client a round, whose answer is the chain itself"}
"""Methods that cannot do with sums over three sites, and why."""


def after_rounds(name: str, kind: str, way: str, rounds: int = 2, **settings: Any) -> tuple[Tensors, Tensors]:
    """Server and clients after some rounds with everyone, or with who was drawn."""
    method = made(name, kind, **settings)
    chances = method.participation == "any"
    rule = fp.participation.Bernoulli([0.9, 0.8, 1.0, 0.95, 0.9, 1.0, 0.85]) if chances else None
    if way == "a cohort of all":
        stage = Stage(method, kind, rounds, rule)
        return stage.run.server, stage.run.sites.store.state()
    apart = Apart(method, clients(kind), rule=rule, exposed=3 if way == "sums over three" else 1)
    for _ in range(rounds):
        apart.train_round()
    each = [apart.state(n) for n in NAMES]
    return apart.server, {
        f"local.{n}": torch.cat([e[n] for e in each]) for n in (each[0] if all(each) else {})
    }


WAYS = ("sites of one", "sums over three")
ACROSS = [
    (name, kind, compressor)
    for name in METHODS
    for kind, compressor in (("linear", "identity"), ("softmax", "identity"), ("softmax", "qsgd"))
    if able(name, kind) and (compressor == "identity" or METHODS[name].compressed)
]


@pytest.mark.parametrize(("name", "kind", "compressor"), ACROSS)
def test_the_same_result_across_sites(name: str, kind: str, compressor: str) -> None:
    """Real bytes between sites of one and the server; then nothing but sums over three sites."""
    server, local = after_rounds(name, kind, "a cohort of all", compressor=compressor)
    # The spectral start's moments are float32.
    single = kind == "linear" and name in ("FedSOUL", "FedSOUK", "MaximumMarginalLikelihood")
    close = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-7, "atol": 1e-9}
    for way in WAYS[:1] if name in ALONE else WAYS:
        other, states = after_rounds(name, kind, way, compressor=compressor)
        assert server.keys() == other.keys()
        for n in server:
            torch.testing.assert_close(server[n], other[n], **close, equal_nan=True)
        for n in states:  # rows in the order in which clients were first heard of
            order = local["slots"].argsort()[-len(states[n]) :]
            torch.testing.assert_close(local[n], states[n][order], **close)


VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exact engine": ("MaximumMarginalLikelihood", "linear", {"prior": "full"}),
    "local epochs": ("FedSOUL", "softmax", {"phi_step": fp.steps.PhiStep(local=fp.LocalSGD(2, 0.01, 2))}),
    "the paper's": (
        "FedSOUL",
        "linear",
        {"kernel": "ula", "beta_step": fp.steps.SGD(1e-3), "start": "random"},
    ),
    "QLSD++": ("QLSD", "softmax", {"variant": "++", "batch": 2, "compressor": "qsgd", "refresh": 2}),
    "QLSD*": ("QLSD", "softmax", {"variant": "star", "compressor": "qsgd"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_across_sites(variant: str) -> None:
    name, kind, settings = VARIANTS[variant]
    server, _ = after_rounds(name, kind, "a cohort of all", rounds=3, **settings)
    for way in WAYS:
        other, _ = after_rounds(name, kind, way, rounds=3, **settings)
        assert server.keys() == other.keys()
        for n in server:
            torch.testing.assert_close(server[n], other[n], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_who_cannot_do_with_sums_over_three() -> None:
    assert all(METHODS[name].participation == "one" and why for name, why in ALONE.items())


# --- what was not heard did not happen -----------------------------------------------------------


STAGES = ["unfit", "refused", "suspected", "lost"]


def refusing(stage: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the answers is lost at random: unfit, refused by the channel, out of proportion for the
    guard, or on the way."""
    g = generator(3)

    def unlucky(count: int) -> Tensor:
        return torch.rand(count, generator=g) < 0.34

    if stage == "unfit":
        send = Channel.send

        def fewer(self: Channel, message: Message, *rest: Any, **more: Any) -> Any:
            return send(self, message.without(unlucky(len(message.units))), *rest, **more)

        monkeypatch.setattr(Channel, "send", fewer)
    elif stage == "refused":
        add = Aggregate.add

        def refused(self: Aggregate, message: Message, *rest: Any) -> Any:
            bad = unlucky(len(message.units)).unsqueeze(1)
            vectors = {n: torch.where(bad, torch.nan, v) for n, v in message.vectors.items()}
            return add(self, replace(message, vectors=vectors, checked=False), *rest)

        monkeypatch.setattr(Aggregate, "add", refused)
    elif stage == "suspected":

        def suspects(self: Guard, message: Message, examples: Tensor, numbers: Any) -> Tensor:
            return message.received & unlucky(len(message.units))

        monkeypatch.setattr(Guard, "suspects", suspects)
    else:
        run.sites.lost = lambda number, units: unlucky(len(units))


@pytest.mark.parametrize("stage", STAGES)
@every("softmax", participation=("any", "full"))
def test_a_state_is_provisional_until_its_answer_was_heard(
    name: str, kind: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "LocalOnly" and stage == "refused":
        pytest.skip("nothing is sent that could be refused")
    if stage == "suspected" and not METHODS[name].guarded:
        pytest.skip("it sends states, which no norm can judge")
    settings = {"compressor": "qsgd"} if METHODS[name].compressed and stage == "refused" else {}
    run = Stage(made(name, kind, **settings), kind).run
    run.sites.lost = lambda number, units: torch.zeros(len(units), dtype=torch.bool)  # no fused sums
    refusing(stage, run, monkeypatch)
    changed, missed = False, False
    for _ in range(4):
        before = run.sites.store.get(EVERYONE, CPU)
        metrics = run.train_round()
        now = run.sites.store.get(EVERYONE, CPU)
        out = torch.tensor([n in metrics["left_out"] for n in NAMES])
        missed = missed or bool(out.any())
        for n in before.keys() - keeps(name):
            assert torch.equal(now[n][out], before[n][out])
            changed = changed or not torch.equal(now[n], before[n])
    assert missed
    assert changed or not before.keys() - keeps(name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rule", [None, 0.6, [0.5, 0.9, 0.7, 0.6, 0.8, 0.7, 0.6]])
def test_what_both_sides_remember_agrees(stage: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCAFFOLD's c is the mean of the c_i, QLSD++'s memory the sum of the clients', whatever is lost."""
    whose = fp.participation.Everyone() if rule is None else fp.participation.Bernoulli(rule)
    for name, settings, ours, theirs, share in (
        ("SCAFFOLD", {}, "c", "c", 1 / len(NAMES)),
        ("QLSD", {"variant": "++", "batch": 2, "compressor": "qsgd", "refresh": 3}, "memory", "memory", 1.0),
    ):
        with monkeypatch.context() as patch:
            run = Stage(made(name, "softmax", **settings), "softmax", 0, whose).run
            run.sites.lost = lambda number, units: torch.zeros(len(units), dtype=torch.bool)
            refusing(stage, run, patch)
            lost = 0
            for _ in range(8):
                lost += len(run.train_round()["left_out"])
                held = run.sites.store.tensors[theirs][: run.sites.store.used]
                torch.testing.assert_close(run.server[ours], share * held.sum(0), rtol=1e-9, atol=1e-10)
            assert lost
            assert bool(run.server[ours].any())
