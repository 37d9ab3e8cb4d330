"""Runs that end when they have converged, and finished runs that go on."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import CheckpointError, FedpopWarning
from fedpop.evaluation.oracle import exact_optimum
from fedpop.evaluation.verdict import Distance, LossTrend
from fedpop.methods.base import Facts
from fedpop.report.run import run_report
from fedpop.run import stages
from fedpop.server.averaging import Averaging
from fedpop.server.optimisers import Constant, Cosine, Decay, Polynomial, Stage
from tests.crash import Crash, CrashAt
from tests.helpers import linear_model, population_data, ragged, run_of, seeded
from tests.run.test_resume import METHODS, final_state, same_runs, with_validation


def small_task(b: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return population_data(b, 8, 3, 2, 0.3)[0]


def sampled() -> fp.FedSOUL:
    """Stages are those of schedules: the exact engine has none."""
    return fp.FedSOUL(linear_model(), engine="sampled")


# --- until it has converged ----------------------------------------------------------------------


def test_without_rounds_it_runs_until_it_has_converged_and_says_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedpopWarning)
        population = fp.FedSOUL(linear_model(3, 2, 0.3), engine="sampled").fit(small_task())
    assert isinstance(population.convergence, Distance)
    assert population.convergence.converged is True
    assert "theta    converged to a local optimum" in str(population)
    start = (population.published["phi"], population.published["beta"])
    best = exact_optimum(population.algorithm, population.federation, [start])
    assert best.log_likelihood - population.log_likelihood().value < 0.06
    rounds = population.rounds
    assert rounds % stages.FIRST_STAGE == 0
    assert rounds < stages.LONGEST_RUN
    assert (rounds // stages.FIRST_STAGE).bit_count() == 1  # each stage as long as all before it


def test_a_search_that_is_over_ends_the_run_in_the_midst_of_a_stage(tmp_path: Path) -> None:
    """The exact engine knows its end; the verdict there is on the published theta, and not its own."""
    method = fp.FedSOUL(linear_model(3, 2, 0.3))
    population = method.fit(small_task(), out=tmp_path)
    assert population.engine.startswith("exact: ")
    assert population.rounds < stages.FIRST_STAGE
    assert isinstance(population.convergence, Distance)
    assert population.convergence.converged is True
    assert population.convergence.nats < 1e-3
    assert "theta    converged to a local optimum" in str(population)
    assert final_state(tmp_path).ends == [stages.FIRST_STAGE]
    again = method.fit(small_task(), out=tmp_path, resume=True)
    assert (again.rounds, again.convergence) == (population.rounds, population.convergence)
    limited = method.fit(small_task(), rounds=1000)
    assert (limited.rounds, limited.convergence) == (population.rounds, population.convergence)


def judge(monkeypatch: pytest.MonkeyPatch, verdict: Callable[[Any], Distance]) -> None:
    """Every verdict on a run is this one."""
    monkeypatch.setattr(stages, "judged", lambda run, thorough=False: stages.Judgement(verdict(run)))


def test_a_search_that_ends_before_a_maximum_is_not_told_to_run_more(monkeypatch: pytest.MonkeyPatch) -> None:
    judge(monkeypatch, lambda run: Distance(3.0, 0.0, 0, True))
    with pytest.warns(
        FedpopWarning, match=r"nats below a local optimum, and its search.*restarts=3 or"
    ) as caught:
        fp.FedSOUL(linear_model(3, 2, 0.3)).fit(small_task())
    assert len(caught) == 1


def test_a_run_that_a_callback_ends_is_judged_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the verdict of the stage before."""
    monkeypatch.setattr(stages, "FIRST_STAGE", 20)
    judge(monkeypatch, lambda run: Distance(run.round, 0.0, 0, True))

    class Stop(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
            return bool(run.round == 30)

    with pytest.warns(FedpopWarning, match="about 30 nats"):
        population = sampled().fit(ragged(), callbacks=[Stop()])
    assert population.convergence == Distance(30, 0.0, 0, True)


def test_stages_double_until_the_verdict_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_STAGE", 4)
    said = {4: Distance(3.0, 0.0, 0, True), 8: Distance(0.0, 0.0, 1, True), 16: Distance(0.01, 0.0, 0, True)}
    judge(monkeypatch, lambda run: said[run.round])
    population = sampled().fit(ragged())
    assert population.rounds == 16
    assert population.convergence == said[16]


def test_a_run_that_never_converges_ends_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_STAGE", 3)
    monkeypatch.setattr(stages, "LONGEST_RUN", 10)
    judge(monkeypatch, lambda run: Distance(3.0, 0.0, 0, True))
    with pytest.warns(FedpopWarning, match="after 10 rounds: not converged: about 3 nats below") as caught:
        population = sampled().fit(ragged())
    assert len(caught) == 1
    assert population.rounds == 10


def test_a_distance_that_draws_cannot_tell_is_looked_at_closely_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds would not tell it better; a pass of all draws may."""
    monkeypatch.setattr(stages, "FIRST_STAGE", 4)
    seen: list[tuple[int, bool]] = []

    def judged(run: Any, thorough: bool = False) -> stages.Judgement:
        seen.append((run.round, thorough))
        return stages.Judgement(Distance(0.01, 0.2, 0, False))

    monkeypatch.setattr(stages, "judged", judged)
    with pytest.warns(FedpopWarning, match="cannot be told"):
        assert sampled().fit(ragged()).rounds == 4
    assert seen == [(4, False), (4, True)]


def test_networks_run_until_their_loss_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_STAGE", 40)
    body = seeded(nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 12)))
    model = fp.Composition(body, seeded(nn.Linear(12, 1)), fp.likelihoods.Normal(0.3))
    population = fp.FedAvg(model, local=fp.LocalSGD(rate=0.01)).fit(small_task(8))
    assert isinstance(population.convergence, LossTrend)
    assert population.convergence.converged is True
    tail = [m["loss"] for m in population.history][-population.rounds // 8 :]
    assert max(tail) - min(tail) < 0.05


def test_a_verdict_leaves_no_trace() -> None:
    """Rounds after one are those without it, and of a run so long the first half is that of a longer one."""
    runs = [run_of(fp.FedSOUL(linear_model(3, 2, 0.3), kernel="hmc"), small_task(5)) for _ in range(2)]
    for k in range(6):
        for run in runs:
            run.train_round()
        if k == 2:
            stages.judged(runs[0])
    for name, value in runs[0].server.items():
        assert torch.equal(value, runs[1].server[name])


# --- so many rounds as were asked for -----------------------------------------------------------


def test_a_run_that_stopped_nats_too_soon_warns_with_advice(tmp_path: Path) -> None:
    clients = population_data(60, 5, 10, 2, 0.1)[0]
    method = fp.FedSOUL(linear_model(10, 2, 0.1), start="random", phi_step=fp.steps.Adam(1e-3))
    with pytest.warns(
        FedpopWarning, match=r"after 100 rounds: not converged.*: rounds=200, or leave"
    ) as caught:
        population = method.fit(clients, rounds=100)
    assert len(caught) == 1
    assert population.convergence.converged is False
    assert population.convergence.words in str(population)
    with pytest.warns(FedpopWarning, match=r"rounds=200 with resume=True in the same folder"):
        method.fit(clients, rounds=100, out=tmp_path)


def test_a_short_run_is_not_judged_and_does_not_warn() -> None:
    population = sampled().fit(ragged(), rounds=10)
    assert population.convergence is None
    assert "diagnostics() tells whether" in str(sampled().fit(ragged(), rounds=19))
    longer = fp.FedSOUL(linear_model(3, 2, 0.3), engine="sampled").fit(small_task(), rounds=20)
    assert longer.convergence is not None


def test_the_verdict_is_kept_in_files(tmp_path: Path) -> None:
    population = fp.FedSOUL(linear_model(3, 2, 0.3)).fit(small_task(), rounds=40)
    assert fp.load(population.save(tmp_path)).convergence == population.convergence
    assert population.public().convergence == population.convergence


# --- a finished run goes on ----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_killed_in_its_extension_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]

    def run(folder: str, rounds: int, crash: int | None = None) -> fp.Population:
        callbacks = [fp.callbacks.EarlyStop(every=2, patience=100)] + ([CrashAt(crash)] if crash else [])
        return method().fit(
            with_validation(),
            out=tmp_path / folder,
            resume=True,
            callbacks=callbacks,
            rounds=rounds,
            **options | {"seed": 3, "checkpoint_every": 3},
        )

    run("whole", 3)
    run("whole", 8)
    run("broken", 3)
    for crash in (4, 7):  # before the extension's first checkpoint, and after it
        with pytest.raises(Crash):
            run("broken", 8, crash)
    population = run("broken", 8)
    same_runs(tmp_path / "broken", tmp_path / "whole")
    assert [line["round"] for line in population.history] == list(range(1, 9))
    assert final_state(tmp_path / "whole").ends == [3, 8]
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["rounds"] == 8


def test_a_run_killed_before_its_end_and_resumed_with_more_finishes_its_stage_first(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, crash: int | None = None) -> None:
        callbacks = [CrashAt(crash)] if crash else []
        sampled().fit(
            ragged(),
            rounds=rounds,
            out=tmp_path / folder,
            resume=True,
            checkpoint_every=2,
            callbacks=callbacks,
        )

    run("whole", 6)
    run("whole", 12)
    with pytest.raises(Crash):
        run("broken", 6, 4)
    run("broken", 12)
    same_runs(tmp_path / "broken", tmp_path / "whole")


def test_the_first_stage_of_an_extended_run_is_the_run_itself(tmp_path: Path) -> None:
    """And the extension is none of a longer run: it starts from where the shorter one ended."""
    method = sampled()
    short = method.fit(ragged(), rounds=6, out=tmp_path)
    long = method.fit(ragged(), rounds=12, out=tmp_path, resume=True)
    timeless = [{k: v for k, v in m.items() if k != "seconds"} for m in (*short.history, *long.history)]
    assert timeless[:6] == timeless[6:12]
    other = method.fit(ragged(), rounds=12)
    assert not torch.equal(long.published["phi"], other.published["phi"])


def test_fewer_rounds_than_there_are_is_an_error(tmp_path: Path) -> None:
    sampled().fit(ragged(), rounds=6, out=tmp_path)
    with pytest.raises(CheckpointError, match="has 6 rounds, more than rounds=5"):
        sampled().fit(ragged(), rounds=5, out=tmp_path, resume=True)


def test_a_run_until_convergence_is_resumed_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "FIRST_STAGE", 4)
    verdict = {True: Distance(0.0, 0.0, 0, True), False: Distance(3.0, 0.0, 0, True)}
    monkeypatch.setattr(
        stages, "judged", lambda run, thorough=False: stages.Judgement(verdict[run.round >= 16])
    )

    def run(folder: str, crash: int | None = None, **more: Any) -> fp.Population:
        callbacks = [CrashAt(crash)] if crash else []
        return sampled().fit(
            ragged(), out=tmp_path / folder, resume=True, checkpoint_every=3, callbacks=callbacks, **more
        )

    run("whole")
    for crash in (2, 4, 5, 11):
        with pytest.raises(Crash):
            run("broken", crash)
    run("broken")
    same_runs(tmp_path / "broken", tmp_path / "whole")
    assert final_state(tmp_path / "whole").ends == [4, 8, 16]
    assert run("whole").rounds == 16  # over: it has converged
    assert run("whole", rounds=20).rounds == 20


def test_a_run_of_so_many_rounds_goes_on_until_it_has_converged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = {True: Distance(0.0, 0.0, 0, True), False: Distance(3.0, 0.0, 0, True)}
    monkeypatch.setattr(
        stages, "judged", lambda run, thorough=False: stages.Judgement(verdict[run.round >= 20])
    )
    method = sampled()
    method.fit(ragged(), rounds=5, out=tmp_path)
    assert method.fit(ragged(), out=tmp_path, resume=True).rounds == 20
    assert final_state(tmp_path).ends == [5, 10, 20]


# --- what schedules do ---------------------------------------------------------------------------


def test_what_goes_by_the_end_starts_anew_and_what_goes_by_the_round_goes_on() -> None:
    stage = Stage(100, 300)
    for schedule in (Cosine(end=0.1), Decay(constant=0.3)):
        for k in (0, 20, 60, 150, 199):
            assert schedule.factor(100 + k, stage) == schedule.factor(k, 200)
    assert Polynomial(0.6).factor(150, stage) == Polynomial(0.6).factor(150, 300)
    assert Constant().factor(150, stage) == 1.0
    em = fp.steps.EM(1.0, 0.1)
    assert [em.at(100 + k, stage) for k in (0, 99, 150)] == [em.at(k, 200) for k in (0, 99, 150)]


@pytest.mark.parametrize("which", ["tail", "iterate", "last"])
def test_averages_of_a_further_stage(which: str) -> None:
    """A tail is that of its own stage; the theorem's average goes on over all rounds."""
    average, seen = Averaging(which, tail=0.5), []
    state = average.init(torch.zeros(1))
    published = {}
    for k in range(16):
        theta = torch.tensor([float(k)])
        stage = Stage(0, 8) if k < 8 else Stage(8, 16)
        state = average.update(state, theta, 1.0, k, stage, lambda theta, reference: theta)
        seen.append(float(k))
        published[k] = float(average.value(state, theta))
    tails = {7: sum(range(4, 8)) / 4, 8: 8.0, 11: 11.0, 12: 12.0, 15: sum(range(12, 16)) / 4}
    expected = {
        "tail": tails,
        "iterate": {k: sum(range(k + 1)) / (k + 1) for k in tails},
        "last": {k: float(k) for k in tails},
    }[which]
    assert {k: published[k] for k in expected} == pytest.approx(expected)


def test_sites_are_told_the_first_rate_again() -> None:
    """Local epochs on phi: the rate that a site receives is that of the stage's first round."""
    step = fp.steps.PhiStep(local=fp.LocalSGD(rate=0.2), schedule=Cosine())
    method = fp.FedSOUL(linear_model(), phi_step=step)
    run = run_of(method, ragged(), rounds=4)
    for _ in range(4):
        run.train_round()
    assert float(run.server["phi_rate"]) == pytest.approx(0.0, abs=1e-6)
    server = method.extended(run.server, Facts(4, 8, start=4))
    assert float(server["phi_rate"]) == pytest.approx(0.2)


def test_the_verdict_is_in_the_run_folder_and_in_its_report(tmp_path: Path) -> None:
    population = fp.FedSOUL(linear_model(3, 2, 0.3)).fit(small_task(), rounds=40, out=tmp_path)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert 0 < population.rounds < 40  # the exact engine was over
    assert saved == {
        "rounds": population.rounds,
        "best_round": None,
        "convergence": population.convergence.plain(),
    }
    assert population.convergence.words in run_report(tmp_path).read_text()
