"""Scores of predictive distributions on held-out examples: for each client, then aggregated over clients.

Averages over clients come with their standard deviation and the mean of the worst tenth beside them. Methods
without uncertainty are scored with plug-in probabilities and flagged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.blocks import ENTRIES_AT_ONCE
from fedpop.errors import DataError
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.methods.base import Algorithm
from fedpop.models.predictive import Predictive
from fedpop.questions import Question, Units

CLASSES = ("accuracy", "nll", "brier", "ece")
REAL = ("rmse", "nll", "coverage", "width")
HIGH_IS_GOOD = ("accuracy", "coverage")
CALIBRATION_BINS = 15
"""Of confidence, behind a calibration error; as many as papers have (Guo et al., ICML 2017)."""
INTERVAL_LEVEL = 0.9
"""Of the intervals whose coverage and width are scored."""
WORST_SHARE = 0.1
"""Of the clients, over which the worst scores are averaged."""
WIDTH_DRAWS = 200
"""Draws that widths of intervals are computed from, evenly out of all."""


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence: their mean confidence, how many were right, how many."""

    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores ``[C]`` of clients by name, and what they come to.

    ``scores`` are accuracy, nll, brier and ece for classes; rmse, nll, coverage and width of the 90 %
    intervals for other targets. ``plug_in``: the method has no uncertainty about its parameters.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> clients = [fp.Client(x, 2 * x[:, 0], test=(x, 2 * x[:, 0])) for _ in range(3)]
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> method = fp.FedAvg(model, local=fp.LocalSGD(epochs=50, rate=1.0))
    >>> evaluation = fp.evaluate(method.fit(clients, rounds=2), "test")
    >>> evaluation.scores["coverage"], evaluation.plug_in
    (tensor([1., 1., 1.], dtype=torch.float64), True)
    >>> evaluation.summary()["coverage_worst"]
    1.0
    """

    names: Sequence[str]
    scores: dict[str, Tensor]
    examples: Tensor
    pooled: dict[str, float]
    plug_in: bool
    reliability: Sequence[Bin] = ()
    unserved: Sequence[str] = ()
    """Clients for whom the method has no model."""

    def __repr__(self) -> str:
        main = next(iter(self.scores))
        kind = ", plug-in" if self.plug_in else ""
        return f"Evaluation({len(self.names)} clients, {main} {float(self.scores[main].mean()):.4g}{kind})"

    def summary(self) -> dict[str, float]:
        """Mean over clients under the score's own name, with ``_sd`` and ``_worst`` (a tenth of the clients);
        ``pooled_`` over all examples."""
        out: dict[str, float] = {}
        for name, values in self.scores.items():
            out[name] = float(values.mean())
            out[f"{name}_sd"] = float(values.std(correction=0))
            if name != "width":  # neither wide nor narrow is worse by itself
                out[f"{name}_worst"] = worst_tenth(values, name in HIGH_IS_GOOD)
        return out | {f"pooled_{name}": value for name, value in self.pooled.items()}


def worst_tenth(values: Tensor, high_is_good: bool) -> float:
    """The mean over the worst tenth of clients, one at least.

    >>> worst_tenth(torch.arange(20.0), high_is_good=True)
    0.5
    """
    count = max(1, math.ceil(WORST_SHARE * len(values)))
    return float(values.sort(descending=not high_is_good).values[:count].mean())


def scored(found: Iterable[tuple[str, Predictive | None, Tensor]], *, widths: bool = True) -> Evaluation:
    """An evaluation out of clients' predictive distributions of their examples, and the targets."""
    names: list[str] = []
    sizes: list[int] = []
    unserved: list[str] = []
    points: list[bool] = []

    def served() -> Iterator[tuple[Predictive, Tensor]]:
        for name, p, y in found:
            if p is None:
                unserved.append(name)
                continue
            if names[-1:] == [name]:  # a client with very many examples comes in pieces
                sizes[-1] += len(y)
            else:
                names.append(name)
                sizes.append(len(y))
                points.append(p.plug_in)
            yield p, y

    parts = [_examples(p, y, widths) for p, y in _merged(served())]
    if not parts:
        raise DataError("no client has both a model and examples to be judged on")
    rows = {n: torch.cat([part[n] for part in parts]).double().cpu() for n in parts[0]}
    owner = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
    examples = torch.tensor(sizes, dtype=torch.float64)

    def by_client(values: Tensor) -> Tensor:
        return values.new_zeros(len(names)).index_add(0, owner, values) / examples

    plug_in = all(points)
    if "confidence" in rows:
        scores = {
            "accuracy": by_client(rows["right"]),
            "nll": by_client(rows["nll"]),
            "brier": by_client(rows["brier"]),
            "ece": _gaps(rows["confidence"], rows["right"], owner, len(names)) / examples,
        }
        bins = reliability(rows["confidence"], rows["right"])
        pooled = {n: float(rows[n].mean()) for n in ("nll", "brier")} | {"ece": ece_of(bins)}
        return Evaluation(names, scores, examples, pooled, plug_in, bins, unserved)
    scores = {
        "rmse": by_client(rows["square"]).sqrt(),
        "nll": by_client(rows["nll"]),
        "coverage": by_client(rows["covered"]),
    }
    if widths:
        scores["width"] = by_client(rows["width"])
    pooled = {
        "rmse": float(rows["square"].mean().sqrt()),
        "nll": float(rows["nll"].mean()),
        "coverage": float(rows["covered"].mean()),
    }
    return Evaluation(names, scores, examples, pooled, plug_in, (), unserved)


