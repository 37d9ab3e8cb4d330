"""fedpop: personalised federated learning that knows what it does not know.

Methods, models, data and what is done with them are here; what they are made of is in modules by kind:
``kernels``, ``priors``, ``likelihoods``, ``links``, ``steps``, ``chains``, ``compressors``,
``participation``, ``privacy``, ``aggregates``, ``layers``, ``networks``, ``data`` and ``callbacks``.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

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
    FedBE,
    FedPer,
    FedProx,
    FedRep,
    FedSOUK,
    FedSOUL,
    LGFedAvg,
    LocalOnly,
    MaximumMarginalLikelihood,
    PerFedAvg,
    PFedMe,
)
from fedpop.methods.base import Algorithm as _Algorithm
from fedpop.models import likelihoods, links, networks
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.split import Split
from fedpop.population import Population, evaluate, load
from fedpop.version import __version__ as __version__

if _TYPE_CHECKING:
    from fedpop import callbacks, data
    from fedpop.comparison import compare
    from fedpop.mixed.model import mixed_model
    from fedpop.run.simulate import fit
else:
    # What no site of a federation needs is imported when it is asked for: there, every message starts a
    # process.
    _LATER = {
        "callbacks": "fedpop",
        "compare": "fedpop.comparison",
        "data": "fedpop",
        "fit": "fedpop.run.simulate",
        "mixed_model": "fedpop.mixed.model",
    }

    def __getattr__(name: str) -> _Any:
        where = _LATER.get(name)
        if where is None:
            raise AttributeError(f"module 'fedpop' has no attribute {name!r}")
        found = (
            _import_module(f"fedpop.{name}") if where == "fedpop" else getattr(_import_module(where), name)
        )
        return globals().setdefault(name, found)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _fit(*given: _Any, **more: _Any) -> _Any:
    return _import_module("fedpop.run.simulate").fit(*given, **more)


_Algorithm.runs_on = _fit

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
    "MaximumMarginalLikelihood",
    "PFedMe",
    "PerFedAvg",
    "Population",
    "Split",
    "Table",
    "aggregates",
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
    "privacy",
    "steps",
]
