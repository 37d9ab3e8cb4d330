"""Annealing of the noise variance: the path, who sees it, what waits for its end, and what it finds."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.oracle import everyone, log_likelihood
from fedpop.keys import Key
from fedpop.message import Total
from fedpop.methods.base import Staged, role_of
from fedpop.questions.targets import TargetSize
from fedpop.run.run import Run
from fedpop.server.optimisers import Stage
from tests.crash import Crash, CrashAt
from tests.helpers import answers, asked, cohort_of, linear_model, population_data, ragged, run_of, train_key
from tests.optima import gap

VARIANCE, ROUNDS = 0.01, 12
NONE = fp.steps.Anneal(rounds=0)


def data() -> list[tuple[Tensor, Tensor]]:
    return population_data(6, 5, 3, 2, VARIANCE)[0]


def soul(variance: float | str = VARIANCE, **settings: Any) -> fp.FedSOUL:
    return fp.FedSOUL(
        linear_model(variance=variance), **({"anneal": fp.steps.Anneal(4), "engine": "sampled"} | settings)
    )


def begun(method: fp.FedSOUL, rounds: int = ROUNDS, **settings: Any) -> Run:
    return run_of(method, data(), rounds=rounds, **settings)


def start_of(clients: list[tuple[Tensor, Tensor]]) -> float:
    return float(torch.cat([y for _, y in clients]).double().square().mean()) / 2


# --- where it starts ---------------------------------------------------------------------------


def size_of(model: fp.Composition, clients: list[tuple[Tensor, Tensor]], minimum: int = 2) -> float:
    known, _ = asked(TargetSize(model, minimum), cohort_of(model, clients), {}, Key(0))
    return float(known["target_size"])


def test_the_size_of_y_is_its_variance_about_the_intercept() -> None:
    clients = [(x, y + 3) for x, y in ragged((3, 0, 5, 4))]
    y = torch.cat([y for _, y in clients]).double()
    without = linear_model()
    assert size_of(without, clients) == pytest.approx(float(y.square().mean()), rel=1e-6)
    for model in (
        fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1, bias=False), "normal"),
        fp.Composition(nn.Linear(3, 2, bias=False), nn.Linear(2, 1), "normal"),
    ):
        assert size_of(model, clients) == pytest.approx(float(y.var(correction=0)), rel=1e-6)


def test_several_outputs_share_one_size() -> None:
    x, y = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.arange(18.0).reshape(9, 2)
    model = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 2), "normal")
    assert size_of(model, [(x, y)]) == pytest.approx(float(y.var(0, correction=0).mean()), rel=1e-6)


def test_clients_below_the_minimum_do_not_tell_their_size() -> None:
    x, y = torch.ones(1, 3), torch.tensor([7.0])
    model = linear_model()
    assert size_of(model, [*data(), (x, y)]) == pytest.approx(2 * start_of(data()), rel=1e-6)
    known, done = asked(TargetSize(model, 2), cohort_of(model, [(x, y)]), {}, Key(0))
    assert known == {}
    assert not bool(done.total.plain["size"].any())
    assert "noise" not in run_of(soul(), [(x, y)], rounds=ROUNDS).server


# --- the path, and who sees it -----------------------------------------------------------------


def test_the_path_is_geometric_and_ends() -> None:
    run, seen = begun(soul()), []
    for _ in range(6):
        seen.append(run.algorithm.broadcast(run.server).get("noise"))
        run.train_round()
    start = start_of(data())
    path = [start * (VARIANCE / start) ** (k / 4) for k in range(4)]
    assert [float(v) for v in seen[:4]] == pytest.approx(path, rel=1e-5)
    assert seen[4:] == [None, None]


def test_a_variance_that_is_large_already_stays() -> None:
    run = begun(soul(variance=50.0))
    for _ in range(4):
        assert float(run.server["noise"]) == pytest.approx(50.0)
        run.train_round()


def test_short_runs_anneal_over_their_first_half() -> None:
    method = soul(anneal=fp.steps.Anneal())
    assert [method.warm_up(rounds) for rounds in (1, 7, 199, 200, 10_000)] == [0, 3, 99, 100, 100]
    assert role_of(fp.FedAvg(method.model), Staged) is None


@pytest.mark.parametrize("setting", [{"rounds": -1}, {"rounds": 0.5}, {"minimum": 0}])
def test_settings_are_checked(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(setting))):
        fp.steps.Anneal(**setting)


def test_clients_work_with_the_variance_that_is_sent() -> None:
    """To the bit what a method with this variance in its model answers."""
    run, other = begun(soul()), soul(variance=0.7)
    told = run.algorithm.broadcast(run.server) | {"noise": torch.tensor(0.7, dtype=torch.float64)}
    plain = {n: v for n, v in told.items() if n != "noise"}
    cohort = cohort_of(other.model, data())
    local = other.enter(cohort.units, told, train_key())
    ours = answers(run.algorithm, cohort, local, told, train_key()).total.plain
    theirs = answers(other, cohort, local, plain, train_key()).total.plain
    without = answers(run.algorithm, cohort, local, plain, train_key()).total.plain
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)
        assert not torch.equal(without[name], value)


def test_a_round_without_anybody_cools_too() -> None:
    run = begun(soul())
    before = run.server
    silent = Total({}, {}, {}, 0, 0.0, 6, ratio=True)
    after = run.algorithm.server_round(before, silent, run.facts, run.key.at(round=0))
    assert float(after["noise"]) < float(before["noise"])
    assert torch.equal(after["phi"], before["phi"])


def test_what_is_published_has_the_variance_that_was_given() -> None:
    run = begun(soul())
    run.train_round()
    population = run.population()
    theta, method = population.published, soul()
    exact = log_likelihood(
        method, everyone(method, run.federation), theta["phi"].double(), theta["beta"].double()
    )
    assert population.log_likelihood().value == pytest.approx(float(exact), rel=1e-4)
    mean, _ = method.hierarchy.target_at(
        theta["phi"], theta["beta"], cohort_of(method.model, data())
    ).moments()
    draws = torch.stack([population.posterior(i).draws.flatten(0, -2) for i in range(6)])
    torch.testing.assert_close(draws.mean(1), mean, rtol=0.05, atol=0.05)
    assert "noise" not in theta


def test_a_learned_variance_starts_at_the_size_of_y_and_is_free() -> None:
    run = begun(soul(variance="learned"))
    views = run.algorithm.model.phi_layout.views(run.server["phi"])
    assert float(views["likelihood.log_variance"]) == pytest.approx(math.log(start_of(data())), rel=1e-5)
    assert "noise" not in run.algorithm.broadcast(run.server)
    assert run.algorithm.warm_up(ROUNDS) == 0


@pytest.mark.parametrize(
    "method",
    [
        fp.FedSOUL(fp.Composition(nn.Linear(3, 2), nn.Linear(2, 3), "categorical")),
        fp.FedSOUL.paper(linear_model()),
        soul(anneal=NONE),
        soul(variance="learned", anneal=NONE),
    ],
    ids=["classes", "paper", "none", "none, learned"],
)
def test_who_does_not_anneal_does_not_ask(method: fp.FedSOUL) -> None:
    names = [q.name for q in method.questions(fp.methods.base.Facts(6, 500), Key(0))]
    assert "target size" not in names
    assert method.warm_up(500) == 0


def test_trial_rounds_for_a_step_size_do_not_anneal() -> None:
    method = soul(phi_step=fp.steps.SGD(None), beta_step=fp.steps.SGD(None))
    found = {}
    for anneal in (NONE, fp.steps.Anneal(4)):
        run = begun(method.replace(anneal=anneal))
        found[anneal] = run.algorithm.rate()
        assert run.algorithm.anneal == anneal
    assert len(set(found.values())) == 1


# --- what waits for its end --------------------------------------------------------------------


@dataclass(frozen=True)
class Noted(fp.steps.Schedule):
    """Constant, and remembers what it was asked."""

    seen: list[tuple[int, int]] = field(default_factory=list)

    def factor(self, k: int, rounds: int) -> float:
        self.seen.append((k, rounds))
        return 1.0


def test_schedules_stand_until_then() -> None:
    noted = Noted()
    run = begun(soul(phi_step=fp.steps.Adam(0.01, noted)))
    for _ in range(7):
        run.train_round()
    stage = Stage(4, ROUNDS)  # a schedule's first value until its fourth round, and all of it after
    assert sorted(set(noted.seen)) == [(k, stage) for k in range(7)]
    for schedule in (fp.steps.Decay(), fp.steps.Cosine()):
        assert {schedule.factor(k, stage) for k in range(5)} == {schedule.factor(0, ROUNDS - 4)}
        assert schedule.factor(6, stage) == schedule.factor(2, ROUNDS - 4)


@pytest.mark.parametrize(
    ("average", "weights", "counted"),
    [
        (fp.steps.Averaging("tail", tail=1.0), ("first_weight", "second_weight"), ROUNDS - 4),
        (fp.steps.Averaging("tail", tail=0.25), ("first_weight", "second_weight"), (ROUNDS - 4) // 4),
        (fp.steps.Averaging("iterate"), ("all_weight",), ROUNDS - 4),
    ],
    ids=["tail", "quarter", "iterate"],
)
def test_averages_begin_after_it(average: fp.steps.Averaging, weights: tuple[str, ...], counted: int) -> None:
    run = begun(soul(average=average, phi_step=fp.steps.SGD(1e-3)))
    for _ in range(ROUNDS):
        run.train_round()
    assert sum(float(run.server[f"average.{w}"]) for w in weights) == counted


def test_early_stopping_looks_only_afterwards() -> None:
    clients = [fp.Client(x, y, validation=(x, y)) for x, y in data()]
    stop = fp.callbacks.EarlyStop(every=1, patience=100)
    population = soul().fit(clients, rounds=ROUNDS, callbacks=[stop])
    looked = [h["round"] for h in population.history if "validation_log_likelihood" in h]
    assert looked == list(range(5, ROUNDS + 1))
    assert stop.best_round > 4


def test_a_run_that_broke_off_while_annealing_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": ROUNDS, "checkpoint_every": 1, "progress": False}
    whole = soul().fit(data(), out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        soul().fit(data(), out=tmp_path / "part", callbacks=[CrashAt(2)], **settings)
    again = soul().fit(
        data(), out=tmp_path / "part", resume=True, callbacks=[fp.callbacks.Callback()], **settings
    )
    for name, value in whole.published.items():
        assert torch.equal(again.published[name], value)


# --- what it finds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "variance", "seed"), [pytest.param(3, 0.01, 9, marks=pytest.mark.slow), (3, 0.09, 9)]
)
def test_hard_draws_are_solved_with_it_and_not_without(examples: int, variance: float, seed: int) -> None:
    """Of the README's model, three examples per client; the whole grid is a slow test."""
    assert gap(examples, variance, seed, anneal=NONE) > 2
    assert gap(examples, variance, seed) < 0.25
