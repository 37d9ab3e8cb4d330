"""Data and settings that cannot be used: one error each, which says what, where, and what to do."""

from __future__ import annotations

import numpy as np
import pytest

import fedpop as fp
from fedpop.cli import main
from fedpop.errors import DataError, EstimateError, FedpopWarning, SettingsError


def changed(frame, **columns):
    return frame.assign(**columns)


@pytest.mark.parametrize(
    ("formula", "family", "change", "error", "words"),
    [
        ("y ~ z + (1 | g)", "gaussian", {}, DataError, "no column 'z' in the table; it has g, x"),
        ("y ~ x + (1 | h)", "gaussian", {}, DataError, "no column 'h'"),
        ("y ~ c + (1 | g)", "gaussian", {"c": 3.7}, DataError, "'c' is constant"),
        ("y ~ c + (1 | g)", "gaussian", {"c": "one"}, DataError, "'c' has one level only"),
        ("y ~ x + (x + I(2 * x) | g)", "gaussian", {}, DataError, "random effect .* combination of others"),
        ("y ~ x + (1 | g)", "gaussian", {"y": 1.5}, DataError, "is constant"),
        ("y ~ x + (1 | g)", "gaussian", {"g": "all"}, DataError, "one group only"),
        ("y ~ x + (1 | g)", "gaussian", {"g": range(48)}, DataError, "48 random effects"),
        ("y ~ x + (1 | g)", "normal", {}, SettingsError, "family is one of"),
        ("count ~ x + (1 | g)", "bernoulli", {}, DataError, "must be 0 or 1"),
        ("y ~ x + (1 | g)", "poisson", {}, DataError, "whole number, 0 or more"),
        ("s ~ x + (1 | g)", "bernoulli", {}, DataError, "has 3 categories"),
        ("s ~ x + (1 | g)", "gaussian", {}, DataError, "response 's' holds names.*family='binomial'"),
        ("yes ~ x + (1 | g)", "bernoulli", {"yes": 0}, DataError, "nothing to explain"),
        ("cbind(yes, x) ~ w + (1 | g)", "binomial", {}, DataError, "failures in cbind"),
        ("cbind(yes, yes) ~ w + (1 | g)", "poisson", {}, SettingsError, "family='binomial'"),
        ("y ~ g + (1 | g)", "gaussian", {}, SettingsError, "a predictor or the response too"),
        ("y ~ 0 + (1 | g)", "gaussian", {}, SettingsError, "no fixed effect"),
        ("y ~ x + (1 | g) + (x | g)", "gaussian", {}, SettingsError, "is there twice"),
        ("y ~ x + (1 | g)", "gaussian", {"x": np.inf}, DataError, "infinite in row 0"),
    ],
)
def test_an_error_that_explains(formula, family, change, error, words, simulated):
    frame = changed(simulated([6] * 8), **change)
    with pytest.raises(error, match=words):
        fp.mixed_model(formula, frame, family)


def test_columns_that_say_nothing_new_are_dropped_and_named(simulated):
    """As R does: the later ones go, among them a cell of an interaction that has no rows."""
    frame = simulated([6] * 8)
    plain = fp.mixed_model("y ~ x + w + (1 | g)", frame)
    with pytest.warns(FedpopWarning, match=r"rank deficient, so dropped 1 column / coefficient: I\(2 \* x\)"):
        fit = fp.mixed_model("y ~ x + I(2 * x) + w + (1 | g)", frame)
    assert fit.coefficients == pytest.approx(plain.coefficients, rel=1e-9)
    assert fit.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-9)
    assert "coefficient: I(2 * x)" in str(fit)
    assert fit.predict(frame.head(3)).to_numpy() == pytest.approx(plain.predict(frame.head(3)).to_numpy())
    frame["arm"] = np.where(frame.s == "c", "p", np.where(np.arange(len(frame)) % 2, "p", "q"))
    with pytest.warns(FedpopWarning, match="coefficient: sc:armq"):
        fit = fp.mixed_model("y ~ s * arm + (1 | g)", frame, min_count=1)
    assert list(fit.coefficients) == ["(Intercept)", "sb", "sc", "armq", "sb:armq"]


def test_missing_values_are_dropped_and_counted_or_refused(simulated):
    frame = simulated([6] * 8)
    whole = fp.mixed_model("y ~ x + (1 | g)", frame.drop(index=[3, 10]))
    frame.loc[3, "x"] = np.nan
    frame.loc[10, "y"] = np.nan
    fit = fp.mixed_model("y ~ x + (1 | g)", frame)
    assert fit.log_likelihood == whole.log_likelihood
    assert "2 row(s) with missing values were left out" in str(fit)
    with pytest.raises(DataError, match=r"'y' has 1 missing value\(s\), the first in row 10"):
        fp.mixed_model("y ~ x + (1 | g)", frame, missing="error")


