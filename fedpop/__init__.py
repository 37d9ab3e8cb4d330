"""fedpop: personalised federated learning that knows what it does not know.

Methods, models, data and what is done with them are here; what they are made of is in modules by kind:
``kernels``, ``priors``, ``likelihoods``, ``links``, ``steps``, ``chains``, ``compressors``,
``participation``, ``privacy``, ``aggregates``, ``layers``, ``networks``, ``data`` and ``callbacks``.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from fedpop.version import __version__ as __version__

if _TYPE_CHECKING:
    from fedpop import (
        aggregates,
        callbacks,
        chains,
        compressors,
        data,
        kernels,
        layers,
        participation,
        priors,
        privacy,
        steps,
    )
    from fedpop.client.local_sgd import LocalSGD
    from fedpop.comparison import compare
    from fedpop.comparison.search import tune
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
    from fedpop.mixed.model import mixed_model
    from fedpop.models import likelihoods, links, networks
    from fedpop.models.composition import Composition
    from fedpop.models.custom import CustomModel
    from fedpop.models.split import Split
    from fedpop.population import Population, evaluate
    from fedpop.run.simulate import fit
    from fedpop.saved import load
else:
    # torch is imported with the first name that is asked for: what has none to ask for, as most of the
    # command line, does not wait for it. These are no part of ``fedpop.names`` and come later still.
    _LATER = {
        "callbacks": "fedpop",
        "compare": "fedpop.comparison",
        "data": "fedpop",
        "fit": "fedpop.run.simulate",
        "mixed_model": "fedpop.mixed.model",
        "tune": "fedpop.comparison.search",
    }

    def __getattr__(name: str) -> _Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'fedpop' has no attribute {name!r}")
        if (where := _LATER.get(name)) is not None:
            found = (
                _import_module(f"fedpop.{name}")
                if where == "fedpop"
                else getattr(_import_module(where), name)
            )
            return globals().setdefault(name, found)
        names = _import_module("fedpop.names")
        if name in globals():  # a package, which is an attribute once it is imported
            return globals()[name]
        if name not in __all__ or not hasattr(names, name):
            raise AttributeError(f"module 'fedpop' has no attribute {name!r}")
        return globals().setdefault(name, getattr(names, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
    "FedBABU",
    "FedBE",
    "FedDBE",
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
    "PFedBayes",
    "PFedFDA",
    "PFedMe",
    "PFedVEM",
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
    "tune",
]
