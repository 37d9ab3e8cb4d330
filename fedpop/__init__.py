"""fedpop: personalised federated learning that knows what it does not know.

Methods, models, data and what is done with them are here; what they are made of is in modules by kind:
``kernels``, ``priors``, ``likelihoods``, ``links``, ``steps``, ``chains``, ``compressors``,
``participation``, ``layers``, ``networks``, ``data`` and ``callbacks``.
"""

from fedpop import callbacks, chains, compressors, data, kernels, layers, participation, priors, steps
from fedpop.algorithms import (
    APFL,
    DGLMC,
    FSGLD,
    L2GD,
    QLSD,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedBE,
    FedPer,
    FedProx,
    FedRep,
    FedSOUK,
    FedSOUL,
    LGFedAvg,
    LocalOnly,
    PerFedAvg,
    PFedMe,
)
from fedpop.algorithms.base import Algorithm as _Algorithm
from fedpop.client.local_sgd import LocalSGD
from fedpop.experiments.comparison import compare
from fedpop.federation.clients import Client, Federation, Table
from fedpop.federation.held_out import hold_out
from fedpop.mixed.model import mixed_model
from fedpop.models import likelihoods, links, networks
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.split import Split
from fedpop.population import Population, evaluate, load
from fedpop.runtime.simulate import fit
from fedpop.version import __version__ as __version__

_Algorithm.runs_on = fit

__all__ = [
    "APFL",
    "DGLMC",
    "FSGLD",
    "L2GD",
    "QLSD",
    "SCAFFOLD",
    "Client",
    "Composition",
    "CustomModel",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedBE",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "Federation",
    "LGFedAvg",
    "LocalOnly",
    "LocalSGD",
    "PFedMe",
    "PerFedAvg",
    "Population",
    "Split",
    "Table",
    "callbacks",
    "chains",
    "compare",
    "compressors",
    "data",
    "evaluate",
    "fit",
    "hold_out",
    "kernels",
    "layers",
    "likelihoods",
    "links",
    "load",
    "mixed_model",
    "networks",
    "participation",
    "priors",
    "steps",
]
