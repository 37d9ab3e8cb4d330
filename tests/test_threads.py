"""How many threads a run takes: by what it does, by what it was given, and never more than are idle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop import threads
from fedpop.errors import SettingsError
from fedpop.models.networks import build
from tests.helpers import linear_model, ragged

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, all of them idle, and torch may use them."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(threads, "idle_cores", lambda: 8.0)
    yield
    torch.set_num_threads(before)


def image_clients(side: int, images: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(images, 3, side, side), torch.arange(images) % 10) for _ in range(3)]


@pytest.mark.usefixtures("machine")
def test_small_steps_take_one_thread_and_large_ones_several(monkeypatch: pytest.MonkeyPatch) -> None:
    small = fp.FedSOUL(linear_model()).fit(ragged(), rounds=1)
    assert [d.chosen for d in small.decisions if d.what == "threads"] == ["1"]
    large = threads.chosen(10 * threads.LEAST_SHARE, CPU)
    assert large.chosen == "8"
    assert not large.unusual
    assert threads.chosen(3.9 * threads.LEAST_SHARE, CPU).chosen == "3"
    monkeypatch.setattr(threads, "idle_cores", lambda: 1.6)
    busy = threads.chosen(10 * threads.LEAST_SHARE, CPU)
    assert busy.chosen == "2"
    assert busy.unusual
    assert "others use 6 of 8" in busy.because
    monkeypatch.setattr(threads, "idle_cores", lambda: 0.0)
    assert threads.chosen(10 * threads.LEAST_SHARE, CPU).chosen == "1"
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "idle_cores", lambda: 2.0)
    assert threads.chosen(10 * threads.LEAST_SHARE, CPU).chosen == "2"


@pytest.mark.usefixtures("machine")
def test_a_run_goes_by_the_examples_of_a_step() -> None:
    model = build("cnn-cifar10", (3, 32, 32), 10)
    few, many = (fp.FedAvg(model, local=fp.LocalSGD(batch=batch, rate=1e-3)) for batch in (2, 40))
    counts = []
    for method in (few, many):
        population = method.fit(image_clients(32, 40), rounds=1, precision="float32")
        counts += [int(d.chosen) for d in population.decisions if d.what == "threads"]
    assert counts[0] == 1 < counts[1]


@pytest.mark.usefixtures("machine")
def test_threads_are_obeyed_inside_and_given_back(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(fp.callbacks.Callback):
        def after_round(self, run: object, metrics: object) -> bool:
            seen.append(torch.get_num_threads())
            return False

    method = fp.FedSOUL(linear_model(), engine="sampled")
    population = method.fit(ragged(), rounds=2, threads=3, callbacks=[Watching()], out=tmp_path / "a")
    assert seen == [3, 3]
    assert torch.get_num_threads() == 8
    assert ("3", "as asked for") in [(d.chosen, d.because) for d in population.decisions]
    again = method.fit(ragged(), rounds=3, callbacks=[Watching()], out=tmp_path / "a", resume=True)
    assert seen == [3, 3, 3]
    assert again.threads == 3
    method.fit(ragged(), rounds=4, threads=2, callbacks=[Watching()], out=tmp_path / "a", resume=True)
    assert seen == [3, 3, 3, 2]
    with pytest.raises(SettingsError, match="threads"):
        method.fit(ragged(), rounds=1, threads=0)


def test_cores_that_work_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks of two cores as the system counts them: one idles for three quarters of the time."""
    ticks = iter([{0: (100, 200), 1: (50, 200)}, {0: (175, 300), 1: (50, 300)}])
    monkeypatch.setattr(threads, "_idle_ticks", lambda: next(ticks))
    monkeypatch.setattr(threads, "cores", lambda: 2)
    assert threads.idle_cores() == 0.75
    monkeypatch.setattr(threads, "_idle_ticks", dict)
    assert threads.idle_cores() == 2  # a system that does not say


def test_what_the_system_says_is_read() -> None:
    assert threads.cores() >= 1
    assert all(0 <= idle <= total for idle, total in threads._idle_ticks().values())
    assert 0 <= threads.idle_cores() <= threads.cores()


def test_a_module_on_another_device_takes_one() -> None:
    assert threads.chosen(1e12, torch.device("meta")).chosen == "1"
