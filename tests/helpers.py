"""Small federations and models that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation import Participation
from fedpop.keys import Key
from fedpop.message import Answer, Channel, Tensors, Total
from fedpop.methods.base import Algorithm, Asks, Facts, Remembers, Round, usual_participation
from fedpop.models.base import Model
from fedpop.questions import Question, Units
from fedpop.run.run import Run, Settings
from fedpop.site.plan import Plan, plan_for
from fedpop.site.sites import settled_states
from tests.tally import Tally

FRAME = 12 + 1
"""Bytes of an uncompressed vector beside its numbers: the frame, and how wide they are."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(module: nn.Module, seed: int = 0, size: float = 0.5) -> nn.Module:
    """The module with keyed weights, so that tests do not depend on torch's global generator."""
    g = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))
    return module


def linear_model(k: int = 3, d: int = 2, variance: float | str = 0.5, seed: int = 0) -> fp.Composition:
    """y = z' W x + noise, without biases: the paper's synthetic model."""
    return fp.Composition(
        seeded(nn.Linear(k, d, bias=False), seed),
        seeded(nn.Linear(d, 1, bias=False), seed + 1),
        fp.likelihoods.Normal(variance),
    )


def two_classes() -> fp.Composition:
    """A linear head with biases over two classes, on three inputs."""
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 2), 2), "categorical")


