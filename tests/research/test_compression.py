"""Compressors of FedSOUL's gradients, on a set of a few small images: bytes, differences and a page."""

from pathlib import Path

import pytest

from fedpop.data.image_task import ImageTask
from fedpop.message.compressors import Identity, RandK
from fedpop.report.results import Results, record
from research import compression
from tests.data.files import mnist
from tests.research.quick import FEW

TASK = ImageTask("mnist", 2, small=3, n_small=2, large=2, n_large=4, validation=0, test=4)
NAMES = ("none", "none, a quarter of the rounds", "QSGD, 1 level", "rand-k, 10 %")


def test_compressors_send_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "PASSES", 80)
    monkeypatch.setattr(compression, "TASK", TASK)
    monkeypatch.setattr(compression, "FINAL", FEW)
    monkeypatch.setattr(compression, "VARIANTS", {n: compression.VARIANTS[n] for n in NAMES})
    out = tmp_path / "out"
    compression.EXPERIMENT.run(out=out, seeds=1, processes=1, data=mnist(tmp_path))
    records = {r["method"]: r for r in Results.open(out).records}
    sent = {name: r["cost"]["bytes_up"] for name, r in records.items()}
    assert tuple(sorted(sent, key=NAMES.index)) == NAMES
    rounds = {name: r["cost"]["rounds"] for name, r in records.items()}
    assert rounds["none"] == rounds["rand-k, 10 %"] > rounds["none, a quarter of the rounds"]
    # Two bits in place of 32, a tenth of the entries, beside what is sent of the prior.
    assert sent["QSGD, 1 level"] < sent["rand-k, 10 %"] < 0.3 * sent["none"]
    assert records["rand-k, 10 %"]["metrics"]["omega"] == pytest.approx(9, rel=1e-3)
    assert records["rand-k, 10 %"]["config"]["compressor"]["share"] == 0.1
    assert "not run" not in (out / "results.md").read_text()
    assert (out / "report.html").read_text().count("<svg") == 2


def test_what_is_lost_is_paired_by_seed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for name, seed, accuracy in (
        ("none", 0, 0.5),
        ("none", 1, 0.6),
        ("natural", 0, 0.49),
        ("natural", 1, 0.57),
        ("natural", 2, 0.1),
    ):
        told = {"accuracy": accuracy}
        results.add([record("compression", compression.setting_of(name), name, seed, told, {}, {})])
    # Lost 1 and 3 points: -2 +- 12.706 sqrt(2) / sqrt(2).
    assert compression.difference(results, "natural") == ("-2.0", "-14.7 to +10.7")
    assert compression.difference(results, "none") == ("-", "-")
    assert compression.difference(results, "QSGD, 7 levels") == ("-", "-")


def test_kinds_are_drawn_against_bytes(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for name, sent in (("none", 51.4e6), ("rand-k, 25 %", 13.1e6), ("rand-k, 1 %", 0.52e6)):
        own = record(
            "compression", compression.setting_of(name), name, 0, {"ece": 0.1}, {"bytes_up": sent}, {}
        )
        results.add([own])
    assert compression.by_bytes(results, "ece", 1.0) == {
        "none": {51.0: [0.1]},
        "rand-k": {0.52: [0.1], 13.0: [0.1]},
    }


def test_variants_are_what_they_are_called() -> None:
    assert compression.VARIANTS["none"].compressor == Identity()
    assert compression.VARIANTS["rand-k, 1 %"].compressor == RandK(share=0.01)
    assert compression.setting_of("none, a quarter of the rounds")["passes"] == compression.PASSES / 4
