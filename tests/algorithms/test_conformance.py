"""What every method promises, asked of each one in ``METHODS``: to register a method is to test it here.

Methods are made with the settings of ``SETTINGS``, where theirs are not the default ones, and run on a few
clients with tiny models in double precision.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms import METHODS
from fedpop.algorithms.base import Algorithm, Round
from fedpop.channel import Answer, Channel, Tally, Tensors, Total
from fedpop.errors import DataError, SettingsError
from fedpop.federation.participation import Active, Participation
from fedpop.population.sites import Outcome
from fedpop.runtime import checkpoint
from fedpop.runtime.members import active_units
from fedpop.runtime.run import Run, Settings
from tests.apart import Apart
from tests.helpers import FRAME, generator, seeded

WIDE = torch.float64
CPU = torch.device("cpu")
NAMES = ("ada", "bea", "cem", "dag")
SIZES = (4, 3, 6, 5)
EVERYONE = torch.arange(len(NAMES))

SHORT = {"local_steps": 3, "chain": fp.chains.Chain(burn_in=4), "final": fp.chains.Final(2, 3, 2)}
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
    return {
        "any": fp.participation.Uniform(2),
        "one": fp.participation.Uniform(1),
        "full": fp.participation.Everyone(),
    }[METHODS[name].participation]


def fit(name: str, kind: str, rounds: int = 3, seed: int = 0, **options: Any) -> fp.Population:
    options = {"participation": partial(name), "progress": False} | options
    return made(name, kind).fit(clients(kind), rounds=rounds, seed=seed, **options)


@functools.cache
def fitted(name: str, kind: str, rounds: int = 3, seed: int = 0) -> fp.Population:
    """A short run, which several tests look at."""
    return fit(name, kind, rounds, seed)


class Stage:
    """A method in the middle of a run."""

    def __init__(
        self, method: Algorithm, kind: str, rounds: int = 1, rule: Participation | None = None
    ) -> None:
        federation = fp.Federation.of(clients(kind))
        method = method.prepared(federation.example)
        settings = Settings(20, 0, method.usual_participation() if rule is None else rule)
        self.run = Run(method, method.model.checked(federation), settings)
        self.run.begin()
        for _ in range(rounds):
            self.run.train_round()
        self.method = self.run.algorithm

    def now(self) -> Round:
        """The next round, as sites see it."""
        keys = (k.at(round=self.run.round, purpose="train") for k in (self.run.secret, self.run.key))
        return Round(self.run.round, self.method.broadcast(self.run.server), *keys)

    def before(self, ids: Tensor) -> Tensors:
        now = self.now()
        return {
            n: t.clone() for n, t in self.run.sites.states(self.method, ids, now.broadcast, now.key).items()
        }

    def work(self, ids: Tensor, weights: Tensor | None = None, ratio: bool = True) -> Outcome:
        """The next round's work of these clients; the run itself stays where it is."""
        active = Active(ids, torch.ones(len(ids)) if weights is None else weights, ratio)
        return self.run.sites.round(self.method, self.now(), active, self.run.plan)

    def after(self, done: Outcome) -> Tensors:
        """What the clients of an outcome would keep."""
        return joined([state for _, state in done.updates])


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
        whole = stage.work(EVERYONE, weights)
        halves = [stage.work(EVERYONE[s], weights[s]) for s in (slice(0, 1), slice(1, 4))]
        assert sum(h.total.count for h in halves) == whole.total.count == len(NAMES)
        for which in ("weighted", "plain", "named"):
            sums = [getattr(h.total, which) for h in halves]
            whole_sums = getattr(whole.total, which)
            same({n: sum(s[n] for s in sums) for n in whole_sums}, whole_sums)
        same(joined([stage.after(h) for h in halves]), stage.after(whole))
        assert whole.bytes_up == sum(h.bytes_up for h in halves)
        stage.run.train_round()


