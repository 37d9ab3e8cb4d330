"""Mixed models over secure sums: what the plain ones find, and no two sums whose difference tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpop.errors import EstimateError
from fedpop.flower.client import app
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.secure_sums import SecureTerms
from fedpop.mixed.fit import MixedFit
from fedpop.mixed.model import FitSettings, fitted_over
from fedpop.mixed.study import FormulaStudy
from fedpop.participation import Everyone
from fedpop.run.settings import Settings
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import keyed
from tests.flower.sites import enrol, transport_on

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")
pytest.importorskip("Crypto")
NAMES = ("east", "north", "south", "west")


def frames(names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Four groups at each site; one site has a level that no other has."""
    out = {}
    for k, name in enumerate(names):
        rng = np.random.default_rng(k)
        g = np.repeat(np.arange(4), 10)
        table = pd.DataFrame({"g": [f"{name}{i}" for i in g], "x": rng.normal(size=40) + 2})
        table["s"] = rng.choice(list("abc" if k else "abcd"), 40)
        table["y"] = 1 + 0.5 * table.x + rng.normal(size=4)[g] + rng.normal(size=40)
        table["yes"] = (rng.uniform(size=40) < 0.5).astype(float)
        out[name] = table
    return out


def over(
    grid: LocalGrid, formula: str, secure: SecureTerms | None, family: str = "gaussian", run: str = "test"
) -> MixedFit:
    study, terms = FormulaStudy.from_text(formula, family), RoundTerms(sites=len(grid.nodes), timeout=30.0)
    members = RemoteMembers(
        study, transport_on(grid), run, terms, Settings(None, 0, Everyone()), secure=secure
    )
    return fitted_over(members, study, FitSettings())


@pytest.mark.parametrize(
    ("formula", "family"), [("y ~ x + s + (x | g)", "gaussian"), ("yes ~ x + (1 | g)", "binomial")]
)
def test_a_formula_over_secure_sums_is_the_plain_one(formula: str, family: str, tmp_path: Path) -> None:
    open_ = LocalGrid(app, enrol(tmp_path / "plain", frames()))
    plain = over(open_, formula, None, family)
    folders = enrol(tmp_path / "secure", frames())
    hidden = LocalGrid(app, folders)
    secure = over(hidden, formula, SecureTerms(keyed(folders)), family)
    # Names of columns, and of levels where there are some, are said before they are counted.
    more = len(hidden.traffic) - len(open_.traffic)
    assert more == len(folders) * (2 if "s" in formula.split() else 1)
    assert secure.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-9)
    for name, value in plain.coefficients.items():
        assert secure.coefficients[name] == pytest.approx(value, rel=1e-5, abs=1e-7)


def test_a_second_formula_after_somebody_joined_or_left_is_refused_by_every_site(tmp_path: Path) -> None:
    folders = enrol(tmp_path, frames((*NAMES, "zurich")))
    terms = SecureTerms(keyed(folders))
    first = {name: folders[name] for name in NAMES}
    over(LocalGrid(app, first), "y ~ x + (1 | g)", terms)
    over(LocalGrid(app, first), "y ~ x + s + (1 | g)", terms, run="again")  # the same sites may
    for run, names in {"joined": folders, "left": NAMES[:3]}.items():
        there = {name: folders[name] for name in names}
        with pytest.raises(EstimateError, match=r"differs by (zurich|west) only"):
            over(LocalGrid(app, there), "y ~ x + s + (1 | g)", terms, run=run)
    noted = [json.loads(line) for line in (folders["east"] / "secure" / "cohorts.jsonl").open()]
    assert [line["sites"] for line in noted] == [list(NAMES)]
