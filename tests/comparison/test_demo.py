"""The demo on a small synthetic task from end to end: methods, the exact optimum, records and report."""

import pytest
import torch

from fedpop.cli import main
from fedpop.comparison import demo
from fedpop.comparison.runner import Job, run_jobs
from fedpop.comparison.truth import METHODS, run_beside_truth
from fedpop.data.synthetic import SyntheticTask
from fedpop.errors import SettingsError
from fedpop.evaluation.oracle import everyone, log_likelihood
from fedpop.federation.clients import Federation
from fedpop.report.results import FIELDS, Results, record
from tests.helpers import FRAME

TASK = SyntheticTask(b=40, d=2, k=6, held_out=10)


@pytest.fixture(scope="module")
def outcomes():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    methods = {name: METHODS[name] for name in ("FedSOUL", "FedRep-spectral", "FedAvg")}
    yield run_beside_truth(demo.NAME, TASK, 0, methods)
    torch.set_num_threads(before)


def metrics(outcomes, method):
    return next(o.record["metrics"] for o in outcomes if o.record["method"] == method)


def test_fedsoul_is_at_the_exact_optimum(outcomes):
    m = metrics(outcomes, "FedSOUL")
    assert m["principal_angle"] <= 1.10 * m["principal_angle_exact"]
    assert 0 <= m["likelihood_gap"] < 0.5


def test_the_limits_are_no_better(outcomes):
    soul = metrics(outcomes, "FedSOUL")["log_likelihood"]
    assert soul > metrics(outcomes, "FedRep-spectral")["log_likelihood"]
    assert soul > metrics(outcomes, "FedAvg")["log_likelihood"]


def test_records_are_complete_and_costs_counted(outcomes):
    for outcome in outcomes:
        assert set(outcome.record) == set(FIELDS)
        assert set(outcome.record["setting"]) == {"b", "d", "k", "share_small", "n_small", "n_large"}
    cost = next(o.record["cost"] for o in outcomes if o.record["method"] == "FedSOUL")
    # A round of the exact engine is one pass, and 15 more where it asks for the Hessian in 12 and 3 numbers.
    passes = cost["backbone_passes"] / sum(len(c.y) for c in TASK.make(0).clients)
    curved, rest = divmod(passes - cost["rounds"], 15)
    assert rest == 0
    assert 2 <= curved < cost["rounds"] < 100
    # 40 clients send a value and a gradient, or half a Hessian as well, in double precision; before that a
    # matrix of 36 and a count, two more and a count, and in double precision what a pooled fit needs and two
    # numbers that tell whose data are unlike all others'.
    rounds = 8 * (cost["rounds"] * 16 + curved * 15 * 16 / 2)
    rounds += FRAME * (2 * cost["rounds"] + curved + 2 + 3 + 1 + 2)
    assert cost["bytes_up"] == 40 * (rounds + 4 * (37 + 73) + 8 * 8 + 8 * 2)


def test_the_oracle_is_a_stationary_point(outcomes):
    optimum = next(o.population for o in outcomes if o.record["method"] == "Exact")
    method = optimum.algorithm
    federation = method.model.checked(Federation.of(TASK.make(0).clients))
    theta = [optimum.published[n].double().requires_grad_() for n in ("phi", "beta")]
    value = log_likelihood(method, everyone(method, federation), *theta)
    grads = torch.autograd.grad(value, theta)
    # theta* was rounded to single precision, and the curvature is of order 1e3.
    assert max(float(g.abs().max()) for g in grads) < 1e-2


def work(seed):
    return [record("synthetic", {"b": 1}, "m", seed, {"angle": 1.0 * seed}, {}, {})]


def test_the_runner_does_not_run_twice_what_is_there(tmp_path):
    jobs = [Job(work, (s,), str(s), {"b": 1}, s, ("m",)) for s in range(3)]
    results = Results.open(tmp_path)
    results.add(work(1))
    results.records[0]["metrics"]["angle"] = 99.0
    run_jobs(jobs, results, 1, "test")
    assert [r["metrics"]["angle"] for r in Results.open(tmp_path).records] == [0.0, 99.0, 2.0]


@pytest.fixture
def shown(tmp_path, outcomes):
    return demo.keep(tmp_path, outcomes, TASK.make(0))


def test_the_demos_table_names_the_engine_that_ran(shown):
    engines = {row[0]: row[1] for row in demo.reached(shown).rows}
    assert engines == {"FedSOUL": "exact", "FedRep-spectral": "-", "FedAvg": "-", "Exact": "-"}


def test_the_demos_report_is_one_self_contained_page(shown, capsys):
    page = demo.REPORT.tell(shown).read_text()
    assert "Distance to the truth" in capsys.readouterr().out
    assert page.count("<svg") == 7
    assert "FedSOUL" in page
    assert "90 % interval" in page
    for outside in ('src="http', "<link", "url(http", "<script"):
        assert outside not in page


def test_the_demos_page_is_made_again_from_its_folder(shown):
    comparison = demo.compare_demo(TASK, 0, shown.folder / demo.COMPARISON, rounds=2)
    assert list(comparison.methods) == [table.get("label", table["name"]) for table in demo.COMPARED]
    page = demo.REPORT.write(shown).read_text()
    assert page.count("<svg") == 7 + 2
    assert "More methods, under one protocol" in page
    (shown.folder / "report.html").unlink()
    main(["report", str(shown.folder)])  # as ``fedpop demo`` wrote it, not as an experiment would be told
    assert (shown.folder / "report.html").read_text() == page


def test_the_report_of_a_run_folder(tmp_path):
    import fedpop as fp

    fp.FedSOUL(TASK.model(0)).fit(TASK.make(0).clients, rounds=5, out=tmp_path / "run")
    main(["report", str(tmp_path / "run")])
    assert "rounds" in (tmp_path / "run" / "report.html").read_text()


def test_a_folder_without_a_run_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["report", str(tmp_path)])
    assert caught.value.code == 2
    assert "neither metrics.jsonl nor" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [{"b": 0}, {"d": 3, "k": 2}, {"share_small": 1.5}])
def test_impossible_tasks_are_refused(bad):
    with pytest.raises(SettingsError):
        SyntheticTask(**bad)
