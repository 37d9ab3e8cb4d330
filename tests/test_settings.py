"""Settings: known by name once they are defined, told in plain values, and read back from them."""

import gc
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, SettingsError
from fedpop.kernels import Kernel
from fedpop.message.compressors import Compressor
from fedpop.methods import METHODS, rebuild
from fedpop.methods.base import Algorithm
from fedpop.priors import Prior
from fedpop.settings import (
    Setting,
    describe,
    known,
    named,
    rebuilt,
)
from tests.helpers import generator, linear_model, two_classes

NEEDED: dict[str, dict[str, Any]] = {
    "SGD": {"rate": 0.1},
    "Steps": {"start": 2, "end": 8},
    "Distillation": {"x": torch.ones(4, 3)},
}
"""What has no default."""


def ours() -> dict[str, type[Setting]]:
    """Every class of settings that fedpop defines, but for methods, which need a model."""
    every = {n: c for n, c in known(Setting).items() if c.__module__.startswith("fedpop.")}
    return {n: c for n, c in every.items() if c is not Setting and not issubclass(c, Algorithm)}


def made(name: str) -> Any:
    return ours()[name](**NEEDED.get(name, {}))


def through_a_file(value: Any) -> Any:
    """As it would be read from a file."""
    return json.loads(json.dumps(describe(value)))


# --- known and named -----------------------------------------------------------------------------


@pytest.fixture
def classes_end_with_their_test() -> Iterator[None]:
    yield
    gc.collect()


def test_what_can_be_made_is_known() -> None:
    assert set(known(Kernel)) >= {"HMC", "MALA", "ULA", "SGLD", "Exponential", "JumpHMC", "MixtureDraw"}
    assert set(known(Compressor)) >= {"Identity", "QSGD", "RandK", "Natural"}
    assert set(known(Prior)) >= {"Normal", "Mixture", "Energy"}
    assert known(Kernel)["HMC"] is fp.kernels.HMC
    assert set(METHODS) <= set(known(Algorithm))
    # Abstract ones cannot be made; those between them and others can.
    for base in (Kernel, Compressor, Prior, Algorithm):
        assert base.__name__ not in known(base)
    assert "JumpHMC" in known(fp.kernels.HMC)
    assert set(known(fp.kernels.ULA)) == {"ULA"}


def test_everything_a_run_is_configured_with_is_a_frozen_dataclass_of_settings() -> None:
    for name, cls in ours().items():
        assert is_dataclass(cls), name
        assert cls.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        assert required == list(NEEDED.get(name, {})), name
    for name in ("steps", "chains", "compressors"):
        module = getattr(fp, name)
        assert all(issubclass(getattr(module, n), Setting) for n in module.__all__), name


@pytest.mark.parametrize(
    ("base", "spelled", "meant"),
    [
        (Kernel, "hmc", "HMC"),
        (Kernel, "HMC", "HMC"),
        (Kernel, "jump-hmc", "JumpHMC"),
        (Kernel, "jump_hmc", "JumpHMC"),
        (Kernel, "mixturedraw", "MixtureDraw"),
        (Compressor, "rand-k", "RandK"),
        (Compressor, "QSGD", "QSGD"),
        (Prior, "Normal", "Normal"),
    ],
)
def test_a_name_however_it_is_spelled(base: type, spelled: str, meant: str) -> None:
    assert named(base, spelled, "thing") is known(base)[meant]


def test_an_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"^unknown prior 'cauchy'; known are energy, .*mixture, .*normal"
    ):
        named(Prior, "cauchy", "prior")
    with pytest.raises(SettingsError, match="unknown kernel 'qsgd'"):  # of another kind
        named(Kernel, "qsgd", "kernel")


# --- a class of one's own ------------------------------------------------------------------------


