"""One process at a time in a run's folder, and a full disk: one line of error, with nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import CheckpointError
from fedpop.run import lock
from fedpop.run.lock import locked_folder
from tests.helpers import linear_model, ragged
from tests.run.test_resume import ROOT, one_thread, same_runs

__all__ = ["one_thread"]  # a fixture for these tests too

HOLD = """
import sys, time
from pathlib import Path
from fedpop.run.lock import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def fit(out: Path, resume: bool = True, **settings: Any) -> fp.Population:
    return fp.FedSOUL(linear_model()).fit(
        ragged(), **({"rounds": 6} | settings), out=out, resume=resume, checkpoint_every=2
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def start_holding(folder: Path) -> subprocess.Popen[str]:
    code = HOLD + "    print('held', flush=True); time.sleep(600)"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def test_a_second_process_is_told_who_holds_the_folder_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    fit(tmp_path, rounds=4)
    other = start_holding(tmp_path)
    try:
        before = content(tmp_path)
        expected = (
            rf"{tmp_path} is in use by process {other.pid} on {socket.gethostname()}, since 20.*UTC; wait"
        )
        with pytest.raises(CheckpointError, match=expected):
            fit(tmp_path)
        assert content(tmp_path) == before
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / ".lock").exists()  # it could not tidy up
    assert len(fit(tmp_path).history) == 6
    assert not (tmp_path / ".lock").exists()


def test_a_run_inside_a_run_is_refused_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    refused = []

    class Again(fp.callbacks.Callback):
        def after_round(self, run: Any, metrics: dict[str, Any]) -> bool:
            try:
                fit(tmp_path)
            except CheckpointError as error:
                refused.append(str(error))
            return False

    assert len(fit(tmp_path, callbacks=[Again()]).history) == 6
    assert len(refused) == 6
    assert f"process {os.getpid()} " in refused[0]


@pytest.mark.parametrize(
    ("holder", "free"),
    [
        ({"pid": os.getpid(), "host": socket.gethostname(), "since": "now"}, False),
        ({"pid": 2**22 + 1, "host": socket.gethostname(), "since": "then"}, True),  # above the largest pid
        ({"pid": "x", "host": socket.gethostname(), "since": "then"}, True),
        ({"pid": 1, "host": "elsewhere", "since": "then"}, False),  # nobody here can tell
        ([], True),
        (None, True),
    ],
)
def test_where_files_cannot_be_locked_the_holder_counts_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, free: bool
) -> None:
    monkeypatch.setattr(lock, "_fcntl", None)
    (tmp_path / ".lock").write_text(json.dumps(holder) if holder is not None else "\xff{")
    if not free:
        with pytest.raises(CheckpointError, match=f"in use by process {holder['pid']} on {holder['host']}"):
            locked_folder(tmp_path).__enter__()
        return
    with locked_folder(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(CheckpointError, match="in use by process"):
            locked_folder(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
from pathlib import Path
from fedpop.errors import CheckpointError
from tests.run import test_lock
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), most))
    try:
        test_lock.fit(Path(sys.argv[1]) / limit, rounds=40)
    except CheckpointError as error:
        print(error)
"""
LIMITS = [600, 1500, 4000, 6000]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder of runs that met their limits, the error of each, and a run that met none."""
    folder = tmp_path_factory.mktemp("full")
    command = [sys.executable, "-c", FULL, str(folder), *map(str, LIMITS)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, check=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fit(folder / "whole", rounds=40)
    torch.set_num_threads(before)
    return folder, done.stdout.splitlines()


@pytest.mark.parametrize("limit", LIMITS)
def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_once_there_is_room(
    filled: tuple[Path, list[str]], limit: int
) -> None:
    """The operating system lets no file grow beyond so many bytes: metrics and checkpoints fail in turn."""
    folder, messages = filled
    assert len(messages) == len(LIMITS)
    words, run = messages[LIMITS.index(limit)], folder / str(limit)
    assert "cannot write" in words
    assert "File too large; what was saved before is still there" in words
    assert str(run) in words
    left = [p.name for p in run.rglob("*") if p.is_file()]
    assert not [n for n in left if n.startswith(".") or n.endswith(".tmp")]
    pairs = {Path(n).stem for n in left if n.startswith("round-")}
    assert all({f"{p}.json", f"{p}.safetensors"} <= set(left) for p in pairs)
    fit(run, rounds=40)
    same_runs(run, folder / "whole")
