"""The main table's experiment on a set of a few small images: every method within its budget, and a page."""

from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.data.image_task import FullImageTask
from fedpop.evaluation.scores import scored
from fedpop.keys import Key
from fedpop.models.predictive import Predictive
from fedpop.report.results import Results, record
from research import full_data
from research.experiment import Asked
from tests.data.files import mnist
from tests.research.quick import shorten

PASSES = 160


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all methods' records."""
    out, data = tmp_path_factory.mktemp("full"), mnist(tmp_path_factory.mktemp("data"))
    with pytest.MonkeyPatch.context() as patch:
        for known in (full_data.METHODS, full_data.IN_LONG_RUNS):
            shorten(patch, known)
        patch.setattr(full_data, "PASSES", PASSES)
        patch.setattr(full_data, "BUDGETS", (PASSES, 2 * PASSES, 4 * PASSES))
        patch.setattr(full_data, "LONG_FROM", 4 * PASSES)
        patch.setattr(full_data, "SEEDS", 2)
        patch.setattr(full_data, "TASKS", (FullImageTask("mnist", 2, b=5),))
        full_data.EXPERIMENT.run(out=out, processes=1, data=data)
        text = (out / "results.md").read_text()
        assert "not run" not in text
        assert "nan" not in text
        assert text.endswith("The command is: python -m research full-data\n")
        assert text.startswith("## mnist, 2 classes per client: accuracy (ECE) by budget\n\n| method |")
    return out


def test_nobody_spends_more_than_the_budget_and_everyone_is_scored(found: Path) -> None:
    records = Results.open(found).records
    own = set(full_data.ALL) - set(full_data.TODAY)
    for passes in (PASSES, 2 * PASSES, 4 * PASSES):
        assert {r["method"] for r in records if r["setting"]["passes"] == passes} == own
    for r in records:
        assert r["cost"]["backbone_passes"] <= r["setting"]["passes"] * (1 + 1e-9) or r["cost"]["rounds"] == 1
        assert 0 <= r["metrics"]["accuracy_worst_decile"] <= r["metrics"]["accuracy"] <= 1
        assert set(r["setting"]) == {"dataset", "classes_per_client", "b", "passes"}


def test_long_runs_have_their_settings_and_some_have_more_seeds(found: Path) -> None:
    records = Results.open(found).records
    kinds = {
        (r["setting"]["passes"], r["config"]["schedule"]["kind"]) for r in records if r["method"] == "FedRep"
    }
    assert kinds == {(PASSES, "Constant"), (2 * PASSES, "Constant"), (4 * PASSES, "Cosine")}
    assert {r["method"] for r in records if r["seed"] == 1} == set(full_data.AT_LENGTH)
    assert {r["setting"]["passes"] for r in records if r["seed"] == 1} == {4 * PASSES}


def test_columns_come_one_after_the_other() -> None:
    """Each with one budget of all methods, then with the others; the longest of some of them first."""
    jobs = full_data.jobs(Asked(Path("none"), 1))
    columns = [(j.setting["dataset"], j.setting["classes_per_client"]) for j in jobs]
    assert list(dict.fromkeys(columns)) == [("cifar10", 5), ("cifar10", 2), ("cifar100", 5), ("cifar100", 20)]
    many = len(full_data.ALL)
    assert [j.methods[0] for j in jobs[:many]] == list(full_data.ALL)
    assert all(j.setting["passes"] == full_data.PASSES for j in jobs[:many])
    later = [(j.methods[0], j.setting["passes"], j.seed) for j in jobs[many : many + 4]]
    assert later == [*[("FedSOUL", 3_000_000, seed) for seed in range(3)], ("FedSOUL", 1_000_000, 0)]
    for images, names in (("cifar10", full_data.ALL), ("cifar100", full_data.ALL[: -len(full_data.TODAY)])):
        made = [
            (s["classes_per_client"], s["passes"], j.methods[0], j.seed)
            for j in jobs
            for s in (*j.smaller, j.setting)
            if s["dataset"] == images
        ]
        assert len(made) == len(set(made)) == 2 * (4 * len(names) + 2 * 3)
    assert len({j.label for j in jobs}) == len(jobs)
    assert jobs[0].needs == (("cifar10", "train"), ("cifar10", "test"))


def test_budgets_are_one_run_where_no_rate_falls() -> None:
    task, every = full_data.TASKS[0], full_data.BUDGETS
    assert full_data.shared(task, "FedRep", every) == [(100_000, 500_000), (1_000_000,), (3_000_000,)]
    assert full_data.shared(task, "APFL", every) == [(n,) for n in every]
    assert full_data.shared(task, "FedSOUL", every) == [(n,) for n in every]
    job = next(j for j in full_data.jobs(Asked(Path("none"), 1)) if j.methods == ("FedRep",))
    short = full_data.setting_of(task, 100_000)
    assert job.smaller == (short,)
    made = [record("full-data", s, "FedRep", 0, {}, {}, dict(job.config or {})) for s in (job.setting, short)]
    assert not job.done(Results(Path("none"), made[:1]))
    assert not job.done(Results(Path("none"), made[1:]))
    assert job.done(Results(Path("none"), made))
    assert job.overrules(record("full-data", short, "FedRep", 0, {}, {}, {}))


def test_a_line_says_what_was_tried_where_a_method_ends_below_the_papers(tmp_path: Path) -> None:
    task, results = full_data.TASKS[0], Results(tmp_path)
    for name, passes, accuracy in (
        ("Local", 500_000, 0.515),
        ("Local", 1_000_000, 0.5),
        ("FedRep", 500_000, 0.73),
        ("FedRep", 100_000, 0.6),
    ):
        found = {"accuracy": accuracy, "ece": 0.1}
        results.add([record("full-data", full_data.setting_of(task, passes), name, 0, found, {}, {})])
    (row,) = full_data.below(results, task).rows
    told = ("51.5 %", "500,000, 10 for each image", "70.7 %", "-19.2", "not searched for")
    assert row == ("Local", *told, "3,000,000 passes not run")
    table = {row[0]: row[1:] for row in full_data.by_budget(results, task).rows}
    assert table["FedRep"] == ("75.7 %", "60.0 % (0.100)", "73.0 % (0.100)", "not run", "not run")
    assert table["pFedFDA"][0] == "-"


def test_no_run_is_left_behind(found: Path) -> None:
    assert not list((found / "runs").iterdir())
    assert "<svg" in (found / "report.html").read_text()


def test_the_limit_is_told_the_classes_of_a_client() -> None:
    """Two classes can be: of the probabilities (.5, .3, .2) the last two are .6 and .4. It is scored by the
    code that scores every method."""
    eta = torch.tensor([[0.5, 0.3, 0.2]] * 2).log().unsqueeze(0)
    p = Predictive(eta, fp.likelihoods.Categorical(), {}, Key(0), plug_in=True)
    found = scored([("anna", full_data.among(p, torch.tensor([1, 2])), torch.tensor([1, 2]))], widths=False)
    assert float(found.scores["accuracy"]) == 0.5
    expected = -torch.tensor([0.6, 0.4]).log().mean()
    assert found.pooled["nll"] == pytest.approx(float(expected), rel=1e-6)
