"""Answers that were recorded are not asked for again, and a search that was killed goes on where it stood."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpop.errors import CheckpointError, SettingsError
from fedpop.mixed.model import fitted_over
from fedpop.mixed.study import ColumnKinds, FormulaStudy
from fedpop.run.journal import Journal, JournaledMembers
from fedpop.run.members import Asking, LocalMembers

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")
FORMULA = "y ~ x + (x | g)"


class Killed(Exception):
    """Nobody is there any more."""


class Dying(LocalMembers):
    """Members whose process ends after so many questions."""

    left = 10**6

    def ask(self, asking: Asking[Any]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().ask(asking)


def table() -> Any:
    x = torch.linspace(-1, 1, 60)
    g = torch.arange(60) % 6
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0))
    y = 1 + x + 0.5 * (g - 2.5) + 0.3 * noise + 0.4 * x * (g % 3)
    return pd.DataFrame({"y": y.numpy(), "x": x.numpy(), "g": g.numpy()})


def members(left: int = 10**6) -> tuple[FormulaStudy, Dying]:
    study = FormulaStudy.from_text(FORMULA)
    found = Dying(study, study.rows(table()))
    found.left = left
    return study, found


def test_a_search_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    study, here = members()
    whole = fitted_over(here, study)
    asked = 10**6 - here.left
    for at in range(0, asked, 3):
        folder = tmp_path / str(at)
        study, dying = members(at)
        with pytest.raises(Killed):
            fitted_over(JournaledMembers(study, Journal.open(folder), dying), study)
        study, alive = members()
        again = JournaledMembers(study, Journal.open(folder), alive)
        fit = fitted_over(again, study)
        assert torch.equal(fit.outcome.point.b, whole.outcome.point.b)
        assert torch.equal(fit.outcome.point.factor, whole.outcome.point.factor)
        assert fit.log_likelihood == whole.log_likelihood
        assert 10**6 - alive.left == again.asked <= asked - at


def test_nobody_is_asked_twice_and_the_record_answers_alone(tmp_path: Path) -> None:
    study, here = members()
    first = fitted_over(JournaledMembers(study, Journal.open(tmp_path), here), study)
    study, here = members(0)
    again = JournaledMembers(study, Journal.open(tmp_path), here)
    fit = fitted_over(again, study)
    assert again.asked == 0
    assert str(fit).splitlines()[:-1] == str(first).splitlines()[:-1]
    with pytest.raises(Killed):
        fit.engine.score(fit.engine.vector(fit.outcome.point) + 0.1, torch.arange(2))
    known = first.groups.study
    alone = replace(fit.groups, members=JournaledMembers(known, Journal.open(tmp_path)))
    engine = replace(fit.engine, groups=alone)
    engine.sums(fit.outcome.point.factor, curved=True)  # what was asked at the end of the search
    assert torch.equal(engine.covariance(fit.outcome.point), first.outcome.covariance)
    with pytest.raises(SettingsError, match="which are at their sites: ask for it there"):
        alone.ask(ColumnKinds(("x", "z")), {})


def test_other_questions_and_other_studies_are_asked(tmp_path: Path) -> None:
    study, here = members()
    fitted_over(JournaledMembers(study, Journal.open(tmp_path), here), study)
    other = FormulaStudy.from_text("y ~ x + (1 | g)")
    asked = JournaledMembers(other, Journal.open(tmp_path), LocalMembers(other, other.rows(table())))
    fitted_over(asked, other)
    assert asked.asked > 0


def test_an_answer_that_is_damaged_is_named(tmp_path: Path) -> None:
    study, here = members()
    fitted_over(JournaledMembers(study, Journal.open(tmp_path), here), study)
    file = min(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=file.name):
        Journal.open(tmp_path)