def ragged(sizes: tuple[int, ...] = (3, 0, 5, 1), k: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Clients of these sizes with standard normal x and y."""
    g = generator(seed)
    return [(torch.randn(n, k, generator=g), torch.randn(n, generator=g)) for n in sizes]


def population_data(
    b: int, n: int, k: int, d: int, variance: float, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Clients of y = x' phi z + noise, z standard normal; and the truth, phi ``[k, d]`` and z ``[b, d]``."""
    g = generator(seed)
    phi = torch.linalg.qr(torch.randn(k, d, generator=g))[0]
    z = torch.randn(b, d, generator=g)
    x = torch.randn(b, n, k, generator=g)
    noise = torch.randn(b, n, generator=g)
    y = torch.einsum("bnk,kd,bd->bn", x, phi, z) + variance**0.5 * noise
    return [(x[i], y[i]) for i in range(b)], phi, z


def federation_of(model: Model, clients: Any) -> fp.Federation:
    """Clients checked and cast as in a run."""
    federation = fp.Federation.of(clients)
    return model.prepared(federation.example).checked(federation)


def cohort_of(model: Model, clients: Any) -> Cohort:
    """All clients as one cohort, checked and cast as in a run."""
    federation = federation_of(model, clients)
    return federation.cohort(torch.arange(len(federation)), model.initial_phi().device)


def train_key(round: int = 0, seed: int = 0) -> Key:
    return Key(seed).at(round=round, purpose="train")


def site_key(round: int = 0, seed: int = 0) -> Key:
    """The key of all sites in a round of a run with this seed."""
    return Key(seed, purpose="site").at(round=round, purpose="train")


def by_name(values: Sequence[Any]) -> dict[str, Any]:
    """One value for each client of a list, by the names that a federation gives them (ten at most)."""
    assert len(values) <= 10
    return {f"client-{i}": value for i, value in enumerate(values)}


def run_of(
    method: Algorithm, clients: Any, rounds: int = 10, rule: Participation | None = None, seed: int = 0
) -> Run:
    """A run that has asked its questions and stands before its first round."""
    federation = fp.Federation.of(clients)
    method = method.prepared(federation.example)
    rule = usual_participation(method) if rule is None else rule
    run = Run(method, method.model.checked(federation), Settings(rounds, seed, rule))
    run.begin()
    return run


def plan_of(method: Algorithm, federation: fp.Federation, budget: int) -> Plan:
    """The plan that a run of the method has."""
    return plan_for(method.model, federation, budget, method.footprint.draws, method.footprint.phi_copies)


@dataclass(frozen=True)
class Answered:
    """A cohort's round, heard by the server."""

    total: Total
    local: Tensors
    """What units keep of it, once they know who was heard."""
    cost: dict[str, float]
    bytes_up: int
    left_out: tuple[int, ...]
    """Positions of units that were not heard."""


def answers(
    method: Algorithm,
    cohort: Cohort,
    local: Tensors,
    broadcast: Tensors,
    key: Key,
    weights: Tensor | None = None,
    of: int | None = None,
    ratio: bool = True,
) -> Answered:
    """A ``local_round`` of a cohort through the method's channel, added up; site and server share a key."""
    channel, everyone = method.channel, torch.arange(len(cohort))
    weights = torch.ones(len(cohort)) if weights is None else weights
    tally = Tally(channel, key, method.remembers if isinstance(method, Remembers) else ())
    wanted = weights if channel.transparent else None
    done = method.local_round(Round(key.round, broadcast, key, key, wanted, channel.omega), cohort, local)
    new, cost, heard = dict(local), dict[str, float](), torch.zeros(len(cohort), dtype=torch.bool)
    for answer in [done] if isinstance(done, Answer) else done:
        rows = everyone if answer.rows is None else answer.rows
        told = tally.add(answer, cohort.units[rows], weights[rows])
        heard[rows] = told.heard
        for name, value in settled_states(method, answer, local, told.heard, told.seen).items():
            base = new.get(name, value.new_zeros((len(cohort), *value.shape[1:])))
            new[name] = base.index_copy(0, rows, value)
        for name, number in answer.cost.items():
            cost[name] = cost.get(name, 0.0) + number
    total = tally.total(len(cohort) if of is None else of, ratio)
    return Answered(total, new, cost, tally.bytes_up, tuple((~heard).nonzero().squeeze(1).tolist()))


def asked(question: Question[Any], cohort: Cohort, known: Tensors, key: Key) -> tuple[Any, Answered]:
    """A question to a cohort: what is made of the sum, and the answers themselves."""
    units = Units(cohort, {}, personal=dict, split=lambda split: cohort)
    answer = question.answer(question.ask(known), units, key)
    tally = Tally(Channel(), key)
    heard = tally.add(answer, cohort.units, torch.ones(len(cohort))).heard
    total = tally.total(len(cohort), ratio=False)
    kept = {n: v.where(heard.reshape(-1, *[1] * (v.dim() - 1)), 0.0) for n, v in answer.local.items()}
    left_out = tuple((~heard).nonzero().squeeze(1).tolist())
    done = Answered(total, kept, dict(answer.cost), tally.bytes_up, left_out)
    return question.finish(known, total), done


def begun(method: Algorithm, cohort: Cohort, facts: Facts, key: Key) -> tuple[Tensors, Tensors]:
    """The server before the first round and everyone's first states, all questions asked."""
    known: Tensors = {}
    noted: Tensors = {}
    for question in method.questions(facts, key) if isinstance(method, Asks) else ():
        found, done = asked(question, cohort, known, key.at(purpose=question.name))
        known, noted = known | found, noted | done.local
    server = method.init(facts, key, known)
    return server, method.enter(cohort.units, method.broadcast(server), key) | noted


@dataclass(frozen=True)
class Quadratics:
    """Clients with f_i(w) = (w - w_i)' H_i (w - w_i) / 2 + constant: linear regression, in double."""

    model: fp.Composition
    clients: list[tuple[Tensor, Tensor]]
    curvature: Tensor
    """H_i, ``[b, k, k]``."""
    optimum: Tensor
    """w_i, ``[b, k]``."""

    def gradient(self, i: int, w: Tensor) -> Tensor:
        return self.curvature[i] @ (w - self.optimum[i])

    def start(self) -> Tensor:
        return self.model.initial_z()

    def proximal(self, i: int, strength: float, centre: Tensor) -> Tensor:
        """argmin f_i(w) + strength/2 norm(w - centre)^2."""
        h = self.curvature[i]
        eye = torch.eye(len(h), dtype=h.dtype)
        return torch.linalg.solve(h + strength * eye, h @ self.optimum[i] + strength * centre)

    def minimum(self, weights: Tensor) -> Tensor:
        """argmin sum weights_i f_i."""
        h = torch.einsum("b,bjk->jk", weights, self.curvature)
        return torch.linalg.solve(h, torch.einsum("b,bjk,bk->j", weights, self.curvature, self.optimum))


def quadratics(sizes: tuple[int, ...] = (8, 5, 12), k: int = 3, seed: int = 0) -> Quadratics:
    """Their curvatures differ (1 to 4 times) as much as their optima do."""
    g = generator(seed)
    clients, curvature, optimum = [], [], []
    for i, n in enumerate(sizes):
        q = torch.linalg.qr(torch.randn(n, k, generator=g, dtype=torch.float64))[0]
        spread = 1 + 3 * torch.rand(k, generator=g, dtype=torch.float64)
        turn = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))[0]
        x = n**0.5 * (q * spread.sqrt()) @ turn.T
        w = 2 * i + torch.randn(k, generator=g, dtype=torch.float64)
        clients.append((x, x @ w + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)))
        curvature.append(x.T @ x / n)
        optimum.append(torch.linalg.lstsq(x, clients[-1][1].unsqueeze(1)).solution[:, 0])
    head = seeded(nn.Linear(k, 1, bias=False).double(), seed)
    model = fp.Composition(None, head, fp.likelihoods.Normal(1.0))
    return Quadratics(model, clients, torch.stack(curvature), torch.stack(optimum))


def states(population: fp.Population, name: str, clients: int) -> Tensor:
    """What clients that all took part keep between rounds, ``[b, ...]``."""
    assert population.store is not None
    return population.store.get(torch.arange(clients), torch.device("cpu"))[name]