def test_a_users_own_class_is_found_after_it_was_defined() -> None:
    with pytest.raises(SettingsError, match="unknown compressor 'half-of-it'"):
        named(Compressor, "half-of-it", "compressor")
    plain = {"kind": "HalfOfIt", "levels": 3, "share": 0.25}
    with pytest.raises(
        CheckpointError, match=r"unknown setting 'HalfOfIt'.*import the module that defines it"
    ):
        rebuilt(plain, {})

    @dataclass(frozen=True)
    class HalfOfIt(fp.compressors.QSGD):
        share: float = 0.5

    assert named(Compressor, "half-of-it", "compressor") is HalfOfIt
    assert known(fp.compressors.QSGD)["HalfOfIt"] is HalfOfIt
    found = rebuilt(plain, {})
    assert found == HalfOfIt(levels=3, share=0.25)
    assert rebuilt(through_a_file(found), {}) == found
    method = fp.FedSOUL(linear_model(), compressor="half-of-it")
    assert method.channel.compressors == (HalfOfIt(),)
    del HalfOfIt, found, method


def test_a_class_that_is_abstract_is_known_by_those_that_are_not() -> None:
    class Colour(Setting, ABC):
        @abstractmethod
        def shade(self) -> int: ...

    @dataclass(frozen=True)
    class Red(Colour):
        depth: int = 3

        def shade(self) -> int:
            return self.depth

    assert known(Colour) == {"Red": Red}
    assert named(Colour, "red", "colour") is Red
    assert rebuilt(through_a_file(Red(5)), {}) == Red(5)


def test_of_two_of_one_name_the_last_one_counts() -> None:
    """As in a notebook, where a cell is run again."""

    class Shape(Setting):
        pass

    @dataclass(frozen=True)
    class Ball(Shape):
        radius: int = 1

    first = Ball

    @dataclass(frozen=True)
    class Ball(Shape):  # type: ignore[no-redef]
        radius: int = 2

    assert known(Shape)["Ball"] is Ball
    assert Ball is not first
    assert rebuilt({"kind": "Ball"}, {}).radius == 2


def test_what_is_gone_is_not_known() -> None:
    @dataclass(frozen=True)
    class Passing(fp.kernels.ULA):
        pass

    assert "Passing" in known(Kernel)
    del Passing
    gc.collect()
    assert "Passing" not in known(Kernel)


# --- plain values, and back ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ours()) - {"Distillation"}))
def test_settings_come_back_from_a_file(name: str) -> None:
    value = made(name)
    plain = through_a_file(value)
    assert plain["kind"] == name
    assert set(plain) == {"kind"} | {f.name for f in fields(value)}
    again = rebuilt(plain, {})
    assert type(again) is type(value)
    assert again == value
    assert describe(again) == describe(value)


def test_data_among_settings_is_told_by_its_digest() -> None:
    """Enough to tell whether it is the same, not to read it back."""
    first, same, other = (describe(fp.methods.Distillation(torch.full((4, 3), v))) for v in (1.0, 1.0, 2.0))
    assert first == same != other
    assert first["x"].startswith("torch.float32 (4, 3) sha256 ")


@pytest.mark.parametrize("name", METHODS)
def test_methods_come_back_from_a_file(name: str) -> None:
    method = METHODS[name](two_classes() if name == "PFedFDA" else linear_model())
    plain = json.loads(json.dumps(method.describe()))
    again = rebuild(plain, name, method.model)
    assert type(again) is type(method)
    for setting in fields(method):
        if setting.name != "model":
            assert getattr(again, setting.name) == getattr(method, setting.name), setting.name
    assert json.loads(json.dumps(again.describe())) == plain


def test_settings_inside_settings_and_by_name() -> None:
    method = fp.FedSOUL(
        linear_model(),
        kernel=fp.kernels.HMC(leapfrog=3),
        prior=fp.priors.Mixture(3, "full", bounds=(0.1, 10.0)),
        phi_step=fp.steps.PhiStep(
            fp.steps.Adam(0.01, fp.steps.Cosine(0.1)),
            local=fp.LocalSGD(epochs=2, rate=0.1, batch=4),
            schedule=fp.steps.Decay(0.3),
        ),
        beta_step=fp.steps.BetaStep(fp.steps.EM(0.5, 0.1), form="left"),
        chain=fp.chains.Chain(chains=3, stateful=False),
        start=fp.steps.Spectral(minimum=4),
        hyperprior=fp.priors.Hyperprior(2.0),
        local_steps={"anna": 3, "ben": 5},
        compressor={"anna": "qsgd", "ben": fp.compressors.RandK(k=2)},
        clip=3.0,
    )
    again = rebuild(json.loads(json.dumps(method.describe())), "FedSOUL", method.model)
    assert again == method


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.25,
        math.inf,
        "word",
        (),
        (1, (2.5, "a"), None),
        {"anna": 3, "ben": (1, 2)},
        {"kind": "a client called kind"},
        {1: fp.kernels.HMC(), 2: {"nested": fp.steps.Adam()}},
        (fp.kernels.HMC(), {"a": fp.chains.Steps(1, 2)}),
    ],
    ids=str,
)
def test_plain_values_come_back(value: Any) -> None:
    assert rebuilt(through_a_file(value), {}) == value


