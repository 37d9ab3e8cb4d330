"""Degrees of freedom, hypotheses and marginal means against R 4.2.2 with lme4 1.1.31, lmerTest 3.1.3,
pbkrtest 0.5.2 and emmeans 1.8.4.1. Numbers without a file are what these gave for the command beside them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.mixed.contrasts import equation
from fedpop.mixed.degrees import KenwardRoger
from tests.mixed.conftest import need, pd

DYESTUFF = (
    "1545 1440 1440 1520 1580 1540 1555 1490 1560 1495 1595 1550 1605 1510 1560 1445 1440 1595 1465 1545 "
    "1595 1630 1515 1635 1625 1520 1455 1450 1480 1445"
)
DYESTUFF2 = (
    "7.298 3.846 2.434 9.566 7.99 5.22 6.556 0.608 11.788 -0.892 0.11 10.386 13.434 5.51 8.166 2.212 4.852 "
    "7.092 9.288 4.98 0.282 9.014 4.458 9.446 7.198 1.722 4.782 8.106 0.758 3.758"
)
MACHINES = (
    "52 52.8 53.1 51.8 52.8 53.1 60 60.2 58.4 51.1 52.3 50.3 50.9 51.8 51.4 46.4 44.8 49.2 62.1 62.6 64 59.7 "
    "60 59 68.6 65.8 69.7 63.2 62.8 62.2 64.8 65 65.4 43.7 44.2 43 67.5 67.2 66.9 61.5 61.7 62.3 70.8 70.6 "
    "71 64.1 66.2 64 72.1 72 71.1 62 61.4 60.5"
)


def six_batches(numbers: str) -> Any:
    yields = [float(v) for v in numbers.split()]
    return pd.DataFrame({"Yield": yields, "Batch": ["ABCDEF"[i // 5] for i in range(30)]})


@pytest.fixture
def machines() -> Any:
    """nlme's Machines, with a number x."""
    i = np.arange(54)
    score = [float(v) for v in MACHINES.split()]
    return pd.DataFrame(
        {
            "score": score,
            "Machine": [f"{'ABC'[j // 18]}" for j in i],
            "Worker": [str(j % 18 // 3 + 1) for j in i],
            "x": (i + 1) * 37 % 11,
        }
    )


@pytest.fixture
def uneven() -> Any:
    """Sleepstudy with days missing: nothing is balanced."""
    frame = pd.read_csv(need("sleepstudy.csv"))
    i, subjects = np.arange(1, 181), sorted(frame.Subject.unique())
    rows = (i % 7 != 0) & ~(frame.Subject.isin([309, 310]) & (frame.Days > 3))
    out = frame[rows].copy()
    out["late"] = ["late" if day > 4 else "early" for day in out.Days]
    out["half"] = [str((subjects.index(s) + 1) % 2) for s in out.Subject]
    return out


NESTED = {
    "sleepstudy": "Reaction ~ Days + (Days | Subject)",
    "oats": "yield ~ nitro * Variety + (1 | Block/Variety)",
    "pastes": "strength ~ 1 + (1 | batch/cask)",
}


@pytest.mark.parametrize("name", NESTED)
def test_degrees_tests_and_means_are_those_of_the_references(name):
    saved = json.loads(need(f"nested/{name}.json").read_text())
    truth, levels = saved["fits"]["REML"], saved["data"].get("fixed_factor_levels") or {}
    fit = fp.mixed_model(NESTED[name], need(f"nested/{name}.csv"), levels=levels, REML=True)
    plain, table = fit.to_frame().set_index("term"), KenwardRoger(fit)
    for i, (term, known) in enumerate(truth["satterthwaite"].items()):
        assert fit.degrees[term] == pytest.approx(known["df"], rel=1e-6)
        assert plain.loc[term, "t"] == pytest.approx(known["t"], rel=1e-5)
        assert plain.loc[term, "p"] == pytest.approx(known["p"], rel=1e-4)
        other, row = truth["kenward_roger"]["coef"][term], torch.eye(len(fit.coefficients)).double()[i]
        assert table.degrees(row) == pytest.approx(other["df"], rel=1e-6)
        assert float(table.covariance[i, i].sqrt()) == pytest.approx(other["se_adj"], rel=1e-6)
    for degrees, key in (("satterthwaite", "anova_type3"), ("kenward-roger", "anova_type3_kr")):
        known = truth.get(key) or {}
        found = fit.anova(degrees=degrees)
        for term, values in known.items():
            if isinstance(values, dict) and term in found.index:
                for column in ("num_df", "den_df", "F"):
                    assert found.loc[term, column] == pytest.approx(values[column], rel=1e-5)
    for factor in truth.get("emmeans") or {}:
        if factor not in fit.design.levels:
            continue
        known = truth["emmeans"][factor]
        found = fit.marginal_means(factor)
        for values, (_, row) in zip(known["means"], found.means.iterrows(), strict=True):
            assert row["estimate"] == pytest.approx(values["emmean"], rel=1e-7)
            assert [row["se"], row["df"]] == pytest.approx([values["SE"], values["df"]], rel=1e-5)
            assert [row["lower"], row["upper"]] == pytest.approx(
                [values["lower.CL"], values["upper.CL"]], rel=1e-5
            )
        for values, (_, row) in zip(known["pairwise"], found.differences.iterrows(), strict=True):
            assert row["estimate"] == pytest.approx(values["estimate"], rel=1e-5)
            assert row["p"] == pytest.approx(values["p.value"], rel=1e-4)


def test_dyestuff_has_five_degrees_of_freedom(fitted):
    """``confint(emmeans(lmer(Yield ~ 1 + (1 | Batch), Dyestuff), ~1))``: 1478 to 1577 where Wald's is 1489.5
    to 1565.5."""
    fit = fitted("Yield ~ 1 + (1 | Batch)", six_batches(DYESTUFF), method="REML").fit
    assert fit.degrees["(Intercept)"] == pytest.approx(5, rel=1e-6)
    assert fit.confint().loc["(Intercept)"].round(1).tolist() == [1477.7, 1577.3]
    assert "19.38 5.00  78.804 6.23e-09" in str(fit)
    assert "t-tests use Satterthwaite's method" in str(fit)
    wald = fit.contrast({"(Intercept)": 1}, degrees="none").iloc[0]
    assert [round(wald.lower, 1), round(wald.upper, 1)] == [1489.5, 1565.5]
    likelihood = fp.mixed_model("Yield ~ 1 + (1 | Batch)", six_batches(DYESTUFF))
    assert math.isinf(likelihood.degrees["(Intercept)"])
    assert "z value" in str(likelihood)


def test_where_a_variance_is_zero_they_are_lmertests():
    """``coef(summary(lmer(Yield ~ 1 + (1 | Batch), Dyestuff2)))``: 29; ``ddf = "Kenward-Roger"``: 5."""
    fit = fp.mixed_model("Yield ~ 1 + (1 | Batch)", six_batches(DYESTUFF2), REML=True)
    assert fit.singular
    assert fit.degrees["(Intercept)"] == pytest.approx(29, rel=1e-6)
    other = fit.test("(Intercept) = 0", "kenward-roger")
    assert other.denominator == pytest.approx(5, rel=1e-6)
    assert other.p_value == pytest.approx(0.0004026832579, rel=1e-6)


UNEVEN = "Reaction ~ Days * half + late + (Days | Subject)"
ANOVA = {  # anova(f, type = , ddf = ): DenDF, F value
    (2, "satterthwaite"): [(47.29523872, 25.16637777), (14.09685158, 0.01077609), (110.0299439, 0.25395374)],
    (2, "kenward-roger"): [(45.39844900, 24.93682020), (15.80203065, 0.01073706), (110.2796382, 0.25327599)],
    (3, "satterthwaite"): [(47.31220547, 24.90329792), (14.09685158, 0.01077609), (110.0299439, 0.25395374)],
    (3, "kenward-roger"): [(45.41729981, 24.67632580), (15.80203065, 0.01073706), (110.2796382, 0.25327599)],
}


def test_rows_that_are_not_balanced(uneven):
    """``lmer(Reaction ~ Days * half + late + (Days | Subject), u)``; lme4's optimum is known to 1e-5."""
    fit = fp.mixed_model(UNEVEN, uneven, REML=True)
    expected = [14.74508286, 30.29645049, 14.09685158, 110.0299439, 15.27605946]
    assert list(fit.degrees.values()) == pytest.approx(expected, rel=1e-3)
    other = fit.contrast({n: {n: 1} for n in fit.coefficients}, degrees="kenward-roger")
    assert other.df.tolist() == pytest.approx(
        [16.52508902, 28.74133901, 15.80203065, 110.2796382, 14.34955652], rel=1e-3
    )
    assert other.se.tolist() == pytest.approx(
        [9.876176636, 2.730883972, 13.846303068, 9.878449879, 3.252147746], rel=1e-4
    )
    for (kind, degrees), known in ANOVA.items():
        found = fit.anova(type=kind, degrees=degrees)
        assert list(found.index) == ["Days", "half", "late", "Days:half"]
        for (den, f), (_, row) in zip(known, found.iterrows(), strict=False):
            assert [row["den_df"], row["F"]] == pytest.approx([den, f], rel=1e-3)
    several = ["Days = 0", "half1 = 0", "Days:half1 = 0"]
    first, second = fit.test(several), fit.test(several, "kenward-roger")  # contest(f, L, ddf = )
    assert [first.statistic, first.denominator] == pytest.approx([8.868159209, 18.72122086], rel=1e-3)
    assert [second.statistic, second.denominator] == pytest.approx([8.28918845, 21.03791439], rel=1e-3)
    assert "on 3 and 18.7" in str(first)


def test_degrees_of_several_effects_at_once_are_those_of_differences_from_the_baseline(uneven):
    """``anova(lmer(Reaction ~ part + part:half + half + (Days | Subject), u), type = )``: degrees of freedom
    depend on how a hypothesis is written, as F does not."""
    uneven["part"] = ["abc"[(day > 1) + (day > 5)] for day in uneven.Days]
    fit = fp.mixed_model("Reaction ~ part + part:half + half + (Days | Subject)", uneven, REML=True)
    known = {
        3: [(83.93507250, 0.52182), (19.71426342, 1.94273), (83.93507254, 1.77887)],
        2: [(77.17775223, 0.53264), (21.16633895, 2.15574), (83.93507254, 1.77887)],
    }
    for kind, rows in known.items():
        found = fit.anova(type=kind)
        assert list(found.index) == ["part", "half", "part:half"]
        assert found[["den_df", "F"]].to_numpy() == pytest.approx(np.array(rows), rel=1e-3)


def test_marginal_means_and_their_differences(machines):
    """``emmeans(lmer(score ~ Machine + x + (1 | Worker/Machine), M), ~ Machine)`` and ``pairs``."""
    fit = fp.mixed_model("score ~ Machine + x + (1 | Worker/Machine)", machines, REML=True)
    found = fit.marginal_means("Machine", adjust="tukey")
    assert found.means.estimate.round(1).tolist() == [52.4, 60.3, 66.3]
    assert found.means.se.round(2).tolist() == [2.49] * 3
    assert found.means.df.round(2).tolist() == [8.53] * 3
    assert found.means.lower.round(1).tolist() == [46.7, 54.6, 60.6]
    assert list(found.differences.index) == ["A - B", "A - C", "B - C"]
    assert found.differences.t.round(3).tolist() == [-3.656, -6.388, -2.732]
    assert found.differences.p.round(4).tolist() == [0.0112, 0.0002, 0.0508]
    plain = fit.marginal_means("Machine").differences
    assert plain.p.round(4).tolist() == [0.0044, 0.0001, 0.0211]
    assert fit.marginal_means("Machine", adjust="bonferroni").differences.p.tolist() == pytest.approx(
        (3 * plain.p).tolist()
    )
    moved = fit.marginal_means("Machine", at={"x": 0})
    assert moved.means.estimate["A"] == pytest.approx(fit.coefficients["(Intercept)"])
    assert "Means of the linear predictor at x = 5.09259" in str(found)
    table = fit.anova()  # anova(f)
    assert table.loc["Machine", ["num_df", "den_df", "F"]].tolist() == pytest.approx(
        [2, 9.992206919, 20.547724394931], rel=1e-6
    )


def test_a_hypothesis_does_not_depend_on_how_factors_are_coded(machines):
    formula = "score ~ Machine * x + (1 | Worker)"
    fits = [
        fp.mixed_model(formula, machines, REML=True, contrasts=c)
        for c in ({}, {"Machine": "sum"}, {"Machine": "helmert"})
    ]
    for kind in (2, 3):
        first, *others = (fit.anova(type=kind) for fit in fits)
        for other in others:
            assert other.to_numpy() == pytest.approx(first.to_numpy(), rel=1e-5)
    summed = fits[1].test(["Machine1 = 0", "Machine2 = 0"])
    assert summed.statistic == pytest.approx(fits[0].anova().loc["Machine", "F"], rel=1e-5)


def test_degrees_over_sites_are_those_of_one_machine(machines, fitted):
    fit = fitted("score ~ Machine + (Machine | Worker)", machines, method="REML").fit
    here = fp.mixed_model("score ~ Machine + (Machine | Worker)", machines, REML=True)
    assert list(fit.degrees.values()) == pytest.approx(list(here.degrees.values()), rel=1e-6)
    one, other = (f.anova(degrees="kenward-roger").to_numpy() for f in (fit, here))
    assert one == pytest.approx(other, rel=1e-6)
    one, other = (f.marginal_means("Machine").means.to_numpy() for f in (fit, here))
    assert one == pytest.approx(other, rel=1e-6)


def test_other_families_have_chi_squares(simulated):
    frame = simulated([8] * 15)
    fit = fp.mixed_model("count ~ s * w + (1 | g)", frame, "poisson")
    table = fit.anova()
    assert list(table.columns) == ["chisq", "df", "p"]
    interaction = fit.test(["sb:w = 0", "sc:w = 0"])
    assert table.loc["s:w", "chisq"] == pytest.approx(interaction.statistic, rel=1e-8)
    assert "chi-square" in str(interaction)
    single = fit.test("w = 0.1")
    assert single.statistic == pytest.approx(
        (fit.coefficients["w"] - 0.1) / fit.standard_errors["w"], rel=1e-9
    )
    means = fit.marginal_means("s", at={"w": 0.0}).means
    assert means.response.tolist() == pytest.approx(np.exp(means.estimate).tolist())


NAMES = ["(Intercept)", "x", "x:sb", "I(x^2)", "factor(k)2"]


@pytest.mark.parametrize(
    ("text", "row", "value"),
    [
        ("x = 0", [0, 1, 0, 0, 0], 0.0),
        ("(Intercept) + 10*x = 2.5", [1, 10, 0, 0, 0], 2.5),
        ("x - x:sb", [0, 1, -1, 0, 0], 0.0),
        ("I(x^2) / 2 = factor(k)2 + 1", [0, 0, 0, 0.5, -1], 1.0),
        ("-x = -3", [0, -1, 0, 0, 0], -3.0),
    ],
)
def test_equations_in_names_of_coefficients(text, row, value):
    found = equation(text, NAMES)
    assert found[0].tolist() == row
    assert found[1] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("z = 0", "no coefficient 'z'"),
        ("1 = 0", "names no coefficient"),
        ("x * x = 0", "not linear"),
        ("x = 0 = 1", "one ="),
        ("x + = 0", "cannot read"),
    ],
)
def test_equations_that_cannot_be_read(text, words):
    with pytest.raises(SettingsError, match=words):
        equation(text, NAMES)


def test_what_cannot_be_asked(machines):
    fit = fp.mixed_model("score ~ Machine + log(x + 1) + (1 | Worker)", machines)
    with pytest.raises(SettingsError, match="method='REML'"):
        fit.test("MachineB = 0", "satterthwaite")
    with pytest.raises(SettingsError, match="degrees is one of"):
        fit.test("MachineB = 0", "kr")
    with pytest.raises(SettingsError, match="no coefficient 'B'"):
        fit.contrast({"B": 1})
    with pytest.raises(SettingsError, match="'x' is no categorical predictor; there are Machine"):
        fit.marginal_means("x", at={"x": 1})
    with pytest.raises(SettingsError, match=r"at=\{'x': ...\}"):
        fit.marginal_means("Machine")
    with pytest.raises(SettingsError, match="type is 2 or 3"):
        fit.anova(type=1)
    assert fit.anova(fp.mixed_model("score ~ Machine + (1 | Worker)", machines)).degrees == 1
