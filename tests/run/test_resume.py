"""A run that was killed at any moment resumes to the same bits as one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop import files
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import FedpopWarning
from fedpop.run import checkpoint
from tests.crash import Crash, CrashAt
from tests.helpers import linear_model, population_data, ragged, seeded

ROOT = Path(__file__).parents[2]
ROUNDS = 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same bits need the same number of threads, here and in other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Everything but wall-clock time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def final_state(folder: Path) -> checkpoint.Checkpoint:
    saved = checkpoint.read(folder / "checkpoints")
    assert saved is not None
    return saved


def same_runs(one: Path, other: Path) -> None:
    """theta, optimiser, chains, adaptation and metrics, bit for bit."""
    a, b = final_state(one), final_state(other)
    assert a.round == b.round
    assert a.tensors.keys() == b.tensors.keys()
    assert [n for n in a.tensors if not torch.equal(a.tensors[n], b.tensors[n])] == []
    assert a.callbacks == b.callbacks
    drop = {"seconds"}
    assert {k: v for k, v in a.totals.items() if k not in drop} == {
        k: v for k, v in b.totals.items() if k not in drop
    }
    assert metrics_of(one) == metrics_of(other)


# --- a real process ----------------------------------------------------------------------------


def killable(out: Path, every: int = 3, resume: bool = True, tell: bool = False) -> fp.Population:
    """Partial participation, chains that adapt, Adam and averages: all that a checkpoint must hold."""
    torch.set_num_threads(1)
    task = SyntheticTask(b=12, k=4, n_small=6, logistic=True, held_out=1)
    method = fp.FedSOUL(task.model(0), local_steps=3, beta_step=fp.steps.Adam(0.02))
    callbacks = [Teller()] if tell else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedpopWarning)  # so many rounds are too few for it, but enough here
        return method.fit(
            task.make(0).clients,
            rounds=ROUNDS,
            seed=5,
            participation=0.5,
            out=out,
            resume=resume,
            checkpoint_every=every,
            callbacks=callbacks,
        )


class Teller(fp.callbacks.Callback):
    """Says each round on standard output."""

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        print(run.round, flush=True)
        return False


def start(out: Path, every: int) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from tests.run.test_resume import killable; "
        f"killable(Path(sys.argv[1]), every={every}, tell=True)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def wait_for_round(process: subprocess.Popen[str], rounds: int) -> int:
    """Block until so many further rounds are done; gives the number of the last one."""
    assert process.stdout is not None
    line = ""
    for _ in range(rounds):
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
    return int(line)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    killable(out, resume=False)
    return out


def test_kill_at_random_moments_and_resume(tmp_path: Path, undisturbed: Path) -> None:
    chance = random.Random()
    reached = []
    for _ in range(2):  # more of them in tests/statistical
        process = start(tmp_path, every=3)
        reached.append(wait_for_round(process, chance.randint(1, 20)))
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    killable(tmp_path)
    assert max(reached) < ROUNDS
    same_runs(tmp_path, undisturbed)


def test_ctrl_c_writes_a_checkpoint_and_nothing_is_lost(tmp_path: Path, undisturbed: Path) -> None:
    process = start(tmp_path, every=10_000)
    reached = wait_for_round(process, 20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    saved = final_state(tmp_path)
    assert reached <= saved.round < ROUNDS
    assert len(metrics_of(tmp_path)) == saved.round
    killable(tmp_path)
    same_runs(tmp_path, undisturbed)


# --- the same in this process, for more methods and more places ---------------------------------


def with_validation() -> list[fp.Client]:
    clients, _, _ = population_data(6, 4, 3, 2, 0.5)
    return [fp.Client(x, y, validation=(x + 0.1, y)) for x, y in clients]


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 1), nn.Softplus())
    return fp.Composition(seeded(nn.Linear(3, 2)), head, fp.likelihoods.Normal(0.5))


SITES = {
    "north": ["client-0", "client-4", "client-5"],
    "south": ["client-2", "client-1"],
    "west": ["client-3"],
}
P = (0.9, 0.6, 0.6, 0.5, 0.9, 0.9)
"""Alike within each site."""
EACH = {f"client-{i}": c for i, c in enumerate(("qsgd", "natural", "identity", "rand-k", "qsgd", "natural"))}
STEPS = {f"client-{i}": 2 + i for i in range(6)}
METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "default": (lambda: fp.FedSOUL(linear_model()), {}),
    "sampled": (lambda: fp.FedSOUL(linear_model(), engine="sampled"), {}),
    "paper": (lambda: fp.FedSOUL.paper(linear_model()), {"participation": 3}),
    "stateless": (
        lambda: fp.FedSOUL(linear_model(), chain=fp.chains.Chain(stateful=False)),
        {"participation": 0.5},
    ),
    "inverse": (
        lambda: fp.FedSOUL(linear_model()),
        {"participation": fp.participation.Bernoulli((0.9,) * 6)},
    ),
    "iterate": (
        lambda: fp.FedSOUL(
            linear_model(), average=fp.steps.Averaging("iterate"), phi_step=fp.steps.PhiStep(batch=2)
        ),
        {},
    ),
    "mass matrix": (
        lambda: fp.FedSOUL(curved(), local_steps=2, chain=fp.chains.Chain(burn_in=5)),
        {"participation": 3},
    ),
    "qsgd": (
        lambda: fp.FedSOUL(linear_model(), compressor=fp.compressors.QSGD(levels=7)),
        {"participation": 3},
    ),
    "rand-k": (lambda: fp.FedSOUL.paper(linear_model(), rate=1e-2, compressor="rand-k"), {}),
    "sites": (lambda: fp.FedSOUL(linear_model()), {"participation": 4, "sites": SITES}),
    "sites, qsgd": (
        lambda: fp.FedSOUL(linear_model(), compressor=fp.compressors.QSGD(levels=7)),
        {"participation": 4, "sites": SITES},
    ),
    "sites, hmc, natural": (
        lambda: fp.FedSOUL(linear_model(), kernel="hmc", local_steps=2, compressor="natural"),
        {"participation": fp.participation.Bernoulli(P), "sites": SITES},
    ),
    "sites, memories": (
        lambda: fp.QLSD(linear_model(), variant="++", step=1e-3, compressor="qsgd"),
        {"participation": 4, "sites": SITES},
    ),
    "a compressor each": (
        lambda: fp.FedSOUL(linear_model(), compressor=EACH, local_steps=STEPS),
        {"participation": 4},
    ),
    "fedavg": (lambda: fp.FedAvg(linear_model(), local=fp.LocalSGD(2, 0.05, 2, 0.9)), {"participation": 3}),
    "fedrep": (lambda: fp.FedRep(linear_model(), phi_step=fp.steps.Adam(0.05)), {"participation": 3}),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]
    settings = options | {"rounds": 8, "seed": 3, "checkpoint_every": 3}

    def run(folder: str, resume: bool, crash: int | None = None) -> fp.Population:
        callbacks = [fp.callbacks.EarlyStop(every=2, patience=100)] + ([CrashAt(crash)] if crash else [])
        return method().fit(
            with_validation(), out=tmp_path / folder, resume=resume, callbacks=callbacks, **settings
        )

    run("whole", False)
    for crash in (2, 4, 7):  # before the first checkpoint, between two, after the last
        with pytest.raises(Crash):
            run("broken", True, crash)
    population = run("broken", True)
    same_runs(tmp_path / "broken", tmp_path / "whole")
    assert [line["round"] for line in population.history] == list(range(1, 9))


def test_a_crash_inside_the_writing_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before the n-th rename, for every rename of the run: each time the rest is still usable."""

    def fit(folder: str) -> None:
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=6, out=tmp_path / folder, resume=True, checkpoint_every=2
        )

    fit("whole")
    real, renames = os.replace, 0
    for stop in range(1, 30):
        count = 0

        def replace(source: Any, target: Any, stop: int = stop) -> None:
            nonlocal count
            count += 1
            if count == stop:
                raise Crash
            real(source, target)

        monkeypatch.setattr(files.os, "replace", replace)
        try:
            fit(f"broken-{stop}")
        except Crash:
            renames += 1
        monkeypatch.setattr(files.os, "replace", real)
        fit(f"broken-{stop}")
        same_runs(tmp_path / f"broken-{stop}", tmp_path / "whole")
        if count < stop:
            break
    assert renames == 8  # the settings, three checkpoints of two files, the result


def test_resuming_a_finished_run_does_no_round(tmp_path: Path) -> None:
    first = fp.FedSOUL(linear_model()).fit(ragged(), rounds=4, out=tmp_path)
    again = fp.FedSOUL(linear_model()).fit(
        ragged(), rounds=4, out=tmp_path, resume=True, callbacks=[CrashAt(5)]
    )
    assert torch.equal(first.published["phi"], again.published["phi"])
    assert again.history == first.history
    assert again.totals == first.totals


def test_the_rate_found_by_trial_rounds_is_not_searched_again(tmp_path: Path) -> None:
    method = fp.FedSOUL.paper(linear_model())
    with pytest.raises(Crash):
        method.fit(ragged(), rounds=4, out=tmp_path, checkpoint_every=2, callbacks=[CrashAt(3)])
    tried = []
    calibrated = type(method).calibrated
    try:
        type(method).calibrated = lambda self, trial: tried.append(1) or calibrated(self, trial)
        population = method.fit(ragged(), rounds=4, out=tmp_path, resume=True)
    finally:
        type(method).calibrated = calibrated
    assert tried == []
    assert population.algorithm.rate() > 0