@every("softmax")
def test_bytes_up_are_those_of_the_messages(name: str, kind: str) -> None:
    method = made(name, kind)
    stage = Stage(method, kind)
    ids = EVERYONE[:1] if method.participation == "one" else EVERYONE
    for _ in range(3):
        done = stage.work(ids)
        vectors = done.total.weighted.values()
        assert done.bytes_up == len(ids) * sum(FRAME + v.numel() * v.element_size() for v in vectors)
        before = stage.run.totals["bytes_up"]
        stage.run.train_round()
        assert stage.run.totals["bytes_up"] - before == done.bytes_up


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
def test_private_state_is_in_no_encoded_message(name: str, kind: str) -> None:
    """Neither as it was before a round nor as it is after it, nor a multiple; questions before the rounds
    included."""
    apart = Apart(made(name, kind), clients(kind))
    seen: set[str] = set()
    for _ in range(3):
        before = {n: apart.state(n) for n in NAMES}
        apart.train_round()
        for site, _, _, vector in apart.traffic:
            for state in (before[site], apart.state(site)):
                for secret in set(apart.method.private) & set(state):
                    seen.add(secret)
                    rows = state[secret].reshape(-1, state[secret].shape[-1])
                    assert not holds(vector, state[secret])
                    assert not any(holds(vector, row) for row in rows)
    local = set().union(*(apart.state(n) for n in NAMES))
    assert seen == set(apart.method.private) & local or not apart.traffic


@pytest.mark.parametrize("name", METHODS)
def test_what_is_called_private_exists(name: str) -> None:
    seen: set[str] = set()
    for kind in MODELS:
        stage = Stage(made(name, kind), kind, rounds=0)
        seen |= set(stage.after(stage.work(EVERYONE[:1])))
    assert set(METHODS[name].private) <= seen


# --- one machine or many -----------------------------------------------------------------------

ALONE = {"FSGLD": "a relay: one client a round, whose answer is the chain itself"}
"""Methods that cannot do with sums over three sites, and why."""


def after_rounds(name: str, kind: str, way: str, rounds: int = 3, **settings: Any) -> tuple[Tensors, Tensors]:
    """Server and clients after some rounds with everyone, or with who was drawn."""
    method = made(name, kind, **settings)
    rule = fp.participation.Bernoulli([0.9, 0.8, 1.0, 0.95]) if method.participation == "any" else None
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


ACROSS = [
    (name, kind, way, compressor)
    for name in METHODS
    for way in ("sites of one", "sums over three")
    for kind, compressor in (("linear", "identity"), ("softmax", "identity"), ("softmax", "qsgd"))
    if compressor == "identity" or METHODS[name].compressed
    if way == "sites of one" or name not in ALONE
]


@pytest.mark.parametrize(("name", "kind", "way", "compressor"), ACROSS)
def test_the_same_result_across_sites(name: str, kind: str, way: str, compressor: str) -> None:
    """Real bytes between sites of one and the server; then nothing but sums over three sites."""
    server, local = after_rounds(name, kind, "a cohort of all", compressor=compressor)
    other, states = after_rounds(name, kind, way, compressor=compressor)
    assert server.keys() == other.keys()
    single = name in ("FedSOUL", "FedSOUK") and kind == "linear"  # the spectral start's moments are float32
    close = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-7, "atol": 1e-9}
    for n in server:
        torch.testing.assert_close(server[n], other[n], **close, equal_nan=True)
    for n in states:  # rows in the order in which clients were first heard of
        order = local["slots"].argsort()[-len(states[n]) :]
        torch.testing.assert_close(local[n], states[n][order], **close)


def test_who_cannot_do_with_sums_over_three() -> None:
    assert all(METHODS[name].participation == "one" and why for name, why in ALONE.items())


# --- what was not heard did not happen -----------------------------------------------------------


