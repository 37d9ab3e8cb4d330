"""Tables as people have them: what is missing, what levels are called, and in which order they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedpop as fp
from fedpop.cli import main
from fedpop.errors import DataError, FedpopWarning, SettingsError
from fedpop.mixed.table import read_csv, rows_of
from tests.mixed.conftest import pd


@pytest.fixture
def frame(simulated):
    return simulated([8] * 9, seed=5)


@pytest.mark.parametrize("nothing", [None, np.nan])
@pytest.mark.parametrize("kind", [object, "string", "category"])
def test_a_missing_word_drops_its_row_with_a_count(kind, nothing, frame, fitted):
    words = frame.s.astype(object)
    words[[3, 9]] = nothing
    fit = fitted("y ~ s + (1 | g)", frame.assign(s=words.astype(kind)), min_count=1).fit
    whole = fp.mixed_model("y ~ s + (1 | g)", frame.drop(index=[3, 9]))
    assert fit.log_likelihood == pytest.approx(whole.log_likelihood, abs=1e-9)
    assert "2 row(s) with missing values were left out (s: 2)" in str(fit)


def test_a_missing_yes_or_no_is_no_number(frame):
    frame["flag"] = (frame.w > 0).astype(object)
    frame.loc[5, "flag"] = None
    assert "flagTRUE" in fp.mixed_model("y ~ flag + (1 | g)", frame).coefficients


def test_a_missing_group_drops_its_row_with_a_count(frame):
    frame.loc[7, "g"] = None
    frame.loc[[7, 8], "w"] = np.nan
    fit = fp.mixed_model("y ~ w + (1 | g)", frame)
    assert fit.n_obs == len(frame) - 2
    assert "2 row(s) with missing values were left out (w: 2, g: 1)" in str(fit)
    with pytest.raises(DataError, match=r"'g' has 1 missing value\(s\), the first in row 7"):
        fp.mixed_model("y ~ x + (1 | g)", frame, missing="error")


def test_only_empty_fields_and_na_are_missing_in_a_file(frame, tmp_path, capsys):
    """A country called NA is missing, as in R, unless other words are named; one called None is a country."""
    words = ["None", "null", "nan", "N/A", "NULL", "plain"]
    frame["s"] = [words[i % 6] for i in range(len(frame))]
    frame["s"] = frame.s.where(frame.index != 4, "NA")
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    fit = fp.mixed_model("y ~ s + (1 | g)", path)
    assert set(fit.coefficients) == {"(Intercept)", "snan", "snull", "splain", "sN/A", "sNULL", "sNone"} - {
        f"s{sorted(words)[0]}"
    }
    assert "left out (s: 1)" in str(fit)
    main(["fit", str(path), "y ~ s + (1 | g)", "--na", "null", "N/A", "--min-count", "1"])
    shown = capsys.readouterr().out
    assert "left out (s: 24)" in shown
    assert "sNone" in shown
    assert "sNA" not in shown  # the baseline now


def test_r_writes_nan_in_columns_of_numbers(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("x,s\n1,NaN\nNaN,a\n3,b\n")
    table = read_csv(path)
    assert table.x.isna().tolist() == [False, True, False]
    assert table.s.tolist() == ["NaN", "a", "b"]


def test_the_order_of_a_categorical_is_that_of_levels(frame):
    order = ["c", "a", "b"]
    ordered = frame.assign(s=pd.Categorical(frame.s, order))
    placed = fp.mixed_model("y ~ s + (1 | g)", ordered)
    named = fp.mixed_model("y ~ s + (1 | g)", frame, levels={"s": order})
    assert placed.coefficients == named.coefficients
    assert list(placed.coefficients) == ["(Intercept)", "sa", "sb"]
    by_site = {str(name): part for name, part in ordered.groupby(frame.g.isin(["g0", "g1"]))}
    apart = fp.mixed_model("y ~ s + (1 | g)", by_site, min_count=1)
    assert apart.coefficients == pytest.approx(named.coefficients, rel=1e-9)


def test_sites_that_order_levels_differently_are_asked_which_it_is(frame):
    frames = {
        f"site {i}": part.assign(s=pd.Categorical(part.s, order))
        for i, (order, (_, part)) in enumerate(
            zip((["c", "a", "b"], ["b", "a", "c"]), frame.groupby(frame.g.isin(["g0", "g1"])), strict=True)
        )
    }
    from fedpop.mixed.design import Design, Wanted
    from fedpop.mixed.study import FormulaStudy
    from tests.flower.formulas import Alone

    study = FormulaStudy.from_text("y ~ s + (1 | g)")
    alone = Alone(study, frames)
    known = {}
    schema = Wanted.of(study.formula, ["s"]).schema(1)
    summary = schema.asked(lambda question, known: alone.ask(question, known)[0])
    with pytest.raises(DataError, match=r"order the levels of 's' differently \(a, b, c\)"):
        Design.agreed(study.formula, summary, known, 1)
    assert Design.agreed(study.formula, summary, {"s": ["b", "c", "a"]}, 1).levels["s"] == ("b", "c", "a")


def test_an_ordered_factor_says_how_it_is_coded(frame):
    frame["s"] = pd.Categorical(frame.s, ["c", "a", "b"], ordered=True)
    plain = fp.mixed_model("y ~ s + (1 | g)", frame)
    assert "s is ordered, and coded by treatment contrasts; R has contrasts={'s': 'poly'}" in str(plain)
    fit = fp.mixed_model("y ~ s + (1 | g)", frame, contrasts={"s": "poly"})
    assert list(fit.coefficients) == ["(Intercept)", "s.L", "s.Q"]
    assert fit.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-9)
    a, b = plain.coefficients["sa"], plain.coefficients["sb"]
    assert fit.coefficients["s.L"] == pytest.approx(b / np.sqrt(2), rel=1e-6)
    assert fit.coefficients["s.Q"] == pytest.approx((b - 2 * a) / np.sqrt(6), rel=1e-6)


CODED = {
    "sum": (["s1", "s2"], [[1, 0], [0, 1], [-1, -1]]),
    "contr.helmert": (["s1", "s2"], [[-1, -1], [1, -1], [0, 2]]),
    "treatment": (["sb", "sc"], [[0, 0], [1, 0], [0, 1]]),
}


@pytest.mark.parametrize("coding", CODED)
def test_codings_are_rs(coding, frame, fitted):
    """One model in other words: means of levels are the same."""
    names, columns = CODED[coding]
    fit = fitted("y ~ s + (1 | g)", frame, contrasts={"s": coding}, min_count=1).fit
    assert list(fit.coefficients) == ["(Intercept)", *names]
    b = np.array(list(fit.coefficients.values()))
    plain = fp.mixed_model("y ~ 0 + s + (1 | g)", frame)
    means = b[0] + np.array(columns) @ b[1:]
    assert means == pytest.approx(np.array(list(plain.coefficients.values())), rel=1e-6)
    with pytest.raises(SettingsError, match="contrasts are one of"):
        fp.mixed_model("y ~ s + (1 | g)", frame, contrasts={"s": "helm"})
    with pytest.raises(SettingsError, match="'w', which is no categorical"):
        fp.mixed_model("y ~ s + w + (1 | g)", frame, contrasts={"w": "sum"})


@pytest.mark.parametrize("written", ["2021-03-0{}", "{}/3/2021", "2021.03.0{} 10:20"])
def test_dates_as_text_are_noticed(written, frame):
    frame["day"] = [written.format(i % 3 + 1) for i in range(len(frame))]
    with pytest.raises(DataError, match="'day' holds dates as text"):
        fp.mixed_model("y ~ day + (1 | g)", frame)
    assert len(fp.mixed_model("y ~ factor(day) + (1 | g)", frame).coefficients) == 3
    assert fp.mixed_model("y ~ w + (1 | day)", frame).n_groups == 3


def test_two_categories_of_one_name(frame):
    frame["s"] = pd.Categorical([("a", 1, "1")[i % 3] for i in range(len(frame))], ["a", 1, "1"])
    with pytest.raises(DataError, match="two categories that are both called '1'"):
        fp.mixed_model("y ~ s + (1 | g)", frame)


def test_levels_and_contrasts_on_the_command_line(frame, tmp_path, capsys):
    path, out = tmp_path / "table.csv", tmp_path / "fit.json"
    frame.to_csv(path, index=False)
    main(["fit", str(path), "y ~ s + (1 | g)", "--levels", "s=c,a,b", "--json", str(out)])
    assert set(json.loads(out.read_text())["fixed"]) == {"(Intercept)", "sa", "sb"}
    main(["fit", str(path), "y ~ s + (1 | g)", "--contrasts", "s=sum"])
    assert "s1 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fit", str(path), "y ~ s + (1 | g)", "--levels", "s"])
    assert "takes COLUMN=" in capsys.readouterr().err


def test_a_comparison_is_a_factor_as_in_r(frame):
    design = fp.mixed_model("y ~ I(w > 0) * x + I(s == 'a') + (1 | g)", frame).design
    assert design.fixed_names == [
        "(Intercept)",
        "I(w > 0)TRUE",
        "x",
        'I(s == "a")TRUE',
        "I(w > 0)TRUE:x",
    ]
    rows = rows_of(frame, design.formula, columns=["y", "w", "x", "s"])
    x = dict(zip(design.fixed_names, design.fixed(rows).T, strict=True))
    assert np.array_equal(x["I(w > 0)TRUE"], frame.w > 0)
    assert np.array_equal(x['I(s == "a")TRUE'], frame.s == "a")
    both = fp.mixed_model("y ~ 0 + I(w > 0 & !(x < 20) | s != 'a') + (1 | g)", frame)
    assert list(both.coefficients)[1] == 'I(w > 0 & !(x < 20) | s != "a")TRUE'
    number = fp.mixed_model("y ~ I((w > 0) * 2) + (1 | g)", frame)
    assert list(number.coefficients)[1] == "I((w > 0) * 2)"


def test_a_logical_column_counts_as_zero_and_one_in_arithmetic(frame):
    frame["flag"] = frame.w > 0
    one = fp.mixed_model("y ~ I(flag * x) + (1 | g)", frame)
    other = fp.mixed_model("y ~ I((w > 0) * x) + (1 | g)", frame)
    assert list(one.coefficients.values()) == list(other.coefficients.values())


def test_another_baseline_in_the_formula(frame):
    fit = fp.mixed_model("y ~ relevel(s, ref = 'b') + C(s, sum):w + (1 | g)", frame)
    assert list(fit.coefficients)[:3] == [
        "(Intercept)",
        'relevel(s, ref = "b")a',
        'relevel(s, ref = "b")c',
    ]
    with pytest.raises(SettingsError, match="there is no level 'q'"):
        fp.mixed_model("y ~ relevel(s, 'q') + (1 | g)", frame)


def test_a_factor_after_a_double_bar_warns(frame):
    with pytest.warns(FedpopWarning, match=r"\(s \|\| g\): the levels of a factor stay correlated"):
        fit = fp.mixed_model("y ~ w + (s || g)", frame)
    assert fit.design.blocks == [0, 1, 1, 1]


def test_weights_are_a_column_or_numbers(frame):
    column = fp.mixed_model("y ~ w + (1 | g)", frame, weights="t")
    numbers = fp.mixed_model("y ~ w + (1 | g)", frame, weights=frame.t.to_numpy())
    assert numbers.log_likelihood == column.log_likelihood
    with pytest.raises(SettingsError, match="72 rows"):
        fp.mixed_model("y ~ w + (1 | g)", frame, weights=[1.0, 2.0])
    with pytest.raises(SettingsError, match="a column of them"):
        fp.mixed_model("y ~ w + (1 | g)", {"a": frame}, weights=[1.0] * 72)


def test_what_users_of_r_type_first(frame):
    fit = fp.mixed_model("y ~ w + (1 | g)", frame, REML=True)
    assert fit.method == "REML"
    assert fp.mixed_model("y ~ w + (1 | g)", frame, REML=False).method == "ML"
    assert fit.summary() == str(fit)
    for name, words in (
        ("fixef", "type fit.coefficients"),
        ("ranef", r"type fit.random_effects\(\)"),
        ("VarCorr", "type fit.sd"),
        ("logLik", "type fit.log_likelihood"),
        ("bse", "type fit.standard_errors"),
        ("nonsense", "no attribute 'nonsense'"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(fit, name)
    for setting, words in (
        ("nAGQ", "as many nodes"),
        ("subset", "the rows themselves"),
        ("metod", "there are"),
    ):
        with pytest.raises(SettingsError, match=words):
            fp.mixed_model("y ~ w + (1 | g)", frame, **{setting: 1})
    with pytest.raises(SettingsError, match="contradict"):
        fp.mixed_model("y ~ w + (1 | g)", frame, method="REML", REML=False)


def test_likelihoods_of_other_rows_or_weights_are_not_compared(frame, fitted):
    frame.loc[3, "x"] = np.nan
    frame.loc[9, "w"] = np.nan
    large = fitted("y ~ w + (1 | g)", frame).fit
    with pytest.raises(SettingsError, match="different rows"):
        large.likelihood_ratio(fitted("y ~ x + t + (1 | g)", frame).fit)
    with pytest.raises(SettingsError, match="71 and 72 rows"):
        large.likelihood_ratio(fitted("y ~ 1 + (1 | g)", frame).fit)
    frame = frame.dropna()
    weighted, plain = (
        fitted("y ~ w + (1 | g)", frame, weights="t").fit,
        fitted("y ~ 1 + (1 | g)", frame).fit,
    )
    with pytest.raises(SettingsError, match="the same weights"):
        plain.likelihood_ratio(weighted)
    assert plain.likelihood_ratio(fitted("y ~ w + (1 | g)", frame).fit).degrees == 1


def test_means_are_at_the_estimate_unless_averaging_is_asked_for(frame):
    """As R's predict(re.form = NA, type = "response"); of a new group the integral, of which Poisson's is
    known."""
    fit = fp.mixed_model("count ~ w + offset(log(t)) + (1 | g)", frame, "poisson")
    b = list(fit.coefficients.values())
    eta = b[0] + b[1] * frame.w.head(5) + np.log(frame.t.head(5))
    plain = fit.predict(frame.head(5), "population")
    assert plain["mean"].to_numpy() == pytest.approx(np.exp(eta).to_numpy(), rel=1e-9)
    new = fit.predict(frame.head(5), "new")
    variance = float(fit.covariance[0, 0])
    assert new["mean"].to_numpy() == pytest.approx(np.exp(eta + variance / 2).to_numpy(), rel=1e-8)
    averaged = fit.predict(frame.head(5), "population", average=True)
    assert (averaged.error > 0).all()
    assert (averaged["mean"] != plain["mean"]).all()
    assert "error" not in plain
    with pytest.raises(SettingsError, match="average=True"):
        fit.predict(frame.head(5), average=True, theta_uncertainty=False)


def test_means_of_known_groups_are_integrals_over_their_posterior(frame):
    fit = fp.mixed_model("yes ~ w + (1 | g)", frame, "bernoulli")
    row = frame.iloc[[2]]
    found = float(fit.predict(row)["mean"].iloc[0])
    b, sd = list(fit.coefficients.values()), fit.sd["(Intercept)"]
    u = np.linspace(-10, 10, 4001)
    group = frame[frame.g == row.g.iloc[0]]
    eta = b[0] + b[1] * group.w.to_numpy()[:, None] + sd * u
    yes = group.yes.to_numpy()[:, None]
    log_joint = (yes * eta - np.logaddexp(0, eta)).sum(0) - u**2 / 2
    weight = np.exp(log_joint - log_joint.max())
    rate = 1 / (1 + np.exp(-(b[0] + b[1] * float(row.w.iloc[0]) + sd * u)))
    assert found == pytest.approx(float((weight * rate).sum() / weight.sum()), rel=1e-6)
    mode = sd * u[log_joint.argmax()]
    assert float(fit.modes["g"][fit.levels.index(row.g.iloc[0]), 0]) == pytest.approx(mode, abs=0.01)
    saved = fit.plain()["modes"]["g"][row.g.iloc[0]]["(Intercept)"]
    assert set(saved) == {"mode", "mean", "sd"}
    assert saved["mode"] != saved["mean"]
