"""Mixed models over the Grid in this process: every question three ways, what has to be agreed on, what stays
at sites, and what cannot be. (Fits against their references, over the Grid too: ``tests/mixed``.)"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import DataError, EstimateError, FedpopWarning, SettingsError
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.requests import Request, code_of
from fedpop.flower.site import open_site, read_theta
from fedpop.keys import Key
from fedpop.message import Total
from fedpop.mixed import gaussian, groups, laplace, quadrature, study
from fedpop.mixed.groups import Groups, agreed, coordinates
from fedpop.mixed.model import FitSettings, fitted_over
from fedpop.mixed.study import MARKS, FormulaStudy
from fedpop.questions import Question
from fedpop.questions.schema import ColumnSquares, ColumnTotals
from fedpop.run.members import Asking, LocalMembers
from fedpop.site.refusal import Code
from fedpop.site.study import SiteData
from tests.flower.formulas import Alone, by_site, grid_of, members_on, over, states_at
from tests.mixed.conftest import alike

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")


@pytest.fixture
def frame() -> Any:
    """Rows of twelve groups, four at each site; names of groups are numbers."""
    rng = np.random.default_rng(3)
    g = np.repeat(np.arange(12), 8)
    z = rng.normal(size=(12, 2)) * [0.8, 0.4]
    table = pd.DataFrame({"g": g, "w": rng.normal(size=96) + 3, "s": rng.choice(list("abc"), 96)})
    table["t"] = rng.uniform(1, 3, 96)
    eta = 0.2 + 0.4 * (table.w - 3) + 0.3 * (table.s == "b") + z[g, 0] + z[g, 1] * (table.w - 3)
    table["y"] = 2 * eta + rng.normal(size=96)
    table["count"] = rng.poisson(np.exp(eta) * table.t)
    table["yes"] = np.where(rng.uniform(size=96) < 1 / (1 + np.exp(-eta)), "ill", "well")
    return table


def here_of(frame: Any, formula: str, family: str = "gaussian", **output: Any) -> Any:
    """The local fit in which groups are at the sites that ``by_site`` gives them."""
    return fp.mixed_model(formula, by_site(frame, "g", 3), family, **output)


# --- every question -------------------------------------------------------------------------------------


class ThreeWays(LocalMembers):
    """Members here; whatever they are asked is asked of groups that are each alone (before there are groups,
    of sites), and over the Grid, too, and they are to find the same."""

    def __init__(self, root: Path, frame: Any, about: FormulaStudy) -> None:
        self.frames, self.root = by_site(frame, "g", 3), root
        self.groups = {str(name): rows for name, rows in frame.groupby("g")}
        whole = pd.concat([f.assign(site=name) for name, f in self.frames.items()], ignore_index=True)
        super().__init__(about, about.rows(whole, "site"))
        self.alone = Alone(about, self.frames)
        self.elsewhere = members_on(grid_of(root, self.frames), about)
        self.asked: set[type[Question[Any]]] = set()

    def update_study(self, study: Any) -> None:
        super().update_study(study)
        self.alone = Alone(study, self.groups)
        self.elsewhere.update_study(study)

    def ask(self, asking: Asking[Any]) -> tuple[Any, Total]:
        question, (found, total) = asking.question, super().ask(asking)
        self.asked.add(type(question))
        others = (self.alone.ask(question, asking.known)[1], self.elsewhere.ask(asking)[1])
        assert [other.count for other in others] == [len(self.alone.sites), self.elsewhere.units]
        for other in others:
            assert other.plain.keys() == total.plain.keys()
            for name, value in total.plain.items():
                if name == json.dumps([MARKS]):
                    continue  # rows have other places in tables of sites than in one of all
                off = (other.plain[name] - value).abs()
                assert bool((off <= 1e-12 * self.alone.size[name]).all()), (question.name, name)
        return found, total

    def kept_alike(self, *names: str) -> None:
        """What groups keep is the same, too."""
        first = torch.tensor([0])
        at = [states_at(self.root, site) for site in self.frames]
        stores = [rows.store.get(first, self.device) for rows in self.alone.sites.values()]
        here = self.store.get(torch.arange(self.units), self.device)
        for name in names:
            for other in (at, stores):
                found = torch.cat([groups[name] for groups in other])
                torch.testing.assert_close(found, here[name], rtol=1e-10, atol=1e-12)


def asked_three_ways(root: Path, frame: Any, about: FormulaStudy) -> set[type[Question[Any]]]:
    """Which questions were asked."""
    ways = ThreeWays(root, frame, about)
    groups = Groups(ways, about)
    units, _, _ = coordinates(groups, agreed(groups, {}, 0))
    factor = 0.5 * torch.eye(len(units.z_names), dtype=torch.float64)
    b, sigma = 0.1 * torch.ones(len(units.x_names), dtype=torch.float64), torch.tensor(1.5).double()
    point = {"b": b, "factor": factor, "sigma": sigma}
    for curved in (False, True):
        known = point | {"curved": torch.tensor(curved), "whole": torch.tensor(curved)}
        if about.family.gaussian:
            groups.ask(gaussian.Profile(units), known)
        else:
            kind = laplace.Laplace if len(units.widths) > 1 else quadrature.Marginal
            groups.ask(kind(units, about.family, 9), known)
    if about.family.gaussian:
        groups.ask(gaussian.Profiles(units), {"factors": torch.stack((factor, 2 * factor))})
        groups.ask(gaussian.GroupEffects(units), point)
    else:
        effects = laplace.LaplaceEffects if len(units.widths) > 1 else quadrature.QuadratureEffects
        groups.ask(effects(units, about.family, 9), point)
    ways.kept_alike("mean", "cov")
    return ways.asked


MODELS = (
    ("y ~ s + scale(w) + (w | g)", "gaussian", "t"),
    ("count ~ w + offset(log(t)) + (w | g)", "poisson", None),
    ("yes ~ s + w + (1 | g)", "bernoulli", None),
    ("y ~ scale(w) + (w | g/s)", "gaussian", "t"),
    ("count ~ w + (w | g) + (1 | g:s)", "poisson", None),
)


def test_every_question_of_mixed_models_is_answered_alike(tmp_path: Path, frame: Any) -> None:
    """By many sites in one process, by groups each of which is a site by itself behind real bytes, and over
    the Grid; sums agree to 1e-12 of the sum of absolute values."""
    asked: set[type[Question[Any]]] = set()
    for number, (formula, family, weights) in enumerate(MODELS):
        asked |= asked_three_ways(
            tmp_path / str(number), frame, FormulaStudy.from_text(formula, family, weights)
        )
    rows = {
        kind
        for module in (study, groups, gaussian, quadrature, laplace)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Question) and kind.__module__ == module.__name__
    }
    assert asked == rows | {ColumnTotals, ColumnSquares}


def test_scores_of_some_are_asked_of_their_sites_alone(tmp_path: Path, frame: Any) -> None:
    grid = grid_of(tmp_path, by_site(frame, "g", 3))
    fit = over(grid, "y ~ w + (1 | g)")
    here = here_of(frame, "y ~ w + (1 | g)")
    x, before = fit.engine.vector(fit.outcome.point) + 0.1, len(grid.traffic)
    for ids in (torch.tensor([1, 2]), torch.tensor([0, 4, 5, 11])):
        torch.testing.assert_close(fit.engine.score(x, ids), here.engine.score(x, ids), rtol=1e-9, atol=1e-9)
    asked = [(site, request_from_record(m.content).header["units"]) for site, m, _ in grid.traffic[before:]]
    assert asked == [("north", [1, 2]), ("north", [0]), ("south", [0, 1]), ("west", [3])]


# --- what has to be agreed on ---------------------------------------------------------------------------


def test_levels_that_one_site_alone_has(tmp_path: Path, frame: Any) -> None:
    """A level of which the other sites have no row, and outcomes of which a site has one only."""
    frames = by_site(frame, "g", 3)
    frames["south"]["s"] = np.where(frames["south"].index % 3 == 0, "d", frames["south"].s)
    frames["west"] = frames["west"].assign(yes="ill")
    fit = over(grid_of(tmp_path / "y", frames), "y ~ s + w + (1 | g)")
    assert list(fit.coefficients) == ["(Intercept)", "sb", "sc", "sd", "w"]
    alike(fit, fp.mixed_model("y ~ s + w + (1 | g)", frames), 1e-9)
    fit = over(grid_of(tmp_path / "yes", frames), "yes ~ s + w + (1 | g)", "bernoulli")
    alike(fit, fp.mixed_model("yes ~ s + w + (1 | g)", frames, "bernoulli"), 1e-8)


def test_what_is_said_of_a_model_is_told_to_sites(tmp_path: Path, frame: Any) -> None:
    """Weights, an order of levels, a factor of numbers, scales, expressions, restricted likelihood."""
    frame["k"] = np.arange(96) % 3 + 9
    formula = "log(t + 20) + y ~ s * scale(w) + factor(k) + I(w^2) + offset(0.1 * t) + (w || g)"
    output: dict[str, Any] = {
        "weights": "t",
        "method": "REML",
        "levels": {"s": ["c", "a", "b"]},
        "min_count": 1,
    }
    fit = over(grid_of(tmp_path, by_site(frame, "g", 3)), formula, **output)
    here = here_of(frame, formula, **output)
    assert list(fit.coefficients) == list(here.coefficients)
    assert "sc" not in fit.coefficients
    alike(fit, here, 1e-8)


def test_columns_that_are_dropped_are_dropped_at_sites(tmp_path: Path, frame: Any) -> None:
    """A combination of others in all is left out; one that is so at a site only stays."""
    frames = by_site(frame, "g", 3)
    frames["south"]["t"] = 2 * frames["south"].w
    formula = "y ~ w + I(2 * w) + t + (w | g)"
    with pytest.warns(FedpopWarning, match=r"dropped 1 column / coefficient: I\(2 \* w\)"):
        fit = over(grid_of(tmp_path, frames), formula)
    with pytest.warns(FedpopWarning, match="dropped 1 column"):
        here = fp.mixed_model(formula, frames)
    assert list(fit.coefficients) == ["(Intercept)", "w", "t"]
    alike(fit, here, 1e-9)
    rows = frame.head(3)
    for groups_ in ("new", "population"):
        one, other = (f.predict(rows, groups_).to_numpy() for f in (fit, here))
        assert one == pytest.approx(other, rel=1e-7)


def test_rows_that_miss_something_are_counted_over_sites(tmp_path: Path, frame: Any) -> None:
    frame.loc[[3, 40, 41], "w"] = np.nan
    fit = over(grid_of(tmp_path, by_site(frame, "g", 3)), "y ~ w + (1 | g)")
    assert fit.n_obs == 93
    assert "3 row(s) with missing values were left out" in str(fit)
    alike(fit, here_of(frame, "y ~ w + (1 | g)"), 1e-9)


# --- what leaves, and what stays --------------------------------------------------------------------------


def test_what_leaves_a_site_is_no_larger_for_more_rows_and_groups(tmp_path: Path, frame: Any) -> None:
    """Sums: messages have the same vectors of the same lengths, however many rows they are made of, and no
    header or name of a vector holds a group's name."""
    sent = []
    for times in (1, 3):
        more = pd.concat([frame.assign(g=[f"person {g} {k}" for g in frame.g]) for k in range(times)])
        grid = grid_of(tmp_path / str(times), by_site(more, "g", 3))
        over(grid, "y ~ s + w + (w | g)")
        shapes: dict[str, dict[str, int]] = {}
        for _, request, reply in grid.traffic:
            about, message = request_from_record(request.content).header, message_from_record(reply.content)
            rows = {name: payload.length for name, payload in message.payloads.items()}
            shapes.setdefault(str(about.get("question")), {}).update(rows)
            assert "person" not in f"{message.header} {list(rows)}"
        sent.append(shapes)
    assert sent[0] == sent[1]


