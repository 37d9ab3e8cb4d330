"""A population with two clusters: which prior predicts clients that were never seen?

Normal, mixture and energy priors are learned by the same rounds of the same method from the same start, and
compared on new clients' predictive log-likelihood, without any data of theirs and with a few examples. phi is
identified only up to an invertible matrix, so they are compared by predictions. "Truth" is the mixture that
the data were drawn from: what no prior can beat but by luck.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.algorithms import FedSOUL
from fedpop.algorithms.fedsouk import FedSOUK
from fedpop.data.clusters import ClusterTask
from fedpop.data.synthetic import Synthetic
from fedpop.experiments.synthetic import held_out
from fedpop.federation.clients import Client, Federation
from fedpop.keys import Key
from fedpop.population import Population
from fedpop.priors.base import Prior
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import Normal
from fedpop.report.results import Record, record

EXPERIMENT = "clusters"
ROUNDS = 200
LOCAL_STEPS = 5
SHOTS = (0, 2, 5)
"""Examples that a new client has."""
TASK = ClusterTask()
NAMES = ("Normal", "Mixture", "Energy", "Truth")


def setting_of(task: ClusterTask) -> dict[str, Any]:
    keys = ("b", "d", "k", "centres", "weights", "sd", "new", "share_small", "n_small", "n_large")
    plain: dict[str, Any] = json.loads(json.dumps(asdict(task)))  # tuples are lists in a file
    return {k: plain[k] for k in keys}


def prior_named(name: str) -> Prior:
    return {"Normal": Normal(), "Mixture": Mixture(2), "Energy": Energy()}[name]


def truth(task: ClusterTask, data: Synthetic, seed: int) -> Population:
    """The population that the data were drawn from."""
    method = FedSOUL(task.model(seed), prior=Mixture(len(task.centres)))
    log_weights = torch.tensor(task.weights).log()
    parts = [torch.tensor([*centre, math.log(task.sd)]) for centre in task.centres]
    published = {"phi": data.phi.mT.reshape(-1).float(), "beta": torch.cat((log_weights, *parts))}
    return Population(method, published, Key(seed), method.model.prepare(Federation.of(data.clients)))


def few_shot(population: Population, new: Synthetic, shots: int) -> dict[str, float]:
    """New clients' held-out log-likelihood and coverage, given so many examples of each."""
    if shots == 0:
        newcomer = population.new_client()
        return held_out(lambda i, x: newcomer.predict(x), new)
    clients = [Client(c.x[:shots], c.y[:shots]) for c in new.clients]
    federation = population.model.prepare(Federation.of(clients))
    # What new_client(x, y) does, for all of them at once: nothing is trained or sent.
    key = population.key.at(purpose=f"new-{shots}")
    newcomers = Population(population.algorithm, population.published, key, federation).sample_all()
    return held_out(lambda i, x: newcomers.predict(i, x), new)


def scores(population: Population, data: Synthetic, new: Synthetic) -> dict[str, float]:
    """Predictive log-likelihood per example of clients in training and of new ones, and the marginal one."""
    known = held_out(lambda i, x: population.predict(i, x), data)
    out = {"log_likelihood": known["log_likelihood"], "coverage90": known["coverage90"]}
    for shots in SHOTS:
        found = few_shot(population, new, shots)
        out |= {
            f"log_likelihood_{shots}": found["log_likelihood"],
            f"coverage90_{shots}": found["coverage90"],
        }
    out["marginal"] = population.log_likelihood().value
    return out


def run_seed(
    task: ClusterTask,
    seed: int,
    folder: Path | None = None,
    rounds: int = ROUNDS,
    names: tuple[str, ...] = NAMES,
) -> list[Record]:
    """All priors on one draw of the task; what was learned is saved below ``folder``."""
    data, new = task.split(seed)
    records = []
    for name in names:
        if name == "Truth":
            population = truth(task, data, seed)
        else:
            method = FedSOUL(task.model(seed), prior=prior_named(name), local_steps=LOCAL_STEPS)
            population = method.fit(data.clients, rounds=rounds, seed=seed, progress=False)
        population.sample_all()
        cost = population.totals | {"rounds": population.rounds}
        config = population.algorithm.describe()
        metrics = scores(population, data, new)
        records.append(record(EXPERIMENT, setting_of(task), name, seed, metrics, cost, config))
        if folder is not None:
            population.public().save(folder / "populations" / name)
    return records


def job(seed: int, folder: Path) -> list[Record]:
    """The records of one seed, for a worker process; the first one's populations are kept for the figure."""
    torch.set_num_threads(1)
    return run_seed(TASK, seed, folder if seed == 0 else None)


def density_in_true_coordinates(population: Population, phi: Tensor, points: Tensor) -> Tensor:
    """The learned prior's density (up to a constant) where the truth's z are ``points`` ``[G, d]``.

    phi_hat z_hat = phi z, so z_hat = pinv(phi_hat) phi z.
    """
    method = population.algorithm
    assert isinstance(method, FedSOUK)
    k, d = phi.shape
    learned = population.published["phi"][: k * d].reshape(d, k).mT.double()
    z = points @ (torch.linalg.pinv(learned) @ phi).mT
    beta = population.published["beta"].double()
    with torch.no_grad():
        log_density = method.prior.log_prob(beta, z)
    return (log_density - log_density.max()).exp()
