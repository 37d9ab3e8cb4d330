"""The one-machine runtime: what it writes, who takes part, and what it does when things go wrong."""

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import TrainingError
from fedpop.keys import Key
from fedpop.methods.base import Facts
from fedpop.run.members import active_units
from fedpop.run.run import Run, Settings
from tests.helpers import (
    FRAME,
    answers,
    cohort_of,
    federation_of,
    linear_model,
    population_data,
    ragged,
    seeded,
    train_key,
)


def soul(**options: Any) -> fp.FedSOUL:
    return fp.FedSOUL(linear_model(), **options)


class Watch(fp.callbacks.Callback):
    """Keeps what a callback is shown."""

    def __init__(self, stop: int | None = None) -> None:
        self.phis: list[torch.Tensor] = []
        self.rounds: list[int] = []
        self.stop = stop

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        self.phis.append(run.algorithm.publish(run.server)["phi"])
        self.rounds.append(run.round)
        assert metrics["round"] == run.round
        return run.round == self.stop


# --- metrics.jsonl ------------------------------------------------------------------------------


def test_metrics_have_a_line_per_round_with_exact_counts(tmp_path: Path) -> None:
    """b=4, phi has 6 entries, beta 3 (two means and a scale); J has 6 and I 3; all of 4 bytes,
    and up each vector in its frame."""
    population = soul(beta_step=fp.steps.Adam()).fit(ragged(), rounds=3, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == population.history
    assert [line["round"] for line in lines] == [1, 2, 3]
    # Before round one: second moments (9 entries, 1 count), then cross products (9, 9, 1), both float32, and
    # the size of y (a square and a count) in double precision; down only the whitener, 9 entries in double
    # precision, and in the one round that is annealed its variance.
    before_up, before_down = 4 * (6 * FRAME + 4 * (10 + 19) + 8 * 2), 4 * (8 * 9 + 4)
    for k, line in enumerate(lines, 1):
        assert line["active"] == 4
        assert line["left_out"] == []
        assert line["bytes_up"] == before_up + k * 4 * (2 * FRAME + 4 * (6 + 3))
        assert line["bytes_down"] == before_down + k * 4 * 4 * (6 + 3)
        assert line["gradient_evaluations"] == 4 * 11  # a start and ten transitions each
        assert line["acceptance"] == pytest.approx(1.0)
        assert line["divergences"] == 0
        assert {"loss", "prior_sd", "prior_mean_norm", "seconds"} <= line.keys()
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
    assert population.totals["backbone_passes"] == 3 * 9  # a forward and backward of each example
    assert population.totals["head_steps"] == 3 * 9 * 11


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    """FedAvg's loss of round one is that of the modules' own weights."""
    model, clients = linear_model(), ragged()
    cohort = cohort_of(model, clients)
    eta = model.head_outputs(
        model.initial_phi(), model.initial_z()[None], cohort.x @ model.backbone.weight.detach().T
    )
    expected = -torch.distributions.Normal(eta[0, :, 0], 0.5**0.5).log_prob(cohort.y[:, 0]).mean()
    assert fp.FedAvg(model).fit(clients, rounds=1).history[0]["loss"] == pytest.approx(
        float(expected), rel=1e-5
    )


# --- who takes part -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "counts"),
    [
        (None, {4}),
        (2, {2}),
        (0.5, {0, 1, 2, 3, 4}),
        (fp.participation.Bernoulli((0.2, 0.5, 0.9, 1.0)), {1, 2, 3, 4}),
    ],
)
def test_participation(participation: Any, counts: set[int]) -> None:
    population = soul().fit(ragged(), rounds=30, participation=participation)
    seen = [line["active"] for line in population.history]
    assert set(seen) <= counts
    assert len(set(seen)) == 1 or len(set(seen)) > 2
    assert bool(torch.isfinite(population.published["phi"]).all())


def test_an_empty_round_is_counted_and_moves_nothing() -> None:
    watch = Watch()
    method = soul(average=fp.steps.Averaging("last"))
    history = method.fit(ragged(), rounds=30, participation=0.1, callbacks=[watch]).history
    empty = [k for k, line in enumerate(history) if line["active"] == 0 and k > 0]
    assert empty
    for k in empty:
        assert torch.equal(watch.phis[k], watch.phis[k - 1])
        assert history[k]["bytes_up"] == history[k - 1]["bytes_up"]
        assert history[k]["loss"] is None  # nothing was measured, which is not a loss of zero
        assert history[k]["acceptance"] is None


