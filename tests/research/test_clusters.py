"""The experiment on clusters, small: its data, its records, its report."""

import shutil
from dataclasses import fields, replace

import pytest
import torch

from fedpop.errors import SettingsError
from fedpop.report.results import FIELDS, Results
from fedpop.server.averaging import Gauge
from research.__main__ import main
from research.clusters import (
    NAMES,
    SHOTS,
    TASK,
    ClusterTask,
    density_in_true_coordinates,
    difference_sheet,
    differences,
    few_shot,
    means,
    prior_figures,
    run_seed,
    setting_of,
    truth,
)
from tests.bad_input import test_settings as refused
from tests.oracles import DOUBLE, assert_mean

SMALL = replace(TASK, b=12, new=5, k=4, held_out=6)


def test_the_task_has_two_clusters_and_keeps_new_clients_apart():
    task = ClusterTask(b=3000, new=1000, k=3, held_out=1)
    data, new = task.split(0)
    assert (len(data.clients), len(new.clients)) == (3000, 1000)
    sizes = [len(c.y) for c in data.clients]
    assert sizes.count(task.n_small) == 2700
    assert {len(c.y) for c in new.clients} == {task.n_large}
    centres = torch.tensor(task.centres, dtype=DOUBLE)
    for part in (data, new):
        first = (part.z - centres[0]).norm(dim=1) < (part.z - centres[1]).norm(dim=1)
        assert_mean(first.to(DOUBLE), torch.tensor(0.6, dtype=DOUBLE), "share of the first cluster")
        for side, centre in ((first, centres[0]), (~first, centres[1])):
            # Five scales apart: nobody is on the wrong side.
            assert_mean(part.z[side], centre, "centre")
            squares = (part.z[side] - centre).square()
            assert_mean(squares, torch.full((2,), task.sd**2, dtype=DOUBLE), "spread")
    assert not torch.equal(data.clients[0].x[:1], new.clients[0].x[:1])


@pytest.mark.parametrize(
    "changes",
    [{"weights": (0.5, 0.4)}, {"weights": (1.0,)}, {"sd": 0.0}, {"d": 3}, {"new": -1}],
    ids=str,
)
def test_impossible_tasks_are_refused(changes):
    with pytest.raises(SettingsError):
        replace(TASK, **changes)


@pytest.mark.parametrize("name", [f.name for f in fields(ClusterTask)])
def test_fields_refuse_what_they_cannot_be(name):
    refused.test_what_no_field_takes(ClusterTask, name)
    refused.test_truth_values_are_no_numbers_and_numbers_no_truth_values(ClusterTask, name)
    refused.test_whole_numbers_too_large(ClusterTask, name)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    found = Results(folder)
    with pytest.MonkeyPatch.context() as patch:  # what is learned is not looked at here
        patch.setattr("fedpop.client.final.Final.__init__.__defaults__", (4, 50, 50))
        found.add(run_seed(SMALL, 0, folder, rounds=2))
        found.add(run_seed(SMALL, 1, rounds=2, names=("Normal", "Mixture", "Truth")))
    return found


def test_records_are_in_the_one_format(results):
    assert len(results.records) == 7
    for item in results.records:
        assert set(item) == set(FIELDS)
        assert item["setting"] == setting_of(SMALL)
        for shots in SHOTS:
            assert item["metrics"][f"log_likelihood_{shots}"] is not None
    again = Results.open(results.folder)
    assert again.records == results.records
    assert again.records[0]["setting"] == setting_of(SMALL)


def test_differences_are_paired_by_seed(results):
    by = {(r["method"], r["seed"]): r["metrics"]["log_likelihood_0"] for r in results.records}
    found = differences(results, "log_likelihood_0", "Mixture", "Normal")
    assert found == [by["Mixture", s] - by["Normal", s] for s in (0, 1)]
    assert len(differences(results, "log_likelihood_0", "Energy", "Normal")) == 1
    assert difference_sheet(results).rows[0][0] == "Mixture - Normal"
    assert [row[0] for row in means(results).rows] == list(NAMES)


def test_the_truth_is_the_truth():
    data, new = SMALL.split(3)
    population = truth(SMALL, data, 3)
    points = torch.tensor([[1.5, 0.5], [-1.0, -1.0], [0.2, -0.2]], dtype=DOUBLE)
    density = density_in_true_coordinates(population, data.phi, points)
    # At their own centres the clusters stand as their weights do; in between there is next to nothing.
    torch.testing.assert_close(density, torch.tensor([1.0, 2 / 3, 0.0], dtype=DOUBLE), rtol=1e-4, atol=1e-3)
    # Nor does it change when features are turned and stretched, and the components with them.
    a = 1.3 * torch.tensor([[0.8, -0.6], [0.6, 0.8]])
    method, beta = population.algorithm, population.published["beta"]
    gauge = Gauge.of(method.model, method.hierarchy.prior)
    moved = dict(zip(("phi", "beta"), gauge.transform(population.published["phi"], beta, a), strict=True))
    other = density_in_true_coordinates(replace(population, published=moved), data.phi, points)
    torch.testing.assert_close(other, density, rtol=1e-4, atol=1e-4)
    assert few_shot(population, new, 2)["coverage90"] > 0.5


def test_the_report(results, monkeypatch):
    monkeypatch.setattr("research.clusters.TASK", SMALL)
    main(["report", str(results.folder)])
    text = (results.folder / "report.html").read_text()
    assert text.count("<svg") == 5
    for name in NAMES:
        assert name in text
    assert "Mixture - Normal" in (results.folder / "results.md").read_text()
    assert "no populations" not in text


def test_populations_of_other_data_are_not_drawn_over_these(results, monkeypatch, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(results.folder, copy)
    monkeypatch.setattr("research.clusters.TASK", SMALL)
    assert len(prior_figures(copy)) == 4
    other = truth(SMALL, SMALL.split(1)[0], 1)
    other.public().save(copy / "populations" / "Truth")
    assert not prior_figures(copy)
    main(["report", str(copy)])
    assert "no populations beside the records" in (copy / "report.html").read_text()
