"""Nested grouping factors: lme4's numbers, densities written down once more, what users type and forget."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import DataError, SettingsError
from fedpop.mixed import gaussian
from fedpop.mixed.engine import Factor
from tests.mixed.conftest import need, pd

PASTES = "strength ~ 1 + (1 | batch/cask)"
OATS = "yield ~ nitro * Variety + (1 | Block/Variety)"
GUIMMUN = "immun ~ kid2p + mom25p + ethn + momEd + rural + pcInd81 + (1 | comm/mom)"


def waves():
    """Rows of twelve hospitals with wards and patients in them, without chance: R has the same."""
    rows = [
        (h, w, p, r)
        for h in range(12)
        for w in range(3 + h % 2)
        for p in range(2 + (h + w) % 3)
        for r in range(1 + (h + w + p) % 4)
    ]
    h, w, p, _ = np.array(rows).T
    i = np.arange(len(h))
    ward, patient = 10 * h + w, 100 * h + 10 * w + p
    x = np.sin(1.7 * i) + 0.3 * np.cos(h)
    y = 3 + 0.5 * x + (1 + 0.6 * x) * np.sin(2.3 * h + 1) + 0.8 * np.sin(5.1 * ward)
    y = y + 0.7 * np.sin(7.7 * patient) + 0.6 * np.sin(11.3 * i + i * i)
    table = {"hospital": [f"h{v}" for v in h], "ward": [f"w{v}" for v in w], "patient": [f"p{v}" for v in p]}
    more = {"count": np.floor(np.exp(0.5 * y - 0.4)).astype(int), "yes": (y + np.sin(3.3 * i * i) > 3) * 1}
    return pd.DataFrame(table | {"x": x, "y": y} | more)


# --- lme4's numbers -------------------------------------------------------------------------------------


def nested_table(name):
    """The table with its labels as text, and what R found."""
    path = need(f"nested/{name}.csv")
    saved = json.loads(path.with_suffix(".json").read_text())
    return pd.read_csv(path, dtype=dict.fromkeys(saved["data"]["factor_columns"], str)), saved["fits"]


def agrees(placed, truth, se, rel):
    fit, effects = placed.fit, placed.effects().sort_index()
    assert fit.converged
    assert fit.counts == truth["n_groups"]
    assert fit.log_likelihood == pytest.approx(truth["logLik"], abs=1e-7)
    for term, value in truth["fixed"].items():
        assert abs(fit.coefficients[term] - value) < 1e-4 * truth["se"][term]
        assert fit.standard_errors[term] == pytest.approx(truth["se"][term], rel=se)
    for factor, random in truth["random"].items():
        for term, value in random["sd"].items():
            assert fit.sd[f"{term}|{factor}"] == pytest.approx(value, rel=rel)
        for mode in truth["conditional_modes"][factor]:
            for term, value in mode["mode"].items():
                row = effects.loc[(factor, mode["level"], term)]
                assert abs(row["mean"] - value) < 1e-5 * row["sd"]
                assert row["sd"] == pytest.approx(mode["sd"][term], rel=1e-5)
    assert fit.df == truth["n_par"]
    if truth["sigma"] is not None:
        assert fit.sigma == pytest.approx(truth["sigma"], rel=1e-6)


@pytest.mark.parametrize("method", ["ML", "REML"])
@pytest.mark.parametrize(("name", "formula"), [("pastes", PASTES), ("oats", OATS)])
def test_gaussian_models_agree_with_lme4(name, formula, method, fitted):
    """Standard errors and modes at both levels too; labels of the inner factor begin anew in each group."""
    table, truth = nested_table(name)
    agrees(fitted(formula, table, method=method), truth[method], 1e-6, 1e-6)


def test_binomial_agrees_with_glmers_laplace(fitted):
    """R's standard errors are from a numerical Hessian."""
    table, truth = nested_table("guimmun")
    agrees(fitted(GUIMMUN, table, "bernoulli"), truth["Laplace"], 1e-4, 1e-5)


