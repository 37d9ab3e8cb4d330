"""A site that counts in another unit, or whose table cannot be used, changes nobody else's numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp
from fedpop.flower.deployment import enrolled_members, run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.site import open_site
from fedpop.report.run import run_report
from fedpop.site.refusal import Code
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import transport_on
from tests.flower.tables import ages, planned, table, tables_at

NAMES = ("north", "south", "west")


def form_of(grid: LocalGrid) -> dict[str, Any]:
    """What sites received in the end."""
    hellos = [request_from_record(m.content) for _, m, _ in grid.traffic]
    return [r.header["study"]["form"] for r in hellos if r.kind == "hello"][-1]


def sent(grid: LocalGrid, site: str) -> list[tuple[str, str | None]]:
    """Kinds of a site's answers, and their questions."""
    out = []
    for name, request, reply in grid.traffic:
        read = request_from_record(request.content)
        if name == site and message_from_record(reply.content).refused is None:
            out.append((read.kind, read.header.get("question")))
    return out


@pytest.mark.parametrize("factor", [1e4, 1e-4])
def test_a_site_in_another_unit_stops_itself_before_any_moment(factor: float, tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)}
    grid = tables_at(tmp_path, texts | {"odd": table(ages(7) * factor)})
    found = run_deployment(planned(sites=3), transport_on(grid), tmp_path / "run")
    assert [m["heard"] for m in found.history] == [sorted(NAMES)] * 2
    everyone = np.concatenate([ages(k) for k in range(3)])
    assert form_of(grid)["scale"]["age"] == pytest.approx([everyone.mean(), everyone.std(ddof=1)], rel=1e-12)
    assert sent(grid, "odd") == [("hello", None), ("ask", "column scales")]
    # The site is told the column, the server only that it is so.
    log = (tmp_path / "odd" / "site.log").read_text()
    assert "the site stops here: site 'odd', column 'age': its median size is" in log
    refused = [message_from_record(r.content).header.get("refused") for s, _, r in grid.traffic if s == "odd"]
    codes = {next(iter(why)) for why in refused if why}
    assert codes == {Code.SCALE}
    assert not any("age" in why[1] for why in refused if why)


def test_a_site_that_comes_later_is_compared_too(tmp_path: Path) -> None:
    grid = tables_at(tmp_path, {n: table(ages(k)) for k, n in enumerate(NAMES)})
    late = tables_at(tmp_path / "late", {"odd": table(ages(7) * 1e4), "even": table(ages(8))})
    folders = {name: tmp_path / "late" / name for name in late.names.values()}

    def fault(site: str, request: Any, reply: Any) -> list[Any]:
        if request_from_record(request.content).header.get("round") == 0 and len(grid.nodes) == 3:
            for name, folder in folders.items():
                grid.join(name, folder)
        return [reply]

    grid.fault = fault
    found = run_deployment(planned(rounds=4, sites=3), transport_on(grid))
    assert found.history[-1]["heard"] == ["even", *sorted(NAMES)]
    assert "column 'age'" in (folders["odd"] / "site.log").read_text()


def test_of_two_sites_both_are_told(tmp_path: Path) -> None:
    """Nobody can know which of them is right."""
    grid = tables_at(tmp_path, {"north": table(ages(0)), "south": table(ages(1) * 1e6)})
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        grid.now += seconds
        waited.append(seconds)
        if grid.now > 20:
            raise TimeoutError

    grid.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        run_deployment(planned(), transport_on(grid))
    for name in ("north", "south"):
        assert "column 'age'" in (tmp_path / name / "site.log").read_text()


def test_how_far_is_a_setting(tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)} | {"odd": table(ages(7) * 30)}
    wide = run_deployment(planned(sites=3), transport_on(tables_at(tmp_path / "wide", texts)))
    assert "odd" in wide.history[0]["heard"]
    narrow = tables_at(tmp_path / "narrow", texts)
    run_deployment(planned(sites=3, scale_tolerance=10.0), transport_on(narrow))
    assert ("ask", "schema") not in sent(narrow, "odd")


