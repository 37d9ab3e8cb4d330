"""The sweep of defaults: equal budgets, records of every kind, and a page made from them."""

import math
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.data.image_task import ImageTask
from fedpop.report.results import Results, record
from research import defaults
from research.__main__ import main
from research.experiment import Asked
from tests.data.files import real
from tests.helpers import generator


def test_every_variant_may_spend_the_same_number_of_passes() -> None:
    task = ImageTask()
    for name, variant in defaults.VARIANTS.items():
        rounds = defaults.rounds_for(task, variant.cost, defaults.PASSES)
        spent = rounds * variant.cost * defaults.ACTIVE * sum(task.sizes) / len(task.sizes)
        assert 0.95 * defaults.PASSES < spent <= defaults.PASSES, name


def test_variants_differ_from_the_default_in_what_they_say() -> None:
    model = ImageTask("mnist").model(0)
    base = defaults.VARIANTS[defaults.DEFAULT].build(model).describe()
    for name in defaults.VARIANTS:
        if name != defaults.DEFAULT:
            assert defaults.VARIANTS[name].build(model).describe() != base, name


def test_the_chosen_row_is_what_fedsoul_does_by_itself() -> None:
    model = ImageTask("mnist").model(0)
    chosen = defaults.VARIANTS[defaults.DEFAULT].build(model).describe()
    default = fp.FedSOUL(model).describe()
    assert {k: v for k, v in chosen.items() if k != "final"} == {
        k: v for k, v in default.items() if k != "final"
    }


@pytest.mark.parametrize("name", ["default", "local epoch .1"])
def test_a_job_on_real_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = real("mnist")
    monkeypatch.setattr(defaults, "PASSES", 40)
    small = ImageTask("mnist", classes=2, small=3, large=3, n_small=2, n_large=4, validation=2, test=4)
    monkeypatch.setattr(defaults, "ImageTask", lambda images: small)
    monkeypatch.setattr(defaults, "ACTIVE", 2)
    records = defaults.job("mnist", name, 0, Asked(folder, data=folder))
    (item,) = records
    assert item["method"] == name
    assert 0 <= item["metrics"]["test_accuracy"] <= 1
    assert item["cost"]["backbone_passes"] > 0


def test_scores_are_over_all_images_and_by_size_of_client() -> None:
    g = generator(0)
    clients = []
    for n, held in ((5, 8), (25, 4), (5, 3)):
        x, y = torch.randn(n + 2 * held, 3, generator=g), torch.randint(3, (n + 2 * held,), generator=g)
        sets = {"validation": (x[n:-held], y[n:-held]), "test": (x[-held:], y[-held:])}
        clients.append(fp.Client(x[:n], y[:n], **sets))
    model = fp.Composition(nn.Linear(3, 3), nn.Linear(3, 3), "categorical")
    population = fp.FedRep(model).fit(clients, rounds=2, progress=False)
    rows = []
    for i, client in enumerate(clients):
        x, y = client.test
        for p, label in zip(population.predict(i, x).probs.tolist(), y.tolist(), strict=True):
            rows.append((len(client.y), max(p), p.index(max(p)) == label, p[label], p, label))
    found = defaults.judged(population, "test")
    assert set(found) == {
        f"test_{n}" for n in ("accuracy", "log_score", "brier", "ece", "accuracy_5", "accuracy_25")
    }
    assert found["test_accuracy"] == pytest.approx(mean(r[2] for r in rows))
    assert found["test_log_score"] == pytest.approx(mean(-math.log(r[3]) for r in rows), rel=1e-5)
    squares = [sum((q - (k == label)) ** 2 for k, q in enumerate(p)) for *_, p, label in rows]
    assert found["test_brier"] == pytest.approx(mean(squares), rel=1e-5)
    bins: dict[int, list[float]] = {}
    for r in rows:
        bins.setdefault(int(15 * r[1]), []).append(r[1] - r[2])
    expected = sum(abs(sum(gaps)) for gaps in bins.values()) / len(rows)
    assert found["test_ece"] == pytest.approx(expected, rel=1e-5)
    small = [[r[2] for r in rows[:8]], [r[2] for r in rows[12:]]]  # means over clients, not over images
    assert found["test_accuracy_5"] == pytest.approx(mean(map(mean, small)))
    assert found["test_accuracy_25"] == pytest.approx(mean(r[2] for r in rows[8:12]))


def test_the_page_is_made_from_records(tmp_path: Path) -> None:
    results = Results.open(tmp_path)
    names = (defaults.BASE, "left form", "a setting that is gone")
    for images in defaults.IMAGES:
        for i, name in enumerate(names):
            for seed in range(2):
                numbers = {
                    f"{s}_{m}": 0.5 + 0.01 * i + 0.001 * seed
                    for s in ("validation", "test")
                    for m in ("accuracy", "log_score", "ece", "brier", "accuracy_5", "accuracy_25")
                }
                setting = defaults.setting_of(ImageTask(images))
                results.add([record("defaults", setting, name, seed, numbers, {"rounds": 3}, {})])
    main(["report", str(tmp_path)])
    table = (tmp_path / "results.md").read_text()
    assert table.count("\n| ") == 2 * len(names)
    page = (tmp_path / "report.html").read_text()
    assert "+0.010 (+0.010 to +0.010)" in page  # left form against the base
