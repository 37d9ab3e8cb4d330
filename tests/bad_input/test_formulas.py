"""Formulas that nobody can mean: one line that says what is wrong, at once, whatever they ask for."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedpop as fp
from fedpop.errors import DataError, SettingsError


def table(**columns: Any) -> Any:
    rng = np.random.default_rng(0)
    numbers = {name: rng.normal(size=60) for name in ("y", "x", "a", "b")}
    return pd.DataFrame(numbers | {"g": np.repeat(list("abcdef"), 10)} | columns)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("offset()", "offset.. takes one column"),
        ("offset(a, b)", "offset.. takes one column"),
        (".11", "number .11"),
        ("x + 0.11", "number 0.11"),
        ("x:.11", "number .11"),
        ("I(9^9^9^9)", "cannot work out"),
        ("poly(x, 100000000)", "no more than 200 columns"),
        ("ns(x, 1e400)", "df is a number"),
        ("*".join(f"I(a + {i})" for i in range(30)), "more than 1000 terms"),
        ("(" + "+".join(f"I(a + {i})" for i in range(30)) + ")^1000000", "more than 1000 terms"),
        ("(" * 5000 + "x" + ")" * 5000, "parentheses within each other"),
        ("I(" + "-" * 5000 + "x)", "cannot read the expression"),
        ("I(" + "+".join(["x"] * 5000) + ")", "cannot .* the expression"),
        ("\ud800", "is not text"),
    ],
)
def test_refused_in_a_line(fixed: str, message: str) -> None:
    with pytest.raises((SettingsError, DataError), match=message) as caught:
        fp.mixed_model(f"y ~ {fixed} + (1 | g)", table())
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("power", ["2", "1000000", "9" * 30])
def test_a_power_beyond_the_number_of_parts_changes_nothing(power: str) -> None:
    """(a + b)^n has no products of more than two parts, whatever n is."""
    fit = fp.mixed_model(f"y ~ (a + b)^{power} + (1 | g)", table())
    assert list(fit.coefficients) == ["(Intercept)", "a", "b", "a:b"]


def test_an_offset_may_be_a_number() -> None:
    with_one, without = (fp.mixed_model(f"y ~ x{o} + (1 | g)", table()) for o in (" + offset(1)", ""))
    difference = without.coefficients["(Intercept)"] - with_one.coefficients["(Intercept)"]
    assert difference == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("column", ["y", "x"])
def test_numbers_beyond_floats_name_their_column(column: str, tmp_path: Any) -> None:
    wrong = table(**{column: [10**400 + i for i in range(60)]})
    path = tmp_path / "table.csv"
    wrong.to_csv(path, index=False)
    for data in (wrong, path):
        with pytest.raises(DataError, match=f"column '{column}'.* too large"):
            fp.mixed_model("y ~ x + (1 | g)", data)


@pytest.mark.parametrize("weights", [5, True, [1, 2], np.ones((60, 2))])
def test_weights_are_one_for_each_row(weights: Any) -> None:
    with pytest.raises(SettingsError, match="weights"):
        fp.mixed_model("y ~ x + (1 | g)", table(), weights=weights)