def test_a_site_that_does_not_fit_the_model_has_not_counted(tmp_path: Path) -> None:
    """Its y cannot be a count, which is seen when the model is there; then all is agreed on without it."""
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)} | {"odd": table(ages(9) + 40, "xm", y=-1.0)}
    grid = tables_at(tmp_path, texts)
    poisson = fp.likelihoods.Poisson()
    members, _ = enrolled_members(planned(sites=3, likelihood=poisson), transport_on(grid), tmp_path / "run")
    assert members.names == sorted(NAMES)
    everyone = np.concatenate([ages(k) for k in range(3)])
    assert form_of(grid)["scale"]["age"] == pytest.approx([everyone.mean(), everyone.std(ddof=1)], rel=1e-12)
    assert form_of(grid)["levels"]["sex"] == ["f", "m"]
    assert "odd" in json.loads((tmp_path / "run" / "scales.json").read_text())["stopped"]


def test_bad_cells_are_refused_before_anything_is_agreed(tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)}
    texts["odd"] = table(ages(3)).replace(",0.0\n", ",\n", 2) + "seven,f,1\n300,m,1\n"
    grid = tables_at(tmp_path, texts)
    found = run_deployment(planned(sites=3, range={"age": [0, 130]}), transport_on(grid))
    assert all("odd" not in m["heard"] for m in found.history)
    refused = [message_from_record(r.content).refused for s, _, r in grid.traffic if s == "odd"]
    assert refused
    for why in refused:
        assert why is not None
        for words in (
            "not in the range 0 to 130",
            "no number",
            "'dose', line 2 and 1 more: nothing is there",
        ):
            assert words in why
        assert "seven" not in why
        assert "300" not in why


def test_a_unit_has_to_be_stated(tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)}
    grid = tables_at(tmp_path, texts, 'unit = {age = "years"}\n')
    (tmp_path / "west" / "site.toml").write_text('name = "west"\ndata = "rows.csv"\n')
    found = run_deployment(planned(unit={"age": "years"}), transport_on(grid))
    assert found.history[0]["heard"] == ["north", "south"]
    assert 'write unit = {"age" = "years"}' in (tmp_path / "west" / "site.log").read_text()


def test_a_site_is_told_of_rows_that_are_used_otherwise(tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)}
    texts["west"] = table(ages(2)) + "40,x,1\n41,,1\n42,f,NA\n"
    grid = tables_at(tmp_path, texts)
    run_deployment(planned(missing="drop"), transport_on(grid))
    log = (tmp_path / "west" / "site.log").read_text()
    assert "2 row(s) are left out because something is missing in them" in log
    assert "these count as (other): 'x' (1)" in log
    assert "WARNING" in log  # fedpop site join shows it
    assert open_site(tmp_path / "west").data.table.unit == {}


def test_how_a_table_is_written_is_the_sites_own_business(tmp_path: Path) -> None:
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)}
    plain = run_deployment(planned(), transport_on(tables_at(tmp_path / "plain", texts)))
    swapped = str.maketrans({",": ";", ".": ","})
    grid = tables_at(
        tmp_path / "other",
        {n: t.translate(swapped) for n, t in texts.items()},
        'separator = ";"\ndecimal = ","\n',
    )
    found = run_deployment(planned(), transport_on(grid))
    assert found.published.keys() == plain.published.keys()
    assert all(bool((found.published[n] == plain.published[n]).all()) for n in plain.published)


def test_the_report_shows_how_sites_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("jinja2")
    caplog.set_level(logging.ERROR)
    texts = {n: table(ages(k)) for k, n in enumerate(NAMES)} | {"odd": table(ages(7) * 1e4)}
    run_deployment(planned(sites=3), transport_on(tables_at(tmp_path, texts)), tmp_path / "run")
    page = run_report(tmp_path / "run").read_text()
    assert "How sites differ" in page
    assert "32 to 64 (3), 2.621e+05 to 5.243e+05 (1)" in page
    assert "odd: a column" in page


@pytest.mark.parametrize("text", ["[]", '{"columns": 3}', '{"columns": {"age": {"size": {"a": 1}}}}'])
def test_a_damaged_file_of_scales_is_named(text: str, tmp_path: Path) -> None:
    from fedpop.report.run import sites_section

    (tmp_path / "scales.json").write_text(text)
    with pytest.raises(fp.errors.CheckpointError, match=r"scales\.json"):
        sites_section(tmp_path)
