"""Every pair of FedSOUL's settings works together, or is refused with a sentence.

A covering array of the pairs that can be: each row is a run of two rounds on a tiny model, which gives finite
predictions for everyone. Each pair that cannot be is tried by itself, and says why.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import ModelError, SettingsError
from tests.helpers import generator, seeded

NAMES = ("ada", "bea", "cem", "dag", "eve", "fay")
SIZES = (4, 2, 5, 3, 1, 4)
LOCAL = fp.LocalSGD(epochs=1, rate=0.01)

FACTORS: dict[str, dict[str, Any]] = {
    "model": {"linear": None, "softmax": None, "curved": None, "network": None},
    "prior": {
        "normal": "normal",
        "diagonal": "diagonal",
        "full": "full",
        "mixture": "mixture",
        "energy": fp.priors.Energy(hidden=4, chains=16, ship=8, steps=1),
        "fixed": fp.priors.Normal(scale=0.7, learn_mean=False),
    },
    "kernel": {
        "auto": None,
        "ula": "ula",
        "exponential": fp.kernels.Exponential(0.5),
        "hmc": fp.kernels.HMC(leapfrog=2),
        "mala": "mala",
        "sgld": fp.kernels.SGLD(batch=2),
        "jumps": "jumphmc",
        "mixture draw": "mixture-draw",
    },
    "local_steps": {
        "3": 3,
        "rising": fp.chains.Steps(1, 3, over=2),
        "own": dict(zip(NAMES, (1, 2, 2, 3, 1, 2), strict=True)),
    },
    "batch": {"usual": 50, "two": 2, "all": None},
    "chain": {
        "default": fp.chains.Chain(),
        "two": fp.chains.Chain(chains=2, burn_in=2),
        "stateless": fp.chains.Chain(stateful=False, burn_in=1),
        "burn-in": fp.chains.Chain(burn_in=3),
        "closed form": fp.chains.Chain(rao_blackwell=True),
        "stays": fp.chains.Chain(follow=False, burn_in=1),
    },
    "phi_step": {
        "default": None,
        "sgd": fp.steps.SGD(1e-3),
        "batch": fp.steps.PhiStep(batch=2),
        "local": fp.steps.PhiStep(local=LOCAL),
        "mean move": fp.steps.PhiStep(
            fp.steps.MeanMove(momentum=0.5), local=fp.LocalSGD(2, 0.01, batch=2), schedule=fp.steps.Cosine()
        ),
    },
    "beta_step": {
        "default": None,
        "adam": fp.steps.Adam(0.01),
        "em": fp.steps.EM(0.5, 0.1),
        "left": fp.steps.BetaStep(form="left"),
        "right": fp.steps.BetaStep(form="right"),
        "mixed": fp.steps.BetaStep(fp.steps.SGD(1e-3), form="mixed"),
    },
    "start": {"auto": "auto", "random": "random", "spectral": fp.steps.Spectral(minimum=3)},
    "average": {n: fp.steps.Averaging(n) for n in ("tail", "iterate", "last")},
    "hyperprior": {
        "flat": fp.priors.Hyperprior(),
        "phi": fp.priors.Hyperprior(phi_scale=2.0),
        "beta": fp.priors.Hyperprior(mean_scale=1.0, log_scale=(0.0, 1.0)),
    },
    "compressor": {
        "identity": "identity",
        "qsgd": "qsgd",
        "rand-k": fp.compressors.RandK(share=0.5),
        "own": dict(zip(NAMES, ("identity", "natural", "qsgd") * 2, strict=True)),
    },
    "clip": {"none": None, "one": 1.0},
    "guard": {"usual": 1e3, "none": None},
    "engine": {"auto": "auto", "sampled": "sampled", "exact": "exact"},
    "anneal": {"usual": fp.steps.Anneal(), "none": fp.steps.Anneal(rounds=0)},
    "final": {"short": fp.chains.Final(2, 3, 2), "one chain": fp.chains.Final(chains=1, burn_in=2, draws=3)},
    "participation": {"everyone": None, "two": 2, "chance": 0.7, "chances": [0.9, 0.6, 0.8, 0.7, 0.5, 0.6]},
    "sites": {"alone": None, "two": {"north": NAMES[:4], "south": NAMES[4:]}},
}
RUN = ("model", "participation", "sites")


REFUSED: dict[tuple[str, str, str, str], str] = {
    ("kernel", "mixture draw", "model", "softmax"): "MixtureDraw needs",
    ("kernel", "mixture draw", "model", "curved"): "MixtureDraw needs",
    ("kernel", "mixture draw", "model", "network"): "MixtureDraw needs",
    ("kernel", "mixture draw", "prior", "energy"): "MixtureDraw needs",
    ("kernel", "exponential", "prior", "energy"): "exact for priors made of Normals",
    ("chain", "closed form", "model", "softmax"): "rao_blackwell needs",
    ("chain", "closed form", "model", "curved"): "rao_blackwell needs",
    ("chain", "closed form", "model", "network"): "rao_blackwell needs",
    ("chain", "closed form", "prior", "energy"): "rao_blackwell needs",
    ("chain", "closed form", "phi_step", "local"): "exclude rao_blackwell",
    ("chain", "closed form", "phi_step", "mean move"): "exclude rao_blackwell",
    ("beta_step", "mixed", "model", "curved"): "mixed form",
    ("beta_step", "mixed", "prior", "mixture"): "form of I needs a Normal prior",
    ("beta_step", "mixed", "prior", "energy"): "form of I needs a Normal prior",
    ("beta_step", "right", "prior", "mixture"): "form of I needs a Normal prior",
    ("beta_step", "right", "prior", "energy"): "form of I needs a Normal prior",
    ("beta_step", "em", "prior", "energy"): "EM steps cannot be made",
    ("hyperprior", "beta", "prior", "mixture"): "hyperprior",
    ("hyperprior", "beta", "prior", "energy"): "hyperprior",
    ("hyperprior", "beta", "prior", "full"): "hyperprior",
    ("start", "spectral", "model", "softmax"): "spectral start needs",
    ("start", "spectral", "model", "curved"): "spectral start needs",
    ("start", "spectral", "model", "network"): "spectral start needs",
    ("compressor", "own", "sites", "two"): "one for all",
    **{
        ("engine", "exact", other, level): "engine='exact' cannot be used here"
        for other, levels in {
            "model": ("softmax", "curved", "network"),
            "prior": ("mixture", "energy"),
            "participation": ("two", "chance", "chances"),
            "compressor": ("qsgd", "rand-k", "own"),
            "clip": ("one",),
        }.items()
        for level in levels
    },
    ("participation", "chances", "sites", "two"): "different probabilities",
}
"""Pairs that cannot be, and what is said of them; all others work."""

Pair = frozenset[tuple[str, str]]


def pairs_of(row: dict[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def beside(level: tuple[str, str], row: dict[str, str]) -> set[Pair]:
    return {frozenset((level, other)) for other in row.items()}


IMPOSSIBLE: set[Pair] = {frozenset(((a, x), (b, y))) for a, x, b, y in REFUSED}
POSSIBLE: set[Pair] = {
    frozenset(((a, x), (b, y)))
    for a, b in itertools.combinations(FACTORS, 2)
    for x in FACTORS[a]
    for y in FACTORS[b]
} - IMPOSSIBLE


def random_row(rng: random.Random, seed: dict[str, str]) -> dict[str, str] | None:
    """A row around these levels without any pair that cannot be."""
    row = dict(seed)
    for name in rng.sample(list(FACTORS), len(FACTORS)):
        if name not in row:
            free = [x for x in FACTORS[name] if not beside((name, x), row) & IMPOSSIBLE]
            if not free:
                return None
            row[name] = rng.choice(free)
    return row


def covering() -> list[dict[str, str]]:
    """Rows in which every pair that can be occurs, greedily: the best of some random rows each time."""
    rng, left, rows = random.Random(0), set(POSSIBLE), []
    while left:
        ordered = sorted(map(sorted, left))
        seeds = [dict(rng.choice(ordered)) for _ in range(30)]
        found = [row for seed in seeds if (row := random_row(rng, seed)) is not None]
        best = max(found, key=lambda row: len(left & pairs_of(row)))
        rows.append(best)
        left -= pairs_of(best)
    return rows


ROWS = covering()


def model_named(name: str) -> fp.Composition:
    body = seeded(nn.Linear(3, 2, bias=False), 1)
    if name == "linear":
        return fp.Composition(body, seeded(nn.Linear(2, 1, bias=False), 2), fp.likelihoods.Normal(0.5))
    if name == "softmax":
        return fp.Composition(body, seeded(nn.Linear(2, 3), 2), "categorical")
    if name == "network":  # large enough for rounds on batches
        deep = nn.Sequential(nn.Linear(3, 90), nn.Tanh(), nn.Linear(90, 2))
        return fp.Composition(seeded(deep, 1), seeded(nn.Linear(2, 3), 2), "categorical")
    head = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3))
    return fp.Composition(body, seeded(head, 2), "categorical")


def data(name: str) -> dict[str, Any]:
    g, out = generator(0), {}
    for client, n in zip(NAMES, SIZES, strict=True):
        x, noise = torch.randn(n, 3, generator=g), torch.randn(n, generator=g)
        out[client] = (x, x.sum(1) + noise if name == "linear" else torch.randint(3, (n,), generator=g))
    return out


def attempt(row: dict[str, str]) -> str:
    """What came of a row: nothing to complain about, or the error's words."""
    chosen = {n: FACTORS[n][level] for n, level in row.items() if n not in RUN}
    try:
        method = fp.FedSOUL(model_named(row["model"]), **chosen)
        population = method.fit(
            data(row["model"]),
            rounds=2,
            participation=FACTORS["participation"][row["participation"]],
            sites=FACTORS["sites"][row["sites"]],
            progress=False,
        )
    except (SettingsError, ModelError) as error:
        return str(error)
    assert all(bool(torch.isfinite(v).all()) for v in population.published.values())
    for client in NAMES:
        assert bool(torch.isfinite(population.predict(client, torch.ones(2, 3)).mean).all())
    assert all(not m["left_out"] for m in population.history)
    return ""


@pytest.mark.parametrize("row", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_pairs_of_settings_work(row: dict[str, str]) -> None:
    assert attempt(row) == "", row


def test_every_setting_is_tried() -> None:
    assert {f.name for f in fields(fp.FedSOUL)} - {"preset"} | set(RUN) == set(FACTORS)


def test_local_epochs_are_compressed() -> None:
    """A pair that once met a bare assertion."""
    for epochs in (1, 3):
        step = fp.steps.PhiStep(local=fp.LocalSGD(epochs=epochs, rate=0.01))
        method = fp.FedSOUL(model_named("softmax"), phi_step=step, compressor="qsgd")
        population = method.fit(data("softmax"), rounds=2, progress=False)
        assert bool(torch.isfinite(population.published["phi"]).all())


@pytest.mark.parametrize("pair", REFUSED, ids=[f"{a} {x}, {b} {y}" for a, x, b, y in REFUSED])
def test_what_cannot_be_is_said(pair: tuple[str, str, str, str]) -> None:
    a, x, b, y = pair
    plain = {n: next(iter(levels)) for n, levels in FACTORS.items()}
    assert REFUSED[pair] in attempt(plain | {a: x, b: y})
