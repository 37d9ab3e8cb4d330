"""What a fit gives: tables, tests, predictions, figures, files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.cli import main
from fedpop.errors import SettingsError
from fedpop.mixed.groups import Groups
from fedpop.mixed.inference import chi_square_tail


@pytest.fixture
def frame(simulated):
    return simulated([8] * 20, seed=2)


@pytest.fixture
def fit(frame):
    return fp.mixed_model("y ~ x + w + s + (w | g)", frame)


def test_tables(fit):
    table = fit.to_frame()
    assert list(table.term[:5]) == ["(Intercept)", "x", "w", "sb", "sc"]
    assert list(table.term[5:]) == ["sd (Intercept)", "cor (Intercept), w", "sd w", "sd"]
    assert table.z[1] == pytest.approx(fit.coefficients["x"] / fit.standard_errors["x"])
    intervals = fit.confint(0.95)
    assert list(intervals.index) == [
        *("sd_(Intercept)|g", "cor_w.(Intercept)|g", "sd_w|g", "sigma"),
        *("(Intercept)", "x", "w", "sb", "sc"),
    ]
    assert intervals.loc["x", "upper"] - intervals.loc["x", "lower"] == pytest.approx(
        2 * 1.959964 * fit.standard_errors["x"], rel=1e-6
    )
    effects = fit.random_effects(0.9)
    assert effects.shape == (40, 4)
    assert effects.loc[("g3", "w"), "lower"] < effects.loc[("g3", "w"), "mean"]
    assert fit.aic == pytest.approx(-2 * fit.log_likelihood + 2 * 9)
    assert fit.bic == pytest.approx(-2 * fit.log_likelihood + 9 * np.log(160))


def test_the_ratio_of_likelihoods(fit, frame):
    without = fp.mixed_model("y ~ x + s + (w | g)", frame)
    ratio = fit.likelihood_ratio(without)
    assert ratio.degrees == 1
    assert not ratio.boundary
    assert ratio.statistic == pytest.approx(2 * (fit.log_likelihood - without.log_likelihood))
    assert ratio.p_value == pytest.approx(chi_square_tail(ratio.statistic, 1))
    assert without.likelihood_ratio(fit) == ratio
    intercepts = fp.mixed_model("y ~ x + w + s + (1 | g)", frame)
    edge = fit.likelihood_ratio(intercepts)
    assert edge.boundary
    assert edge.degrees == 2
    half = 0.5 * (chi_square_tail(edge.statistic, 1) + chi_square_tail(edge.statistic, 2))
    assert edge.p_value == pytest.approx(half)
    assert "edge" in str(edge)
    with pytest.raises(SettingsError, match="as many parameters"):
        fit.likelihood_ratio(fit)
    with pytest.raises(SettingsError, match="not nested"):
        fit.likelihood_ratio(fp.mixed_model("y ~ t + (1 | g)", frame))
    with pytest.raises(SettingsError, match="the responses differ"):
        fit.likelihood_ratio(fp.mixed_model("log(t) ~ x + (1 | g)", frame))


def test_reml_does_not_compare_fixed_effects(frame):
    one, other = (fp.mixed_model(f"y ~ {x} + (1 | g)", frame, method="REML") for x in ("x", "x + w"))
    with pytest.raises(SettingsError, match="by REML"):
        one.likelihood_ratio(other)


def test_predictions_in_closed_form(fit, frame):
    """With theta fixed everything is normal: means and widths from the formulas."""
    rows = frame.iloc[[0, 9, 17]]
    known = fit.predict(rows, theta_uncertainty=False, level=0.9)
    x = np.stack([np.ones(3), rows.x, rows.w, rows.s == "b", rows.s == "c"], 1).astype(float)
    z = np.stack([np.ones(3), rows.w], 1)
    mean, cov = fit._effects
    at = [fit.levels.index(g) for g in rows.g]
    b = np.array(list(fit.coefficients.values()))
    centre = x @ b + (z * mean.numpy()[at]).sum(1)
    spread = np.sqrt(np.einsum("ni,nij,nj->n", z, cov.numpy()[at], z) + fit.sigma**2)
    assert known["mean"].to_numpy() == pytest.approx(centre, rel=1e-9)
    assert (known.upper - known.lower).to_numpy() == pytest.approx(2 * 1.644854 * spread, rel=1e-5)
    new = fit.predict(rows, "new", theta_uncertainty=False)
    spread = np.sqrt(np.einsum("ni,ij,nj->n", z, fit.covariance.numpy(), z) + fit.sigma**2)
    assert new["mean"].to_numpy() == pytest.approx(x @ b, rel=1e-9)
    assert (new.upper - new.lower).to_numpy() == pytest.approx(2 * 1.644854 * spread, rel=1e-5)
    nobody = fit.predict(rows.drop(columns="g"), "population", theta_uncertainty=False)
    assert (nobody.upper - nobody.lower).to_numpy() == pytest.approx([2 * 1.644854 * fit.sigma] * 3, rel=1e-5)


def test_theta_makes_intervals_wider(fit, frame):
    plain, wide = (fit.predict(frame.head(5), "new", theta_uncertainty=t) for t in (False, True))
    assert ((wide.upper - wide.lower) > (plain.upper - plain.lower)).all()
    assert plain["mean"].to_numpy() == pytest.approx(wide["mean"].to_numpy())


def test_rows_of_a_new_group_update_it_without_refitting(fit, frame):
    """A training group under another name has the posterior that it had; without rows it is the prior's."""
    new_rows = frame[frame.g == "g3"]
    again = fit.predict(
        new_rows.assign(g="new"), "new", observed=new_rows.assign(g="new"), theta_uncertainty=False
    )
    known = fit.predict(new_rows, theta_uncertainty=False)
    assert again.to_numpy() == pytest.approx(known.to_numpy(), rel=1e-6)
    other = fit.predict(
        new_rows.assign(g="other"), "new", observed=new_rows.assign(g="new"), theta_uncertainty=False
    )
    prior = fit.predict(new_rows, "new", theta_uncertainty=False)
    assert other.to_numpy() == pytest.approx(prior.to_numpy(), rel=1e-9)
    with pytest.raises(SettingsError, match="rows of new groups"):
        fit.predict(new_rows, observed=new_rows)


