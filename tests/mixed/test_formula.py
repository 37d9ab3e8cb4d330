"""Formulas in R's spellings: terms, coding and names as R has them."""

from __future__ import annotations

import numpy as np
import pytest

from fedpop.errors import DataError, SettingsError
from fedpop.mixed.design import Design, Wanted
from fedpop.mixed.formula import parse, shown
from fedpop.mixed.table import rows_of
from fedpop.run.members import LocalMembers
from fedpop.site.study import Survey


def built(frame, text, levels=None):
    formula = parse(text)
    rows = rows_of(frame, formula, columns=[c for c in formula.columns if c != formula.group])
    wanted = Wanted.of(formula, [n for n, values in rows.columns.items() if hasattr(values, "cat")])
    summary = wanted.schema(1).asked(LocalMembers(Survey(), {"here": wanted.table(rows)}).asks)
    return Design.agreed(formula, summary, levels or {}, 1), rows


@pytest.mark.parametrize(
    ("right", "names"),
    [
        ("x", ["(Intercept)", "x"]),
        ("s", ["(Intercept)", "sb", "sc"]),
        ("x * s", ["(Intercept)", "x", "sb", "sc", "x:sb", "x:sc"]),
        ("x:s + w", ["(Intercept)", "w", "x:sa", "x:sb", "x:sc"]),
        ("x * s - s", ["(Intercept)", "x", "x:sb", "x:sc"]),
        ("s / x", ["(Intercept)", "sb", "sc", "sa:x", "sb:x", "sc:x"]),
        ("0 + s", ["sa", "sb", "sc"]),
        ("s - 1 + flag", ["sa", "sb", "sc", "flagTRUE"]),
        ("(x + w)^2", ["(Intercept)", "x", "w", "x:w"]),
        ("I(x^2) + log( x+1 )", ["(Intercept)", "I(x^2)", "log(x + 1)"]),
        ("factor(k)", ["(Intercept)", "factor(k)2", "factor(k)10"]),
        ("s:flag + s", ["(Intercept)", "sb", "sc", "sa:flagTRUE", "sb:flagTRUE", "sc:flagTRUE"]),
        ("x * w + s * x", ["(Intercept)", "x", "w", "sb", "sc", "x:w", "x:sb", "x:sc"]),
        ("s + w:x + x:s", ["(Intercept)", "sb", "sc", "w:x", "sb:x", "sc:x"]),
        (
            "s:flag + flag",
            ["(Intercept)", "flagTRUE", "sb:flagFALSE", "sc:flagFALSE", "sb:flagTRUE", "sc:flagTRUE"],
        ),
        ("`odd name`", ["(Intercept)", "`odd name`"]),
        ("dotted.name", ["(Intercept)", "dotted.name"]),
    ],
)
def test_columns_are_named_as_r_names_them(right, names, simulated):
    frame = simulated([6] * 6)
    frame["flag"] = frame.w > 0
    frame["k"] = np.array([1, 2, 10])[np.arange(len(frame)) % 3]
    frame["odd name"] = frame["dotted.name"] = frame.w
    design, rows = built(frame, f"y ~ {right} + (1 | g)")
    assert design.fixed_names == names
    assert design.fixed(rows).shape == (len(frame), len(names))


def test_columns_hold_what_their_names_say(simulated):
    frame = simulated([6] * 6)
    design, rows = built(frame, "y ~ x * s + log(x) + scale(w) + (w | g) + offset(2 * t)")
    x = dict(zip(design.fixed_names, design.fixed(rows).T, strict=True))
    b = (frame.s == "b").to_numpy()
    assert np.array_equal(x["sb"], b * 1.0)
    assert np.array_equal(x["x:sb"], b * frame.x)
    assert x["log(x)"] == pytest.approx(np.log(frame.x))
    assert x["scale(w)"] == pytest.approx((frame.w - frame.w.mean()) / frame.w.std())
    assert np.array_equal(design.random(rows), np.stack((np.ones(len(frame)), frame.w), 1))
    assert design.offset(rows) == pytest.approx(2 * frame.t)


def test_the_order_of_levels_may_be_given(simulated):
    frame = simulated([6] * 6)
    design, _ = built(frame, "y ~ s + (1 | g)", {"s": ["c", "a", "b"]})
    assert design.fixed_names == ["(Intercept)", "sa", "sb"]
    with pytest.raises(SettingsError, match="'c' is in the data"):
        built(frame, "y ~ s + (1 | g)", {"s": ["a", "b"]})


