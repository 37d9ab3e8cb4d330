"""A run that was killed at any moment resumes to the same bits as one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop import files
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import CheckpointError, DataError, FedpopWarning, SettingsError
from fedpop.runtime import checkpoint
from tests.helpers import linear_model, population_data, ragged, seeded

ROOT = Path(__file__).parents[2]


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
    return method.fit(
        task.make(0).clients,
        rounds=120,
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
        "import sys; from pathlib import Path; from tests.runtime.test_checkpoint import killable; "
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
    for _ in range(3):
        process = start(tmp_path, every=3)
        reached.append(wait_for_round(process, chance.randint(1, 30)))
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    killable(tmp_path)
    assert max(reached) < 120
    same_runs(tmp_path, undisturbed)


def test_ctrl_c_writes_a_checkpoint_and_nothing_is_lost(tmp_path: Path, undisturbed: Path) -> None:
    process = start(tmp_path, every=10_000)
    told = wait_for_round(process, 20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    saved = final_state(tmp_path)
    assert told <= saved.round < 120
    assert len(metrics_of(tmp_path)) == saved.round
    killable(tmp_path)
    same_runs(tmp_path, undisturbed)


# --- the same in this process, for more methods and more places ---------------------------------


class Crash(BaseException):
    """What a test throws in place of a power cut."""


class CrashAt(fp.callbacks.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
        if run.round == self.round:
            raise Crash
        return False


def with_validation() -> list[fp.Client]:
    clients, _, _ = population_data(6, 4, 3, 2, 0.5)
    return [fp.Client(x, y, validation=(x + 0.1, y)) for x, y in clients]


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 1), nn.Softplus())
    return fp.Composition(seeded(nn.Linear(3, 2)), head, fp.likelihoods.Normal(0.5))


METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "default": (lambda: fp.FedSOUL(linear_model()), {}),
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
    "mass matrix": (lambda: fp.FedSOUL(curved(), local_steps=2), {"participation": 3}),
    "qsgd": (
        lambda: fp.FedSOUL(linear_model(), compressor=fp.compressors.QSGD(levels=7)),
        {"participation": 3},
    ),
    "rand-k": (lambda: fp.FedSOUL.paper(linear_model(), rate=1e-2, compressor="rand-k"), {}),
    "fedavg": (lambda: fp.FedAvg(linear_model(), local=fp.LocalSGD(2, 0.05, 2, 0.9)), {"participation": 3}),
    "fedrep": (lambda: fp.FedRep(linear_model(), phi_step=fp.steps.Adam(0.05)), {"participation": 3}),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]
    settings = options | {"rounds": 12, "seed": 3, "checkpoint_every": 4}

    def run(folder: str, resume: bool, crash: int | None = None) -> fp.Population:
        callbacks = [fp.callbacks.EarlyStop(every=2, patience=100)] + ([CrashAt(crash)] if crash else [])
        return method().fit(
            with_validation(), out=tmp_path / folder, resume=resume, callbacks=callbacks, **settings
        )

    run("whole", False)
    for crash in (3, 6, 11):  # before the first checkpoint, between two, after the last
        with pytest.raises(Crash):
            run("broken", True, crash)
    population = run("broken", True)
    same_runs(tmp_path / "broken", tmp_path / "whole")
    assert [line["round"] for line in population.history] == list(range(1, 13))


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
    assert renames == 7  # the settings, then three checkpoints of two files


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


# --- checkpoints that cannot be trusted ---------------------------------------------------------


def fit(out: Path, *, rounds: int = 6, resume: bool = True, **changes: Any) -> fp.Population:
    model = changes.pop("model", None) or linear_model()
    clients = changes.pop("clients", None) or ragged()
    settings = {k: changes.pop(k) for k in ("seed", "participation", "memory", "sites") if k in changes}
    method = fp.FedSOUL(model, **changes)
    return method.fit(clients, rounds=rounds, out=out, resume=resume, checkpoint_every=2, **settings)


def newest(out: Path, suffix: str) -> Path:
    return max((out / "checkpoints").glob(f"*.{suffix}"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def edit_the_round(path: Path) -> None:
    path.write_text(path.read_text().replace('"round": 6', '"round": 5'))


DAMAGE = [
    ("safetensors", truncate, "truncated or edited"),
    ("safetensors", flip_a_bit, "truncated or edited"),
    ("safetensors", Path.unlink, "cannot read"),
    ("json", truncate, "not readable JSON"),
    ("json", edit_the_round, "was edited"),
    ("json", lambda p: p.write_text("{}"), "not a checkpoint"),
    ("json", lambda p: p.write_bytes(b"\xff\xfe\x00"), "not readable JSON"),
]


@pytest.mark.parametrize(("suffix", "damage", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    tmp_path: Path, suffix: str, damage: Callable[[Path], Any], message: str
) -> None:
    fit(tmp_path / "whole")
    fit(tmp_path / "run")
    bad = newest(tmp_path / "run", suffix)
    damage(bad)
    with pytest.warns(FedpopWarning, match=rf"{message}.*using the previous one") as caught:
        fit(tmp_path / "run")
    assert bad.name in str(caught[0].message)
    same_runs(tmp_path / "run", tmp_path / "whole")


def test_no_usable_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    fit(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "checkpoints").glob("*.safetensors"):
        truncate(path)
    with (
        pytest.warns(FedpopWarning, match="checkpoint refused"),
        pytest.raises(CheckpointError, match=r"no usable checkpoint.*delete the folder"),
    ):
        fit(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda p: p.write_bytes(p.read_bytes()[:20])])
def test_metrics_that_do_not_reach_the_checkpoint_are_an_error(tmp_path: Path, damage: Any) -> None:
    fit(tmp_path)
    damage(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is missing or shorter"):
        fit(tmp_path)


# --- resuming something else --------------------------------------------------------------------


def tanh_or_relu(activation: Any) -> fp.Composition:
    from torch import nn

    return fp.Composition(
        nn.Sequential(nn.Linear(3, 2), activation), nn.Linear(2, 1), fp.likelihoods.Normal(0.5)
    )


def shifted() -> list[Any]:
    clients = ragged()
    clients[2][1][0] += 1e-5
    return clients


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"rounds": 8}, "rounds: 6 then, 8 now"),
        ({"participation": 2}, "participation"),
        ({"memory": "1KiB"}, "memory: 1GiB then, 1KiB now"),
        ({"local_steps": 3}, r"algorithm\.local_steps: 10 then, 3 now"),
        (
            {"kernel": fp.kernels.Exponential(0.5)},
            r"algorithm\.kernel: None then, .*'Exponential', 'h': 0\.5",
        ),
        ({"phi_step": fp.steps.Adam(0.2)}, r"algorithm\.phi_step: None then, .*'Adam', 'rate': 0\.2"),
        ({"prior": "diagonal"}, r"algorithm\.prior: normal then, diagonal now"),
        ({"chain": fp.chains.Chain(chains=2)}, r"algorithm\.chain\.chains: 1 then, 2 now"),
        ({"sites": {"all": [f"client-{i}" for i in range(4)]}}, r"sites: None then, .*'all'"),
        ({"model": linear_model(d=1)}, "model"),
        ({"model": linear_model(variance=0.6)}, r"likelihood: Normal\(variance=0\.5\) then"),
        ({"clients": ragged()[:3]}, "clients: 4 then, 3 now"),
        ({"clients": shifted()}, "data: "),
    ],
)
def test_changed_settings_or_data_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    fit(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=rf"cannot resume.*{named}"):
        fit(tmp_path, **changes)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (
            {"kernel": fp.kernels.Exponential()},
            {"kernel": fp.kernels.Exponential(0.5)},
            r"algorithm\.kernel\.h: 1\.0 then, 0\.5 now",
        ),
        (
            {"phi_step": fp.steps.PhiStep(fp.steps.Adam(0.1))},
            {"phi_step": fp.steps.PhiStep(fp.steps.Adam(0.2))},
            r"algorithm\.phi_step\.optimiser\.rate: 0\.1 then, 0\.2 now",
        ),
        (
            {"prior": fp.priors.Normal()},
            {"prior": fp.priors.Normal("diagonal")},
            r"algorithm\.prior\.covariance: isotropic then, diagonal now",
        ),
    ],
    ids=["kernel", "phi step", "prior"],
)
def test_what_differs_inside_a_setting_is_named(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    fit(tmp_path, **then)
    with pytest.raises(CheckpointError, match=rf"cannot resume.*\({named}\)"):
        fit(tmp_path, **now)


def test_another_network_of_the_same_size_is_refused(tmp_path: Path) -> None:
    from torch import nn

    fit(tmp_path, model=tanh_or_relu(nn.Tanh()))
    with pytest.raises(CheckpointError, match=r"model\.modules"):
        fit(tmp_path, model=tanh_or_relu(nn.ReLU()))


def test_what_does_not_change_the_result_may_change(tmp_path: Path) -> None:
    method = fp.FedSOUL(linear_model())
    method.fit(ragged(), rounds=4, out=tmp_path, checkpoint_every=1)
    method.fit(ragged(), rounds=4, out=tmp_path, checkpoint_every=3, resume=True, progress=False)


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    fit(tmp_path, resume=False)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="already holds a run; use resume=True"):
        fit(tmp_path, resume=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    assert len(fit(tmp_path / "new", resume=True).history) == 6


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am not a folder")
    with pytest.raises(SettingsError, match=r"cannot write to .*file/sub"):
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=1, out=tmp_path / "file" / "sub", callbacks=[CrashAt(1)]
        )
    assert (tmp_path / "file").read_text() == "I am not a folder"


def test_a_run_leaves_the_same_few_files_and_no_pickle(tmp_path: Path) -> None:
    fit(tmp_path, rounds=7)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert names == [
        "checkpoints/round-00000006.json",
        "checkpoints/round-00000006.safetensors",
        "checkpoints/round-00000007.json",
        "checkpoints/round-00000007.safetensors",
        "config.json",
        "metrics.jsonl",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rounds"] == 7
    assert config["algorithm"]["local_steps"] == 10


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"participation": 9}, SettingsError),
        ({"participation": fp.participation.Bernoulli((0.5, 0.5))}, SettingsError),
        ({"memory": "a lot"}, SettingsError),
        ({"callbacks": [fp.callbacks.EarlyStop()]}, DataError),  # no validation data
        ({"rounds": 0}, SettingsError),
        ({"checkpoint_every": 0}, SettingsError),
        ({"seed": -1}, SettingsError),
        ({"restarts": -1}, SettingsError),
    ],
)
def test_impossible_settings_create_nothing(tmp_path: Path, settings: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        fp.FedSOUL(linear_model()).fit(ragged(), out=tmp_path / "new", **({"rounds": 2} | settings))
    assert list(tmp_path.iterdir()) == []


def test_the_thread_count_comes_back_with_the_run(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=4, out=tmp_path, checkpoint_every=2, callbacks=[CrashAt(3)]
        )
    torch.set_num_threads(2)
    seen: list[int] = []

    class Look(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
            seen.append(torch.get_num_threads())
            return False

    fp.FedSOUL(linear_model()).fit(ragged(), rounds=4, out=tmp_path, resume=True, callbacks=[Look()])
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