def _merged(served: Iterable[tuple[Predictive, Tensor]]) -> Iterator[tuple[Predictive, Tensor]]:
    """Clients next to each other as one predictive distribution, where they have as many draws each and the
    same parameters of the likelihood."""
    group: list[tuple[Predictive, Tensor]] = []
    entries = 0
    for p, y in served:
        if group and not (_alike(group[0][0], p) and entries + p.eta.numel() <= ENTRIES_AT_ONCE):
            yield _joined(group)
            group, entries = [], 0
        group.append((p, y))
        entries += p.eta.numel()
    if group:
        yield _joined(group)


def _alike(p: Predictive, q: Predictive) -> bool:
    same = p.eta.shape[0] == q.eta.shape[0] and p.params.keys() == q.params.keys()
    return same and all(torch.equal(v, q.params[n]) for n, v in p.params.items())


def _joined(group: Sequence[tuple[Predictive, Tensor]]) -> tuple[Predictive, Tensor]:
    eta = torch.cat([p.eta for p, _ in group], dim=1)
    return replace(group[0][0], eta=eta), torch.cat([y for _, y in group])


def _examples(p: Predictive, y: Tensor, widths: bool) -> dict[str, Tensor]:
    """What each example adds to the scores, ``[n]`` each."""
    nll = -p.log_prob(y)
    lost = torch.where(torch.isnan(nll), nll, torch.zeros_like(nll))  # no prediction is not a wrong one
    if p.likelihood.classes(p.eta.shape[-1]):
        probs = p.probs.clamp(0, 1)  # a mean of ones may round to more
        labels = y.reshape(len(y)).long()
        truth = torch.nn.functional.one_hot(labels, probs.shape[-1]).to(probs.dtype)
        confidence, chosen = probs.max(-1)
        return {
            "right": (chosen == labels).to(probs.dtype) + lost,
            "confidence": confidence,
            "nll": nll,
            "brier": (probs - truth).square().sum(-1),
        }
    shape = (len(y), -1)
    rows = {
        "square": (p.mean.reshape(shape) - y.reshape(shape)).square().mean(-1),
        "nll": nll,
        "covered": p.covers(y, INTERVAL_LEVEL).reshape(shape).to(p.eta.dtype).mean(-1) + lost,
    }
    if widths:
        few = replace(p, eta=p.eta[:: max(1, len(p.eta) // WIDTH_DRAWS)])
        low, high = few.interval(INTERVAL_LEVEL, of="y")
        rows["width"] = (high - low).reshape(shape).mean(-1)
    return rows


def _bins(confidence: Tensor) -> Tensor:
    # Closed on the left, and one bin more for those that are exactly sure: torchmetrics' rule.
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=confidence.dtype)
    return torch.bucketize(confidence, edges, right=True) - 1


def reliability(confidence: Tensor, right: Tensor) -> list[Bin]:
    """The reliability curve over equal bins of confidence, without the empty ones.

    >>> reliability(torch.tensor([0.91, 0.93, 0.5]), torch.tensor([1.0, 0.0, 1.0]))[-1].accuracy
    0.5
    """
    if not bool(torch.isfinite(confidence).all()):
        return []
    index = _bins(confidence)
    out = []
    for b in index.unique().tolist():
        own = index == b
        out.append(Bin(float(confidence[own].mean()), float(right[own].mean()), int(own.sum())))
    return out


def ece_of(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean distance between confidence and accuracy.

    >>> ece_of([Bin(0.9, 0.5, 3), Bin(0.6, 0.6, 1)])
    0.3...
    """
    total = sum(b.count for b in bins)
    return sum(abs(b.confidence - b.accuracy) * b.count for b in bins) / total if total else math.nan


def _gaps(confidence: Tensor, right: Tensor, owner: Tensor, clients: int) -> Tensor:
    """For each client, the sum over its bins of how far confidence and accuracy lie apart, in examples."""
    if not bool(torch.isfinite(confidence).all()):
        return confidence.new_full((clients,), math.nan)
    index = owner * (CALIBRATION_BINS + 1) + _bins(confidence)
    gaps = confidence.new_zeros(clients * (CALIBRATION_BINS + 1)).index_add(0, index, confidence - right)
    return gaps.abs().view(clients, -1).sum(1)


@dataclass(frozen=True)
class ValidationScore(Question[float]):
    """Mean predictive log-likelihood of validation examples, nan where nobody has any; units' models are
    their states as they would enter a round."""

    method: Algorithm
    split: str = "validation"
    name: ClassVar[str] = "validation score"
    quorum: ClassVar[float] = 0.0  # worth knowing without a site that is away

    def ask(self, known: Tensors) -> Tensors:
        return known

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        held_out = units.split(self.split)
        value, examples = self.method.score(asked, units.cohort, held_out, units.personal(), key)
        everyone = torch.ones(len(value), dtype=torch.bool, device=value.device)
        return Answer(everyone, sums={"score": torch.stack((value.sum(), examples.sum()))})

    def finish(self, known: Tensors, total: Total) -> float:
        value, examples = (float(v) for v in total.weighted.get("score", torch.zeros(2)))
        return value / examples if examples else math.nan