@pytest.mark.parametrize(
    ("random", "blocks"),
    [
        ("(x | g)", [["(Intercept)", "x"]]),
        ("(x || g)", [["(Intercept)"], ["x"]]),
        ("(1 | g) + (0 + x | g)", [["(Intercept)"], ["x"]]),
        ("(x + w - 1 | g)", [["x", "w"]]),
        ("(x * w | g)", [["(Intercept)", "x", "w", "x:w"]]),
    ],
)
def test_blocks_of_random_effects(random, blocks, simulated):
    design, _ = built(simulated([6] * 6), f"y ~ 1 + {random}")
    assert design.random_names == [n for block in blocks for n in block]
    assert design.blocks == [i for i, block in enumerate(blocks) for _ in block]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y ~ x", "no random term"),
        ("y ~ x + (1 | a) + (1 | b)", r"a and b are crossed.*\(1 \| a/b\) or \(1 \| b/a\).*\+ factor"),
        ("y ~ x + (1 | a:b) + (1 | a:c)", r"a:b and a:c are crossed.*\(1 \| outer/inner\)"),
        ("y ~ x + (1 | a/b) + (1 | c)", "are crossed"),
        ("y ~ x + (1 | log(a))", r"'log\(a\)' is computed \(of a\): make it a column"),
        ("y ~ x + (1 | a/a)", "'a' twice"),
        ("y ~ x + (1 | a/)", "computed"),
        ("y ~ x + 1 | g", "in parentheses"),
        ("x + (1 | g)", "has one ~"),
        ("y ~ x + (1 | g", "not closed"),
        ("y ~ x + (0 | g)", "are empty"),
        ("y ~ x + (1 | )", "names no group"),
        ("y ~ 2 + (1 | g)", "the number 2"),
        ("y ~ . + (1 | g)", "name them"),
        ("y ~ a %in% b + (1 | g)", "%in%"),
        ("y ~ x ? 2 + (1 | g)", "cannot read"),
        ("~ x + (1 | g)", "response"),
        ("y ~ x + (1 | g) +", "ends with"),
        ("y ~ x + - + (1 | g)", "missing"),
    ],
)
def test_what_cannot_be_read_is_explained(text, words):
    with pytest.raises(SettingsError, match=words):
        parse(text)


def test_functions_are_a_short_list(simulated):
    frame = simulated([6] * 6)
    design, rows = built(frame, "y ~ system(x) + (1 | g)")
    with pytest.raises(SettingsError, match="no function 'system'"):
        design.fixed(rows)
    design, rows = built(frame, "y ~ log(w) + (1 | g)")
    with pytest.raises(DataError, match=r"log\(w\) is nan in row \d+ \(w = -"):
        design.fixed(rows)
    design, rows = built(frame, "y ~ I(s^2) + (1 | g)")
    with pytest.raises(DataError, match="has categories, not numbers"):
        design.fixed(rows)


def test_r_prints_it_this_way():
    assert shown(parse("log(y+1)~x+(1|g)").response.tokens) == "log(y + 1)"


@pytest.mark.parametrize("right", ["x", "x + w + s", "0 + x", "1", "x + 1 + w", "x + x"])
def test_a_plain_sum_is_what_formulae_says(right):
    """A term that is taken away again goes the long way."""
    short, long = parse(f"y ~ {right} + (1 | g)"), parse(f"y ~ {right} + a - a + (1 | g)")
    assert short.fixed == long.fixed


def test_text_is_categories_even_where_it_looks_like_numbers(simulated):
    frame = simulated([6] * 6)
    frame["period"] = [str(i % 4 + 1) for i in range(36)]
    frame["age"] = ["3+" if i % 4 == 3 else str(i % 4) for i in range(36)]
    frame["mixed"] = frame.w.astype(object)
    design, _ = built(frame, "y ~ period + age + mixed + (1 | g)")
    assert design.fixed_names[1:] == ["period2", "period3", "period4", "age1", "age2", "age3+", "mixed"]


def test_scale_of_an_expression_is_by_the_federations_moments(simulated):
    frame = simulated([6] * 6)
    design, rows = built(frame, "y ~ scale(log(x)) + I(center(x * w)^2) + center(`t`) + (1 | g)")
    x = dict(zip(design.fixed_names, design.fixed(rows).T, strict=True))
    log = np.log(frame.x)
    assert x["scale(log(x))"] == pytest.approx((log - log.mean()) / log.std())
    both = frame.x * frame.w
    assert x["I(center(x * w)^2)"] == pytest.approx((both - both.mean()) ** 2)
    assert x["center(t)"] == pytest.approx(frame.t - frame.t.mean())
    with pytest.raises(SettingsError, match="within another"):
        built(frame, "y ~ scale(scale(x) + w) + (1 | g)")
    with pytest.raises(DataError, match=r"log\(w\) is nan in row"):
        built(frame, "y ~ scale(log(w)) + (1 | g)")
