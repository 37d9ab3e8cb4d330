"""One protocol for all methods: every client scored on its own held-out examples, and clients never seen.

Train, validation and test are fixed in the ``Federation`` before anything else. Every client that has
examples in a split is scored, whoever was active last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fedpop.checked import OneOf, Whole, checked, require
from fedpop.errors import DataError
from fedpop.evaluation.scores import Evaluation, scored
from fedpop.federation.clients import SPLITS, Client, Federation
from fedpop.federation.inputs import as_inputs, leaves, map_inputs
from fedpop.federation.labels import as_targets, numbered
from fedpop.models.predictive import Predictive
from fedpop.population.population import Population


@checked
def evaluate(
    population: Population,
    split: Annotated[str, OneOf(*SPLITS)] = "test",
    *,
    widths: bool = True,
    theta_uncertainty: bool = False,
) -> Evaluation:
    """Score every client of a population on its own examples of a split.

    Args:
        population: What ``fit`` returned, or ``load`` with ``clients``.
        split: Which of the clients' sets (default: "test").
        widths: False leaves out the mean width of intervals, which costs more than all other scores together.
        theta_uncertainty: True has predictions that do not take theta for granted (``Population.predict``);
            it takes longer, and matters where clients are few.

    >>> import torch, fedpop as fp
    >>> x, y = torch.eye(2), torch.tensor([0, 1])
    >>> clients = {"anna": fp.Client(x, y, test=(x, y)), "ben": fp.Client(x, 1 - y, test=(x, 1 - y))}
    >>> model = fp.Composition(None, torch.nn.Linear(2, 2), "categorical")
    >>> method = fp.FedAvgFT(model, fine_tune=fp.LocalSGD(epochs=50, rate=1.0))
    >>> fp.evaluate(method.fit(clients, rounds=1))
    Evaluation(2 clients, accuracy 1, plug-in)
    """
    held_out = population.held_out(split, theta_uncertainty=theta_uncertainty)
    found = ((population.names[i], p, y) for i, p, y in held_out)
    return scored(found, widths=widths)


@dataclass(frozen=True)
class NewClients:
    """Scores of clients never seen: without any data of theirs, and with their own few.

    None where the method has nothing to offer.
    """

    without: Evaluation | None
    own_data: Evaluation | None


def evaluate_new(population: Population, newcomers: Sequence[Client]) -> NewClients:
    """Score clients that took no part: their ``test`` examples, from nothing and from their own (x, y).

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> population = fp.FedRep(model, heads="exact").fit([(x, x[:, 0])], rounds=1)
    >>> new = evaluate_new(population, [fp.Client(x, 3 * x[:, 0], test=(x, 3 * x[:, 0]))])
    >>> new.without, round(float(new.own_data.scores["rmse"]), 3)
    (None, 0.0)
    """
    _require_fit(population, newcomers)
    return NewClients(_newcomers(population, newcomers, False), _newcomers(population, newcomers, True))


def evaluate_few(population: Population, newcomers: Sequence[Client], examples: int) -> Evaluation | None:
    """Score clients that took no part, each given its first so many examples; with 0 of them, from nothing.

    None where the method has nothing to offer.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> population = fp.FedRep(model, heads="exact").fit([(x, x[:, 0])], rounds=1)
    >>> new = [fp.Client(x, 3 * x[:, 0], test=(x, 3 * x[:, 0]))]
    >>> evaluate_few(population, new, 0), round(float(evaluate_few(population, new, 2).scores["rmse"]), 3)
    (None, 0.0)
    """
    require(Whole, examples=examples)
    _require_fit(population, newcomers)
    first = [_first(client, examples, f"new client {i}") for i, client in enumerate(newcomers)]
    return _newcomers(population, first, examples > 0)


def _first(client: Client, examples: int, where: str) -> Client:
    """With so many of its examples."""
    x = map_inputs(lambda leaf: leaf[:examples], as_inputs(client.x, where))
    return Client(x, as_targets(client.y, where)[:examples], test=client.test)


def _require_fit(population: Population, newcomers: Sequence[Client]) -> None:
    """Raise where these clients were in training, or do not fit the model."""
    check_newcomers(newcomers, population.federation)
    for i, client in enumerate(newcomers):
        own = Federation.of({f"new client {i}": client}, population.model.labels)
        if len(own.train.y):
            population.model.prepared(own.example).checked(own)


def _newcomers(population: Population, newcomers: Sequence[Client], with_data: bool) -> Evaluation | None:
    found: list[tuple[str, Predictive | None, Tensor]] = []
    for i, client in enumerate(newcomers):
        assert client.test is not None
        x, y = client.test
        known = population.model
        y = numbered(as_targets(y, f"new client {i}"), known.labels, f"new client {i}")
        y = known.likelihood.check_targets(y, known.outputs, f"new client {i}")
        try:
            model = population.new_client(client.x, client.y) if with_data else population.new_client()
        except DataError:  # its data were checked: the method has nothing to offer
            found.append((str(i), None, y))
            continue
        p = model.predict(x)
        found.append((str(i), p, y.to(p.eta.device)))
    return scored(found) if any(p is not None for _, p, _ in found) else None


def check_newcomers(newcomers: Sequence[Client], federation: Federation | None) -> None:
    """Raise unless these are clients with test examples of whom the federation has none."""
    for i, client in enumerate(newcomers):
        if not isinstance(client, Client) or client.test is None:
            raise DataError(f"new client {i}: give fedpop.Client(x, y, test=(x, y))")
        own = Federation.of([client], () if federation is None else federation.labels).train
        if federation is None or federation.embedded or not len(own.y):
            continue
        for j in (federation.train.sizes == len(own.y)).nonzero().squeeze(1).tolist():
            if _same(own.x, own.y, federation, j):
                raise DataError(
                    f"new client {i} is client {federation.names[j]!r} of the federation: new clients must "
                    "never have been in training"
                )


def _same(x: Any, y: Tensor, federation: Federation, j: int) -> bool:
    start, size = int(federation.train.starts[j]), int(federation.train.sizes[j])
    theirs = [federation.train.y, *leaves(federation.train.x)]
    # Targets first: they are short, and few clients have the same ones.
    return all(
        torch.equal(a.double().flatten(), b[start : start + size].double().flatten())
        for a, b in zip([y, *leaves(x)], theirs, strict=True)
    )
