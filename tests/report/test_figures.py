"""Figures are honest: one look per method, nothing hidden behind another dot or outside the axes."""

import re

import pytest

from fedpop.methods import METHODS as ALGORITHMS
from fedpop.report import plots, side_by_side
from fedpop.report.marks import swarm
from fedpop.report.style import METHODS, known_look, looks


def words(svg: str) -> str:
    return " ".join(re.findall(r">([^<>]+)</(?:text|tspan)>", svg))


def legends(svg: str) -> int:
    return svg.count('id="legend_')


def test_every_method_has_a_look_of_its_own_by_name_and_by_class() -> None:
    own = {m.name: known_look(m.name) for m in ALGORITHMS.values()}
    assert None not in own.values()
    assert len({look[0] for look in own.values() if look}) == len(own)  # colours, not dashes alone
    assert own == {m.name: known_look(m.__name__) for m in ALGORITHMS.values()}


def test_a_method_looks_the_same_whoever_else_is_in_the_figure() -> None:
    few, many = looks(["FedRep", "FedAvg"]), looks(["mine", "FedAvg, tuned", *ALGORITHMS])
    assert few["FedAvg"] == many["FedAvg"] == METHODS["FedAvg"]
    assert many["FedAvg, tuned"][0] == METHODS["FedAvg"][0]
    assert len(set(many.values())) == len(many)


def test_one_line_has_no_legend_and_two_have_one() -> None:
    line = [(1.0, 1.0), (2.0, 0.5)]
    assert legends(plots.curves({"FedSOUL": line}, "round", "loss")) == 0
    assert legends(plots.curves({"FedSOUL": line, "FedAvg": line}, "round", "loss")) == 1
    assert legends(plots.curves({"FedSOUL": line}, "round", "loss", ("exact", 0.4))) == 1
    one = looks(["FedSOUL"])
    assert legends(side_by_side.paths({"FedSOUL": line}, one, "round", "loss")) == 0


def test_lines_that_leave_the_axes_are_named() -> None:
    lines = {f"m{i}": [(1.0, 1.0), (2.0, 0.9 + 0.01 * i)] for i in range(5)}
    lines["wild"] = [(1.0, 1.0), (2.0, 400.0)]
    svg = side_by_side.paths(lines, looks(lines), "round", "RMSE", high_is_good=False)
    assert "wild leaves above (up to 400)" in words(svg)
    assert "m3 leaves" not in words(svg)
    lost = {"FedAvg": [(1.0, 1.0), (2.0, float("nan"))], "FedSOUL": [(1.0, 1.0), (2.0, 0.0)]}
    told = words(plots.curves(lost, "round", "gap"))
    assert "FedAvg diverged" in told
    assert "FedSOUL has values of zero or less" in told


def test_dots_that_coincide_stand_beside_each_other() -> None:
    places = swarm([1.0, 1.0, 1.0, 2.0], near=0.1)
    assert len(set(places[:3])) == 3
    assert places[3] == 0
    svg = plots.dots({"FedSOUL": [1.0, 1.0, 1.0], "other": [2.0, 3.0, 9.0]}, "score", far=5.0)
    assert "1 further" in words(svg)
    marks = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: #0072b2', svg)
    assert len(set(marks)) == len(marks) >= 3


def test_clients_that_coincide_or_lie_outside_are_seen() -> None:
    pairs = [(0.5, 0.5)] * 3 + [(0.1 * i, 0.1 * i) for i in range(60)] + [(0.2, 900.0)]
    svg = side_by_side.scatters({"FedAvg": pairs}, looks(["FedAvg"]), "FedRep: RMSE", "RMSE")["FedAvg"]
    assert svg.count("PathCollection_") >= 2  # dots, and a triangle on the edge


LINE = [(1.0, 1.0), (2.0, 0.5)]
FIGURES = {
    "curves": lambda: plots.curves({"a": LINE}, "first", "second"),
    "bars": lambda: plots.bars({"a": 1.0}, "second"),
    "dots": lambda: plots.dots({"a": [1.0, 2.0]}, "first"),
    "intervals": lambda: plots.intervals([(1.0, 0.0, 2.0, 1.0)], "first", "second"),
    "paths": lambda: side_by_side.paths({"a": LINE}, looks(["a"]), "first", "second"),
    "reliabilities": lambda: side_by_side.reliabilities({"a": [(0.5, 0.5, 9)]}, looks(["a"])),
    "ranked": lambda: side_by_side.ranked({"a": 1.0}, looks(["a"]), "first"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = side_by_side if name in ("paths", "reliabilities", "ranked") else plots
    drawn = module.svg_of
    monkeypatch.setattr(module, "svg_of", lambda figure: (seen.append(figure), drawn(figure))[1])
    FIGURES[name]()
    for axes in seen[0].axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
