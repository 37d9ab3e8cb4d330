"""All public names that are imported together, and that methods run on the simulator."""

# ruff: noqa: F401

from importlib import import_module
from typing import Any

from fedpop import aggregates, chains, compressors, kernels, layers, participation, priors, privacy, steps
from fedpop.client.local_sgd import LocalSGD
from fedpop.federation.clients import Client, Federation, Table
from fedpop.federation.held_out import hold_out
from fedpop.methods import (
    APFL,
    DGLMC,
    FSGLD,
    L2GD,
    QLSD,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBE,
    FedDBE,
    FedPer,
    FedProx,
    FedRep,
    FedSOUK,
    FedSOUL,
    LGFedAvg,
    LocalOnly,
    MaximumMarginalLikelihood,
    PerFedAvg,
    PFedBayes,
    PFedFDA,
    PFedMe,
    PFedVEM,
)
from fedpop.methods.base import Algorithm as _Algorithm
from fedpop.models import likelihoods, links, networks
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.split import Split
from fedpop.population import Population, evaluate
from fedpop.saved import load


def run_on_simulator(*given: Any, **more: Any) -> Any:
    """``fedpop.fit``, which is imported once a method is fitted."""
    return import_module("fedpop.run.simulate").fit(*given, **more)


_Algorithm.runs_on = run_on_simulator
