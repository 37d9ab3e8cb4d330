"""The main table's experiment on a set of a few small images: every method within its budget, and a page."""

from pathlib import Path

import pytest
import torch

import fedpop as fp
from fedpop.data.image_task import FullImageTask
from fedpop.evaluation.scores import scored
from fedpop.keys import Key
from fedpop.models.predictive import Predictive
from fedpop.report.results import Results
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
        shorten(patch, full_data.METHODS)
        patch.setattr(full_data, "PASSES", PASSES)
        task = FullImageTask("mnist", 2, b=5)
        patch.setattr(full_data, "OTHERS", {task: (2 * PASSES,)})
        patch.setattr(full_data, "TASKS", (task,))
        full_data.EXPERIMENT.run(out=out, processes=1, data=data)
        text = (out / "results.md").read_text()
        assert "not run" not in text
        assert "nan" not in text
        assert text.endswith("The command is: python -m research full-data\n")
        assert text.startswith(f"## mnist, 2 classes per client, 5 clients, {PASSES} passes\n\n| method |")
    return out


def test_nobody_spends_more_than_the_budget_and_everyone_is_scored(found: Path) -> None:
    records = Results.open(found).records
    assert {r["method"] for r in records} == set(full_data.ALL)
    assert {r["method"] for r in records if r["setting"]["passes"] == 2 * PASSES} == set(full_data.OURS)
    for r in records:
        assert r["cost"]["backbone_passes"] <= r["setting"]["passes"] * (1 + 1e-9) or r["cost"]["rounds"] == 1
        assert 0 <= r["metrics"]["accuracy_worst_decile"] <= r["metrics"]["accuracy"] <= 1
        assert set(r["setting"]) == {"dataset", "classes_per_client", "b", "passes"}


def test_the_first_stage_comes_first() -> None:
    """CIFAR-10 with the methods of the first stage, for all seeds; nothing is left out at the end."""
    jobs = full_data.jobs(Asked(Path("none"), 2))
    early = [(j.setting["dataset"], j.methods[0], j.seed) for j in jobs[:32]]
    assert {dataset for dataset, _, _ in early} == {"cifar10"}
    assert {name for _, name, _ in early} == {*full_data.FIRST_METHODS, full_data.LIMIT}
    assert {seed for _, _, seed in early} == {0, 1}
    others = sum(len(passes) for passes in full_data.OTHERS.values())
    assert others == 2 * 3 + 2
    assert len(jobs) == 2 * (4 * len(full_data.ALL) + 2 * others)
    assert len({j.label for j in jobs}) == len(jobs)
    assert jobs[0].needs == (("cifar10", "train"), ("cifar10", "test"))


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
