"""Federated methods, one file each, under one contract (``base.py``)."""

from __future__ import annotations

from typing import Any

from fedpop.errors import CheckpointError
from fedpop.methods.apfl import APFL
from fedpop.methods.base import About, Algorithm, Facts, Round
from fedpop.methods.dg_lmc import DGLMC
from fedpop.methods.ditto import Ditto
from fedpop.methods.fedavg import FedAvg
from fedpop.methods.fedavg_ft import FedAvgFT
from fedpop.methods.fedbabu import FedBABU
from fedpop.methods.fedbe import Distillation, FedBE
from fedpop.methods.feddbe import FedDBE
from fedpop.methods.fedper import FedPer
from fedpop.methods.fedprox import FedProx
from fedpop.methods.fedrep import FedRep
from fedpop.methods.fedsouk import FedSOUK
from fedpop.methods.fedsoul import FedSOUL
from fedpop.methods.fsgld import FSGLD
from fedpop.methods.l2gd import L2GD
from fedpop.methods.lg_fedavg import LGFedAvg
from fedpop.methods.local_only import LocalOnly
from fedpop.methods.marginal_ml import MaximumMarginalLikelihood
from fedpop.methods.per_fedavg import PerFedAvg
from fedpop.methods.pfedbayes import PFedBayes
from fedpop.methods.pfedfda import PFedFDA
from fedpop.methods.pfedme import PFedMe
from fedpop.methods.pfedvem import PFedVEM
from fedpop.methods.qlsd import QLSD
from fedpop.methods.scaffold import SCAFFOLD
from fedpop.models.base import Model
from fedpop.models.spec import described_module
from fedpop.settings import class_of, known, rebuilt_fields

__all__ = [
    "APFL",
    "DGLMC",
    "FSGLD",
    "L2GD",
    "METHODS",
    "QLSD",
    "SCAFFOLD",
    "About",
    "Algorithm",
    "Distillation",
    "Ditto",
    "Facts",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBE",
    "FedDBE",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "LGFedAvg",
    "LocalOnly",
    "MaximumMarginalLikelihood",
    "PFedBayes",
    "PFedFDA",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Round",
    "rebuild",
]

METHODS: dict[str, type[Algorithm]] = {
    m.__name__: m
    for m in (
        FedSOUL,
        FedSOUK,
        MaximumMarginalLikelihood,
        LocalOnly,
        FedAvg,
        FedAvgFT,
        FedProx,
        SCAFFOLD,
        FedPer,
        FedRep,
        LGFedAvg,
        FedBABU,
        FedDBE,
        PFedFDA,
        PFedVEM,
        PFedBayes,
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
"""fedpop's own, in the order of tables; a method that is to be compared and tested by name is added here."""


def known_methods() -> dict[str, type[Algorithm]]:
    """Every method by the name of its class: fedpop's, and those that a user has defined."""
    return {n: c for n, c in known(Algorithm).items() if hasattr(c, "name")} | METHODS


def method_class(name: str) -> type[Algorithm] | None:
    """The method of this name, which is what files call it."""
    return class_of(Algorithm, name) if ":" in name else known_methods().get(name)


def rebuild(described: dict[str, Any], method: str, model: Model, **given: Any) -> Algorithm:
    """The method that ``Algorithm.describe`` described, with ``given`` settings in the place of its own."""
    cls = method_class(method)
    if cls is None:
        raise CheckpointError(
            f"unknown method {method!r}; known are {', '.join(known_methods())} (one of your own is known "
            "once the module that defines it is imported)"
        )
    settings = {k: v for k, v in described.items() if k not in ("model", *given)}
    return cls(model, **rebuilt_fields(settings, cls, {"Module": described_module}), **given)
