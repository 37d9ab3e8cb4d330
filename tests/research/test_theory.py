"""The theory experiment's pieces: the task, rounds to a level, records of every part, and the page."""

import math

import pytest
import torch

import fedpop as fp
from fedpop.report.results import FIELDS, Results, record
from research.__main__ import main
from research.experiment import Asked
from research.theory import page as report
from research.theory import run as theory


def test_the_task_has_the_population_it_says():
    """Mean intercept and mean slope along phi, within five standard errors.

    A slope of least squares has variance at most (3 + 1 + 1 + 9) / n here: fourth moments of x' phi for
    w_i, one each for a_i and the noise, and nine further examples that share w_i.
    """
    task = theory.problem(0, b=1600)
    y = torch.stack([c.y.mean() for c in task.clients])
    assert abs(float(y.mean()) - theory.MEAN) < 5 * float(y.std()) / 40
    x = torch.cat([c.x for c in task.clients])
    slope = torch.linalg.lstsq(x, torch.cat([c.y for c in task.clients]).unsqueeze(1)).solution[:, 0]
    assert abs(float(slope @ task.phi.float()) - theory.MEAN) < 5 * math.sqrt(14 / len(x))


def test_a_model_starts_where_it_is_told():
    task = theory.problem(0, b=5)
    phi = torch.arange(float(theory.TASK.k))
    assert torch.equal(task.starting_at(phi).initial_phi(), phi)
    assert torch.equal(task.starting_at(phi).initial_z(), task.model.initial_z())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param([0.5, 0.04, 0.2, 0.05, 0.01], 4.0, id="crossed-twice"),
        pytest.param([0.5, 0.04, 0.2], None, id="not-for-good"),
        pytest.param([0.01, 0.01], 1.0, id="at-once"),
        pytest.param([0.01, math.nan], None, id="nan"),
    ],
)
def test_rounds_to_a_level(path, expected):
    assert theory.rounds_to(path, 0.05) == expected


def test_marks_are_means_over_the_last_half():
    path = theory.Path(float)
    path.values = [float(i) for i in range(10)]
    assert path.marks("v", (4, 10, 20)) == {"v@4": 2.5, "v@10": 7.0}


def test_the_pooled_gap_is_fedavgs_own():
    """Zero at the least-squares solution, and one full-batch step of FedAvg goes down its gradient."""
    task = theory.problem(0, b=10)
    of, start = theory.pooled_gap(task)
    x = torch.cat([torch.cat((c.x, torch.ones(len(c.y), 1)), 1) for c in task.clients])
    best = torch.linalg.lstsq(x, torch.cat([c.y for c in task.clients]).unsqueeze(1)).solution[:, 0]
    k = theory.TASK.k
    assert of({"w": torch.cat((best[:k], torch.ones(1), best[k:]))}) == pytest.approx(0, abs=1e-5)
    w = torch.cat((task.model.initial_phi(), task.model.initial_z()))
    assert start == of({"w": w})
    path = theory.Path(of)
    method = fp.FedAvg(task.model, local=fp.LocalSGD(epochs=1, rate=1e-4))
    method.fit(task.clients, rounds=1, callbacks=[path], progress=False)
    assert 0 < path.values[0] < start


@pytest.fixture
def short(monkeypatch):
    """Every job in a few rounds, on a smaller federation."""
    whole = theory.problem
    monkeypatch.setattr(theory, "problem", lambda seed: whole(seed, b=10))
    monkeypatch.setattr(theory, "BIAS", theory.BIAS | {"local_steps": 2})
    for name, value in (("BIAS_ROUNDS", 4), ("MARKS", (2, 4)), ("NOISE_ROUNDS", 4), ("NOISE_BURN_IN", 2)):
        monkeypatch.setattr(theory, name, value)
    monkeypatch.setattr(theory, "NOISE_MARKS", (2, 4))
    monkeypatch.setattr(theory, "ROUNDS", dict.fromkeys(theory.ROUNDS, 3))
    monkeypatch.setattr(theory, "FEDAVG_ROUNDS", {2: 3})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "part", ["bias", "decreasing", "noise", "vanishing", "paper", "trial", "default", "fedavg"]
)
def test_a_job_gives_the_records_it_promises(short, part, tmp_path):
    calls = {
        "bias": (theory.bias_job, (0.2, 0.0, 0)),
        "decreasing": (theory.bias_job, (*theory.DECREASING, 0)),
        "noise": (theory.noise_job, (5, 0.5, 0.0, 0)),
        "vanishing": (theory.noise_job, (2, 0.25, theory.POWER, 0)),
        "paper": (theory.local_job, ("FedSOUL-paper", 2, 0)),
        "trial": (theory.local_job, (theory.TRIAL, 2, 0)),
        "default": (theory.local_job, ("FedSOUL", 2, 0)),
        "fedavg": (theory.local_job, ("FedAvg", 2, 0)),
    }
    call, arguments = calls[part]
    job = next(j for j in theory.jobs(Asked(tmp_path, 1)) if j.call is call and j.arguments == arguments)
    results = Results.open(tmp_path)
    assert not job.done(results)
    records = call(*arguments)
    assert all(set(r) == set(FIELDS) for r in records)
    results.add(records)
    assert job.done(results)


