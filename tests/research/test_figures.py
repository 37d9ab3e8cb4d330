"""Figures of experiments alone: named axes, and regions that hold what they say."""

import pytest

from fedpop.report.style import looks
from research import figures

FIGURES = {
    "spread": lambda: figures.spread({"g": {"a": [1.0, 2.0]}}, "first", "second"),
    "points": lambda: figures.points({"a": {1.0: [1.0, 2.0]}}, {}, "first", "second"),
    "contours": lambda: figures.contours("a", [[0.1, 0.2], [0.3, 0.4]], [0, 1], [0, 1], [(0, 1)]),
    "densities": lambda: figures.densities({"a": [[1, 2]]}, looks(["a"]), 1.0, "first"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, drawn = [], figures.svg_of
    monkeypatch.setattr(figures, "svg_of", lambda figure: (seen.append(figure), drawn(figure))[1])
    FIGURES[name]()
    for axes in seen[0].axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_levels_hold_their_shares() -> None:
    density = [[0.4, 0.3], [0.2, 0.1]]
    assert figures._levels(density, (0.5, 0.9)) == [0.2, 0.3]