@pytest.mark.parametrize(
    "formula",
    [
        "strength ~ 1 + (1 | batch) + (1 | batch:cask)",
        "strength ~ (1 | batch/sample)",
        "strength ~ (1|lot/cask)",
    ],
)
def test_other_spellings_are_the_same_model(formula):
    """Labels that are unique, and labels that begin anew, also where they are numbers."""
    table, truth = nested_table("pastes")
    table["sample"], table["lot"] = table.batch + table.cask, table.batch.map(ord).astype(float)
    fit = fp.mixed_model(formula, table)
    assert fit.log_likelihood == pytest.approx(truth["ML"]["logLik"], abs=1e-7)
    assert list(fit.sd.values()) == pytest.approx([2.90407760, 1.09505960], rel=1e-6)


# lme4 1.1-31 on waves() as CSV, logLik, VarCorr, fixef and sqrt(diag(vcov)): gaussian by lmer(optimizer =
# "bobyqa", rhoend = 1e-10), the others by glmer(bobyqa, rhoend = 1e-9, tolPwrss = 1e-13).
THREE, SLOPES = "y ~ x + (1|hospital/ward/patient)", "y ~ x + (x|hospital/ward)"
MIXED, INDEPENDENT = "x + (x|hospital) + (1|hospital:ward)", "(x||hospital) + (1|hospital:ward:patient)"
LMER = [
    (
        THREE,
        "ML",
        -363.93439915452,
        [0.514301947, 0.548082286, 0.553862004],
        [3.0285402079, 0.5816723089],
        [0.19064620369, 0.04781318514],
    ),
    (
        THREE,
        "REML",
        -366.77213924296,
        [0.513797145, 0.548711043, 0.587559178],
        [3.0284063319, 0.5817991039],
        [0.19893417056, 0.04792911758],
    ),
    (
        SLOPES,
        "ML",
        -359.05058982188,
        [0.6262300969, 0.0471576904, 0.5761626030, 0.4209492562],
        [3.0123668193, 0.5836159218],
        [0.1963868136, 0.1320762860],
    ),
    (
        SLOPES,
        "REML",
        -361.25149985418,
        [0.6284821071, 0.0482490196, 0.6087056856, 0.4430976037],
        [3.0118902597, 0.5834489758],
        [0.2046031535, 0.1380017578],
    ),
    (
        f"y ~ {MIXED}",
        "REML",
        -361.50963476998,
        [0.625770160, 0.607409725, 0.448196298],
        [3.0118869369, 0.5865666334],
        [0.2041492119, 0.1392104852],
    ),
    (
        f"y ~ x + {INDEPENDENT}",
        "ML",
        -331.37564662567,
        [0.733497078, 0.596328151, 0.457054038],
        [3.0081018703, 0.5469840123],
        [0.1865024670, 0.1371625019],
    ),
]
GLMER = [
    (
        "count ~ x + (1|hospital/ward)",
        "poisson",
        -559.82542635275,
        [0.332781384, 0.359294639],
        [0.9805932091, 0.4032408111],
        [0.12215987531, 0.04725757293],
    ),
    (
        f"count ~ {MIXED}",
        "poisson",
        -554.22669137796,
        [0.320199440, 0.335128304, 0.195338174],
        [0.9805370143, 0.3376227726],
        [0.11547050176, 0.07635651319],
    ),
    (
        THREE.replace("y", "count", 1),
        "poisson",
        -559.7697796049,
        [0.0798955389, 0.3276214288, 0.3588838826],
        [0.9786275500, 0.4024024055],
        [0.12212683281, 0.04745905949],
    ),
    (
        f"yes ~ {MIXED}",
        "bernoulli",
        -178.55658446884,
        [0.738573803, 0.926097362, 0.490915099],
        [-0.01727288239, 1.40247740679],
        [0.3291503423, 0.2723009620],
    ),
    (
        THREE.replace("y", "yes", 1),
        "bernoulli",
        -177.82664370994,
        [0.894083948, 0.640762675, 1.024390722],
        [-0.02862063116, 1.52339351819],
        [0.3571720937, 0.2628692661],
    ),
]


