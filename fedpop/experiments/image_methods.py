"""The methods of the experiments on images, with settings from files that lie beside this one.

Nothing there was chosen on test images: ``fedpop tune`` chooses on others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources

from fedpop.client.local_sgd import LocalSGD
from fedpop.experiments.methods import Entry, entry_from, in_line
from fedpop.federation.clients import Federation
from fedpop.methods.base import Algorithm
from fedpop.methods.dg_lmc import DGLMC
from fedpop.methods.fedbe import FedBE
from fedpop.methods.qlsd import QLSD
from fedpop.models.base import Model
from fedpop.report.html import Sheet
from fedpop.server.schedules import Cosine

MEMBERS = 20
"""Models that chains on the whole network keep: every one costs a pass over all test images."""

Build = Callable[[Model], Algorithm]


def entries(name: str) -> dict[str, Entry]:
    """The rows of ``settings/NAME.toml`` by their labels."""
    path = resources.files("fedpop.experiments").joinpath("settings", f"{name}.toml")
    tables = tomllib.loads(path.read_text("utf-8"))["method"]
    return {e.label: e for e in (entry_from(table, f"settings/{name}.toml") for table in tables)}


def methods(name: str) -> dict[str, Build]:
    """What makes each of them on a model.

    >>> "FedSOUL" in methods("small-data")
    True
    """
    return {label: entry.build for label, entry in entries(name).items()}


def settings_of(name: str) -> Sheet:
    """What each of them has that is not its default."""
    rows = [(label, in_line(e.settings) or "as they are") for label, e in entries(name).items()]
    return Sheet(("method", "settings"), rows)


BAYESIAN = ("FedBE", "QLSD", "DG-LMC")


def bayesian(own: LocalSGD, federation: Federation) -> dict[str, Build]:
    """Methods with samples of the whole network, the same for all clients; none of them is personalised.

    Steps of chains are as long as those of SGD without momentum: asking all clients for the curvature, by
    which they are chosen unless told, takes more passes than the whole budget. A client of DG-LMC is held to
    the server's model by a quarter of what its own step allows.
    """
    examples, plain = len(federation.train.y), 5 * own.rate
    step = plain * len(federation) / examples
    return {
        "FedBE": lambda model: FedBE(model, local=own, schedule=Cosine()),
        "QLSD": lambda model: QLSD(model, step=plain / examples, batch=own.batch, samples=MEMBERS),
        "DG-LMC": lambda model: DGLMC(model, step=step, rho=4 * step, batch=own.batch, samples=MEMBERS),
    }
