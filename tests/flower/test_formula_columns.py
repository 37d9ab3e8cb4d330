"""Columns of a formula that are out of range, in another unit or out of all proportion at a site: it stops
before anything of them leaves, and is told which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedpop.errors import DataError, SchemaError, SettingsError
from fedpop.federation.table_format import TableFormat
from fedpop.files import read_json
from fedpop.flower.formulas import FormulaDeployment, run_formula
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.server_folder import SCALES, ServerFolder
from fedpop.flower.server_settings import deployment as deployment_in
from fedpop.site.study import SiteData
from tests.flower.commands import fedpop
from tests.flower.formulas import by_site, grid_of
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on
from tests.mixed.conftest import simulated  # noqa: F401

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")
ABOUT = {"formula": "y ~ w + (1 | g)"}


def deployment(form: Mapping[str, Any] | None = None) -> FormulaDeployment:
    return FormulaDeployment.of("test", ABOUT, 0, RoundTerms(sites=3), "trial", form)


@pytest.fixture
def frames(simulated: Any) -> dict[str, Any]:  # noqa: F811
    return by_site(simulated([8] * 12), "g", 3)


def asked(grid: LocalGrid) -> list[str]:
    read = [request_from_record(request.content) for _, request, _ in grid.traffic]
    return [str(request.header["question"]) for request in read if request.kind == "ask"]


@pytest.mark.parametrize("factor", [1e4, 1e-4])
def test_a_site_in_another_unit_stops_before_anything_else_is_asked(
    factor: float, frames: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames["south"]["w"] *= factor
    grid = grid_of(tmp_path, frames)
    with pytest.raises(DataError, match=r"not every site can take part .south: a column's size or spread"):
        run_formula(deployment(), transport_on(grid), tmp_path / "run")
    assert set(asked(grid)) == {"column scales"}
    assert "site 'south', column 'w': its median size is" in caplog.text
    assert "column 'y'" not in caplog.text


def test_how_far_is_a_setting_and_how_sites_differ_is_stored(frames: dict[str, Any], tmp_path: Path) -> None:
    frames["south"]["w"] *= 300
    grid = grid_of(tmp_path / "sites", frames)
    run_formula(deployment({"scale_tolerance": 1e6}), transport_on(grid), tmp_path / "run")
    found = read_json(tmp_path / "run" / SCALES)["columns"]
    assert found.keys() == {"y", "w"}
    assert all(sum(counts.values()) == 3 for both in found.values() for counts in both.values())


def test_names_are_not_compared(frames: dict[str, Any], tmp_path: Path) -> None:
    for frame in frames.values():
        frame["w"] = ["low", "high"] * (len(frame) // 2)
    run_formula(deployment(), transport_on(grid_of(tmp_path / "sites", frames)), tmp_path / "run")
    assert read_json(tmp_path / "run" / SCALES)["columns"].keys() == {"y"}


def test_numbers_out_of_their_range_are_counted_by_column(frames: dict[str, Any], tmp_path: Path) -> None:
    """The words are for the server, too: they have no value of a cell."""
    frames["west"].loc[:2, "w"] = 77.25
    grid = grid_of(tmp_path, frames)
    form = {"range": {"w": [-50, 50], "y": [-1e6, 1e6]}}
    with pytest.raises(DataError, match=r"column 'w', 3 row\(s\): a number .* range -50 to 50") as caught:
        run_formula(deployment(form), transport_on(grid), tmp_path / "run")
    assert "77" not in str(caught.value)
    assert asked(grid) == []


def test_a_unit_has_to_be_stated(frames: dict[str, Any], tmp_path: Path) -> None:
    study, file = deployment({"unit": {"w": "kg"}}).study, tmp_path / "rows.csv"
    frames["west"].to_csv(file, index=False)
    assert type(study).from_description(*study.description()).form == {"unit": {"w": "kg"}}
    for stated, words in (({}, "does not say"), ({"w": "g"}, "another unit")):
        with pytest.raises(SchemaError, match=words):
            study.read(SiteData("west", str(file), table=TableFormat(unit=stated)))
    assert len(study.read(SiteData("west", str(file), table=TableFormat(unit={"w": "kg"})))) == 32
    text = frames["west"].assign(w="some")
    text.to_csv(file, index=False)
    with pytest.raises(SchemaError, match="column 'w' holds names, and numbers are wanted"):
        study.read(SiteData("west", str(file), table=TableFormat(unit={"w": "kg"})))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"x": ["w"]}, "unknown setting 'x'"),
        ({"range": {"v": [0, 1]}}, "'v' is not a column that the formula names"),
        ({"range": {"w": [1, 0]}}, "from the least to the most"),
        ({"scale_tolerance": 1}, "scale_tolerance"),
    ],
)
def test_settings_that_cannot_be(form: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        deployment(form)


def test_a_further_formula_has_the_settings_of_its_columns(tmp_path: Path) -> None:
    server = tmp_path / "server"
    fedpop("server", "init", server, "--formula", "y ~ w + v + (1 | g)", "--insecure")
    file = server / "app" / "federation.toml"
    more = '[data]\nrange = {w = [0, 9], v = [0, 1]}\nunit = {w = "kg"}\nscale_tolerance = 50\n'
    file.write_text(f"{file.read_text()}\n{more}")
    every = {"range": {"w": [0, 9], "v": [0, 1]}, "unit": {"w": "kg"}, "scale_tolerance": 50}
    assert deployment_in(ServerFolder(server)).study.form == every  # type: ignore[union-attr]
    further = ServerFolder(server, "one")
    further.run.mkdir(parents=True)
    (further.run / "formula.toml").write_text('formula = "y ~ w + (1 | g)"\n')
    found = deployment_in(further).study.form  # type: ignore[union-attr]
    assert found == every | {"range": {"w": [0, 9]}}