def refusing(stage: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the answers is lost at random: unfit, refused by the channel, or on the way."""
    g = generator(3)

    def unlucky(count: int) -> Tensor:
        return torch.rand(count, generator=g) < 0.34

    if stage == "unfit":
        add = Tally.add

        def fewer(self: Tally, answer: Answer, *rest: Any, **more: Any) -> Any:
            return add(self, replace(answer, good=answer.good & ~unlucky(len(answer.good))), *rest, **more)

        monkeypatch.setattr(Tally, "add", fewer)
    elif stage == "refused":
        carry = Channel.carry

        def refused(self: Channel, name: str, vectors: Tensor, sites: Tensor, key: Any) -> Any:
            seen, size = carry(self, name, vectors, sites, key)
            return torch.where(unlucky(len(seen)).unsqueeze(1), torch.nan, seen), size

        monkeypatch.setattr(Channel, "carry", refused)
    else:
        run.sites.lost = lambda number, units: unlucky(len(units))


@pytest.mark.parametrize("stage", ["unfit", "refused", "lost"])
@every("softmax", participation=("any", "full"))
def test_a_state_is_provisional_until_its_answer_was_heard(
    name: str, kind: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "LocalOnly" and stage == "refused":
        pytest.skip("nothing is sent that could be refused")
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
        for n in before.keys() - set(METHODS[name].keeps):
            assert torch.equal(now[n][out], before[n][out])
            changed = changed or not torch.equal(now[n], before[n])
    assert missed
    assert changed or not before.keys() - set(METHODS[name].keeps)


@pytest.mark.parametrize("stage", ["unfit", "refused", "lost"])
@pytest.mark.parametrize("rule", [None, 0.6, [0.5, 0.9, 0.7, 0.6]])
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
    rule = partial(name)
    run = Stage(made(name, kind), kind, 0, rule).run
    changed = False
    for k in range(6):
        store = run.sites.store
        before = {i: store.get(EVERYONE[i : i + 1], CPU) for i in range(4) if store.seen(EVERYONE[i])}
        active = active_units(rule, run.federation, run.key, k).ids.tolist()
        run.train_round()
        for i, state in before.items():
            now = store.get(EVERYONE[i : i + 1], CPU)
            alike = all(torch.equal(now[n], state[n]) for n in state)
            assert alike or i in active
            changed = changed or not alike
        assert set(active) | set(before) >= {i for i in range(4) if store.seen(EVERYONE[i])}
    # Those who are there do change, where there is something to keep that is not fitted once and for all.
    assert changed or not run.sites.store.tensors or name == "FSGLD"


@every("linear", "softmax")
def test_a_client_that_is_not_finite_is_left_out_and_named(name: str, kind: str) -> None:
    """It keeps its state, and the others go on as if it were not there."""
    stage = Stage(made(name, kind), kind)
    others = torch.tensor([0, 1, 3])
    alone = stage.method.participation == "one"
    ids = EVERYONE[2:3] if alone else EVERYONE
    for _ in range(12):  # a round that does not look at data cannot know
        before, healthy = stage.before(ids), stage.run.sites.federation
        packed = healthy.train
        rows = slice(int(packed.starts[2]), int(packed.starts[2] + packed.sizes[2]))
        x = packed.x.clone()
        x[rows] = torch.nan
        stage.run.sites.federation = replace(healthy, splits={"train": replace(packed, x=x)})
        stage.run.sites._everyone = None
        done = stage.work(ids)
        stage.run.sites.federation, stage.run.sites._everyone = healthy, None
        if done.left_out:
            break
        stage.run.train_round()
    assert done.left_out == (2,)
    place, after = (0 if alone else 2), stage.after(done)
    for n in after.keys() - ADAPTED.get(name, set()):
        assert torch.equal(after[n][place], before[n][place])
    total = done.total
    assert all(bool(torch.isfinite(v).all()) for v in total.weighted.values())
    assert total.count == (0 if alone else 3)
    key = stage.run.key.at(round=stage.run.round, purpose="train")
    server = stage.method.server_round(stage.run.server, total, stage.run.facts, key)
    floats = [t for t in server.values() if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    if not alone:
        rest = stage.work(others)
        same(total.weighted, rest.total.weighted)
        same({n: t[others] for n, t in after.items()}, stage.after(rest))
        for n in ("log_likelihood", "examples"):
            if n in rest.cost:
                assert done.cost[n] == pytest.approx(rest.cost[n], rel=1e-9)


@every("linear", participation=("any", "full"))
def test_a_round_of_nobody(name: str, kind: str) -> None:
    """Under b/|A| weights nothing moves; under 1/p_i weights everything stays finite."""
    stage = Stage(made(name, kind), kind)
    key = stage.run.key.at(round=stage.run.round, purpose="train")
    for ratio in (True, False):
        nobody = Total.of_nobody(len(NAMES), ratio)
        server = stage.method.server_round(stage.run.server, nobody, stage.run.facts, key)
        for n, v in server.items():
            if ratio and n in ("phi", "beta", "w", "z", "c", "memory"):
                assert torch.equal(v, stage.run.server[n])
            assert not v.is_floating_point() or bool(
                (torch.isfinite(v) | torch.isnan(stage.run.server[n])).all()
            )


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
    assert METHODS[name].usual_participation() == (
        fp.participation.Uniform(1) if allowed == "one" else fp.participation.Everyone()
    )
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
        done, whole = (s.work(EVERYONE[:1]).total.plain for s in (stage, plain))
        for n in set(METHODS[name].compressed) & set(done):
            # Powers of two is what the natural compressor rounds to.
            powers = torch.log2(done[n].abs()[done[n] != 0])
            assert torch.equal(powers, powers.round())
            assert done[n].shape == whole[n].shape
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
