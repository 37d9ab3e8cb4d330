"""A federation about a formula: the fit of one machine, kills, files, and what sites have afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.flower.formulas import FormulaDeployment, fit_at, predicted_rows, run_formula
from fedpop.flower.remote import RoundTerms
from fedpop.flower.site import SiteExperiment, open_site
from tests.flower.formulas import by_site, grid_of
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on
from tests.mixed.conftest import alike, simulated  # noqa: F401

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

MODELS = [
    {"formula": "y ~ w + (w | g)", "method": "REML"},
    {"formula": "count ~ w + offset(log(t)) + (1 | g)", "family": "poisson"},
    {"formula": "yes ~ w + (1 | g)", "family": "bernoulli"},
]


def deployment(model: dict[str, Any], sites: int) -> FormulaDeployment:
    return FormulaDeployment.of("test", model, 0, RoundTerms(sites=sites), "trial")


class Killed(Exception):
    """The server's process ends."""


class Dying(LocalGrid):
    """A Grid whose server is killed after so many messages to a site."""

    left = 10**6

    def push_messages(self, messages: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().push_messages(messages)


@pytest.mark.parametrize("model", MODELS)
def test_the_fit_over_sites_is_that_of_one_machine(
    model: dict[str, Any],
    simulated: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    frame = simulated([8] * 12)
    frames = by_site(frame, "g", 3)
    grid = grid_of(tmp_path / "sites", frames)
    run = tmp_path / "run"
    fit = run_formula(deployment(model, 3), transport_on(grid), run)
    about = {n: v for n, v in model.items() if n != "formula"}
    here = fp.mixed_model(model["formula"], frames, **about)
    alike(fit, here, 1e-8)
    per_site = sum(site == "north" for site, _, _ in grid.traffic)
    assert per_site <= 40
    plain = json.loads((run / "fit.json").read_text())
    assert plain["fixed"].keys() == here.plain()["fixed"].keys()
    again = fp.load(run / "fit")
    assert again.confint().equals(fit.confint())
    assert again.degrees == fit.degrees
    new = frame.head(4).assign(g="somebody new")
    assert again.predict(new, "new").equals(fit.predict(new, "new"))


def test_each_site_has_its_own_groups_and_everybodys_theta(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    frame = simulated([8] * 12)
    frames = by_site(frame, "g", 3)
    run_formula(deployment(MODELS[0], 3), transport_on(grid_of(tmp_path, frames)), tmp_path / "run")
    here = fp.mixed_model(MODELS[0]["formula"], frames, method="REML")
    effects = here.random_effects()
    for site, rows in frames.items():
        fit = fit_at(SiteExperiment(open_site(tmp_path / site), "test"))
        own = fit.random_effects()
        np.testing.assert_allclose(own.to_numpy(), effects.loc[own.index].to_numpy(), rtol=1e-6, atol=1e-8)
        asked = pd.concat([rows.head(2), rows.head(2).assign(g="new"), rows.head(2).assign(g=None)])
        found = predicted_rows(fit, asked, 0.9)
        assert found.kind.tolist() == ["known"] * 2 + ["new"] * 2 + ["population"] * 2
        for kind, at in (("known", slice(0, 2)), ("new", slice(2, 4)), ("population", slice(4, 6))):
            table = rows.head(2) if kind != "new" else rows.head(2).assign(g="new")
            one = here.predict(table, kind).to_numpy()
            np.testing.assert_allclose(found[["mean", "lower", "upper"]].to_numpy()[at], one, rtol=1e-6)


def test_a_server_that_is_killed_goes_on_without_asking_twice(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    frames = by_site(simulated([8] * 9), "g", 3)
    whole = run_formula(
        deployment(MODELS[0], 3), transport_on(grid_of(tmp_path / "a", frames)), tmp_path / "r"
    )
    for at in (1, 4, 7, 11, 16):
        run = tmp_path / f"run{at}"
        grid = grid_of(tmp_path / f"b{at}", frames)
        grid.__class__ = Dying
        grid.left = at
        with pytest.raises(Killed):
            run_formula(deployment(MODELS[0], 3), transport_on(grid), run)
        grid.left = 10**6
        before = len(grid.traffic)
        fit = run_formula(deployment(MODELS[0], 3), transport_on(grid), run)
        alike(fit, whole, 1e-12)
        assert len(grid.traffic) > before


def test_what_a_formula_cannot_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="quorum is 1"):
        FormulaDeployment.of("test", MODELS[0], 0, RoundTerms(quorum=0.5), "trial")
    with pytest.raises(SettingsError, match="REML is for gaussian"):
        FormulaDeployment.of("test", MODELS[1] | {"method": "REML"}, 0, RoundTerms(), "trial")
    with pytest.raises(SettingsError, match="formula is a text"):
        FormulaDeployment.of("test", {"formula": 3}, 0, RoundTerms(), "trial")
