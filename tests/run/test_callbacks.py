"""What may happen between rounds: callbacks, early stopping, and going back to the best state."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import ExtraError, SettingsError
from fedpop.report.run import run_report
from fedpop.run.run import Run
from tests.crash import Crash, CrashAt
from tests.helpers import linear_model, population_data, ragged, run_of
from tests.run.test_simulate import Watch, soul


def test_a_callback_sees_every_round_and_may_stop() -> None:
    watch = Watch(stop=3)
    population = soul().fit(ragged(), rounds=10, callbacks=[watch])
    assert watch.rounds == [1, 2, 3]
    assert population.rounds == 3
    assert len(population.history) == 3


def overfitting() -> tuple[fp.FedAvg, list[fp.Client]]:
    """Validation targets that have nothing to do with training: every step makes them worse."""
    clients, _, _ = population_data(5, 6, 3, 2, 0.5)
    opposite = [fp.Client(x, y, validation=(x, -y)) for x, y in clients]
    return fp.FedAvg(linear_model(), local=fp.LocalSGD(rate=0.05)), opposite


def test_early_stopping_goes_back_to_the_best_theta() -> None:
    method, clients = overfitting()
    watch, stop = Watch(), fp.callbacks.EarlyStop(every=2, patience=3)
    population = method.fit(clients, rounds=100, callbacks=[stop, watch])
    # The first look is the best one; then three that are worse.
    assert population.rounds == 8
    assert stop.best_round == 2
    scores = [h["validation_log_likelihood"] for h in population.history if h["round"] % 2 == 0]
    assert scores == sorted(scores, reverse=True)
    assert torch.equal(population.published["phi"], watch.phis[1])
    assert not torch.equal(watch.phis[1], watch.phis[6])


def test_what_early_stopping_chose_is_printed_kept_and_reported(tmp_path: Path) -> None:
    method, clients = overfitting()
    stop = fp.callbacks.EarlyStop(every=2, patience=3)
    population = method.fit(clients, rounds=100, callbacks=[stop], out=tmp_path / "run")
    assert (population.rounds, population.best_round) == (8, 2)
    assert "rounds   8 run, theta of round 2 returned, the best on validation data" in str(population)
    assert fp.load(population.save(tmp_path / "saved")).best_round == 2
    again = method.fit(
        clients, rounds=100, callbacks=[fp.callbacks.EarlyStop(2, 3)], out=tmp_path / "run", resume=True
    )
    assert again.best_round == 2
    for folder in ("run", "saved"):
        page = run_report(tmp_path / folder).read_text()
        assert "rounds run" in page
        assert "2, the best on validation data" in page
    plain = method.fit(clients, rounds=3, out=tmp_path / "plain")
    assert plain.best_round is None
    assert "round returned" not in run_report(tmp_path / "plain").read_text()


def test_early_stopping_goes_on_while_validation_improves() -> None:
    clients, _, _ = population_data(5, 6, 3, 2, 0.5)
    same = [fp.Client(x, y, validation=(x, y)) for x, y in clients]
    method = fp.FedAvg(linear_model(), local=fp.LocalSGD(rate=0.05))
    population = method.fit(same, rounds=20, callbacks=[fp.callbacks.EarlyStop(every=2, patience=1)])
    assert population.rounds == 20


def test_early_stopping_remembers_across_a_resume(tmp_path: Path) -> None:
    method, clients = overfitting()
    settings = {"rounds": 100, "checkpoint_every": 1}
    whole = method.fit(clients, callbacks=[fp.callbacks.EarlyStop(every=2, patience=3)], **settings)

    stop = fp.callbacks.EarlyStop(every=2, patience=3)
    with pytest.raises(KeyboardInterrupt):
        method.fit(
            clients,
            out=tmp_path,
            callbacks=[fp.callbacks.EarlyStop(every=2, patience=3), CrashAt(6, KeyboardInterrupt)],
            **settings,
        )
    resumed = method.fit(clients, out=tmp_path, resume=True, callbacks=[stop], **settings)
    assert stop.best_round == 2
    assert resumed.rounds == whole.rounds == 8
    assert torch.equal(resumed.published["phi"], whole.published["phi"])
    # A stopped run stays stopped.
    again = method.fit(
        clients, out=tmp_path, resume=True, callbacks=[fp.callbacks.EarlyStop(2, 3)], **settings
    )
    assert again.rounds == 8
    assert torch.equal(again.published["phi"], whole.published["phi"])


@pytest.mark.parametrize("settings", [{"every": 0}, {"patience": 0}, {"every": -2}])
def test_impossible_early_stopping_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=r"EarlyStop: .* must be a whole number, 1 or more"):
        fp.callbacks.EarlyStop(**settings)


def test_validation_of_fedsoul_is_the_posterior_predictive() -> None:
    """Against the predictive of the final pass, which uses far more draws."""
    clients, _, _ = population_data(4, 6, 3, 2, 0.5)
    held_out = [fp.Client(x, y, validation=(x + 0.2, y)) for x, y in clients]

    class Look(fp.callbacks.Callback):
        score = 0.0

        def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
            self.score = run.validation_score()
            return False

    look = Look()
    population = soul().fit(held_out, rounds=30, callbacks=[look])
    expected = torch.cat(
        [population.predict(i, x + 0.2).log_prob(y) for i, (x, y) in enumerate(clients)]
    ).mean()
    assert look.score == pytest.approx(float(expected), abs=0.1)


# --- remember and recall --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        lambda: soul(local_steps=2, kernel="hmc", start="random"),
        lambda: fp.FedRep(linear_model()),
        lambda: fp.SCAFFOLD(linear_model(), local=fp.LocalSGD(rate=0.01)),
    ],
    ids=["FedSOUL", "FedRep", "SCAFFOLD"],
)
def test_recall_brings_back_the_server_and_every_site(method: Any) -> None:
    """To the bit, whatever happened in between; and what is remembered does not move with the run."""
    run = run_of(method(), ragged((4, 3, 5, 2)), rule=fp.participation.Uniform(2))
    run.train_round()
    server = {n: t.clone() for n, t in run.server.items()}
    states = {n: t.clone() for n, t in run.sites.store.state().items()}
    run.remember()
    for _ in range(5):
        run.train_round()
    assert any(not torch.equal(run.server[n], t) for n, t in server.items())
    assert int(run.sites.store.entered.sum()) > int(states["entered"].sum())
    run.recall()
    assert same(run.server, server)
    assert same(run.sites.store.state(), states)
    # What it goes back to stays: rounds after it change neither copy.
    run.train_round()
    run.recall()
    assert same(run.server, server)
    assert same(run.sites.store.state(), states)


def test_a_later_memory_takes_the_place_of_an_earlier_one_and_none_is_no_memory() -> None:
    run = run_of(soul(), ragged())
    run.train_round()
    before = dict(run.server)
    run.recall()  # there is nothing to go back to
    assert same(run.server, before)
    run.remember()
    run.train_round()
    later = dict(run.server)
    run.remember()
    run.train_round()
    run.recall()
    assert same(run.server, later)


def test_what_is_remembered_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Server and sites alike: a callback remembers round three, the run is killed at round five."""

    class Remember(fp.callbacks.Callback):
        def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
            if run.round == 3:
                run.remember()
            return False

    def fit(out: Path, stop: int | None = None) -> fp.Population:
        method = fp.FedRep(linear_model())
        callbacks = [Remember(), *([CrashAt(stop)] if stop else [])]
        return method.fit(
            ragged((4, 3, 5, 2)), rounds=6, out=out, resume=True, checkpoint_every=1, participation=2,
            callbacks=callbacks,
        )  # fmt: skip

    whole = fit(tmp_path / "whole")
    third = fp.FedRep(linear_model()).fit(ragged((4, 3, 5, 2)), rounds=3, participation=2)
    with pytest.raises(Crash):
        fit(tmp_path / "killed", 5)
    resumed = fit(tmp_path / "killed")
    for population in (whole, resumed):  # the end of a run goes back to what it remembers
        assert same(population.published, third.published)
        assert population.store is not None
        assert third.store is not None
        assert same(population.store.state(), third.store.state())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --- live curves ------------------------------------------------------------------------------------


