"""What every method promises, asked of each one in ``METHODS``: to register a method is to test it here.

Methods are made with the settings of ``SETTINGS``, where theirs are not the default ones, and run on a few
clients with tiny models in double precision.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms import METHODS
from fedpop.algorithms.base import Algorithm, Facts, Info, Message, Tensors
from fedpop.channel import Channel
from fedpop.errors import DataError, SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation.rules import Participation
from fedpop.runtime import checkpoint
from fedpop.runtime.run import Run, Settings
from tests.helpers import generator, seeded

WIDE = torch.float64
CPU = torch.device("cpu")
NAMES = ("ada", "bea", "cem", "dag")
SIZES = (4, 3, 6, 5)
EVERYONE = torch.arange(len(NAMES))

SHORT = {"local_steps": 3, "burn_in": 4, "final": fp.chains.Final(2, 3, 2)}
SETTINGS: dict[str, dict[str, Any]] = {
    "FedSOUL": SHORT,
    "FedSOUK": SHORT,
    "FedRep": {"head": fp.LocalSGD(epochs=2)},
    "L2GD": {"p": 0.5, "local": fp.LocalSGD(rate=0.1)},
    "PFedMe": {"local": fp.LocalSGD(epochs=2, rate=0.01)},
    "PerFedAvg": {"alpha": 0.1, "local": fp.LocalSGD(rate=0.1)},
}
"""What is not left at its default: passes that would be long, and rates at which a few rounds show."""

ADAPTED: dict[str, set[str]] = {n: {"log_step", "updates"} for n in ("FedSOUL", "FedSOUK")}
"""Local state that is to change when a round fails: a chain that diverged tries a shorter step."""


def linear() -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(3, 2, bias=False).to(WIDE), 1),
        seeded(nn.Linear(2, 1, bias=False).to(WIDE), 2),
        fp.likelihoods.Normal(0.5),
    )


def softmax() -> fp.Composition:
    body, head = seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3).to(WIDE), 2)
    return fp.Composition(body, head, "categorical")


def curved() -> fp.Composition:
    """A head that is not linear: some states exist for such heads only."""
    head = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3))
    return fp.Composition(seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(head.to(WIDE), 2), "categorical")


MODELS = {"linear": linear, "softmax": softmax, "curved": curved}


def clients(kind: str, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    g = generator(seed)
    out = {}
    for name, n in zip(NAMES, SIZES, strict=True):
        x = torch.randn(n, 3, generator=g, dtype=WIDE)
        noise = torch.randn(n, generator=g, dtype=WIDE)
        out[name] = (x, x.sum(1) + noise if kind == "linear" else torch.randint(3, (n,), generator=g))
    return out


def made(name: str, kind: str, **settings: Any) -> Algorithm:
    return METHODS[name](MODELS[kind](), **SETTINGS.get(name, {}) | settings)


def partial(name: str) -> Participation:
    """A rule under which not everyone is there, where the method allows one."""
    return {"any": fp.participation.Uniform(2), "one": fp.participation.Uniform(1), "full": fp.participation.Everyone()}[METHODS[name].participation]


def fit(name: str, kind: str, rounds: int = 3, seed: int = 0, **options: Any) -> fp.Population:
    options = {"participation": partial(name), "progress": False} | options
    return made(name, kind).fit(clients(kind), rounds=rounds, seed=seed, **options)


@functools.cache
def fitted(name: str, kind: str, rounds: int = 3, seed: int = 0) -> fp.Population:
    """A short run, which several tests look at."""
    return fit(name, kind, rounds, seed)


@dataclass
class Work:
    """What a cohort's round was given and gave."""

    before: Tensors
    after: Tensors
    message: Message
    info: Info
    channel: Channel


class Stage:
    """A method in the middle of a run."""

    def __init__(self, method: Algorithm, kind: str, rounds: int = 1) -> None:
        federation = method.model.prepare(fp.Federation.of(clients(kind)))
        settings = Settings(20, 0, method.usual_participation(), "1GiB", 50)
        self.run = Run(method, federation, settings, None, [])
        self.run._begin(resume=False)
        for _ in range(rounds):
            self.run.train_round()
        self.method = self.run.algorithm

    def cohort(self, ids: Tensor, weights: Tensor | None = None) -> Cohort:
        return self.run.federation.cohort(ids, torch.ones(len(ids)) if weights is None else weights, CPU)

    def work(self, cohort: Cohort) -> Work:
        """The next round's work of this cohort; the run itself stays where it is."""
        key = self.run.key.at(round=self.run.round, purpose="train")
        broadcast = self.method.broadcast("train", self.run.server)
        local = self.run._enter(cohort.ids, broadcast, key)
        channel = self.method.channel(key)
        before = {n: t.clone() for n, t in local.items()}
        return Work(
            before, *self.method.local_round("train", broadcast, cohort, local, channel, key), channel
        )