@pytest.mark.parametrize("method", [fp.FedAvg, fp.FedRep, fp.FedSOUL], ids=["FedAvg", "FedRep", "FedSOUL"])
def test_a_round_without_examples_has_no_loss(method: Any, capfd: pytest.CaptureFixture[str]) -> None:
    empty = [(torch.zeros(0, 3), torch.zeros(0)), (torch.ones(2, 3), torch.ones(2))]
    rule = fp.participation.Bernoulli((1.0, 1e-9))
    population = method(linear_model()).fit(empty, rounds=2, participation=rule, progress=True)
    assert [line["loss"] for line in population.history] == [None, None]
    assert "loss" not in capfd.readouterr().err


def test_weights_follow_the_rule_even_when_everyone_joins() -> None:
    """A round that all join under 1/p weights steps twice as far at p = 1/2 (plain gradient steps)."""
    clients = ragged((3, 4))
    rule, federation = fp.participation.Bernoulli((0.5, 0.5)), fp.Federation.of(clients)
    seed = next(s for s in range(100) if len(active_units(rule, federation, Key(s), 0).ids) == 2)
    method = soul(
        phi_step=fp.steps.SGD(1e-3),
        average=fp.steps.Averaging("last"),
        start="spectral",
        chain=fp.chains.Chain(rao_blackwell=True),
    )
    start = Watch()
    method.replace(phi_step=fp.steps.SGD(1e-30)).fit(clients, rounds=1, seed=seed, callbacks=[start])
    moved = [
        method.fit(clients, rounds=1, seed=seed, participation=p).published["phi"] - start.phis[0]
        for p in (None, rule)
    ]
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-6)


def test_stateful_chains_go_on_and_stateless_ones_begin_anew() -> None:
    cohort = cohort_of(linear_model(), ragged())
    for stateful in (True, False):
        # A chain that follows the mode begins at it in its first round, wherever it stood.
        chain = fp.chains.Chain(stateful=stateful, follow=False)
        method = soul(chain=chain, kernel=fp.kernels.Exponential(0.3), local_steps=1)
        broadcast = method.broadcast(method.init(Facts(4, 10), train_key(), {}))
        local = method.enter(cohort.units, broadcast, train_key())
        other = local | {"z": local["z"] + 3.0}
        ends = [
            answers(method, cohort, start, broadcast, train_key(2)).local["z"] for start in (local, other)
        ]
        assert torch.equal(ends[0], ends[1]) is not stateful


def test_stateful_chains_are_kept_between_rounds() -> None:
    """With two rounds and no server steps the second begins where the first ended."""
    population = soul(
        phi_step=fp.steps.SGD(1e-30), prior=fp.priors.Normal(learn_mean=False, learn_scale=False)
    ).fit(ragged(), rounds=2, participation=2)
    assert population.store is not None
    seen = population.store.seen(torch.arange(4))
    assert 2 <= int(seen.sum()) <= 4


# --- the same numbers ---------------------------------------------------------------------------


def methods() -> dict[str, Any]:
    logistic = fp.Composition(
        seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2), fp.likelihoods.Bernoulli()
    )
    head = nn.Sequential(seeded(nn.Linear(2, 1), 2), nn.Tanh())
    curved = fp.Composition(seeded(nn.Linear(3, 2), 1), head, fp.likelihoods.Normal(0.5))
    return {
        "exact": soul(),
        "mini-batches": soul(phi_step=fp.steps.PhiStep(batch=2)),
        "hmc": fp.FedSOUL(logistic, local_steps=3),
        "mala": fp.FedSOUL(logistic, local_steps=3, kernel="mala"),
        "mass matrix": fp.FedSOUL(curved, local_steps=3, chain=fp.chains.Chain(burn_in=5)),
        "paper": fp.FedSOUL.paper(linear_model(), rate=1e-2),
        "fedavg": fp.FedAvg(linear_model(), local=fp.LocalSGD(epochs=2, batch=2)),
        "fedrep": fp.FedRep(linear_model(), head=fp.LocalSGD(epochs=2, batch=2)),
    }


def data_for(name: str) -> Any:
    clients = ragged((3, 0, 5, 1, 2, 4))
    return [(x, (y > 0).float()) for x, y in clients] if name in ("hmc", "mala") else clients