def test_what_needs_rows_or_posteriors_says_where_they_are(tmp_path: Path, frame: Any) -> None:
    fit = over(grid_of(tmp_path, by_site(frame, "g", 3)), "y ~ w + (w | g)")
    here = here_of(frame, "y ~ w + (w | g)")
    assert fit.confint().to_numpy() == pytest.approx(here.confint().to_numpy(), rel=1e-7)
    assert fit.to_frame().estimate.to_numpy() == pytest.approx(here.to_frame().estimate.to_numpy(), rel=1e-9)
    smaller = over(grid_of(tmp_path / "smaller", by_site(frame, "g", 3)), "y ~ w + (1 | g)")
    assert fit.likelihood_ratio(smaller).degrees == 2
    new = frame.tail(8).assign(g="somebody new")
    for asked in ({"observed": new}, {}):
        one, other = (f.predict(new, "new", **asked).to_numpy() for f in (fit, here))
        assert one == pytest.approx(other, rel=1e-6)
    plain = fit.plain()
    assert plain["modes"] == {"g": {}}
    assert plain["fixed"].keys() == here.plain()["fixed"].keys()
    assert fit.plot("trace") is not None
    asks: list[Callable[[], Any]] = [
        fit.random_effects,
        fit.diagnostics,
        lambda: fit.draws("3"),
        lambda: fit.predict(frame.head(2)),
        lambda: fit.plot("effects"),
        lambda: fit.plot("lines"),
        lambda: fit.to_netcdf(tmp_path / "fit.nc"),
        lambda: fit.levels,
        lambda: fit.rows,
    ]
    for ask in asks:
        with pytest.raises(SettingsError, match="which are at their sites: ask for it there"):
            ask()