@pytest.mark.parametrize(("formula", "method", "value", "sd", "fixed", "se"), LMER)
def test_any_number_of_levels_and_slopes(formula, method, value, sd, fixed, se):
    fit = fp.mixed_model(formula, waves(), method=method)
    assert fit.converged
    assert fit.log_likelihood == pytest.approx(value, abs=1e-8)
    assert list(fit.sd.values()) == pytest.approx(sd, rel=2e-6)
    assert list(fit.standard_errors.values()) == pytest.approx(se, rel=2e-6)
    assert list(fit.coefficients.values()) == pytest.approx(fixed, rel=1e-6)


@pytest.mark.parametrize(("formula", "family", "value", "sd", "fixed", "se"), GLMER)
def test_other_families_by_laplace(formula, family, value, sd, fixed, se):
    """As far as the tolerance of glmer's inner iterations goes."""
    fit = fp.mixed_model(formula, waves(), family)
    assert fit.converged
    assert fit.log_likelihood == pytest.approx(value, abs=1e-6)
    assert list(fit.sd.values()) == pytest.approx(sd, rel=1e-5)
    assert list(fit.standard_errors.values()) == pytest.approx(se, rel=5e-5)
    assert list(fit.coefficients.values()) == pytest.approx(fixed, rel=5e-5)
    assert "(Laplace Approximation)" in str(fit)


# --- densities ------------------------------------------------------------------------------------------


def columns(frame):
    """X, and Z of (x | hospital) + (1 | hospital:ward) as blocks of one matrix with the factor of each."""
    x = np.stack((np.ones(len(frame)), frame.x), 1)
    ward = pd.get_dummies(frame.hospital + frame.ward).to_numpy(float)
    hospital = pd.get_dummies(frame.hospital).to_numpy(float)
    return x, ward, hospital


def dense(fit, frame, weight, offset):
    """log N(y; X b, V) with V in full, of (x | hospital) + (1 | hospital:ward)."""
    x, ward, hospital = columns(frame)
    sigma = fit.covariance.numpy()
    z = [hospital * x[:, [j]] for j in range(2)]
    v = sigma[0, 0] * ward @ ward.T + np.diag(fit.sigma**2 / weight)
    for i in range(2):
        for j in range(2):
            v = v + sigma[1 + i, 1 + j] * z[i] @ z[j].T
    left = frame.y.to_numpy() - offset - x @ np.array(list(fit.coefficients.values()))
    return -0.5 * (left @ np.linalg.solve(v, left) + np.linalg.slogdet(2 * np.pi * v)[1])


def test_the_likelihood_is_the_density_and_is_stationary(fitted):
    """With weights, an offset, and x far from zero."""
    frame = waves().assign(t=lambda d: 1 + np.arange(len(d)) % 3, x=lambda d: d.x + 40)
    weight, offset = frame.t.to_numpy(), 0.3 * frame.t.to_numpy()
    formula = "y ~ x + (x | hospital) + (1 | hospital:ward) + offset(0.3 * t)"
    fit = fitted(formula, frame, weights="t").fit
    best = dense(fit, frame, weight, offset)
    assert fit.converged
    assert fit.log_likelihood == pytest.approx(best, abs=1e-7)
    for name, se in fit.standard_errors.items():
        for step in (-0.1, 0.1):
            kept = fit.coefficients
            fit.__dict__["coefficients"] = dict(kept) | {name: kept[name] + step * se}
            assert dense(fit, frame, weight, offset) < best
            fit.__dict__["coefficients"] = kept
    kept = fit.covariance
    for times in (0.97, 1.03):
        for part in (slice(0, 1), slice(1, 3)):
            moved = kept.clone()
            moved[part, part] *= times
            fit.__dict__["covariance"] = moved
            assert dense(fit, frame, weight, offset) < best
    fit.__dict__["covariance"] = kept


