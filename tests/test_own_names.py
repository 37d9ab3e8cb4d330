"""A class of a user's own that has a name of fedpop's takes over nothing: neither what the bare name asks for
nor what saved files mean by it; and is itself saved, and found again, under the name of its module."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods import METHODS, rebuild
from fedpop.methods.asking import describe_question, question_from_description
from fedpop.methods.base import Algorithm
from fedpop.methods.tables import method_from
from fedpop.models.spec import model_from, model_spec
from fedpop.questions import Question, Units
from fedpop.questions.spectral import SecondMoments
from fedpop.settings import Setting, describe, known, name_of, named, rebuilt
from tests.helpers import generator, linear_model


@pytest.fixture(autouse=True)
def _classes_end_with_their_test() -> Iterator[None]:
    yield
    gc.collect()


def softmax() -> fp.Composition:
    return fp.Composition(nn.Linear(3, 2), nn.Linear(2, 2), "categorical")


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 3, generator=generator(i)), torch.arange(4) % 2) for i in range(3)]


def through_a_file(value: Any) -> Any:
    return json.loads(json.dumps(describe(value)))


def own(of: type, **more: Any) -> type:
    """A class of a user's own with the name of one of fedpop's, which it derives from."""
    return dataclass(frozen=True)(type(of.__name__, (of,), {"__module__": __name__, **more}))


OURS: list[type[Setting]] = [
    fp.kernels.HMC,
    fp.kernels.ULA,
    fp.priors.Normal,
    fp.priors.Energy,
    fp.compressors.QSGD,
    fp.compressors.Natural,
    fp.steps.Adam,
    fp.steps.EM,
    fp.steps.Cosine,
    fp.steps.PhiStep,
    fp.chains.Final,
    fp.LocalSGD,
]


@pytest.mark.parametrize("ours", OURS, ids=lambda c: c.__name__)
def test_files_mean_ours_by_the_bare_name(ours: type[Setting]) -> None:
    before = through_a_file(ours())
    theirs = own(ours)
    assert known(ours)[ours.__name__] is ours
    assert type(rebuilt(before, {})) is ours
    told = through_a_file(theirs())
    assert told["kind"] == f"{__name__}:{theirs.__qualname__}" == name_of(theirs)
    assert type(rebuilt(told, {})) is theirs
    assert through_a_file(ours()) == before


@pytest.mark.parametrize(
    ("base", "name", "ours"),
    [
        (fp.kernels.Kernel, "hmc", fp.kernels.HMC),
        (fp.priors.Prior, "mixture", fp.priors.Mixture),
        (fp.compressors.Compressor, "rand-k", fp.compressors.RandK),
    ],
)
def test_bare_names_ask_for_ours(base: type, name: str, ours: type) -> None:
    theirs = own(ours)
    assert named(base, name, "thing") is ours
    assert named(base, name_of(theirs), "thing") is theirs
    with pytest.raises(SettingsError, match="unknown thing"):
        named(base, "elsewhere:Nothing", "thing")


def test_a_spelling_of_ours_is_ours_too() -> None:
    theirs = dataclass(frozen=True)(type("Hmc", (fp.kernels.ULA,), {"__module__": __name__}))
    assert named(fp.kernels.Kernel, "hmc", "kernel") is fp.kernels.HMC
    assert type(rebuilt(through_a_file(theirs()), {})) is theirs


def test_a_population_with_a_kernel_called_hmc_is_saved_and_loaded(tmp_path: Path) -> None:
    own_steps = fp.FedSOUL(softmax(), kernel="hmc", local_steps=2, final=fp.chains.Final(1, 3, 3))
    usual = own_steps.fit(clients(), rounds=1, progress=False)
    usual.save(tmp_path / "ours")

    @dataclass(frozen=True)
    class HMC(fp.kernels.ULA):
        name: ClassVar[str] = "HMC"

    theirs = own_steps.replace(kernel=HMC()).fit(clients(), rounds=1, progress=False)
    theirs.save(tmp_path / "theirs")
    assert type(fp.FedSOUL(softmax(), kernel="hmc").sampler.kernel) is fp.kernels.HMC
    found = {name: fp.load(tmp_path / name).algorithm.sampler.kernel for name in ("ours", "theirs")}
    assert found == {"ours": fp.kernels.HMC(), "theirs": HMC()}
    config = tmp_path / "run"
    own_steps.replace(kernel=HMC()).fit(clients(), rounds=1, out=config, progress=False)
    told = json.loads((config / "config.json").read_text())["algorithm"]["kernel"]["kind"]
    assert told.endswith(":" + HMC.__qualname__)
    again = own_steps.replace(kernel=HMC()).fit(clients(), rounds=2, out=config, resume=True, progress=False)
    assert again.rounds == 2


def test_a_class_that_has_moved_is_found_by_its_name() -> None:
    @dataclass(frozen=True)
    class Walk(fp.kernels.ULA):
        name: ClassVar[str] = "Walk"

    assert rebuilt({"kind": "an.older.module:Walk"}, {}) == Walk()
    assert rebuilt({"kind": "Walk"}, {}) == Walk()  # as files had it before


def test_methods() -> None:
    described = fp.FedAvg(linear_model()).describe()

    @dataclass(frozen=True, kw_only=True)
    class FedAvg(fp.FedAvg):
        boost: float = 2.0

    assert type(rebuild(described, "FedAvg", linear_model())) is METHODS["FedAvg"] is fp.FedAvg
    assert known(Algorithm)["FedAvg"] is fp.FedAvg
    assert type(method_from("FedAvg", {}, linear_model(), "here")) is fp.FedAvg
    theirs = FedAvg(linear_model(), boost=3.0)
    again = rebuild(json.loads(json.dumps(theirs.describe())), name_of(FedAvg), linear_model())
    assert type(again) is FedAvg
    assert again.boost == 3.0
    assert type(method_from(name_of(FedAvg), {"boost": 4.0}, linear_model(), "here")) is FedAvg


def test_a_population_of_a_method_called_fedavg(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class FedAvg(fp.FedAvg):
        pass

    FedAvg(softmax()).fit(clients(), rounds=1, progress=False).save(tmp_path / "theirs")
    fp.FedAvg(softmax()).fit(clients(), rounds=1, progress=False).save(tmp_path / "ours")
    assert type(fp.load(tmp_path / "theirs").algorithm) is FedAvg
    assert type(fp.load(tmp_path / "ours").algorithm) is fp.FedAvg


def test_settings_files_name_ours_and_theirs() -> None:
    theirs = own(fp.steps.Adam)
    for kind, cls in (("Adam", fp.steps.Adam), (name_of(theirs), theirs)):
        method = method_from("FedSOUL", {"phi_step": {"kind": kind, "rate": 0.5}}, linear_model(), "here")
        assert type(method.phi_step) is cls  # type: ignore[attr-defined]
        assert method.phi_step.rate == 0.5  # type: ignore[attr-defined]


def test_questions() -> None:
    @dataclass(frozen=True)
    class Mine(Question[Tensors]):
        minimum: int = 3
        name: ClassVar[str] = "mine"

        def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
            raise NotImplementedError

        def finish(self, known: Tensors, total: Total) -> Tensors:
            return {}

    Mine.__name__ = "SecondMoments"
    ours, _ = describe_question(SecondMoments(minimum=5), {})
    theirs, _ = describe_question(Mine(4), {})
    assert ours["kind"] == "SecondMoments" != theirs["kind"]
    assert question_from_description(ours, {}, None) == SecondMoments(minimum=5)
    assert question_from_description(json.loads(json.dumps(theirs)), {}, None) == Mine(4)


def test_likelihoods() -> None:
    before = model_spec(linear_model())

    @dataclass(frozen=True)
    class Normal(fp.likelihoods.Normal):
        tails: float = 1.0
        name: ClassVar[str] = "normal"

    assert type(fp.Composition(None, nn.Linear(1, 1), "normal").likelihood) is fp.likelihoods.Normal
    assert type(model_from(before).likelihood) is fp.likelihoods.Normal
    mine = fp.Composition(None, nn.Linear(1, 1), Normal(2.0, tails=3.0))
    again = model_from(json.loads(json.dumps(model_spec(mine))))
    assert type(again.likelihood) is Normal
    assert again.likelihood == Normal(2.0, tails=3.0)