@pytest.mark.parametrize("name", methods())
def test_results_agree_across_cohort_sizes(name: str) -> None:
    method, clients = methods()[name], data_for(name)
    federation = federation_of(method.model, clients)
    one, many = (
        Run(method, federation, Settings(5, 0, fp.participation.Everyone(), memory))
        for memory in ("1GiB", "1KiB")
    )
    sizes = federation.train.sizes
    assert len(one.plan.cut(torch.arange(6), sizes)) == 1
    assert len(many.plan.cut(torch.arange(6), sizes)) >= 3
    populations = [run.execute(resume=False, progress=False) for run in (one, many)]
    torch.testing.assert_close(populations[0].published, populations[1].published, rtol=1e-4, atol=1e-5)
    for a, b in zip(populations[0].history, populations[1].history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["bytes_up"] == b["bytes_up"]


@pytest.mark.parametrize("name", methods())
def test_the_same_seed_gives_the_same_bits_and_another_does_not(name: str) -> None:
    runs = [methods()[name].fit(data_for(name), rounds=4, seed=s, participation=3) for s in (7, 7, 8)]
    assert torch.equal(runs[0].published["phi"], runs[1].published["phi"])
    assert not torch.equal(runs[0].published["phi"], runs[2].published["phi"])


def test_no_global_random_state_is_touched() -> None:
    method = soul()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    population = method.fit(ragged(), rounds=2, participation=0.5)
    population.predict(0, torch.zeros(2, 3)).samples  # noqa: B018
    str(population)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert states[2] == random.getstate()


def test_both_fits_are_the_same_door() -> None:
    one = fp.fit(soul(), ragged(), rounds=2).published["phi"]
    assert torch.equal(one, soul().fit(ragged(), rounds=2).published["phi"])


def test_a_run_works_outside_the_main_thread() -> None:
    """Where no signal handler can be installed."""
    out: list[fp.Population] = []
    thread = threading.Thread(target=lambda: out.append(soul().fit(ragged(), rounds=2)))
    thread.start()
    thread.join()
    assert len(out[0].history) == 2


# --- clients that break -------------------------------------------------------------------------


def broken(size: float = 1e30) -> dict[str, Any]:
    """Client "c" has x so large that squares overflow."""
    a, b, c, d = ragged((4, 5, 3, 6))
    return {"a": a, "b": b, "c": (c[0] * size, c[1]), "d": d}


BREAKABLE: dict[str, Any] = {
    "spectral start": lambda: soul(),
    "random start": lambda: soul(start="random"),
    "closed form": lambda: soul(chain=fp.chains.Chain(rao_blackwell=True)),
    "hmc": lambda: soul(start="random", kernel="hmc", local_steps=2),
    "mini-batches": lambda: soul(phi_step=fp.steps.PhiStep(batch=2)),
    "paper": lambda: fp.FedSOUL.paper(linear_model(), rate=1e-3),
    "full covariance": lambda: soul(prior="full"),
    "fedavg": lambda: fp.FedAvg(linear_model()),
    "fedrep": lambda: fp.FedRep(linear_model()),
}


@pytest.mark.parametrize("name", BREAKABLE)
def test_a_client_whose_update_is_not_finite_is_left_out_counted_and_named(tmp_path: Path, name: str) -> None:
    population = BREAKABLE[name]().fit(broken(), rounds=3, out=tmp_path)
    for line in population.history:
        assert line["left_out"] == ["c"]
        assert line["active"] == 4
        assert math.isfinite(line["loss"])
    assert all(bool(torch.isfinite(t).all()) for t in population.published.values())
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["spectral start", "closed form", "fedavg", "fedrep"])
def test_the_broken_client_does_not_reach_theta(name: str) -> None:
    """theta is the same whatever the broken client holds."""
    runs = [BREAKABLE[name]().fit(broken(size), rounds=3).published["phi"] for size in (1e30, 1e36)]
    assert torch.equal(runs[0], runs[1])


def test_a_run_of_broken_clients_only_is_an_error() -> None:
    clients = {name: (x * 1e30 if float(x.abs().max()) < 1e20 else x, y) for name, (x, y) in broken().items()}
    method = soul(start="random", prior=fp.priors.Normal(scale=1.0))
    with pytest.raises(
        TrainingError, match=r"everybody .* left out, 2 rounds in a row from round 1 on, client 'a'"
    ):
        method.fit(clients, rounds=2)


# --- restarts and the progress bar --------------------------------------------------------------


def test_restarts_return_the_best_likelihood(tmp_path: Path) -> None:
    clients, _, _ = population_data(10, 5, 5, 2, 0.1)
    method = fp.FedSOUL(linear_model(5, 2, 0.1), start="random")
    best = method.fit(clients, rounds=20, restarts=2, out=tmp_path)
    scores = json.loads((tmp_path / "restarts.json").read_text())["log_likelihood"]
    assert len(set(scores)) == 3
    assert best.log_likelihood().value == pytest.approx(max(scores))
    alone = method.fit(clients, rounds=20)
    assert alone.log_likelihood().value == pytest.approx(scores[0])
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["restart-0", "restart-1", "restart-2"]


def test_the_progress_bar_shows_the_numbers_that_matter(capfd: pytest.CaptureFixture[str]) -> None:
    soul(engine="sampled").fit(ragged(), rounds=3, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    for word in ("FedSOUL", "3/3", "loss", "active 4", "accept 1.00", "kB"):
        assert word in shown.err
    soul().fit(ragged(), rounds=3)
    assert capfd.readouterr().err == ""