def every(*kinds: str, participation: tuple[str, ...] = ("any", "one", "full")) -> Any:
    cases = [(n, k) for n, m in METHODS.items() if m.participation in participation for k in kinds]
    return pytest.mark.parametrize(("name", "kind"), cases)


def same(one: Tensors, other: Tensors) -> None:
    """Alike to rounding: sums are formed in another order."""
    assert one.keys() == other.keys()
    for n in one:
        torch.testing.assert_close(one[n], other[n], rtol=1e-9, atol=1e-10, equal_nan=True)


def joined(parts: list[Tensors]) -> Tensors:
    return {n: torch.cat([p[n] for p in parts]) for n in parts[0]}


# --- messages ----------------------------------------------------------------------------------


@every("linear", "softmax", participation=("any", "full"))
def test_two_halves_send_what_the_whole_cohort_sends(name: str, kind: str) -> None:
    method = made(name, kind)
    stage = Stage(method, kind)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5] if method.participation == "any" else [1.0] * 4)
    for _ in range(2):
        whole = stage.work(stage.cohort(EVERYONE, weights))
        halves = [stage.work(stage.cohort(EVERYONE[s], weights[s])) for s in (slice(0, 1), slice(1, 4))]
        total = halves[0].message + halves[1].message
        assert total.count == whole.message.count == len(NAMES)
        same(total.sums, whole.message.sums)
        if whole.after:
            same(joined([h.after for h in halves]), whole.after)
        assert whole.channel.bytes_up == sum(h.channel.bytes_up for h in halves)
        stage.run.train_round()


@every("softmax")
def test_bytes_up_are_those_of_the_messages(name: str, kind: str) -> None:
    method = made(name, kind)
    stage = Stage(method, kind)
    ids = EVERYONE[:1] if method.participation == "one" else EVERYONE
    for _ in range(3):
        done = stage.work(stage.cohort(ids))
        vectors = done.message.sums.values()
        assert done.channel.bytes_up == len(ids) * sum(v.numel() * v.element_size() for v in vectors)
        before = stage.run.totals["bytes_up"]
        stage.run.train_round()
        assert stage.run.totals["bytes_up"] - before == done.channel.bytes_up


def holds(vector: Tensor, secret: Tensor) -> bool:
    """Whether the secret's numbers, or a multiple of them, are in the vector one after the other."""
    v, s = vector.flatten().double(), secret.flatten().double()
    if len(s) > len(v) or not bool(s.any()):
        return False
    windows = v.unfold(0, len(s), 1)
    if len(s) == 1:  # any number is a multiple of any other
        return bool(torch.isclose(windows, s, rtol=1e-9, atol=0).any())
    sizes = windows.norm(dim=1) * s.norm()
    return bool(((windows @ s).abs() >= (1 - 1e-12) * sizes)[sizes > 0].any())


def test_holds_can_tell() -> None:
    vector, secret = torch.tensor([0.0, 1.0, -2.0, 3.0]), torch.tensor([[1.0, -2.0]])
    assert holds(vector, secret)
    assert holds(vector, -0.3 * secret)
    assert holds(vector, torch.tensor([3.0]))
    assert not holds(vector, secret + torch.tensor([[0.0, 1e-4]]))
    assert not holds(vector, torch.tensor([2.9]))
    assert not holds(torch.zeros(4), secret)


@every("linear", "softmax", "curved")
def test_private_state_is_in_no_message(name: str, kind: str) -> None:
    """Neither as it was before the round nor as it is after it, nor a multiple; each client alone."""
    stage = Stage(made(name, kind), kind)
    for i in EVERYONE:
        done = stage.work(stage.cohort(i[None]))
        for secret in set(stage.method.private) & set(done.after):
            for state in (done.before[secret], done.after[secret]):
                rows = state.reshape(-1, state.shape[-1]) if state.dim() > 1 else state[None]
                for vector in done.message.sums.values():
                    assert not holds(vector, state)
                    assert not any(holds(vector, row) for row in rows)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_called_private_exists(name: str) -> None:
    seen: set[str] = set()
    for kind in MODELS:
        stage = Stage(made(name, kind), kind, rounds=0)
        seen |= set(stage.work(stage.cohort(EVERYONE[:1])).after)
    assert set(METHODS[name].private) <= seen


# --- runs --------------------------------------------------------------------------------------


class CrashError(Exception):
    pass