@pytest.mark.parametrize("zero", [False, True])
def test_derivatives_are_those_of_the_products(zero):
    """Of W' V^-1 W and log det V in the entries of Sigma, once and twice, with V in full; also where a
    variance is zero."""
    frame = waves()
    fit = fp.mixed_model("y ~ x + (x | hospital) + (1 | hospital:ward)", frame)
    units, federation = fit.units, fit.groups.federation
    places = Factor(units.blocks)
    factor = places.matrix(torch.tensor([0.0 if zero else 0.7, 0.9, 0.3, 0.5], dtype=torch.float64))
    x, ward, hospital = columns(frame)
    x = (x - units.x_centre.numpy()) / units.x_scale.numpy()
    z = (columns(frame)[0] - units.z_centre.numpy()[1:]) / units.z_scale.numpy()[1:]
    w = torch.tensor(np.concatenate((x, frame.y.to_numpy()[:, None] - units.y_centre), 1))
    inner = torch.tensor(ward @ ward.T / units.z_scale.numpy()[0] ** 2)
    outer = [torch.tensor(hospital * z[:, [j]]) for j in range(2)]

    def found(entries):
        sigma = torch.zeros(3, 3, dtype=torch.float64)
        for value, (i, j) in zip(entries, places.places, strict=True):
            sigma[i, j] = sigma[j, i] = value
        v = torch.eye(len(w), dtype=torch.float64) + sigma[0, 0] * inner
        for i in range(2):
            for j in range(2):
                v = v + sigma[1 + i, 1 + j] * outer[i] @ outer[j].mT
        s = w.mT @ torch.linalg.solve(v, w)
        return torch.cat((s.flatten(), torch.linalg.slogdet(v)[1].reshape(1)))

    at = places.entries(factor @ factor.mT).requires_grad_()
    value = found(at)
    first = torch.autograd.functional.jacobian(found, at)
    second = torch.stack(
        [torch.autograd.functional.hessian(lambda e, n=n: found(e)[n], at) for n in range(10)]
    )
    cells = federation.cohort(torch.arange(len(federation)), torch.device("cpu"), "cells")
    sums = gaussian.profiled(cells, units, factor, True)
    s = w.mT @ w - sums["explained"]
    torch.testing.assert_close(torch.cat((s.flatten(), sums["log_det"])), value.detach())
    torch.testing.assert_close(sums["s1"].flatten(1).mT, first[:9], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(sums["d1"], first[9], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(sums["s2"].permute(2, 3, 0, 1).flatten(0, 1), second[:9], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sums["d2"], second[9], rtol=1e-8, atol=1e-8)
    many = gaussian.Profiles(units).without_derivatives(
        gaussian.Tree.of(cells), gaussian.group_products(cells, units), torch.stack((factor, factor))
    )
    torch.testing.assert_close(many[0][1], sums["explained"])


def test_three_levels_of_derivatives():
    """By differences, through the score of all parameters."""
    engine, x = _engine("y ~ x + (x | hospital/ward) + (1 | hospital:ward:patient)", "gaussian")
    score, information = engine.score_and_information(x)
    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    slope = [
        (engine.log_likelihood(engine.point(x + s)) - engine.log_likelihood(engine.point(x - s)))
        for s in steps
    ]
    assert score.numpy() == pytest.approx(np.array(slope) / 2e-5, rel=1e-5, abs=1e-4)
    bend = [engine.score_and_information(x - s)[0] - engine.score_and_information(x + s)[0] for s in steps]
    assert information.numpy() == pytest.approx(torch.stack(bend).numpy() / 2e-5, rel=1e-4, abs=1e-3)
    parts = [engine.score(x, ids) for ids in torch.arange(12).split(5)]
    assert torch.stack(parts).sum(0).numpy() == pytest.approx(score.numpy(), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(("y", "family"), [("count", "poisson"), ("yes", "bernoulli")])
def test_laplace_is_what_it_says(y, family):
    """The mode by a dense Newton search, the determinant in full; gradient and Hessian by differences."""
    frame = waves()
    engine, x = _engine(f"{y} ~ x + (x | hospital) + (1 | hospital:ward)", family)
    units, point = engine.units, engine.point(x)
    fixed, ward, hospital = columns(frame)
    to = units.random_map.numpy() @ point.factor.numpy()
    zl = [ward * to[0, 0], *(hospital * (fixed @ to[1:, 1:])[:, [j]] for j in range(2))]
    zl, base = np.concatenate(zl, 1), fixed @ units.fixed(point.b).numpy()
    u, count = np.zeros(zl.shape[1]), frame[y].to_numpy()
    for _ in range(50):
        eta = base + zl @ u
        mean = np.exp(eta) if family == "poisson" else 1 / (1 + np.exp(-eta))
        bend = mean if family == "poisson" else mean * (1 - mean)
        inner = zl.T @ (bend[:, None] * zl) + np.eye(len(u))
        u = u + np.linalg.solve(inner, zl.T @ (count - mean) - u)
    norm = np.exp(eta) if family == "poisson" else np.log1p(np.exp(eta))
    lost = sum(float(torch.lgamma(torch.tensor(v + 1.0))) for v in count) if family == "poisson" else 0.0
    expected = (count * eta - norm).sum() - lost - 0.5 * u @ u - 0.5 * np.linalg.slogdet(inner)[1]
    assert engine.log_likelihood(point) == pytest.approx(expected, abs=1e-8)
    score, information = engine.score_and_information(x)
    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    slope = [
        (engine.log_likelihood(engine.point(x + s)) - engine.log_likelihood(engine.point(x - s)))
        for s in steps
    ]
    assert score.numpy() == pytest.approx(np.array(slope) / 2e-5, rel=1e-5, abs=1e-4)
    bend = [engine.score_and_information(x - s)[0] - engine.score_and_information(x + s)[0] for s in steps]
    assert information.numpy() == pytest.approx(torch.stack(bend).numpy() / 2e-5, rel=1e-4, abs=1e-3)


def _engine(formula, family):
    """An engine, and a point beside its maximum."""
    fit = fp.mixed_model(formula, waves(), family)
    return fit.engine, fit.engine.vector(fit.outcome.point) + 0.05


# --- predictions ----------------------------------------------------------------------------------------


def test_predictions_at_each_level():
    """A known ward, a new one at a known hospital, a new hospital, nobody: by conditioning in full."""
    frame = waves()
    fit = fp.mixed_model("y ~ x + (x | hospital) + (1 | hospital:ward)", frame)
    x, ward, hospital = columns(frame)
    sigma, b, rows = fit.covariance.numpy(), np.array(list(fit.coefficients.values())), [0, 100, 250]

    def cov(one, other, wards):
        """Of linear predictors of rows, whose hospitals these are."""
        same = hospital[one] @ hospital[other].T
        out = same * (x[one] @ sigma[1:, 1:] @ x[other].T)
        return out + sigma[0, 0] * (ward[one] @ ward[other].T) * wards

    every = np.arange(len(frame))
    v = cov(every, every, 1) + np.eye(len(frame)) * fit.sigma**2
    left = np.linalg.solve(v, frame.y.to_numpy() - x @ b)
    for known in (True, False):
        new_rows = frame.iloc[rows] if known else frame.iloc[rows].assign(ward=None)
        across = cov(np.array(rows), every, known)
        prior = np.einsum("ni,ij,nj->n", x[rows], sigma[1:, 1:], x[rows]) + sigma[0, 0]
        spread = np.sqrt(prior - np.einsum("ni,in->n", across, np.linalg.solve(v, across.T)) + fit.sigma**2)
        found = fit.predict(new_rows, theta_uncertainty=False)
        assert found["mean"].to_numpy() == pytest.approx(x[rows] @ b + across @ left, rel=1e-8)
        assert (found.upper - found.lower).to_numpy() == pytest.approx(2 * 1.644854 * spread, rel=1e-5)
    without = fit.predict(frame.iloc[rows].drop(columns="ward"), theta_uncertainty=False)
    assert without.to_numpy() == pytest.approx(found.to_numpy())
    new = fit.predict(frame.iloc[rows], "new", theta_uncertainty=False)
    assert (new.upper - new.lower).to_numpy() == pytest.approx(
        2 * 1.644854 * np.sqrt(prior + fit.sigma**2), rel=1e-5
    )
    # A hospital of the table under another name has the posterior that it had, at each level.
    mine = frame[frame.hospital == "h3"]
    observed = mine.assign(hospital="new")
    for ward_there in (True, False):
        asked = mine if ward_there else mine.drop(columns="ward")
        again = fit.predict(asked.assign(hospital="new"), "new", observed=observed, theta_uncertainty=False)
        assert again.to_numpy() == pytest.approx(
            fit.predict(asked, theta_uncertainty=False).to_numpy(), rel=1e-8
        )
    with pytest.raises(DataError, match="'w9:h0' was not there in training"):
        fp.mixed_model("y ~ x + (1 | hospital/ward)", frame).predict(frame.head(2).assign(ward="w9"))
    with pytest.raises(DataError, match="needs its group: column 'hospital'"):
        fit.predict(frame.head(2).drop(columns="hospital"))


def test_predictions_of_counts_at_each_level():
    """Draws about the modes: their mean is near, and what is less known is wider."""
    frame = waves()
    fit = fp.mixed_model("count ~ x + (1 | hospital/ward)", frame, "poisson")
    rows, table = frame.iloc[[0, 100, 250]], fit.random_effects().sort_index()
    known, new_ward, new = (
        fit.predict(r, g, of="mean", theta_uncertainty=False)
        for r, g in ((rows, "known"), (rows.drop(columns="ward"), "known"), (rows, "new"))
    )
    wide = [(p.upper / p.lower).to_numpy() for p in (known, new_ward, new)]
    assert (wide[0] < wide[1]).all()
    assert (wide[1] < wide[2]).all()
    modes = [
        table.loc[("hospital", h), "mean"].iloc[0] + table.loc[("ward:hospital", f"{w}:{h}"), "mean"].iloc[0]
        for h, w in zip(rows.hospital, rows.ward, strict=True)
    ]
    b = fit.coefficients
    expected = np.exp(b["(Intercept)"] + b["x"] * rows.x.to_numpy() + np.array(modes))
    assert known["mean"].to_numpy() == pytest.approx(expected, rel=0.1)


# --- tables, figures, and what does not work ------------------------------------------------------------


def test_tables_name_factors_as_lme4_does(tmp_path):
    fit = fp.mixed_model("y ~ x + (x | hospital/ward)", waves())
    assert fit.factors == ["ward:hospital", "hospital"]
    assert fit.counts == {"ward:hospital": 42, "hospital": 12}
    assert "groups:  ward:hospital, 42; hospital, 12" in str(fit)
    spreads = ["sd_(Intercept)|ward:hospital", "cor_x.(Intercept)|ward:hospital", "sd_x|ward:hospital"]
    assert list(fit.confint().index[:3]) == spreads
    assert list(fit.to_frame().group[2:]) == ["ward:hospital"] * 3 + ["hospital"] * 3 + ["Residual"]
    effects = fit.random_effects()
    assert len(effects) == 2 * (42 + 12)
    inner = fit.random_effects(factor="ward:hospital")
    assert inner.loc[("w0:h3", "x"), "mean"] == effects.loc[("ward:hospital", "w0:h3", "x"), "mean"]
    plain = fit.plain()
    assert set(plain["random"]) == set(plain["modes"]) == {"ward:hospital", "hospital"}
    assert set(plain["modes"]["ward:hospital"]["w2:h11"]) == {"(Intercept)", "x"}
    for kind in ("effects", "lines", "trace"):
        fit.plot(kind).savefig(tmp_path / f"{kind}.png")
    with pytest.raises(SettingsError, match="factor is one of ward:hospital, hospital"):
        fit.random_effects(factor="ward")
    smaller = fp.mixed_model("y ~ x + (x | hospital)", waves())
    ratio = fp.mixed_model("y ~ x + (x | hospital) + (1 | hospital:ward)", waves()).likelihood_ratio(smaller)
    assert ratio.degrees == 1
    assert ratio.p_value == pytest.approx(ratio.p_chi_square / 2)


def test_chains_know_one_factor():
    for settings in ({"engine": "sampled"}, {"participation": 0.5}):
        with pytest.raises(SettingsError, match="chains know one grouping factor"):
            fp.mixed_model("y ~ x + (1 | hospital/ward)", waves(), **settings)
    with pytest.raises(SettingsError, match=r"random_effects\(\) has its groups' posteriors"):
        fp.mixed_model("y ~ x + (1 | hospital/ward)", waves()).draws("h1")


def test_combinations_alone_are_groups_too():
    frame = waves()
    fit = fp.mixed_model("y ~ x + (1 | hospital:ward)", frame)
    same = fp.mixed_model("y ~ x + (1 | g)", frame.assign(g=frame.hospital + ":" + frame.ward))
    assert fit.log_likelihood == same.log_likelihood
    assert fit.levels == same.levels
    assert fit.predict(frame.head(3)).to_numpy() == pytest.approx(
        same.predict(frame.head(3).assign(g=frame.hospital + ":" + frame.ward)).to_numpy()
    )
    assert fit.plot("lines") is not None


# --- edges ----------------------------------------------------------------------------------------------


def test_a_variance_of_one_level_at_zero(fitted):
    """Wards that differ less than chance: the model is that of hospitals alone."""
    frame = waves()
    ward = frame.hospital + frame.ward
    frame["y"] = frame.y - frame.y.groupby(ward).transform("mean") + 0.4 * frame.hospital.str[1:].astype(int)
    placed = fitted("y ~ x + (1 | hospital/ward)", frame)
    alone = fp.mixed_model("y ~ x + (1 | hospital)", frame)
    fit = placed.fit
    assert fit.converged
    assert fit.singular
    assert fit.sd["(Intercept)|ward:hospital"] < 1e-4
    assert fit.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-7)
    assert fit.confint().loc["sd_(Intercept)|ward:hospital"].isna().all()
    assert "boundary (singular) fit" in str(fit)
    assert placed.effects().sort_index().loc["ward:hospital", "mean"].abs().max() < 1e-6


def test_groups_with_one_group_or_one_row_in_them(fitted):
    """Counts too; the fixture compares sites with the local fit."""
    frame = waves()
    ragged = frame[(frame.hospital != "h0") | (frame.ward == "w0")]
    first = ragged.hospital.eq("h1") & ragged.duplicated("hospital")
    ragged = ragged[~first].reset_index(drop=True)
    assert (ragged.hospital == "h1").sum() == 1
    fit = fitted("y ~ x + (1 | hospital/ward)", ragged).fit
    assert fit.converged
    assert fit.counts == {"ward:hospital": 42 - 2 - 3, "hospital": 12}
    fit = fitted("count ~ x + (1 | hospital/ward)", ragged, "poisson").fit
    assert fit.converged


def test_one_inner_group_in_each_is_an_error():
    frame = waves().assign(ward="w")
    with pytest.raises(
        DataError, match=r"each level of 'hospital' has one of 'ward:hospital' only.*\(Intercept\)"
    ):
        fp.mixed_model("y ~ x + (1 | hospital/ward)", frame)
    with pytest.raises(DataError, match="314 rows and 314 random effects"):
        fp.mixed_model("y ~ x + (1 | hospital/i)", frame.assign(i=np.arange(len(frame))))
    slopes = fp.mixed_model("y ~ x + (1 | hospital) + (0 + x | hospital:ward)", frame)
    same = fp.mixed_model("y ~ x + (x || hospital)", frame)
    assert slopes.log_likelihood == pytest.approx(same.log_likelihood, abs=1e-8)


def test_columns_that_say_nothing_new_are_dropped():
    with pytest.warns(fp.errors.FedpopWarning, match="dropped 1 column"):
        fit = fp.mixed_model("y ~ x + I(2 * x) + (1 | hospital/ward)", waves())
    same = fp.mixed_model("y ~ x + (1 | hospital/ward)", waves())
    assert fit.log_likelihood == pytest.approx(same.log_likelihood, abs=1e-9)


def test_rows_that_miss_something_are_left_out():
    frame = waves()
    whole = fp.mixed_model("y ~ x + (1 | hospital/ward)", frame.drop(index=[3, 40]))
    frame.loc[3, "x"] = np.nan
    frame.loc[40, "ward"] = None  # of an inner group too
    fit = fp.mixed_model("y ~ x + (1 | hospital/ward)", frame)
    assert fit.log_likelihood == whole.log_likelihood
    assert "2 row(s) with missing values were left out" in str(fit)


def test_names_that_would_be_confused():
    frame = waves().assign(ward=lambda d: np.where(d.ward == "w0", "a:b", "a"))
    frame["patient"] = np.where(frame.ward == "a", "b:" + frame.patient, frame.patient)
    with pytest.raises(DataError, match="hold colons"):
        fp.mixed_model("y ~ x + (1 | hospital) + (1 | ward:patient:hospital)", frame)


def test_a_large_group_takes_no_more_than_its_rows():
    """One hospital with 30,000 patients, of whom a matrix would take 7 GB."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(31_000), 2)
    hospital = np.where(patient < 30_000, 0, patient % 10)
    y = rng.normal(size=11)[hospital] + 0.7 * rng.normal(size=31_000)[patient] + rng.normal(size=62_000)
    frame = pd.DataFrame({"y": y, "hospital": hospital, "patient": patient})
    fit = fp.mixed_model("y ~ 1 + (1 | hospital/patient)", frame)
    assert fit.converged
    assert fit.sd["(Intercept)|patient:hospital"] == pytest.approx(0.7, abs=0.03)


# --- sites ----------------------------------------------------------------------------------------------


def test_the_site_itself_needs_no_column(tmp_path):
    """Of a factor ``site`` without a column the levels are the sites."""
    frame = waves()
    frames = {name: rows.drop(columns="hospital") for name, rows in frame.groupby("hospital")}
    for formula in ("y ~ x + (1 | site)", "y ~ x + (1 | site/ward)"):
        column = fp.mixed_model(formula.replace("site", "hospital"), frame)
        here = fp.mixed_model(formula, frames)
        named = fp.mixed_model(formula, frame, sites="hospital")
        for fit in (here, named):
            assert fit.log_likelihood == pytest.approx(column.log_likelihood, abs=1e-9)
            assert set(fit.levels) == set(frames)
    with pytest.raises(SettingsError, match=r"\(1 \| site\) stands for the sites.*sites='a column'"):
        fp.mixed_model("y ~ x + (1 | site)", frame)


def test_the_site_itself_over_sites(tmp_path):
    pytest.importorskip("flwr", reason="the Grid needs the extra 'flower'")
    from tests.flower.formulas import grid_of, over

    frame = waves()
    frame["at"] = frame.hospital.map(lambda h: ("north", "south", "west")[int(h[1:]) % 3])
    frames = {name: rows.drop(columns="at").reset_index(drop=True) for name, rows in frame.groupby("at")}
    fit = over(grid_of(tmp_path, frames), "y ~ x + (1 | site/hospital/ward)")
    here = fp.mixed_model("y ~ x + (1 | at/hospital/ward)", frame)
    assert fit.converged
    assert fit.counts == {"ward:(hospital:site)": 42, "hospital:site": 12, "site": 3}
    assert fit.log_likelihood == pytest.approx(here.log_likelihood, abs=1e-9)
    assert list(fit.sd.values()) == pytest.approx(list(here.sd.values()), rel=1e-6, abs=1e-6)
