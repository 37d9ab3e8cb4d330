"""Does a client's model know that something is none of its kind? Entropies of its own test examples against
those of examples from elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.evaluation.outliers import auroc
from fedpop.models.predictive import Predictive
from fedpop.population.population import Population


@dataclass(frozen=True)
class Outside:
    """One client's predictive entropies in nats, of its own test examples and of those from elsewhere.

    The epistemic part is what disagreement between draws of z adds; None for point estimates.
    """

    name: str
    inside: Tensor
    outside: Tensor
    epistemic_inside: Tensor | None
    epistemic_outside: Tensor | None

    @property
    def auroc(self) -> float:
        """The probability that an example from elsewhere has the larger entropy."""
        return auroc(self.inside, self.outside)

    @property
    def auroc_epistemic(self) -> float | None:
        if self.epistemic_inside is None or self.epistemic_outside is None:
            return None
        return auroc(self.epistemic_inside, self.epistemic_outside)


def evaluate_outside(population: Population, examples: Sequence[Any], split: str = "test") -> list[Outside]:
    """For every client that has examples in the split, and for whom the method has a model.

    Args:
        population: What ``fit`` returned.
        examples: For each client of the federation, in its order, inputs x from elsewhere.
        split: Which of the clients' sets is told apart from them (default: "test").

    >>> import torch, fedpop as fp
    >>> x, y = torch.tensor([[-4.0], [4.0]]), torch.tensor([0, 1])
    >>> model = fp.Composition(None, torch.nn.Linear(1, 2), "categorical")
    >>> method = fp.LocalOnly(model, local=fp.LocalSGD(epochs=50, rate=1.0))
    >>> population = method.fit([fp.Client(x, y, test=(x, y))], rounds=1)
    >>> (client,) = evaluate_outside(population, [torch.tensor([[0.1], [0.2]])])  # between the classes
    >>> client.auroc, client.auroc_epistemic
    (1.0, None)
    """
    if len(examples) != len(population):
        raise DataError(f"{len(population)} clients, but examples from elsewhere for {len(examples)}")
    out = []
    served = ((i, own) for i, own, _ in population.held_out(split) if own is not None)
    for i, found in itertools.groupby(served, key=lambda pair: pair[0]):  # in pieces, where there are many
        inside, drawn = _entropies(own for _, own in found)
        outside, others = _entropies([population.predict(i, examples[i])])
        out.append(Outside(population.names[i], inside, outside, drawn, others))
    return out


def _entropies(pieces: Iterable[Predictive]) -> tuple[Tensor, Tensor | None]:
    """Total and epistemic; the latter None of a point estimate."""
    parts = [(p.entropy, p.plug_in) for p in pieces]
    epistemic = None if parts[0][1] else torch.cat([e.epistemic for e, _ in parts]).cpu()
    return torch.cat([e.total for e, _ in parts]).cpu(), epistemic
