"""Federated methods, one file each, under one contract (``base.py``)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from fedpop.algorithms.apfl import APFL
from fedpop.algorithms.base import Algorithm
from fedpop.algorithms.dg_lmc import DGLMC
from fedpop.algorithms.ditto import Ditto
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.fedavg_ft import FedAvgFT
from fedpop.algorithms.fedbe import Distillation, FedBE
from fedpop.algorithms.fedper import FedPer
from fedpop.algorithms.fedprox import FedProx
from fedpop.algorithms.fedrep import FedRep
from fedpop.algorithms.fedsouk import FedSOUK, Final
from fedpop.algorithms.fedsoul import FedSOUL
from fedpop.algorithms.fsgld import FSGLD
from fedpop.algorithms.l2gd import L2GD
from fedpop.algorithms.lg_fedavg import LGFedAvg
from fedpop.algorithms.local_only import LocalOnly
from fedpop.algorithms.per_fedavg import PerFedAvg
from fedpop.algorithms.pfedme import PFedMe
from fedpop.algorithms.qlsd import QLSD
from fedpop.algorithms.scaffold import SCAFFOLD
from fedpop.channel import QSGD, Identity, Natural, RandK
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.local_steps import Steps
from fedpop.errors import CheckpointError
from fedpop.kernels import HMC, MALA, SGLD, ULA, Exponential, JumpHMC, MixtureDraw
from fedpop.models.base import Model
from fedpop.priors.em import EM
from fedpop.priors.energy import Energy
from fedpop.priors.hyper import Hyperprior
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import Normal
from fedpop.server.averaging import Averaging
from fedpop.server.optimisers import SGD, Adam, Average
from fedpop.server.schedules import Constant, Cosine, Decay, Polynomial
from fedpop.server.start import SpectralStart

__all__ = [
    "APFL",
    "DGLMC",
    "EM",
    "FSGLD",
    "L2GD",
    "METHODS",
    "QLSD",
    "SCAFFOLD",
    "Algorithm",
    "Distillation",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedBE",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "Final",
    "Hyperprior",
    "LGFedAvg",
    "LocalOnly",
    "LocalSGD",
    "PFedMe",
    "PerFedAvg",
    "Steps",
    "rebuild",
]

METHODS: dict[str, type[Algorithm]] = {
    m.__name__: m
    for m in (
        FedSOUL,
        FedSOUK,
        LocalOnly,
        FedAvg,
        FedAvgFT,
        FedProx,
        SCAFFOLD,
        FedPer,
        FedRep,
        LGFedAvg,
        Ditto,
        APFL,
        PerFedAvg,
        PFedMe,
        L2GD,
        QLSD,
        FSGLD,
        FedBE,
        DGLMC,
    )
}

_SETTINGS: dict[str, type] = {
    c.__name__: c
    for c in (
        ULA,
        HMC,
        MALA,
        SGLD,
        Exponential,
        JumpHMC,
        MixtureDraw,
        Normal,
        Mixture,
        Energy,
        Adam,
        Average,
        SGD,
        EM,
        Hyperprior,
        Averaging,
        Final,
        SpectralStart,
        LocalSGD,
        Distillation,
        Identity,
        QSGD,
        RandK,
        Natural,
        Steps,
        Constant,
        Polynomial,
        Cosine,
        Decay,
    )
}


def rebuild(described: dict[str, Any], method: str, model: Model, **given: Any) -> Algorithm:
    """The method that ``Algorithm.describe`` described, with ``given`` settings in the place of its own."""
    if method not in METHODS:
        raise CheckpointError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    cls = METHODS[method]
    known = {f.name for f in fields(cls)} - {"model"}
    settings = {k: _value(v) for k, v in described.items() if k in known - set(given)}
    return cls(model, **settings, **given)


def rebuilt_module(spec: dict[str, Any] | None) -> nn.Module:
    """A network among the settings (an energy's): its values are in theta."""
    from fedpop.models.spec import module_from

    if spec is None:
        raise CheckpointError(
            "this prior's network is not made of torch's own layers only, so it cannot be rebuilt from the "
            "file; give it again: fedpop.load(path, prior=...)"
        )
    return module_from(spec)


def _value(value: Any) -> Any:
    if isinstance(value, dict) and value.get("kind") == "Module":
        return rebuilt_module(value["spec"])
    if isinstance(value, dict) and "kind" in value:
        if value["kind"] not in _SETTINGS:
            raise CheckpointError(
                f"unknown setting {value['kind']!r}: it was saved with a class that this fedpop does not have"
            )
        inner = {k: _value(v) for k, v in value.items() if k != "kind"}
        return _SETTINGS[value["kind"]](**inner)
    return tuple(_value(v) for v in value) if isinstance(value, list) else value