class Recorded(fp.callbacks.Callback):
    """What callbacks receive once a round is complete."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.ended = 0

    def recorded(self, run: Any, metrics: dict[str, Any]) -> None:
        self.rounds.append(dict(metrics))

    def finished(self, run: Any) -> None:
        self.ended += 1


def test_complete_numbers_are_recorded_whatever_the_order() -> None:
    method, clients = overfitting()
    seen = Recorded()
    population = method.fit(clients, rounds=4, callbacks=[seen, fp.callbacks.EarlyStop(every=2)])
    assert seen.rounds == population.history
    assert "validation_log_likelihood" in seen.rounds[1]
    assert seen.ended == 1


def expected(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Curves of a run, out of its numbers."""
    out: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        for name, value in line.items():
            number = len(value) if isinstance(value, list) else value
            if number is not None:
                out.setdefault(name, []).append((line["round"], float(number)))
    return out


def with_a_crash(tmp_path: Path, live: Any) -> fp.Population:
    """Six rounds, of which the fourth was seen before the crash and is run again."""
    settings: dict[str, Any] = {"rounds": 6, "out": tmp_path / "run", "checkpoint_every": 3}
    with pytest.raises(Crash):
        soul().fit(ragged(), callbacks=[live(), CrashAt(5)], **settings)
    return soul().fit(ragged(), callbacks=[live()], resume=True, **settings)


def test_tensorboard_has_what_the_metrics_have(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs fedpop[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    population = with_a_crash(tmp_path, lambda: fp.callbacks.TensorBoard(board))
    found = EventAccumulator(str(board))
    found.Reload()
    for name, points in expected(population.history).items():
        shown = [(e.step, e.value) for e in found.Scalars(name)]
        if name != "seconds":  # of rounds that were run twice
            assert [k for k, _ in shown] == [k for k, _ in points]
            assert [v for _, v in shown] == pytest.approx([v for _, v in points], rel=1e-6)


def test_mlflow_has_what_the_metrics_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # no server, no database
    mlflow = pytest.importorskip("mlflow", reason="needs fedpop[mlflow]")
    where = (tmp_path / "mlruns").as_uri()
    population = with_a_crash(tmp_path, lambda: fp.callbacks.MLflow("trial", tracking=where))
    client = mlflow.MlflowClient(tracking_uri=where)
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "FedSOUL"
    for name, points in expected(population.history).items():
        if name != "seconds":
            shown = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
            assert shown == pytest.approx(dict(points))


@pytest.mark.parametrize("what", ["TensorBoard", "MLflow"])
def test_without_the_extra_nothing_is_begun(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, what.lower(), None)
    live = getattr(fp.callbacks, what)(str(tmp_path / "live"))
    with pytest.raises(ExtraError, match=rf"pip install 'fedpop\[{what.lower()}\]'"):
        soul().fit(ragged(), rounds=2, callbacks=[live], out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
