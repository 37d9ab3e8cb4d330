"""Other formulas on one table."""

from __future__ import annotations

import pytest

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.mixed.refits import changed


def test_update_takes_dots_for_what_was_there(simulated):
    frame = simulated([6] * 10)
    fit = fp.mixed_model("log(t) ~ w * s + (1 | g)", frame, REML=True)
    other = fit.update(". ~ . - w:s + x")
    whole = fp.mixed_model("log(t) ~ w + s + x + (1 | g)", frame, REML=True)
    assert other.coefficients == pytest.approx(whole.coefficients, rel=1e-8)
    assert other.method == "REML"
    assert fit.update(method="ML", REML=False).method == "ML"
    assert fit.update("y ~ .").response == "y"
    assert changed("y ~ x + (1 | g)", "log(.) ~ x + (1 | g)") == "log(y) ~ x + (1 | g)"
    with pytest.raises(SettingsError, match="one ~"):
        fit.update("+ x")


def test_drop1_is_rs(table):
    """``drop1(lmer(Reaction ~ Days + (Days | Subject)), test = "Chisq")`` by ML; R 4.2.2, lme4 1.1.31:
    AIC 1763.9 and 1785.5, LRT 23.537, p 1.226e-06."""
    fit = fp.mixed_model("Reaction ~ Days + (Days | Subject)", table("sleepstudy"), REML=True)
    found = fit.drop1()
    assert found.aic.round(1).tolist() == [1763.9, 1785.5]
    assert found.loc["Days", "chisq"] == pytest.approx(23.537, abs=5e-4)
    assert found.loc["Days", "p"] == pytest.approx(1.226e-06, rel=1e-3)


def test_fits_side_by_side(simulated):
    frame = simulated([6] * 10)
    one, other = (fp.mixed_model(f"y ~ {x} + (1 | g)", frame) for x in ("w", "w + x"))
    found = other.beside(one)
    assert list(found.columns) == ["(1)", "(2)"]
    assert found.loc["x", "(2)"] == ""
    assert found.loc["rows"].tolist() == ["60", "60"]
    assert found.loc["w", "(2)"].startswith(f"{one.coefficients['w']:.4g} (")