def test_no_job_stands_for_another(tmp_path):
    jobs = theory.jobs(Asked(tmp_path, 2))
    names = [(str(sorted(j.setting.items())), j.seed, j.methods) for j in jobs]
    assert len(set(names)) == len({j.label for j in jobs}) == len(jobs) == 2 * (5 + 10 + 24)


# --- the page, from made-up records whose answers are known ----------------------------------


def made_up(rounds_of=lambda m: 100.0 / m):
    """Bias 0.3 c, gap 4 c^2, error .01 + .003 excess, and rounds as told; FedAvg stops at M = 20."""
    out = []

    def add(setting, method, seed, **metrics):
        out.append(record("theory", setting, method, seed, metrics, {}, {}))

    for seed in range(3):
        wobble = 1 + 0.01 * seed
        for c, decay in (*((c, 0.0) for c in theory.STEPS), theory.DECREASING):
            path = {f"log_scale@{k}": 0.3 * c * wobble for k in theory.MARKS}
            add(
                theory.bias_setting(c, decay),
                "FedSOUL-paper",
                seed,
                log_scale=0.3 * c * wobble,
                log_scale_root=0.3 * c,
                gap=4 * c**2,
                gap_root=4 * c**2,
                **path,
            )
        for kept, p in theory.KEPT:
            setting = theory.noise_setting(kept, p, 0.0)
            add(setting, "FedSOUL-paper", seed, error=(0.01 + 0.003 * setting["excess"]) * wobble)
        for kept, p in theory.VANISHING:
            path = {f"error@{k}": wobble * k**-0.6 for k in theory.NOISE_MARKS}
            add(theory.noise_setting(kept, p, theory.POWER), "FedSOUL-paper", seed, error=0.1, **path)
        for m in theory.LOCAL_STEPS:
            for name in theory.METHODS:
                rounds = None if name == "FedAvg" and m >= 20 else rounds_of(m)
                add(theory.local_setting(m), name, seed, rounds=rounds, left=0.01 * m)
    return out


def test_the_page_says_what_the_records_say(tmp_path, capsys):
    Results(tmp_path).add(made_up())
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "alpha = 1.00 (1.00 to 1.00)" in page
    assert "the power 2.00" in page
    assert "R2 = 1.000" in page
    assert "3.03e-03 ((omega + 1)/p - 1)" in page
    assert "the median never rises with M" in page
    assert "100 (100 to 100) and never (never to never)" in page
    table = (tmp_path / "results.md").read_text()
    assert "| rounds to 5 % | M = 50 | FedAvg | 3 | never (never to never) | - |" in table
    assert "FedSOUL-paper" in capsys.readouterr().out


def test_errors_in_proportion_to_the_step(tmp_path):
    """From mark to mark as the mean of eta_k over the rounds k/2 to k."""
    results = Results(tmp_path)
    results.add(made_up())
    (first, start), *_, (last, end) = report.proportional(results, 11, 1.0)
    assert (first, last) == (theory.NOISE_MARKS[0], theory.NOISE_MARKS[-1])
    halves = [range(int(k) // 2, int(k)) for k in (first, last)]
    etas = [sum((1 + j) ** -theory.POWER for j in half) / len(half) for half in halves]
    assert end / start == pytest.approx(etas[1] / etas[0])


def test_a_claim_that_does_not_hold_is_said_so(tmp_path):
    results = Results(tmp_path)
    results.add(made_up(lambda m: 10.0 + m))
    assert report.verdict(results, theory.PAPER) == "it rises, against the paper's claim"
    results.add(made_up(lambda m: 50.0 - m + (10 if m == 5 else 0)))
    assert report.verdict(results, theory.PAPER) == (
        "it does not rise overall; the largest rise between neighbours is 7 at M = 5"
    )


def test_a_part_alone_has_a_page(tmp_path):
    bias = [r for r in made_up() if r["setting"]["part"] == "bias"]
    Results(tmp_path).add(bias)
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "The bias of Langevin steps" in page
    assert "The noise of" not in page
    assert (tmp_path / "results.md").read_text().count("\n| ") == len(theory.BIAS_POINTS)


def test_one_seed_has_numbers_and_no_intervals(tmp_path):
    Results(tmp_path).add([r for r in made_up() if r["seed"] == 0])
    main(["report", str(tmp_path)])
    assert "<svg" not in (tmp_path / "report.html").read_text()
    assert (
        "| rounds to 5 % | M = 50 | FedSOUL | 1 | 2 (2 to 2) | - |" in (tmp_path / "results.md").read_text()
    )