class CrashAt(fp.callbacks.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        if run.round == self.round:
            raise CrashError
        return False


def last_state(folder: Path) -> tuple[checkpoint.Checkpoint, list[dict[str, Any]]]:
    saved = checkpoint.read(folder / "checkpoints")
    assert saved is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return saved, [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@every("softmax")
def test_a_run_that_was_stopped_resumes_to_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    """Server, clients and metrics; stopped between two checkpoints."""
    settings: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2}
    fit(name, kind, out=tmp_path / "whole", **settings)
    with pytest.raises(CrashError):
        fit(name, kind, out=tmp_path / "broken", callbacks=[CrashAt(3)], **settings)
    fit(name, kind, out=tmp_path / "broken", resume=True, **settings)
    (one, lines), (other, more) = (last_state(tmp_path / f) for f in ("whole", "broken"))
    assert one.round == other.round == 5
    assert one.tensors.keys() == other.tensors.keys()
    assert [n for n in one.tensors if not torch.equal(one.tensors[n], other.tensors[n])] == []
    assert lines == more


def state_of(population: fp.Population) -> Tensors:
    """Everything that a run ended with."""
    assert population.store is not None
    return population.published | population.store.state()


@every("linear")
def test_the_seed_is_the_run(name: str, kind: str) -> None:
    one, again, other = fitted(name, kind), fit(name, kind), fitted(name, kind, seed=1)
    assert state_of(one).keys() == state_of(again).keys()
    assert all(torch.equal(state_of(one)[n], state_of(again)[n]) for n in state_of(one))
    for a, b in zip(one.history, again.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    a, b = state_of(one), state_of(other)
    assert a.keys() != b.keys() or any(
        a[n].shape != b[n].shape or not torch.equal(a[n], b[n]) for n in a if a[n].is_floating_point()
    )


@every("linear", participation=("any", "one"))
def test_absent_clients_stay_as_they_were(name: str, kind: str) -> None:
    method, rule = made(name, kind), partial(name)
    federation = method.model.prepare(fp.Federation.of(clients(kind)))
    run = Run(method, federation, Settings(6, 0, rule, "1GiB", 50), None, [])
    run._begin(resume=False)
    changed = False
    for k in range(6):
        before = {i: run.store.get(EVERYONE[i : i + 1], CPU) for i in range(4) if run.store.seen(EVERYONE[i])}
        key = run.key.at(round=k, purpose="train").at(purpose="who")
        active = rule.draw(len(NAMES), key).ids.tolist()
        run.train_round()
        for i, state in before.items():
            now = run.store.get(EVERYONE[i : i + 1], CPU)
            alike = all(torch.equal(now[n], state[n]) for n in state)
            assert alike or i in active
            changed = changed or not alike
        assert set(active) | set(before) >= {i for i in range(4) if run.store.seen(EVERYONE[i])}
    # Those who are there do change, where there is something to keep that is not fitted once and for all.
    assert changed or not run.store.tensors or name == "FSGLD"


@every("linear", "softmax")
def test_a_client_that_is_not_finite_is_left_out_and_named(name: str, kind: str) -> None:
    """It keeps its state, and the others go on as if it were not there."""
    stage = Stage(made(name, kind), kind)
    others = torch.tensor([0, 1, 3])
    alone = stage.method.participation == "one"
    for _ in range(12):  # a round that does not look at data cannot know
        cohort = stage.cohort(EVERYONE[2:3] if alone else EVERYONE)
        bad = torch.full_like(cohort.x, torch.nan)
        mine = cohort.ids[cohort.owner] == 2
        done = stage.work(replace(cohort, x=torch.where(mine.unsqueeze(1), bad, cohort.x)))
        if done.info.left_out:
            break
        stage.run.train_round()
    assert done.info.left_out == (2,)
    place = 0 if alone else 2
    for n in done.after.keys() - ADAPTED.get(name, set()):
        assert torch.equal(done.after[n][place], done.before[n][place])
    assert all(bool(torch.isfinite(v).all()) for v in done.message.sums.values())
    assert done.message.count == (0 if alone else 3)
    key = stage.run.key.at(round=stage.run.round, purpose="train")
    server = stage.method.server_round("train", stage.run.server, done.message, Facts(4, 20), key)
    floats = [t for t in server.values() if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    if not alone:
        rest = stage.work(stage.cohort(others))
        same(done.message.sums, rest.message.sums)
        same({n: t[others] for n, t in done.after.items()}, rest.after)
        for n in ("log_likelihood", "examples"):
            if n in rest.info.sums:
                assert done.info.sums[n] == pytest.approx(rest.info.sums[n], rel=1e-9)


# --- predictions -------------------------------------------------------------------------------


def mean_of(predictive: Any, kind: str) -> Tensor:
    out: Tensor = predictive.mean if kind == "linear" else predictive.probs
    return out


def predicts(predictive: Any, kind: str) -> bool:
    return bool(torch.isfinite(mean_of(predictive, kind)).all())


@every("linear", "softmax")
def test_everyone_can_predict(name: str, kind: str) -> None:
    """After one round in which most were absent, where that is allowed: with what is published alone."""
    population = fitted(name, kind, rounds=1)
    label = population.algorithm.label
    x = torch.randn(5, 3, generator=generator(9), dtype=WIDE)
    assert population.published["phi"].shape == (population.model.phi_layout.size,)
    for client in NAMES:
        assert predicts(population.predict(client, x), kind)
    own = clients(kind, seed=5)["cem"]
    assert predicts(population.new_client(*own).predict(x), kind)
    said = ""
    try:
        nobody = population.new_client().predict(x)
    except DataError as error:
        said = str(error)
    # It predicts, or says in a sentence which method has nothing to offer.
    assert (label in said and len(said.split()) > 5) if said else predicts(nobody, kind)


@every("softmax")
def test_a_saved_population_predicts_the_same(name: str, kind: str, tmp_path: Path) -> None:
    population = fitted(name, kind)
    again = fp.load(population.save(tmp_path))
    x = torch.randn(5, 3, generator=generator(9), dtype=WIDE)
    assert type(again.algorithm) is METHODS[name]
    assert again.algorithm.describe() == population.algorithm.describe()
    for client in NAMES:
        one, other = (mean_of(p.predict(client, x), kind) for p in (population, again))
        assert torch.equal(one, other)
    own = clients(kind, seed=5)["cem"]
    one, other = (mean_of(p.new_client(*own).predict(x), kind) for p in (population, again))
    assert torch.equal(one, other)


# --- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_rule_of_participation_is_enforced(name: str) -> None:
    kind = "linear"
    allowed = METHODS[name].participation
    assert allowed in ("any", "full", "one")
    assert METHODS[name].usual_participation() == (fp.participation.Uniform(1) if allowed == "one" else fp.participation.Everyone())
    for rule, fits in (
        (fp.participation.Everyone(), allowed in ("any", "full")),
        (fp.participation.Uniform(2), allowed == "any"),
        (fp.participation.Bernoulli(0.5), allowed == "any"),
        (fp.participation.Uniform(1), allowed in ("any", "one")),
    ):
        if fits:
            made(name, kind).check_participation(rule)
        else:
            with pytest.raises(SettingsError, match="participation="):
                fit(name, kind, participation=rule)


@pytest.mark.parametrize("name", METHODS)
def test_passes_are_counted_only_through_a_backbone_that_learns(name: str) -> None:
    """Features of a frozen one are computed once, for every method alike."""
    given = clients("linear")
    assert fit(name, "linear", participation=None, rounds=4).totals["backbone_passes"] > 0
    frozen = fp.Composition(None, seeded(nn.Linear(3, 1, bias=False).to(WIDE), 2), fp.likelihoods.Normal(0.5))
    method = METHODS[name](frozen, **SETTINGS.get(name, {}))
    totals = method.fit(given, rounds=4, progress=False).totals
    assert totals["backbone_passes"] == 0
    assert totals["head_steps"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_compressor_works_or_is_refused(name: str) -> None:
    if not METHODS[name].compressed:
        with pytest.raises(SettingsError, match=r"compress"):
            made(name, "softmax", compressor="natural")
        return
    stage, plain = (Stage(made(name, "softmax", **c), "softmax") for c in ({"compressor": "natural"}, {}))
    seen = set()
    for _ in range(3):
        done, whole = (s.work(s.cohort(EVERYONE[:1])) for s in (stage, plain))
        for n in set(METHODS[name].compressed) & set(done.message.sums):
            # Powers of two is what the natural compressor rounds to.
            powers = torch.log2(done.message.sums[n].abs()[done.message.sums[n] != 0])
            assert torch.equal(powers, powers.round())
            assert done.message.sums[n].shape == whole.message.sums[n].shape
            seen.add(n)
        stage.run.train_round()
        plain.run.train_round()
    assert seen
    assert all(bool(torch.isfinite(t).all()) for t in stage.run.server.values() if t.is_floating_point())


@every("softmax")
def test_clients_with_one_class_only_are_clients_like_any_other(name: str, kind: str) -> None:
    data = {n: (x, torch.full_like(y, i % 3)) for i, (n, (x, y)) in enumerate(clients(kind).items())}
    population = made(name, kind).fit(data, rounds=3, progress=False)
    assert all(not metrics["left_out"] for metrics in population.history)
    for client, (x, _) in data.items():
        if len(x):
            probs = population.predict(client, x).probs
            torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[:, 0]))