# --- what cannot be ---------------------------------------------------------------------------------------


def lacking(frames: dict[str, Any]) -> None:
    frames["south"] = frames["south"].drop(columns="w")


def without_rows(frames: dict[str, Any]) -> None:
    frames["south"] = frames["south"].assign(w=np.nan)


def other_kind(frames: dict[str, Any]) -> None:
    frames["south"] = frames["south"].assign(w=frames["south"].w.map("{:.1f} cm".format))


def small_level(frames: dict[str, Any]) -> None:
    frames["south"].loc[[0, 1], "s"] = "rare"


def bad_value(frames: dict[str, Any]) -> None:
    frames["south"].loc[0, "t"] = -4.25


@pytest.mark.parametrize(
    ("change", "formula", "error", "words"),
    [
        (lacking, "y ~ w + (1 | g)", DataError, r"\(south: site 'south' has no column 'w', which the fed"),
        (lacking, "y ~ s + (w | g)", DataError, "site 'south' has no column 'w'"),
        (
            without_rows,
            "y ~ w + (1 | g)",
            DataError,
            "site 'south' has no row in which nothing is missing of",
        ),
        (other_kind, "y ~ w + (1 | g)", DataError, "'w' holds names at 1 site.*; unlike the others: south"),
        (
            small_level,
            "y ~ s + (1 | g)",
            DataError,
            r"south: site 'south' has 2 row\(s\) of 's' at levels that too few rows have",
        ),
        (bad_value, "y ~ log(t) + (1 | g)", DataError, r"\(south: DataError; the site's log says more\)"),
    ],
)
def test_what_is_wrong_at_a_site_is_told_with_its_name(
    change: Any, formula: str, error: type[Exception], words: str, tmp_path: Path, frame: Any
) -> None:
    """At once, and without a value of the data."""
    frames = by_site(frame, "g", 3)
    change(frames)
    grid = grid_of(tmp_path, frames)
    with pytest.raises(error, match=words):
        over(grid, formula)
    assert grid.now < 60
    output = str([message_from_record(reply.content).header for _, _, reply in grid.traffic])
    assert "4.25" not in output
    assert "rare" not in output


