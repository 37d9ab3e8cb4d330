"""What is asked of a population, of partitions, of networks and of functions: checked as settings are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, DataError, FedpopError, ModelError, SettingsError
from tests.bad_input.corrupter import content
from tests.helpers import linear_model, ragged

X, Y = torch.ones(4, 3), torch.zeros(4)
NORMAL = fp.likelihoods.Normal(1.0)
Asked = Callable[[fp.Population], Any]


@pytest.fixture(scope="module")
def population() -> fp.Population:
    clients = dict(zip(("anna", "ben", "cara"), ragged((3, 4, 2)), strict=True))
    return fp.FedSOUL(linear_model()).fit(clients, rounds=1)


class Stranger:
    def __repr__(self) -> str:
        return "<a stranger>"


STRANGERS: dict[str, Any] = {
    "an object": Stranger(),
    "None": None,
    "a list": ["anna"],
    "a fraction": 0.5,
    "a truth value": True,
    "a mapping": {},
    "bytes": b"anna",
    "not a number": math.nan,
    "a tensor": torch.tensor(1),
}
WHOSE: dict[str, Callable[[fp.Population, Any], Any]] = {
    "predict": lambda p, who: p.predict(who, X),
    "posterior": lambda p, who: p.posterior(who),
    "mixing": lambda p, who: p.mixing(who),
    "personal": lambda p, who: p.personal(who),
}


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("method", WHOSE)
def test_a_client_is_a_name_or_a_position(population: fp.Population, method: str, kind: str) -> None:
    with pytest.raises(SettingsError, match=f"^Population.{method}: client must be a text or a whole number"):
        WHOSE[method](population, STRANGERS[kind])
    federation = population.federation
    assert federation is not None
    with pytest.raises(SettingsError, match=r"Federation\.index: client must be"):
        federation.index(STRANGERS[kind])


ASKED: dict[str, tuple[Asked, type[FedpopError], str]] = {
    "a position that is not there": (lambda p: p.predict(3, X), DataError, "no client 3"),
    "a word for a truth value": (
        lambda p: p.predict("anna", X, theta_uncertainty="yes"),
        SettingsError,
        "theta_uncertainty must be True or False",
    ),
    "a setting of predict": (lambda p: p.predict("anna", X, draws=3), SettingsError, "no setting 'draws'"),
    "nothing to predict": (lambda p: p.predict("anna"), SettingsError, "missing a required argument: 'x'"),
    "a setting of a newcomer's": (
        lambda p: p.new_client().predict(X, level=0.9),
        SettingsError,
        "Newcomer.predict has no setting 'level'",
    ),
    "a limit in words": (lambda p: p.diagnostics("all"), SettingsError, "limit must be a whole number"),
    "a limit of nobody": (lambda p: p.diagnostics(0), SettingsError, "limit must be a whole number, 1 or"),
    "a limit below zero": (lambda p: p.diagnostics(-1), SettingsError, "limit must be"),
    "half a limit": (lambda p: p.diagnostics(1.5), SettingsError, "limit must be"),
    "a split": (lambda p: p.held_out("tset"), SettingsError, "split must be one of .*did you mean test"),
    "a list of splits": (lambda p: p.held_out([]), SettingsError, "split must be one of"),
    "no question": (lambda p: p.ask("likelihood"), SettingsError, "question must be a Question"),
    "a setting of save": (lambda p: p.save("x", posterior="all"), SettingsError, "did you mean posteriors"),
    "an empty path": (lambda p: p.save(""), SettingsError, "a folder is given by its path, not by ''"),
    "too few targets": (lambda p: p.predict("anna", X).log_prob(Y[:2]), DataError, "y has 2 row.*4 examples"),
    "one target": (lambda p: p.predict("anna", X).log_prob(0.0), DataError, "y has 1 row.*4 examples"),
    "too few for a cdf": (lambda p: p.predict("anna", X).cdf(Y[:3]), DataError, "y has 3 row.*4 examples"),
    "too wide for a cdf": (lambda p: p.predict("anna", X).cdf(X), DataError, r"shape \(4, 3\), not \(4, 1\)"),
    "words for a cdf": (lambda p: p.predict("anna", X).cdf("abcd"), DataError, "predictive, y"),
    "too few to cover": (lambda p: p.predict("anna", X).covers(Y[:2]), DataError, "y has 2 row"),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_a_population_is_not_asked(population: fp.Population, case: str, tmp_path: Path) -> None:
    ask, error, message = ASKED[case]
    with pytest.raises(error, match=message) as caught:
        ask(population)
    assert len(str(caught.value).splitlines()) == 1
    assert not content(tmp_path)


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        (fp.priors.Mixture(), r"Mixture\(\) now, Normal\(\) then"),
        (fp.priors.Normal(covariance="full"), "covariance='full'.* now, .*'isotropic'.* then"),
        (fp.priors.Normal(mean=1.0), "mean=1.0.* now, .*mean=0.0.* then"),
    ],
)
def test_another_prior_than_the_one_that_was_saved(
    population: fp.Population, prior: fp.priors.Prior, words: str, tmp_path: Path
) -> None:
    folder = population.save(tmp_path / "saved")
    assert fp.load(folder, prior=fp.priors.Normal()).names == population.names
    with pytest.raises(CheckpointError, match=f"the prior is not the saved one: .*{words}"):
        fp.load(folder, prior=prior)


@pytest.mark.parametrize(
    "likelihood",
    [fp.likelihoods.Normal(variance=0.25), fp.likelihoods.Normal(), fp.likelihoods.Poisson()],
    ids=repr,
)
def test_another_likelihood_or_noise_than_the_one_that_was_saved(
    population: fp.Population, likelihood: fp.likelihoods.Likelihood, tmp_path: Path
) -> None:
    folder = population.save(tmp_path / "saved")
    backbone, head = linear_model().modules()
    with pytest.raises(CheckpointError, match="likelihood is not the saved one"):
        fp.load(folder, model=fp.Composition(backbone, head, likelihood))


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_names_that_no_file_can_hold(name: str, tmp_path: Path) -> None:
    clients, method = dict(zip(("ben", name), ragged((3, 2)), strict=True)), fp.FedAvg(linear_model())
    for out in (None, tmp_path / "run"):
        with pytest.raises(DataError, match="which is not text"):
            method.fit(clients, rounds=1, out=out)
    with pytest.raises(DataError, match="which is not text"):
        method.fit(ragged((3, 2)), rounds=1, sites={name: ["client-0", "client-1"]})
    assert not content(tmp_path)


def test_the_right_kinds_are_taken(population: fp.Population) -> None:
    by_name = population.predict("ben", X).mean
    for who in (1, np.int64(1), -2):
        assert torch.equal(population.predict(who, X).mean, by_name)  # type: ignore[arg-type]


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    for path in ("", "x" * 400, "a\0b"):
        with pytest.raises(FedpopError):
            fp.load(path)
    with pytest.raises(SettingsError, match="a folder is given by its path"):
        fp.FedAvg(linear_model()).fit([(X, Y)], rounds=1, out="")


def test_a_comparison_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    clients = fp.hold_out({"a": (X, Y), "b": (X, Y + 0.5)}, test=0.5)
    yes = fp.FedAvg(fp.Composition(None, nn.Linear(3, 1), "bernoulli"))
    method = fp.FedAvg(linear_model())
    for methods, data, message in (
        ([yes], clients, "a bernoulli target is 0 or 1"),
        ([method], {"a": (X, Y)}, "methods are compared on test examples"),
        ({"": method}, clients, "a method's label is a word"),
        ({"a\nb": method}, clients, "a method's label is a word"),
        ([fp.FedAvg(fp.Composition(None, nn.Linear(5, 1), NORMAL))], clients, "does not accept examples"),
    ):
        with pytest.raises(FedpopError, match=message):
            fp.compare(methods, data, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError) as caught:
        fp.compare([method], clients, rounds=1, newcomers=[(X, Y)])  # type: ignore[list-item]
    assert len(str(caught.value).splitlines()) == 1


# --- partitions and networks -----------------------------------------------------------------------

data, net = fp.data, fp.networks
MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "clients in words": (lambda: data.IID("a"), "IID: b must be"),
    "no clients": (lambda: data.IID(0), "IID: b must be"),
    "not said how many": (lambda: data.IID(), "IID: missing a required argument: 'b'"),
    "a size too few": (lambda: data.IID(2, sizes=(1,)), "one size"),
    "half a size": (lambda: data.IID(1, sizes=(1.5,)), r"IID: sizes\[0\] must be a whole"),
    "a name that is nearly there": (lambda: data.Shards(3, clases=3), "did you mean classes"),
    "no proportions": (lambda: data.Dirichlet(3, 0), "Dirichlet: alpha must be"),
    "endless proportions": (lambda: data.Dirichlet(3, math.inf), "Dirichlet: alpha must be"),
    "less than nobody": (lambda: data.Dirichlet(3, 1.0, least=-1), "Dirichlet: least must be"),
    "a key for all": (lambda: data.ByKey(3), "ByKey: keys must be a list"),
    "nobody's key": (lambda: data.ByKey(["a", None]), "the key of example 1 is None"),
    "a key that is no number": (lambda: data.ByKey([1.0, math.nan]), "the key of example 1 is nan"),
    "a key of several": (lambda: data.ByKey([["a"], ["b"]]), "the key of example 0"),
    "labels in words": (lambda: data.IID(2).deal("abc", 0), "labels: "),
    "no labels": (lambda: data.Shards(2, 1).deal(None, 0), "labels: "),
    "labels in a grid": (lambda: data.IID(2).deal(torch.zeros(4, 2), 0), r"labels: one for each .*\(4, 2\)"),
    "fractions of labels": (
        lambda: data.Dirichlet(2, 1.0).deal([0, 0.5, 1, 1], 0),
        "in whole numbers: that of row 1 is 0.5",
    ),
    "labels below zero": (lambda: data.Shards(2, 1).deal([0, 1, -1], 0), "that of row 2 is -1"),
    "a seed in words": (lambda: data.IID(2).deal([0, 1], "a"), "seed must be a whole number"),
    "shares in words": (lambda: data.share_sizes("a", 0.5, 1, 2), "share_sizes: b must be"),
    "a share above one": (lambda: data.share_sizes(3, 2.0, 1, 2), "share_sizes: share_small must be"),
    "a flat image": (lambda: net.cnn((3, 32)), "cnn: shape must be 3 values"),
    "an image in words": (lambda: net.cnn("abc"), "cnn: shape must be 3 values"),
    "no filters": (lambda: net.cnn(filters=(0, 3)), r"cnn: filters\[0\] must be"),
    "filters too many": (lambda: net.cnn(filters=(1, 2, 3)), "cnn: filters must be 2 values"),
    "a width below zero": (lambda: net.cnn(widths=(-1,)), r"cnn: widths\[0\] must be"),
    "a width beyond memory": (lambda: net.mlp(widths=(10**12,)), r"mlp: widths\[0\] must be"),
    "all dropped": (lambda: net.cnn(dropout=1.0), "cnn: dropout must be"),
    "dropped in words": (lambda: net.cnn(dropout="x"), "cnn: dropout must be"),
    "dropout that is no number": (lambda: net.cnn(dropout=math.nan), "cnn: dropout must be"),
    "no image": (lambda: net.lenet(None), "lenet: shape must be"),
    "no classes": (lambda: net.build("mlp", (1, 28, 28), 0), "build: classes must be"),
    "a start in words": (lambda: net.build("mlp", (1, 28, 28), 10, "a"), "build: seed must be"),
    "nothing to redraw": (lambda: net.redraw(3, None), "redraw: module must be a Module"),
    "a trace of no file": (lambda: fp.participation.Availability.read(3, ["a"]), "path must be"),
    "a trace of nobody": (lambda: fp.participation.Availability.read("x.csv", 3), "names must be"),
    "a link that is not there": (lambda: fp.links.Parameter(1.0, "positiv"), "did you mean positive"),
    "a parameter without a start": (lambda: fp.links.real(), "real: missing a required argument: 'start'"),
    "a seed of a formula": (lambda: fp.mixed_model("y ~ x + (1|g)", {}, seed=-1), "seed must be a whole"),
}


@pytest.mark.parametrize("case", MADE)
def test_partitions_networks_and_the_like(case: str) -> None:
    make, message = MADE[case]
    with pytest.raises(FedpopError, match=message):
        make()


# --- models ------------------------------------------------------------------------------------------


def own(log_likelihood: Any = None, z: Any = None, **more: Any) -> fp.CustomModel:
    return fp.CustomModel(log_likelihood, z={"a": 1.0} if z is None else z, **more)


def density(phi: Any, z: Any, x: Tensor, y: Tensor) -> Tensor:
    return -((y - z["a"] * x[:, 0]) ** 2)


def linear(*sizes: int, **more: Any) -> nn.Linear:
    return nn.Linear(*sizes, **more)


def shared() -> fp.Composition:
    layer = nn.Linear(3, 3)
    return fp.Composition(layer, nn.Sequential(layer, nn.Linear(3, 1)), NORMAL)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "z as a list": (lambda: own(density, z=[1]), "CustomModel: z must be a mapping"),
    "phi as a number": (lambda: own(density, phi=3), "CustomModel: phi must be a mapping"),
    "no z": (lambda: fp.CustomModel(density), "CustomModel: missing a required argument: 'z'"),
    "a setting of another": (lambda: own(density, prior=3), "CustomModel has no setting 'prior'"),
    "a type in words": (lambda: own(density, dtype="float32"), "CustomModel: dtype must be a dtype"),
    "whole numbers": (lambda: own(density, dtype=torch.int64), "CustomModel: dtype must be"),
    "a device that is none": (lambda: own(density, device="tpu9"), "CustomModel: device 'tpu9' is not here"),
    "no pattern": (lambda: fp.Split(nn.Linear(3, 1), [], NORMAL), "personal names no parameter"),
    "halves": (lambda: fp.Composition(linear(3, 2).half(), linear(2, 1), NORMAL), "of one type|float16"),
    "half of everything": (lambda: fp.Composition(None, linear(3, 1).half(), NORMAL), "type torch.float16"),
    "two types": (lambda: fp.Composition(linear(3, 2).double(), linear(2, 1), NORMAL), "of one type on one"),
    "complex weights": (
        lambda: fp.Composition(None, linear(3, 1, dtype=torch.complex64), NORMAL),
        "type torch.complex64",
    ),
    "no values": (lambda: fp.Composition(None, linear(3, 1, device="meta"), NORMAL), "device meta"),
    "a layer in both": (shared, "weight is a parameter of two modules"),
    "sparse gradients": (
        lambda: fp.Composition(nn.Embedding(3, 2, sparse=True), linear(2, 1), NORMAL),
        "sparse=False",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_made(case: str) -> None:
    make, message = MODELS[case]
    with pytest.raises(FedpopError, match=message):
        make()


FUNCTIONS: dict[str, tuple[Any, str]] = {
    "a name that is not there": (lambda phi, z, x, y: z["b"] * y, "the function failed: KeyError: 'b'"),
    "a division": (lambda phi, z, x, y: 1 / 0, "the function failed: ZeroDivisionError"),
    "a mean over rows": (lambda phi, z, x, y: (y - y.mean()) * z["a"], "lets rows see those that follow"),
    "a sum over rows": (lambda phi, z, x, y: y * z["a"] / x.sum(), "lets rows see those that follow"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_that_fail_or_mix_rows(case: str, tmp_path: Path) -> None:
    function, message = FUNCTIONS[case]
    with pytest.raises(ModelError, match=message):
        fp.FedSOUL(own(function)).fit({"a": (X, torch.arange(4.0))}, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_row_may_see_those_before_it(tmp_path: Path) -> None:
    def walk(phi: Any, z: Any, x: Tensor, y: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(y[:1]), y[:-1]))
        return -((y - z["a"] * before) ** 2)

    assert fp.FedSOUL(own(walk)).fit({"a": (X, torch.arange(4.0))}, rounds=1).rounds == 1


@pytest.mark.parametrize("wrong", [10, -1])
@pytest.mark.parametrize("split", ["train", "test"])
def test_codes_outside_an_embedding(wrong: int, split: str, tmp_path: Path) -> None:
    model = fp.Composition(nn.Sequential(nn.Embedding(10, 2), nn.Flatten()), nn.Linear(4, 1), NORMAL)
    good = torch.tensor([[0, 9], [3, 4], [9, 0]])
    bad = good.clone()
    bad[2, 1] = wrong
    y = torch.zeros(3)
    ben = fp.Client(bad, y) if split == "train" else fp.Client(good, y, test=(bad, y))
    where = "client 'ben', row 2" if split == "train" else "client 'ben', test set, row 2"
    with pytest.raises(DataError, match=f"{where}: the model does not accept .*index out of range"):
        fp.FedAvg(model).fit({"anna": (good, y), "ben": ben}, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    population = fp.FedAvg(model).fit({"anna": (good, y)}, rounds=1)
    with pytest.raises(DataError, match="does not accept"):
        population.predict("anna", bad)
    with pytest.raises(DataError, match="client 'the new client', row 2"):
        population.new_client(bad, y)