def test_builders_make_what_is_more_than_settings() -> None:
    @dataclass(frozen=True)
    class Outer(Setting):
        inner: Any = None
        count: int = 0

    plain = {"kind": "Outer", "inner": {"kind": "Linear", "width": 3}, "count": 2}
    found = rebuilt(plain, {"Linear": lambda p: torch.nn.Linear(p["width"], 1)})
    assert isinstance(found.inner, torch.nn.Linear)
    assert found.inner.in_features == 3
    assert found.count == 2


def test_what_a_class_no_longer_knows_is_left_out_and_what_is_new_has_its_default() -> None:
    assert rebuilt({"kind": "HMC", "leapfrog": 3, "antithetic": True}, {}) == fp.kernels.HMC(leapfrog=3)
    assert rebuilt({"kind": "HMC"}, {}) == fp.kernels.HMC()


def test_values_that_cannot_be_are_refused_on_the_way_back() -> None:
    with pytest.raises(SettingsError):
        rebuilt({"kind": "HMC", "leapfrog": 0}, {})


def test_what_is_not_said_is_derived_and_not_told() -> None:
    """Only fields are settings: caches and what was derived from them stay out of files."""

    @dataclass(frozen=True)
    class Counted(Setting):
        size: int = 2
        twice: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.size)

    found = rebuilt(through_a_file(Counted(4)), {})
    assert found == Counted(4)
    assert found.twice == 8


@pytest.mark.usefixtures("classes_end_with_their_test")
def test_a_class_is_found_among_those_that_its_field_takes(tmp_path: Path) -> None:
    """A kernel of one's own may have the name of a step."""

    @dataclass(frozen=True)
    class Adam(fp.kernels.ULA):
        name: ClassVar[str] = "Adam"

    model = fp.Composition(None, nn.Linear(1, 1), "bernoulli")
    method = fp.FedSOUK(model, kernel=Adam(), phi_step=fp.steps.Adam(0.01), local_steps=1)
    clients = [(torch.randn(4, 1, generator=generator(i)), torch.arange(4.0) % 2) for i in range(2)]
    method.fit(clients, rounds=1, progress=False).save(tmp_path / "saved")
    again = fp.load(tmp_path / "saved").algorithm
    assert isinstance(again, fp.FedSOUK)
    assert type(again.kernel) is Adam
    assert again.phi_step == fp.steps.Adam(0.01)


@pytest.mark.usefixtures("classes_end_with_their_test")
def test_a_likelihood_of_ones_own_is_saved_and_loaded(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Doubtful(fp.likelihoods.Bernoulli):
        """Yes/no targets of which a share is wrong."""

        wrong: float = 0.1
        name: ClassVar[str] = "doubtful"

        def log_prob(self, eta: Tensor, y: Tensor, params: dict[str, Tensor]) -> Tensor:
            p = self.wrong + (1 - 2 * self.wrong) * torch.sigmoid(eta)
            return (y * p.log() + (1 - y) * (1 - p).log()).sum(-1)

    clients = [(torch.randn(4, 1, generator=generator(i)), torch.arange(4.0) % 2) for i in range(2)]
    model = fp.Composition(None, nn.Linear(1, 1), Doubtful(0.2))
    population = fp.FedAvg(model).fit(clients, rounds=1, progress=False)
    population.save(tmp_path / "saved")
    again = fp.load(tmp_path / "saved")
    assert again.model.likelihood == Doubtful(0.2)
    assert fp.Composition(None, nn.Linear(1, 1), "doubtful").likelihood == Doubtful()


def test_settings_stay_as_they_were_given() -> None:
    assert replace(fp.compressors.RandK(), k=3) == fp.compressors.RandK(k=3)
    assert replace(fp.participation.Bernoulli(0.5), p=(0.5, 0.25)).weights is None
