"""Images of another kind, on two sets of a few small images: areas by client, curves and a page."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedpop.data.catalogue import DATASETS
from fedpop.data.image_task import FullImageTask
from fedpop.errors import DataError
from fedpop.files import read_json
from fedpop.report.results import Results
from research import ood
from research.ood import Outside
from tests.data.files import mnist
from tests.research.quick import shorten

PAIR = ood.Pair(FullImageTask("mnist", 2, b=5), "fashionmnist", 160)


def test_entropies_are_told_client_by_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ood, "PAIRS", (PAIR,))
    shorten(monkeypatch, ood.METHODS)
    out, data = tmp_path / "out", mnist(mnist(tmp_path), "fashionmnist", seed=1)
    ood.EXPERIMENT.run(out=out, processes=1, data=data)
    records = {r["method"]: r["metrics"] for r in Results.open(out).records}
    assert set(records) == set(ood.METHODS)
    for name, m in records.items():
        assert 0 <= m["auroc_worst_decile"] <= m["auroc"] <= 1
        assert 0 <= m["entropy_in"] <= math.log(10)
        assert ("auroc_epistemic" in m) == (name == "FedSOUL")
        kept = read_json(ood.curves_file(out, ood.setting_of(PAIR), name, 0))
        # Five clients with four test images each, and as many from elsewhere.
        assert all(
            [sum(map(int, row.split())) for row in kept[side]] == [4] * 5 for side in ("inside", "outside")
        )
    assert (out / "report.html").read_text().count("<svg") == 3
    assert "| FedSOUL | 1 | 0." in (out / "results.md").read_text()
    # What is there is not run again, and needs no images.
    ood.EXPERIMENT.run(out=out, processes=1, data=tmp_path / "gone")


def test_areas_by_hand() -> None:
    """One client is always less sure of the others' images, one in half of all pairs."""
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0])
    found = [Outside("anna", low, high, None, None), Outside("ben", low, low, None, None)]
    got = ood.scores(found)
    assert (got["auroc"], got["auroc_std"], got["auroc_worst_decile"]) == (0.75, 0.25, 0.5)
    assert got["entropy_in"] == pytest.approx(0.15)
    assert got["entropy_out"] == pytest.approx((1.5 + 0.15) / 2)
    assert "auroc_epistemic" not in got


def test_nobody_sees_an_image_twice(tmp_path: Path) -> None:
    federation = PAIR.task.make(mnist(tmp_path), 0)
    parts = ood.dealt(torch.arange(30), federation)
    assert [len(p) for p in parts] == [4] * 5
    assert len(torch.cat(parts).unique()) == 20


def test_a_set_that_is_missing_is_told_with_what_can_be_run_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ood.Pair(PAIR.task, "mnist", 160)
    monkeypatch.setattr(ood, "PAIRS", (PAIR, other))
    monkeypatch.setattr("fedpop.data.images.fetch", _refused)
    monkeypatch.setattr("fedpop.data.lookup.cache_folder", lambda: tmp_path / "cache")
    # Whatever packages this machine has.
    elsewhere = replace(DATASETS["fashionmnist"], system=(str(tmp_path / "no-package"),))
    monkeypatch.setitem(DATASETS, "fashionmnist", elsewhere)
    with pytest.raises(
        DataError, match=r"no test images of fashionmnist.*dataset-fashion-mnist.*--only, such as 'mnist in"
    ):
        ood.EXPERIMENT.run(out=tmp_path / "out", processes=1, data=mnist(tmp_path))


def _refused(*_: object) -> None:
    raise DataError("there is no network")