def test_predictions_of_counts_and_of_yes_or_no(frame):
    frame = frame.iloc[:80]
    counts = fp.mixed_model("count ~ w + offset(log(t)) + (1 | g)", frame, "poisson")
    for groups in ("known", "new", "population"):
        found = counts.predict(frame.head(4), groups)
        assert (found.lower <= found["mean"]).all()
        assert (found["mean"] <= found.upper).all()
        assert (found.lower == found.lower.round()).all()  # of a new observation
    yes = fp.mixed_model("yes ~ w + (1 | g)", frame, "bernoulli")
    known = yes.predict(frame.head(4))
    assert ((known.lower > 0) & (known.upper < 1)).all()
    with pytest.raises(SettingsError, match="no interval"):
        yes.predict(frame.head(4), of="y")
    # A group's rows under another name: the same posterior, drawn anew.
    new_rows = frame[frame.g == "g1"].assign(g="new")
    again = counts.predict(new_rows, "new", observed=new_rows, theta_uncertainty=False)
    same = counts.predict(new_rows.assign(g="g1"), theta_uncertainty=False)
    assert again["mean"].to_numpy() == pytest.approx(same["mean"].to_numpy(), rel=0.05)


@pytest.mark.parametrize("kind", ["effects", "lines", "trace"])
def test_figures(kind, fit, tmp_path):
    figure = fit.plot(kind)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    with pytest.raises(SettingsError, match="kind is one of"):
        fit.plot("pie")


