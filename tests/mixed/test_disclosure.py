"""A site does not answer what would show a few of its rows: by itself, or beside what it answered before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpop.mixed.disclosure import DesignColumns, SmallCounts
from fedpop.mixed.groups import Groups, agreed
from fedpop.mixed.study import FormulaStudy
from fedpop.run.members import LocalMembers
from fedpop.site.refusal import Code, Refusal

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")


@pytest.fixture
def frame() -> Any:
    rng = np.random.default_rng(0)
    n = 120
    table = pd.DataFrame({"id": np.arange(n), "g": np.repeat([f"g{i}" for i in range(12)], 10)})
    table["x"] = rng.normal(60, 10, n).clip(40, 98)
    table["income"] = rng.lognormal(10, 1.5, n)
    table["s"], table["t"] = rng.choice(list("ab"), n), np.where(np.arange(n) % 2, "u", "v")
    table["rare"] = np.where(np.arange(n) < 3, "seldom", "often")
    table["w"] = rng.uniform(1, 2, n)
    table["y"] = 0.1 * table.x + rng.normal(size=n)
    return table


def prepared(frame: Any, formula: str, weights: str | None = None) -> FormulaStudy:
    """The study as a site receives it, once columns and levels are agreed on."""
    study = FormulaStudy.from_text(formula, weights=weights)
    groups = Groups(LocalMembers(study, study.rows(frame)), study)
    agreed(groups, {}, 1)
    return groups.study


def checked(frame: Any, formula: str, weights: str | None = None, **more: Any) -> DesignColumns:
    study, earlier = prepared(frame, formula, weights), more.pop("earlier", {})
    return SmallCounts(**more).check(study, study.rows(frame), earlier)


@pytest.mark.parametrize(
    "formula",
    [
        "y ~ x + (1 | g)",
        "y ~ log(income) + s + (1 | g)",
        "y ~ income + x * s + (x | g)",
        "y ~ s * t + I(x^2) + (x || g)",
        "y ~ scale(x) + offset(w) + (1 | g)",
    ],
)
def test_what_people_ask_for_is_answered(frame: Any, formula: str) -> None:
    found = checked(frame, formula, weights="w")
    assert len(found.rows) == 120
    again = DesignColumns.read(found.tensors())
    assert again.columns.keys() == found.columns.keys()
    assert all((again.columns[n] == v).all() for n, v in found.columns.items())


@pytest.mark.parametrize(
    ("formula", "weights", "words"),
    [
        ("y ~ x + I(id == 7) + (1 | g)", None, r"the column 'I\(id == 7\)TRUE'"),
        ("y ~ x + I(id != 7) + (1 | g)", None, r"the column 'I\(id != 7\)TRUE'"),
        ("y ~ I(id < 4) + (1 | g)", None, "the column"),
        ("y ~ I(abs(id - 50) < 2) + (1 | g)", None, "the column"),
        ("y ~ exp(200 * (id - 119)) + (1 | g)", None, "the column"),
        ("y ~ x + I((x / 60)^150) + (1 | g)", None, "the column"),
        ("y ~ x + (0 + I(id == 7) | g)", None, "the column"),
        ("I(y * (id == 7)) ~ x + (1 | g)", None, "the column"),
        ("y ~ x + offset(I(id == 7) * 1000) + (1 | g)", None, "the column 'offset'"),
        ("y ~ x + (1 | g)", "I(1 + 1000 * (id == 7))", "the column 'weights = I"),
        ("y ~ rare + (1 | g)", None, "sets fewer than 5 rows apart"),
        ("y ~ x + I(x + (id == 7)) + (1 | g)", None, "a combination of the formula's columns"),
        ("y ~ x + I(2 * x - 3 * (id == 7)) + w + (1 | g)", None, "a combination"),
        ("y ~ x + I(x + 1000 * (id == 7) + (id == 8)) + (1 | g)", None, "a combination"),
        ("y ~ x + income + I(income + (id == 7) + 2 * (id == 8)) + (1 | g)", None, "a combination"),
        ("y ~ x + pmax(x - 78, 0) + (1 | g)", None, r"the column 'pmax\(x - 78, 0\)'"),
        ("y ~ x + (1 | id)", None, "most groups of 'id' have a single row"),
    ],
)
def test_what_sets_a_few_rows_apart_is_refused_by_name(
    frame: Any, formula: str, weights: str | None, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        checked(frame, formula, weights)
    assert refused.value.code is Code.FEW_ROWS
    assert not any(
        ch.isdigit()
        for ch in str(refused.value).replace(formula, "").replace("fewer than 5", "").split("'")[0]
    )
    checked(frame, formula, weights, minimum=1, single_rows=True)


def test_the_baselines_cells_count_and_those_of_interactions(frame: Any) -> None:
    frame["s"] = np.where(frame.index < 3, "a", "b")  # "a" is the baseline, which has no column
    with pytest.raises(Refusal, match=r"the column .sb.|a cell of .s."):
        checked(frame, "y ~ s + (1 | g)")
    frame["s"] = np.where((frame.index < 60) | ((frame.index % 2 == 1) & (frame.index > 66)), "a", "b")
    frame.loc[frame.index >= 66, "s"] = "a"
    with pytest.raises(Refusal, match=r"a cell of .s. and .t.|sets fewer"):
        checked(frame, "y ~ s * t + (1 | g)")
    checked(frame, "y ~ s + t + (1 | g)")


def test_a_site_with_few_rows_is_not_shown(frame: Any) -> None:
    study = prepared(frame, "y ~ x + (1 | g)")
    with pytest.raises(Refusal, match="this site has fewer than 5 rows"):
        SmallCounts().check(study, study.rows(frame.head(4)), {})


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ("y ~ x + (1 | g)", "y ~ I(x + (id == 7)) + (1 | g)", "the difference of"),
        ("y ~ x + (1 | g)", "y ~ I(3 * x + (id == 7)) + (1 | g)", "columns beside those of the formula"),
        ("y ~ x + (1 | g)", "I(y + 5 * (id < 3)) ~ x + (1 | g)", "the difference of"),
        ("y ~ x + (1 | g)", "y ~ x + sqrt(id - 2) + (1 | g)", "the difference to the formula"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_difference_to_what_was_answered_is_checked(
    frame: Any, first: str, then: str, words: str
) -> None:
    before = checked(frame, first)
    if "sqrt" in then:  # two rows are left out of the second
        frame["id"] = frame.id.astype(float)
        frame.loc[[0, 1], "id"] = np.nan
    checked(frame, then)
    with pytest.raises(Refusal, match=words):
        checked(frame, then, earlier={first: before})
    checked(frame, "y ~ s + (1 | g)", earlier={first: before})
    checked(frame, first, earlier={first: before})


def test_rows_that_come_later_are_many_or_not_answered(frame: Any) -> None:
    formula = "y ~ x + (1 | g)"
    before = checked(frame.head(110), formula)
    checked(frame, formula, earlier={formula: before})
    nearly = checked(frame.head(118), formula)
    with pytest.raises(Refusal, match="the difference to the formula"):
        checked(frame, formula, earlier={formula: nearly})


def test_what_no_two_formulas_show_three_do_not(frame: Any) -> None:
    """The third column is the sum of the two before, but in one row."""
    earlier, third = {}, "y ~ I(x + w * (id != 7)) + (1 | g)"
    for formula in ("y ~ x + (1 | g)", "y ~ w + (1 | g)", "y ~ I(x + w) + (1 | g)"):
        if "I" not in formula:
            checked(frame, third, earlier=dict(earlier))
        earlier[formula] = checked(frame, formula, earlier=dict(earlier))
    del earlier["y ~ I(x + w) + (1 | g)"]
    with pytest.raises(Refusal, match="columns beside those of all formulas answered before"):
        checked(frame, third, earlier=earlier)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("y ~ scale(x * (id == 7)) + (1 | g)", r"the column 'scale\(x \* \(id == 7\)\)' sets fewer"),
        ("y ~ scale(x + 1e6 * (id == 7)) + (1 | g)", "the column 'scale"),
        ("y ~ scale(x + (id == 7)) + (1 | g)", "a combination of the columns inside scale"),
    ],
)
def test_moments_of_expressions_do_not_leave_before_they_were_looked_at(
    frame: Any, formula: str, words: str
) -> None:
    """They are asked for while there is no design yet."""
    study = FormulaStudy.from_text(formula)
    with pytest.raises(Refusal, match=words):
        SmallCounts().check_scaled(study, study.rows(frame), {})
    SmallCounts(minimum=1).check_scaled(study, study.rows(frame), {})


def test_moments_of_what_people_scale_do(frame: Any) -> None:
    answered = checked(frame, "y ~ x + (1 | g)")
    for formula in (
        "y ~ scale(x) + (1 | g)",
        "y ~ scale(log(income)) * s + scale(x) + (1 | g)",
        "y ~ x + (1 | g)",
    ):
        study = FormulaStudy.from_text(formula)
        SmallCounts().check_scaled(study, study.rows(frame), {"y ~ x + (1 | g)": answered})
    later = frame.assign(v=frame.x + (frame.id == 7))
    study = FormulaStudy.from_text("y ~ scale(v) + (1 | g)")
    SmallCounts().check_scaled(study, study.rows(later), {})
    with pytest.raises(Refusal, match=r"'v' to the formula .* answered before"):
        SmallCounts().check_scaled(study, study.rows(later), {"y ~ x + (1 | g)": answered})
