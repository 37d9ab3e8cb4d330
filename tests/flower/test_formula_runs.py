"""A federation about a formula: the fit of one machine, kills, files, and what sites have afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.files import write_json
from fedpop.flower import server_commands
from fedpop.flower.formulas import FormulaDeployment, compare_fits, fit_at, predicted_rows, run_formula
from fedpop.flower.offline import residuals
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.server_folder import ServerFolder
from fedpop.flower.server_settings import deployment as settings_of
from fedpop.flower.site import SiteExperiment, open_site
from fedpop.flower.status import status
from fedpop.flower.transport import Transport
from fedpop.report.run import run_report
from tests.flower.formulas import by_site, grid_of
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import DATA, transport_on
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
    assert per_site <= 25
    plain = json.loads((run / "fit.json").read_text())
    assert plain["fixed"].keys() == here.plain()["fixed"].keys()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["heard"] for line in lines] == [sorted(frames)] * len(lines)
    assert [line["question"] for line in lines[:2]] == ["column scales", "kinds of columns"]
    again = fp.load(run)
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
        residuals(tmp_path / site, tmp_path / "left.csv", tmp_path / "left.png", None, "test", [].append)
        left = pd.read_csv(tmp_path / "left.csv", index_col="row")
        parts = left.response + left.fitted
        np.testing.assert_allclose(parts[range(len(rows))], rows.y, rtol=0, atol=1e-4)
        np.testing.assert_allclose(left.fitted, here.fitted()[frame.y.isin(rows.y)], rtol=0, atol=1e-4)
        assert (tmp_path / "left.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_site_are_its_own_where_sites_are_the_groups(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    frames = by_site(simulated([8] * 9), "g", 3)
    formula = "y ~ w + (1 | site)"
    run_formula(deployment({"formula": formula}, 3), transport_on(grid_of(tmp_path, frames)), tmp_path / "r")
    here = fp.mixed_model(formula, frames)
    fit, rows = fit_at(SiteExperiment(open_site(tmp_path / "south"), "test")), frames["south"].head(3)
    found = predicted_rows(fit, rows[["w"]], 0.9)
    assert found.kind.tolist() == ["known"] * 3
    assert found.group.tolist() == ["south"] * 3
    expected = here.predict(rows.assign(site="south"))
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-6)
    assert predicted_rows(fit, rows.assign(site=None), 0.9).kind.tolist() == ["population"] * 3


def test_profiles_and_replicates_are_those_of_one_machine(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    """A few rows of rare responses: replicates differ in fewer rows than a site shows of its own."""
    frame = simulated([8] * 12)
    frames, formula = by_site(frame, "g", 3), "yes ~ w + (1 | g)"
    model = {"formula": formula, "family": "bernoulli", "profile": True, "bootstrap": 2}
    run_formula(deployment(model, 3), transport_on(grid_of(tmp_path, frames)), tmp_path / "run")
    here = fp.mixed_model(formula, frames, "bernoulli")
    ends = pd.read_csv(tmp_path / "run" / "profile.csv", index_col="parameter")
    expected = here.confint(method="profile")
    assert list(ends.index) == list(expected.index)
    np.testing.assert_allclose(ends.to_numpy(), expected.to_numpy(), rtol=1e-6, atol=1e-8)
    replicates = pd.read_csv(tmp_path / "run" / "bootstrap.csv")
    pd.testing.assert_frame_equal(replicates, here.bootstrap(2).table, rtol=1e-6)
    printed = (tmp_path / "run" / "fit.txt").read_text()
    assert printed.startswith("Generalized linear mixed model")
    assert "2 parametric replicates" in printed
    assert "Profile intervals (95 %)" in printed
    fit = fit_at(SiteExperiment(open_site(tmp_path / "north"), "test"))
    own = fit.random_effects()
    np.testing.assert_allclose(own, here.random_effects().loc[own.index], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"profile": True, "method": "REML"}, "profile intervals are for method ML"),
        ({"bootstrap": 1}, "takes 2 replicates or more, not 1"),
        ({"bootstrap": True}, "bootstrap a number of replicates"),
    ],
)
def test_what_cannot_be_asked_beside_a_fit(words: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        deployment({"formula": "y ~ w + (1 | g)", **words}, 3)


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


def test_a_killed_server_goes_on_with_those_it_began_with(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    """One that is away then is waited for, however few the settings ask for; one that came later stays
    outside."""
    frames = by_site(simulated([8] * 12), "g", 3)
    here = fp.mixed_model("y ~ w + (w | g)", frames, method="REML")
    late = grid_of(tmp_path / "late", {"late": frames["west"].assign(g=lambda f: "late " + f.g.astype(str))})
    grid, run = grid_of(tmp_path / "sites", frames), tmp_path / "run"
    about = FormulaDeployment.of("test", MODELS[0], 0, RoundTerms(sites=2, begin=3), "trial")
    grid.__class__ = Dying
    grid.left = 9
    with pytest.raises(Killed):
        run_formula(about, transport_on(grid), run)
    grid.left = 10**6
    grid.offline.add("west")
    grid.join("late", late.nodes[late.first].node_config["site"])
    came_back = list[float]()

    def sleep(seconds: float) -> None:
        grid.now += seconds
        if grid.now > 5000 and not came_back:
            came_back.append(grid.now)
            grid.offline.clear()

    terms = RoundTerms(sites=2)
    transport = Transport(grid, clock=grid.clock, sleep=sleep)
    fit = run_formula(replace(about, terms=terms), transport, run)
    assert came_back
    alike(fit, here, 1e-9)
    assert json.loads((run / "sites.json").read_text()) == {"sites": ["north", "south", "west"]}


def test_a_run_begins_with_all_who_are_admitted(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    """A site that leaves between two formulas is one that is no longer admitted: the next one is of those who
    stay, and is not compared with the one before."""
    frames = by_site(simulated([8] * 12), "g", 3)
    grid = grid_of(tmp_path / "sites", frames)
    root = tmp_path / "server"
    server_commands.init(root, "trial", "127.0.0.1:8000", [], False, lambda words: None, MODELS[1])
    for name in frames:
        (root / "sites" / f"{name}.pub").write_text("a key")
    first = settings_of(ServerFolder(root))
    assert isinstance(first, FormulaDeployment)
    assert (first.terms.sites, list(first.whom)) == (2, ["north", "south", "west"])
    whole = run_formula(first, transport_on(grid), root / "run")
    (root / "sites" / "west.pub").unlink()
    grid.offline.add("west")
    (root / "fits" / "smaller").mkdir(parents=True)
    text = "".join(
        f"{n} = {json.dumps(v)}\n" for n, v in (MODELS[1] | {"formula": "count ~ 1 + (1 | g)"}).items()
    )
    (root / "fits" / "smaller" / "formula.toml").write_text(text)
    folder = ServerFolder(root, "smaller")
    second = settings_of(folder)
    assert isinstance(second, FormulaDeployment)
    fit = run_formula(second, transport_on(grid), folder.run)
    alike(fit, fp.mixed_model("count ~ 1 + (1 | g)", {n: frames[n] for n in second.whom}, "poisson"), 1e-8)
    assert fit.n_obs < whole.n_obs
    lines = list[str]()
    compare_fits(root, lines.append)
    assert "are not compared" in lines[-1]
    write_json(root / "run" / "status.json", {"state": "finished", "rounds": 9})
    lines.clear()
    status(root, lines.append)
    assert (
        lines[0]
        == f"trial: finished, {len((root / 'run' / 'metrics.jsonl').read_text().splitlines())} questions"
    )
    assert "Generalized linear mixed model" in lines[-1]
    page = run_report(root).read_text()
    assert "Generalized linear mixed model" in page
    assert "marginal likelihood by quadrature" not in page.split("<title>")[1].split("</title>")[0]


def test_sites_mend_their_data_and_are_asked_anew(simulated: Any, tmp_path: Path) -> None:  # noqa: F811
    """A run that failed has no answers left of before."""
    frames = by_site(simulated([8] * 12), "g", 3)
    good = frames["south"].copy()
    frames["south"] = good.assign(w=1.0, y=0.0)
    frames["north"] = frames["north"].assign(w=1.0)
    frames["west"] = frames["west"].assign(w=1.0)
    grid, run = grid_of(tmp_path / "sites", frames), tmp_path / "run"
    with pytest.raises(DataError, match="'w' is constant"):
        run_formula(deployment({"formula": "y ~ w + (1 | g)"}, 3), transport_on(grid), run)
    mended = by_site(simulated([8] * 12), "g", 3)
    DATA.update(mended)
    fit = run_formula(deployment({"formula": "y ~ w + (1 | g)"}, 3), transport_on(grid), run)
    alike(fit, fp.mixed_model("y ~ w + (1 | g)", mended), 1e-9)


def late_with(grid: LocalGrid, chance: float) -> None:
    rng = np.random.default_rng(1)

    def delay(site: str, request: Any) -> float:
        question = str(request_from_record(request.content).header.get("question"))
        return 100.0 if "two points" in question and rng.uniform() < chance else 0.0

    grid.delay = delay


@pytest.mark.parametrize("model", [{"formula": "y ~ w + (1 | g)"}, MODELS[2]])
def test_a_quorum_has_scoring_steps_and_says_so(
    model: dict[str, Any],
    simulated: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Sites whose answers come too late are left out of a step, not of the estimate."""
    frames = by_site(simulated([10] * 12), "g", 3)
    grid = grid_of(tmp_path / "sites", frames)
    late_with(grid, 0.3)
    terms = RoundTerms(sites=2, begin=3, quorum=0.6, timeout=60.0)
    about = FormulaDeployment.of("test", model, 0, terms, "trial")
    fit = run_formula(about, transport_on(grid), tmp_path / "run")
    here = fp.mixed_model(model["formula"], frames, **{n: v for n, v in model.items() if n != "formula"})
    assert fit.converged
    assert "scoring engine, whose rounds close with 60% of the sites" in str(fit)
    off = [(fit.coefficients[n] - v) / here.standard_errors[n] for n, v in here.coefficients.items()]
    assert max(map(abs, off)) < 0.04
    assert here.log_likelihood - 1e-3 < fit.log_likelihood <= here.log_likelihood + 1e-9
    assert fp.load(tmp_path / "run").confint().equals(fit.confint())
    heard = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {len(line["heard"]) for line in heard} >= {2, 3}


def test_what_a_formula_cannot_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="REML needs everyone"):
        FormulaDeployment.of("test", MODELS[0], 0, RoundTerms(quorum=0.5), "trial")
    with pytest.raises(SettingsError, match="REML is for gaussian"):
        FormulaDeployment.of("test", MODELS[1] | {"method": "REML"}, 0, RoundTerms(), "trial")
    with pytest.raises(SettingsError, match="formula is a text"):
        FormulaDeployment.of("test", {"formula": 3}, 0, RoundTerms(), "trial")
