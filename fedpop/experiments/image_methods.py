"""The methods of the experiments on images, with their steps: one local epoch a round for all who take any.

Nothing here was chosen on test images. What a method cannot do as the others do is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from fedpop.algorithms.apfl import APFL
from fedpop.algorithms.base import Algorithm
from fedpop.algorithms.dg_lmc import DGLMC
from fedpop.algorithms.ditto import Ditto
from fedpop.algorithms.fedavg import FedAvg
from fedpop.algorithms.fedavg_ft import FedAvgFT
from fedpop.algorithms.fedbe import FedBE
from fedpop.algorithms.fedrep import FedRep
from fedpop.algorithms.fedsoul import FedSOUL
from fedpop.algorithms.l2gd import L2GD
from fedpop.algorithms.lg_fedavg import LGFedAvg
from fedpop.algorithms.local_only import LocalOnly
from fedpop.algorithms.per_fedavg import PerFedAvg
from fedpop.algorithms.pfedme import PFedMe
from fedpop.algorithms.qlsd import QLSD
from fedpop.algorithms.scaffold import SCAFFOLD
from fedpop.client.local_sgd import LocalSGD
from fedpop.client.phi_step import PhiStep
from fedpop.federation.clients import Federation
from fedpop.models.base import Model

TUNED = 10
"""Epochs of a client's own after training, for methods that tune: counted in nobody's budget."""
MEMBERS = 20
"""Models that chains on the whole network keep: every one costs a pass over all test images."""

Build = Callable[[Model], Algorithm]


def _own(rate: float, batch: int) -> LocalSGD:
    return LocalSGD(1, rate, batch, momentum=0.9, decay=1e-3)


def methods(rate: float, batch: int) -> dict[str, Build]:
    """FedSOUL as it is, and with local epochs; the others with one local epoch a round."""
    own = _own(rate, batch)
    tune = LocalSGD(TUNED, rate / 2, batch)
    heads = LocalSGD(TUNED, rate, batch, momentum=0.9)
    return {
        "FedSOUL": FedSOUL,
        "FedSOUL-local": lambda model: FedSOUL(model, phi_step=PhiStep(local=own)),
        "FedRep": lambda model: FedRep(model, head=heads, body=own),
        "FedAvg-FT": lambda model: FedAvgFT(model, local=own, fine_tune=tune),
        "Ditto": lambda model: Ditto(model, local=own, personal=own),
        "APFL": lambda model: APFL(model, local=own),
        "Local": lambda model: LocalOnly(model, local=own),
    }


def further(rate: float, batch: int) -> dict[str, Build]:
    """The others of the paper's table, and pFedMe.

    SCAFFOLD and pFedMe step without momentum, so their steps are longer; L2GD has everybody in every round.
    """
    own = _own(rate, batch)
    plain = LocalSGD(1, 5 * rate, batch, decay=1e-3)
    near = LocalSGD(1, 0.05, batch)
    return {
        "FedAvg": lambda model: FedAvg(model, local=own),
        "SCAFFOLD": lambda model: SCAFFOLD(model, local=plain),
        "LG-FedAvg": lambda model: LGFedAvg(model, local=own),
        "Per-FedAvg": lambda model: PerFedAvg(
            model, alpha=rate, variant="first-order", local=own, adapt_steps=TUNED
        ),
        "L2GD": lambda model: L2GD(model, local=own),
        "pFedMe": lambda model: PFedMe(model, local=near),
    }


BAYESIAN = ("FedBE", "QLSD", "DG-LMC")


def bayesian(rate: float, batch: int, federation: Federation) -> dict[str, Build]:
    """Methods with samples of the whole network, the same for all clients; none of them is personalised.

    Steps of chains are as long as those of plain SGD: asking all clients for the curvature, by which they
    are chosen unless told, takes more passes than the whole budget. A client of DG-LMC is held to the
    server's model by a quarter of what its own step allows.
    """
    examples = len(federation.train.y)
    own = 5 * rate * len(federation) / examples
    return {
        "FedBE": lambda model: FedBE(model, local=_own(rate, batch)),
        "QLSD": lambda model: QLSD(model, step=5 * rate / examples, batch=batch, samples=MEMBERS),
        "DG-LMC": lambda model: DGLMC(model, step=own, rho=4 * own, batch=batch, samples=MEMBERS),
    }
