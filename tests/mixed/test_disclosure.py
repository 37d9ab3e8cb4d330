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


def prepared(frame: Any, formula: str, weights: str | None = None, family: str = "gaussian") -> FormulaStudy:
    """The study as a site receives it, once columns and levels are agreed on."""
    study = FormulaStudy.from_text(formula, family, weights)
    groups = Groups(LocalMembers(study, study.rows(frame)), study)
    agreed(groups, {}, 1)
    return groups.study


def checked(frame: Any, formula: str, weights: str | None = None, **more: Any) -> DesignColumns:
    study = prepared(frame, formula, weights, more.pop("family", "gaussian"))
    earlier = more.pop("earlier", [])
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
    again = DesignColumns.read(found.formula, found.tensors())
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
        SmallCounts().check(study, study.rows(frame.head(4)), [])


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
        checked(frame, then, earlier=[before])
    checked(frame, "y ~ s + (1 | g)", earlier=[before])
    checked(frame, first, earlier=[before])


def test_rows_that_come_later_are_many_or_not_answered(frame: Any) -> None:
    formula = "y ~ x + (1 | g)"
    before = checked(frame.head(110), formula)
    checked(frame, formula, earlier=[before])
    nearly = checked(frame.head(118), formula)
    with pytest.raises(Refusal, match="the difference to the formula"):
        checked(frame, formula, earlier=[nearly])


def test_what_no_two_formulas_show_three_do_not(frame: Any) -> None:
    """The third column is the sum of the two before, but in one row."""
    earlier, third = list[DesignColumns](), "y ~ I(x + w * (id != 7)) + (1 | g)"
    for formula in ("y ~ x + (1 | g)", "y ~ w + (1 | g)"):
        checked(frame, third, earlier=earlier)
        earlier.append(checked(frame, formula, earlier=earlier))
    with pytest.raises(Refusal, match="columns beside those of all formulas answered before"):
        checked(frame, third, earlier=earlier)


def test_nor_do_rows_that_several_formulas_leave_out(frame: Any) -> None:
    """Two leave out six rows each; the third leaves out eleven of these twelve."""
    missing = {"a": range(6), "b": range(6, 12), "c": range(1, 12)}
    for name, rows in missing.items():
        frame[name] = np.random.default_rng(len(rows)).normal(size=len(frame))
        frame.loc[list(rows), name] = np.nan
    earlier = list[DesignColumns]()
    for formula in ("y ~ x + (1 | g)", "y ~ a + (1 | g)", "y ~ b + (1 | g)"):
        checked(frame, "y ~ c + (1 | g)", earlier=earlier)
        earlier.append(checked(frame, formula, earlier=earlier))
    with pytest.raises(Refusal, match="the rows beside those of all formulas answered before"):
        checked(frame, "y ~ c + (1 | g)", earlier=earlier)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("y ~ x + (1 | late)", "a group of 'late', which has few here"),
        ("y ~ x + (1 | half / late)", "a group of 'late:half', which has few here"),
        ("y ~ x + (0 + I(id < 62) | half)", "an effect within a group of 'half'"),
        ("y ~ x + (1 | half / id)", "most groups of 'id:half' have a single row"),
    ],
)
def test_few_groups_are_as_good_as_a_factor(frame: Any, formula: str, words: str) -> None:
    frame["half"] = np.where(frame.id < 60, "first", "second")
    frame["late"] = np.where(frame.id < 117, "no", "yes")
    with pytest.raises(Refusal, match=words):
        checked(frame, formula)
    checked(frame, "y ~ x + (x | half)")
    checked(frame, "y ~ x + (1 | half / g)")


def test_groups_that_look_alike_hide_each_other(frame: Any) -> None:
    """Four people with six visits each; of the last one then five, and then four."""
    few = frame.head(24).assign(g=np.repeat(list("abcd"), 6), late=[0, 0, 0, 1, 1, 1] * 4)
    checked(few, "y ~ late + (late | g)")
    with pytest.raises(Refusal, match="an effect within a group of 'g'"):
        checked(few.head(23), "y ~ late + (late | g)")
    checked(few.head(23), "y ~ late + (1 | g)")
    with pytest.raises(Refusal, match="a group of 'g', which has few here"):
        checked(few.head(22), "y ~ late + (1 | g)")


def test_columns_that_meet_in_one_row_do_so_in_products_with_weights(frame: Any) -> None:
    first, second = "I(id <= 60)", "I(1 + (id >= 60 & id < 100))"
    checked(frame, f"y ~ {first} + (1 | g)")
    checked(frame, "y ~ x + (1 | g)", second)
    with pytest.raises(Refusal, match="a combination of the formula's columns"):
        checked(frame, f"y ~ {first} + (1 | g)", second)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_a_response_that_few_rows_have(frame: Any, family: str) -> None:
    """Sums of columns times it are those rows'."""
    frame["event"] = (frame.id % 50 == 3).astype(int)
    with pytest.raises(Refusal, match="the column 'event'"):
        checked(frame, "event ~ x + (1 | g)", family=family)
    frame["event"] = (frame.id % 20 == 3).astype(int)
    checked(frame, "event ~ x + (1 | g)", family=family)


def test_as_many_columns_as_rows_are_rows(frame: Any) -> None:
    waves = " + ".join(f"cos({k} * x)" for k in range(1, 21))
    with pytest.raises(Refusal, match="a combination of the formula's columns"):
        checked(frame.head(20), f"y ~ {waves} + (1 | g)")


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (
            "y ~ scale(x * (id == 7)) + (1 | g)",
            r"the expression 'x \* \(id == 7\)', whose moments are asked for, sets fewer",
        ),
        ("y ~ scale(x + 1e6 * (id == 7)) + (1 | g)", "the expression 'x"),
        ("y ~ scale(x + (id == 7)) + (1 | g)", "a combination of the columns inside scale"),
        ("y ~ poly(x * (id == 7), 2) + (1 | g)", r"the expression 'x \* \(id == 7\)'"),
        ("y ~ ns(x * (id == 7), 2) + (1 | g)", r"the expression 'x \* \(id == 7\)'"),
    ],
)
def test_moments_of_expressions_do_not_leave_before_they_were_looked_at(
    frame: Any, formula: str, words: str
) -> None:
    """They are asked for while there is no design yet."""
    study = FormulaStudy.from_text(formula)
    with pytest.raises(Refusal, match=words):
        SmallCounts().check_scaled(study, study.rows(frame), [])
    SmallCounts(minimum=1).check_scaled(study, study.rows(frame), [])


def test_moments_of_what_people_scale_do(frame: Any) -> None:
    answered = checked(frame, "y ~ x + (1 | g)")
    for formula in (
        "y ~ scale(x) + (1 | g)",
        "y ~ scale(log(income)) * s + scale(x) + (1 | g)",
        "y ~ x + (1 | g)",
    ):
        study = FormulaStudy.from_text(formula)
        SmallCounts().check_scaled(study, study.rows(frame), [answered])
    later = frame.assign(v=frame.x + (frame.id == 7))
    study = FormulaStudy.from_text("y ~ scale(v) + (1 | g)")
    SmallCounts().check_scaled(study, study.rows(later), [])
    with pytest.raises(Refusal, match=r"'v' to the formula .* answered before"):
        SmallCounts().check_scaled(study, study.rows(later), [answered])