def test_a_small_level_is_not_told_unless_allowed(simulated):
    frame = simulated([6] * 8)
    frame["s"] = ["rare"] * 3 + ["a", "b", "c"] * 15
    with pytest.raises(DataError, match=r"3 row\(s\) at levels of fewer than 5 rows.*min_count=1"):
        fp.mixed_model("y ~ s + (1 | g)", frame)
    assert "srare" in fp.mixed_model("y ~ s + (1 | g)", frame, min_count=1).coefficients


@pytest.mark.parametrize("complete", [True, False])
def test_separated_data_are_found(complete, simulated):
    frame = simulated([4] * 9)
    hidden = (frame.w > 0) if complete else (frame.yes == 1) & (frame.s != "a")
    formula = "yes ~ w + (1 | g)" if complete else "yes ~ s + (1 | g)"
    with pytest.raises(EstimateError, match="separated"):
        fp.mixed_model(formula, frame.assign(yes=hidden * 1), "bernoulli")


def test_groups_that_are_all_yes_or_all_no(simulated):
    frame = simulated([3] * 8)
    frame["yes"] = frame.g.str[1:].astype(int) % 2
    with pytest.raises(EstimateError, match="groups are separated"):
        fp.mixed_model("yes ~ w + (1 | g)", frame, "bernoulli")


def test_a_singular_covariance_is_told(simulated):
    """Group means of noise that vary less than chance: the variance is at zero, and so is its maximum."""
    frame = simulated([10] * 10)
    noise = np.random.default_rng(0).normal(size=100).reshape(10, 10)
    frame["y"] = (noise - noise.mean(1, keepdims=True)).flatten()
    fit = fp.mixed_model("y ~ w + (1 | g)", frame)
    assert fit.converged
    assert fit.singular
    assert fit.sd["(Intercept)"] < 1e-4
    assert "boundary (singular) fit" in str(fit)


def test_a_group_with_one_row_is_fine(simulated):
    fit = fp.mixed_model("y ~ w + (1 | g)", simulated([1, 1, 1, 6, 6, 6, 6, 6]))
    assert fit.converged
    assert fit.n_groups == 8


def test_settings_that_contradict(simulated):
    frame = simulated([6] * 8)
    for settings, words in (
        ({"method": "REML", "family": "poisson"}, "REML is for gaussian"),
        ({"method": "MAP"}, "method must be one of"),
        ({"engine": "exact", "participation": 0.2}, "engine='exact' cannot be used"),
        ({"method": "REML", "participation": 0.2}, "REML needs the exact engine"),
        ({"rounds": 10}, "ends by itself"),
        ({"missing": "guess"}, "missing must be one of"),
        ({"min_count": -1}, "min_count"),
        ({"levels": {"x": [1]}}, "no categorical predictor"),
    ):
        with pytest.raises(SettingsError, match=words):
            fp.mixed_model("count ~ x + (1 | g)", frame, **settings)


def test_files_that_are_no_tables(tmp_path, capsys, simulated):
    """Through the command line: a message, no traceback, and a status other than zero."""
    latin, mixed, empty = tmp_path / "latin.csv", tmp_path / "mixed.csv", tmp_path / "empty.csv"
    latin.write_bytes("y,x,g\n1,2,Zürich\n".encode("latin1"))
    frame = simulated([6] * 8).astype({"x": object})
    frame.loc[17, "x"] = "n/k"
    frame.to_csv(mixed, index=False)
    empty.write_text("")
    other, wide = tmp_path / "other.csv", tmp_path / "wide.csv"
    frame.to_csv(other, index=False, sep=";")
    frame.to_csv(wide, index=False, encoding="utf-16")
    for path, words in (
        (latin, "iconv -f latin1"),
        (wide, "iconv -f utf-16"),
        (other, "values are separated by ';', not by ',': save it with commas"),
        (mixed, "mixes numbers and text: row 17 is 'n/k'"),
        (empty, "not a table"),
        (tmp_path / "none.csv", "cannot read"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", str(path), "y ~ x + (1 | g)"])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err


def test_predictions_name_what_they_miss(simulated):
    frame = simulated([6] * 8)
    fit = fp.mixed_model("y ~ w + s + (w | g)", frame)
    row = frame.head(1)
    with pytest.raises(DataError, match="'zz' was not there in training"):
        fit.predict(row.assign(g="zz"))
    with pytest.raises(DataError, match="level 'q' was not there in training"):
        fit.predict(row.assign(s="q"))
    with pytest.raises(DataError, match="needs its group"):
        fit.predict(row.drop(columns="g"))
    with pytest.raises(SettingsError, match="groups is one of"):
        fit.predict(row, "all")