def test_a_file_that_arviz_reads(fit, tmp_path):
    """Groups and dimensions of its schema; xarray is what it reads with."""
    h5netcdf = pytest.importorskip("h5netcdf")
    path = fit.to_netcdf(tmp_path / "fit.nc")
    with h5netcdf.File(path) as file:
        effects = file["posterior"]["random_effects"]
        assert effects.dimensions == ("chain", "draw", "g", "effect")
        means = np.asarray(effects[...]).mean((0, 1))
        assert file["observed_data"]["y"].shape == (160,)
    expected = fit.random_effects()
    table = expected["mean"].to_numpy().reshape(20, 2)
    error = expected["sd"].to_numpy().reshape(20, 2)
    assert (np.abs(means - table) < 0.3 * error).all()
    xarray = pytest.importorskip("xarray")
    tree = xarray.open_datatree(path, engine="h5netcdf")
    effects = tree["posterior"]["random_effects"]
    assert effects.sizes["draw"] >= 100
    assert list(effects["effect"].values) == ["(Intercept)", "w"]


def test_the_command_writes_what_others_read(frame, tmp_path, capsys):
    data, out = tmp_path / "data.csv", tmp_path / "fit.json"
    frame.to_csv(data, index=False)
    main(
        [
            "fit",
            str(data),
            "yes ~ s * w + (1 | g)",
            "--family",
            "bernoulli",
            "--json",
            str(out),
            "--seed",
            "3",
        ]
    )
    assert "Family: bernoulli ( logit )" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert set(found) == {
        "converged",
        "dispersion",
        "fixed",
        "knots",
        "random",
        "sigma",
        "log_likelihood",
        "modes",
        "rounds",
        "seconds",
    }
    assert set(found["fixed"]) == {"(Intercept)", "sb", "sc", "w", "sb:w", "sc:w"}
    assert set(found["fixed"]["w"]) == {"estimate", "se"}
    assert found["random"]["g"]["cor"] == [[1.0]]
    assert set(found["random"]["g"]["sd"]) == {"(Intercept)"}
    assert set(found["modes"]["g"]["g0"]["(Intercept)"]) == {"mode", "mean", "sd"}
    assert found["sigma"] is None
    assert found["converged"] is True


def test_what_leaves_a_site_is_a_sum_over_its_groups(frame):
    """The server sees no group's numbers: messages are as many as sites."""
    frame["site"] = frame.g.str[-1]
    fit = fp.mixed_model("y ~ w + (1 | g)", frame, sites="site")
    each = fp.mixed_model("y ~ w + (1 | g)", frame)
    assert fit.rounds == each.rounds
    assert fit.groups.bytes_up * 2 == each.groups.bytes_up  # ten sites of two groups


def test_a_level_that_is_small_at_each_site_is_not_told(frame):
    frame["site"] = frame.g.str[-1]
    frame["s"] = np.where(frame.groupby("site").cumcount() == 0, "rare", "usual")
    assert "susual" in fp.mixed_model("y ~ s + (1 | g)", frame).coefficients  # ten rows in all
    with pytest.raises(fp.mixed.model.DataError, match="suppressed"):
        fp.mixed_model("y ~ s + (1 | g)", frame, sites="site")


def test_no_point_is_asked_for_twice(simulated, monkeypatch):
    """What everyone said of a point is known where it comes again: in the search's last steps, and where
    standard errors are found."""
    asked, ask = [], Groups.ask

    def counted(self, question, known, among=None):
        if "curved" in known:
            point = torch.cat((known["b"], known["factor"].flatten()))
            asked.append((question.nodes, tuple(point.tolist())))
        return ask(self, question, known, among)

    monkeypatch.setattr(Groups, "ask", counted)
    fit = fp.mixed_model("yes ~ w + (1 | g)", simulated([9] * 12), "bernoulli")
    fit.confint()
    assert len(asked) == len(set(asked))
    assert len(asked) <= 12
