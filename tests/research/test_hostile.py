"""The experiment on clients who mean harm."""

from pathlib import Path

import pytest
import torch

from fedpop.report.results import Results
from research import hostile
from research.__main__ import main


def test_what_hostile_clients_send() -> None:
    v = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    honest = v[3:]
    sent = {kind: hostile.attacked(v, 0.3, kind) for kind in hostile.KINDS}
    for rows in sent.values():
        assert rows[3:].equal(honest)
    assert sent["scaled"][:3].equal(100 * v[:3])
    assert sent["flipped"][:3].equal(-v[:3])
    assert sent["constant"][0].equal(10 * honest.abs().mean(0))
    assert torch.allclose(sent["colluding"][2], honest.mean(0) - 1.5 * honest.std(0))
    assert hostile.attacked(v, 0.0, "none") is v


def test_a_job_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "ROUNDS", 3)
    results = Results.open(tmp_path)
    results.add(hostile.job(0.3, "scaled", 0))
    assert {r["method"] for r in results.records} == set(hostile.RULES)
    assert all(0 <= r["metrics"]["angle"] <= 1 for r in results.records)
    main(["report", str(tmp_path)])
    assert "30 %" in (tmp_path / "results.md").read_text()
