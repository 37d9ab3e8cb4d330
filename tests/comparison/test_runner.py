"""Jobs over worker processes: what is there is not run again, and nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from fedpop.comparison.runner import Board, Job, run_jobs, tell
from fedpop.errors import ConvergenceWarning, FedpopWarning, warn_user
from fedpop.report.results import Record, Results, record


def work(method: str, seed: int, marks: str) -> list[Record]:
    (Path(marks) / f"{method}-{seed}").write_text(str(os.getpid()))
    return [record("synthetic", {"b": 1}, method, seed, {"angle": 1.0}, {}, {})]


def linger(marks: str) -> list[Record]:
    (Path(marks) / "worker").write_text(str(os.getpid()))
    time.sleep(120)
    return []


def jobs(marks: Path) -> list[Job]:
    return [Job(work, (m, 0, str(marks)), m, {"b": 1}, 0, (m,)) for m in ("a", "b", "c")]


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "results")
    results.add(work("b", 0, str(tmp_path)))
    (tmp_path / "b-0").unlink()
    run_jobs(jobs(tmp_path), results, 2, "test")
    assert sorted(p.name for p in tmp_path.glob("*-0")) == ["a-0", "c-0"]
    assert sorted(r["method"] for r in Results.open(tmp_path / "results").records) == ["a", "b", "c"]


def warned(method: str) -> list[Record]:
    warn_user("run more rounds", ConvergenceWarning)
    warn_user("read with care")
    return [record("synthetic", {"b": 1}, method, 0, {"angle": 1.0}, {}, {})]


def test_nobody_is_told_to_change_an_experiments_rounds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(processes: int) -> None:
        found = Results.open(tmp_path / str(processes))
        run_jobs([Job(warned, ("a",), "a", {"b": 1}, 0, ("a",))], found, processes, "test")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told(0)
    assert [str(w.message) for w in caught if issubclass(w.category, FedpopWarning)] == ["read with care"]
    told(1)
    error = capfd.readouterr().err
    assert "read with care" in error
    assert "run more rounds" not in error


SCRIPT = """
import sys
from pathlib import Path

import pytest
from fedpop.report.results import Results
from fedpop.comparison.runner import Board, Job, run_jobs, tell
from tests.comparison.test_runner import linger
if __name__ == "__main__":
    folder = sys.argv[1]
    run_jobs([Job(linger, (folder,), "x", {}, 0, ("x",))], Results.open(folder), 1, "test")
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to see whether a process is alive")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        mark = tmp_path / "worker"
        for _ in range(600):
            if mark.exists() and mark.read_text():
                break
            time.sleep(0.1)
        worker = int(mark.read_text())
        assert alive(worker)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        for _ in range(300):
            if not alive(worker):
                break
            time.sleep(0.1)
        assert not alive(worker)
    finally:
        parent.kill()


def telling(method: str, seed: int) -> list[Record]:
    tell(0.5, "half of it")
    return [record("synthetic", {"b": 1}, method, seed, {"angle": 1.0}, {}, {})]


@pytest.mark.parametrize("processes", [0, 1])
def test_the_bar_moves_while_a_job_is_under_way(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    inner = Board.at

    def at(self: Board, job: int, share: float, doing: str) -> None:
        inner(self, job, share, doing)
        shown = self.progress.tasks[0]
        seen.append((doing, shown.completed, shown.fields["last"]))

    monkeypatch.setattr(Board, "at", at)
    todo = [Job(telling, ("a", 0), "a", {"b": 1}, 0, ("a",))]
    run_jobs(todo, Results.open(tmp_path), processes, "test")
    half = next(s for s in seen if s[0] == "half of it")
    crossed = ("half of it", 1.0, "a: done")  # told by a process before the end, heard after it
    assert half == ("half of it", 0.5, "a: half of it") or (processes and half == crossed)
    assert seen[-1][1:] == (1.0, "a: done")
    tell(0.1, "to nobody")  # outside of a job there is no bar