def test_outcomes_that_are_not_two_over_all_sites(tmp_path: Path, frame: Any) -> None:
    """Each site has two, and they are not the same ones."""
    frames = by_site(frame, "g", 3)
    frames["south"] = frames["south"].assign(yes=frames["south"].yes.replace("ill", "dead"))
    with pytest.raises(DataError, match=r"'yes' has 3 categories \(dead, ill, well\)"):
        over(grid_of(tmp_path, frames), "yes ~ w + (1 | g)", "bernoulli")


def test_chains_stay_on_one_machine(tmp_path: Path, frame: Any) -> None:
    grid = grid_of(tmp_path, by_site(frame, "g", 3))
    with pytest.raises(SettingsError, match="run where all rows are on one machine"):
        over(grid, "y ~ w + (1 | g)", engine="sampled")
    assert not grid.traffic


def test_a_site_that_does_not_answer_is_waited_for(
    tmp_path: Path, frame: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """However long: it is named, and asked again."""
    grid = grid_of(tmp_path, by_site(frame, "g", 3))
    lost = 3

    def fault(site: str, request: Any, reply: Any) -> list[Any] | None:
        nonlocal lost
        asks = request_from_record(request.content).header.get("question") == "profile"
        if site == "west" and asks and lost:
            lost -= 1
            return None
        return [reply]

    grid.fault = fault
    with caplog.at_level("INFO", "fedpop.server"):
        fit = over(grid, "y ~ w + (1 | g)")
    assert "west must answer, and went away or was silent for long" in caplog.text
    assert grid.now >= 3 * 60
    alike(fit, here_of(frame, "y ~ w + (1 | g)"), 1e-9)


def test_a_level_that_few_rows_of_a_site_have_is_known_from_others(tmp_path: Path, frame: Any) -> None:
    """The site does not tell its cell, and takes part."""
    frames = by_site(frame, "g", 3)
    frames["south"]["s"] = np.where(frames["south"].index < 3, "c", "a")
    grid = grid_of(tmp_path, frames)
    fit = over(grid, "y ~ s + (1 | g)")
    (told,) = [
        list(message_from_record(reply.content).payloads)
        for site, request, reply in grid.traffic
        if site == "south" and request_from_record(request.content).header.get("question") == "schema"
    ]
    assert sorted(told) == ['["s", "a"]', '["s", null]']
    alike(fit, fp.mixed_model("y ~ s + (1 | g)", frames, min_count=1), 1e-9)


def test_sites_as_groups_however_few(tmp_path: Path, frame: Any) -> None:
    """Two are the least that have a spread; one alone is told so."""
    frames = {name: rows.drop(columns="g") for name, rows in by_site(frame, "g", 2).items()}
    fit = over(grid_of(tmp_path / "two", frames), "y ~ w + (1 | site)")
    alike(fit, fp.mixed_model("y ~ w + (1 | site)", frames), 1e-9)
    assert "equal names" not in str(fit)
    with pytest.raises(DataError, match="'site' has one group only; a population needs two or more"):
        over(grid_of(tmp_path / "one", {"north": frames["north"]}), "y ~ w + (1 | site)")


def test_a_parquet_file_is_read_as_it_is(tmp_path: Path, frame: Any) -> None:
    pytest.importorskip("pyarrow", reason="Parquet files need the extra 'data'")
    table = frame.assign(s=frame.s.astype("category"), w=frame.w.mask(frame.index < 3))
    table.to_parquet(tmp_path / "rows.parquet")
    about = FormulaStudy.from_text("y ~ s + w + (1 | g)")
    found = about.read(SiteData("north", str(tmp_path / "rows.parquet")))
    expected = about.rows(table)
    assert (len(found), found.dropped, dict(found.missing)) == (93, 3, {"w": 3})
    assert all(found.columns[name].equals(values) for name, values in expected.columns.items())
    assert found.groups is not None
    assert expected.groups is not None
    assert found.groups.tolist() == expected.groups.tolist()
    alike(
        fp.mixed_model("y ~ s + w + (1 | g)", tmp_path / "rows.parquet"),
        fp.mixed_model("y ~ s + w + (1 | g)", table),
        None,
    )
    (tmp_path / "broken.parquet").write_text("a,b\n")
    with pytest.raises(DataError, match=r"cannot read .*broken\.parquet"):
        fp.mixed_model("y ~ w + (1 | g)", tmp_path / "broken.parquet")


def test_a_site_has_a_minimum_of_its_own(tmp_path: Path, frame: Any) -> None:
    """Whatever the server asks for, cells below it are not told, nor is a design that sets them apart."""
    frames = by_site(frame, "g", 3)
    frames["south"]["s"] = np.where(frames["south"].index < 3, "c", "a")
    grid = grid_of(tmp_path, frames)
    settings = tmp_path / "south" / "site.toml"
    settings.write_text(settings.read_text().replace("minimum = 1", "minimum = 5"))
    with pytest.raises(DataError, match=r"south: the column 'sc' sets fewer than 5 rows apart"):
        over(grid, "y ~ s + (1 | g)", min_count=1)
    assert '["s", "c"]' not in str(
        [
            list(message_from_record(reply.content).payloads)
            for site, _, reply in grid.traffic
            if site == "south"
        ]
    )


@pytest.mark.parametrize("what", ["chain.safetensors", "everything"])
def test_a_site_that_loses_its_disk_meanwhile(what: str, tmp_path: Path, frame: Any) -> None:
    """States of groups are made again, and a study that is not known any more is sent again."""
    grid = grid_of(tmp_path, by_site(frame, "g", 3))
    questions: list[str] = []

    def fault(site: str, request: Any, reply: Any) -> list[Any]:
        question = request_from_record(request.content).header.get("question")
        questions.append(str(question))
        if site == "south" and questions.count("profile") == 6:
            folder = tmp_path / "south" / "experiments" / "test"
            if what == "everything":
                shutil.rmtree(folder)
            else:
                (folder / what).unlink()
        return [reply]

    grid.fault = fault
    fit = over(grid, "y ~ w + (w | g)")
    assert questions.count("profile") > 12
    alike(fit, here_of(frame, "y ~ w + (w | g)"), 1e-9)


def test_who_comes_after_the_start_stays_outside(tmp_path: Path, frame: Any) -> None:
    frames = by_site(frame, "g", 3)
    late = grid_of(tmp_path / "late", {"late": frames.pop("west")})
    grid = grid_of(tmp_path, frames)

    def fault(site: str, request: Any, reply: Any) -> list[Any]:
        if request_from_record(request.content).header.get("question") == "profile" and len(grid.nodes) == 2:
            grid.join("late", late.nodes[late.first].node_config["site"])
        return [reply]

    grid.fault = fault
    about = FormulaStudy.from_text("y ~ w + (1 | g)")
    fit = fitted_over(members_on(grid, about), about, FitSettings())
    assert "late" in {site for site, _, _ in grid.traffic}
    alike(fit, fp.mixed_model("y ~ w + (1 | g)", frames), 1e-9)


def test_a_site_refuses_what_it_was_not_told_of(tmp_path: Path, frame: Any) -> None:
    """Rounds, where there is no method; questions, before there are coordinates."""
    grid = grid_of(tmp_path, by_site(frame, "g", 3))
    about = FormulaStudy.from_text("y ~ w + (1 | g)")
    members = members_on(grid, about)
    groups = Groups(members, about)
    agreed(groups, {}, 5)
    units = fp.mixed_model("y ~ w + (1 | g)", frame).units
    known = {"factor": torch.eye(1, dtype=torch.float64)} | {
        n: torch.tensor(False) for n in ("curved", "whole")
    }
    with pytest.raises(EstimateError, match=r"Profile needs .* there is none yet"):
        members.ask(Asking(gaussian.Profile(units), known, Key(0)))
    with pytest.raises(SettingsError, match="no rounds"):
        members.update_method(fp.FedAvg(fp.Composition(None, torch.nn.Linear(1, 1), "normal")))


def test_refusals_of_a_formulas_site_have_codes(tmp_path: Path, frame: Any) -> None:
    """What it does not know it is sent again; what it is not about it does not do; columns are named."""
    frames = by_site(frame, "g", 3)
    grid = grid_of(tmp_path, frames)
    over(grid, "y ~ w + (1 | g)")
    requests = [request_from_record(m.content) for site, m, _ in grid.traffic if site == "south"]
    site = open_site(tmp_path / "south")
    ask = next(x for x in requests if x.kind == "ask" and x.header["question"] == "profile")
    hello = next(x for x in requests if x.kind == "hello")

    def code(request: Request, **about: Any) -> Code:
        return code_of(site.answer(Request(request.kind, dict(request.header) | about, request.tensors)))

    assert code(ask, experiment="another") == Code.STRANGER
    assert code(ask, units=[99]) == Code.STRANGER
    assert code(ask, description={"kind": "Nonsense", "fields": {}}) == Code.QUESTION
    train = Request("train", dict(ask.header) | {"round": 0, "units": None}, ask.tensors)
    assert code(train) == Code.STUDY
    assert code(hello, study=dict(hello.header["study"]) | {"kind": "Nonsense"}) == Code.STUDY
    assert code(hello, study=dict(hello.header["study"]) | {"formula": "y ~ z + (1 | g)"}) == Code.DATA


def test_theta_is_given_to_sites_at_the_end(tmp_path: Path, frame: Any) -> None:
    frames = by_site(frame, "g", 3)
    about = FormulaStudy.from_text("y ~ w + (w | g)")
    members = members_on(grid_of(tmp_path, frames), about)
    fit = fitted_over(members, about)
    theta = {"b": fit.outcome.point.b, "factor": fit.outcome.point.factor}
    assert members.finish(theta, fit.rounds) == list(frames)
    for name in frames:
        folder = tmp_path / name / "experiments" / "test"
        assert torch.equal(read_theta(folder)["b"], theta["b"])
        assert (folder / "final.safetensors").exists()
