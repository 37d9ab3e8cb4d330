"""A fit that was saved says what it said, without rows and without sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpop as fp
from fedpop.errors import CheckpointError, SettingsError

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

CASES = [
    ("y ~ w + s + (w | g)", "gaussian", "REML"),
    ("y ~ scale(x) + (1 | g)", "gaussian", "ML"),
    ("count ~ w + offset(log(t)) + (w | g)", "poisson", "ML"),
    ("yes ~ w + (1 | g)", "bernoulli", "ML"),
]


@pytest.mark.parametrize(("formula", "family", "method"), CASES)
def test_a_fit_is_read_back(formula: str, family: str, method: str, simulated: Any, tmp_path: Path) -> None:
    frame = simulated([7] * 12)
    fit = fp.mixed_model(formula, frame, family, method=method)
    again = fp.load(fit.save(tmp_path / "fit"))
    assert str(again) == str(fit)
    assert again.coefficients == fit.coefficients
    assert again.sd == fit.sd
    assert again.df == fit.df
    assert again.confint().equals(fit.confint())
    assert again.degrees == fit.degrees
    assert again.to_frame().equals(fit.to_frame())
    new = frame.head(5).assign(g="somebody new")
    for groups in ("new", "population"):
        one, other = (f.predict(new, groups).to_numpy() for f in (again, fit))
        np.testing.assert_array_equal(one, other)
    one, other = (
        f.predict(new, "new", observed=frame.tail(6).assign(g="somebody new")) for f in (again, fit)
    )
    np.testing.assert_allclose(one.to_numpy(), other.to_numpy(), rtol=1e-12)
    with pytest.raises(SettingsError, match="ask for it there"):
        again.random_effects()


def test_fits_that_were_read_back_are_compared(simulated: Any, tmp_path: Path) -> None:
    frame = simulated([7] * 12)
    fits = [fp.mixed_model(f"y ~ w + ({z} | g)", frame) for z in ("w", "1")]
    large, small = (fp.load(fit.save(tmp_path / str(i))) for i, fit in enumerate(fits))
    assert large.likelihood_ratio(small) == fits[0].likelihood_ratio(fits[1])


def test_what_is_damaged_or_newer_is_refused(simulated: Any, tmp_path: Path) -> None:
    folder = fp.mixed_model("y ~ w + (1 | g)", simulated([7] * 6)).save(tmp_path / "fit")
    text = (folder / "mixed.json").read_text()
    (folder / "mixed.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointError):
        fp.load(folder)
    (folder / "mixed.json").write_text(text)
    numbers = folder / "mixed.safetensors"
    numbers.write_bytes(numbers.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"mixed\.safetensors"):
        fp.load(folder)
