"""One protocol for all methods: every client scored on its own held-out examples, then aggregated.

Train, validation and test are fixed in the ``Federation`` before anything else. Every client that has
examples in a split is scored, whoever was active last; scores are averaged over clients, with their standard
deviation and the mean of the worst tenth beside it. Methods without uncertainty are scored with plug-in
probabilities and flagged. Nothing here changes a run: a ``Watch`` looks between rounds and leaves no trace in
the model that comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpop.algorithms.base import require_whole
from fedpop.algorithms.fedsouk import Final
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.federation.inputs import leaves
from fedpop.models.likelihoods import Likelihood
from fedpop.models.predictive import Predictive
from fedpop.runtime.callbacks import Callback

if TYPE_CHECKING:
    from fedpop.population import Population
    from fedpop.runtime.simulate import Run

CLASSES = ("accuracy", "nll", "brier", "ece")
REAL = ("rmse", "nll", "coverage", "width")
HIGH_IS_GOOD = ("accuracy", "coverage")
BINS = 15
LEVEL = 0.9
WORST = 0.1
SHORT = Final(chains=1, draws=50, burn_in=50)
"""FedSOUK's pass for looks between rounds: means over clients do not need more."""
DRAWS = 200
"""Draws that widths of intervals are computed from, evenly out of all."""
ENTRIES = 2**22
"""Head outputs that are worked on together, at most."""


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
    count = max(1, math.ceil(WORST * len(values)))
    return float(values.sort(descending=not high_is_good).values[:count].mean())


def evaluate(population: Population, split: str = "test", *, widths: bool = True) -> Evaluation:
    """Score every client of a population on its own examples of a split.

    ``widths`` False leaves out the mean width of intervals, which costs more than all other scores together.

    >>> import torch, fedpop as fp
    >>> x, y = torch.eye(2), torch.tensor([0, 1])
    >>> clients = {"anna": fp.Client(x, y, test=(x, y)), "ben": fp.Client(x, 1 - y, test=(x, 1 - y))}
    >>> model = fp.Composition(None, torch.nn.Linear(2, 2), "categorical")
    >>> method = fp.FedAvgFT(model, fine_tune=fp.LocalSGD(epochs=50, rate=1.0))
    >>> fp.evaluate(method.fit(clients, rounds=1))
    Evaluation(2 clients, accuracy 1, plug-in)
    """
    found = ((population.names[i], p, y) for i, p, y in population.held_out(split))
    return scored(found, widths=widths)


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
        if group and not (_alike(group[0][0], p) and entries + p.eta.numel() <= ENTRIES):
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
    if classes(p.likelihood, p.eta.shape[-1]):
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
        "covered": p.covers(y, LEVEL).reshape(shape).to(p.eta.dtype).mean(-1) + lost,
    }
    if widths:
        few = replace(p, eta=p.eta[:: max(1, len(p.eta) // DRAWS)])
        low, high = few.interval(LEVEL, of="y")
        rows["width"] = (high - low).reshape(shape).mean(-1)
    return rows


def classes(likelihood: Likelihood, outputs: int) -> bool:
    """Whether targets are judged as classes or as numbers."""
    if likelihood.name == "bernoulli" and outputs > 1:
        raise SettingsError("several yes/no targets per example cannot be compared; use one output")
    return likelihood.name in ("categorical", "bernoulli")


def _bins(confidence: Tensor) -> Tensor:
    # Closed on the left, and one bin more for those that are exactly sure: torchmetrics' rule.
    edges = torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype)
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
    index = owner * (BINS + 1) + _bins(confidence)
    gaps = confidence.new_zeros(clients * (BINS + 1)).index_add(0, index, confidence - right)
    return gaps.abs().view(clients, -1).sum(1)


# --- clients that were never in training -----------------------------------------------------


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
    check_newcomers(newcomers, population.federation)
    for i, client in enumerate(newcomers):
        own = Federation.of({f"new client {i}": client})
        if len(own.train.y):
            population.model.prepare(own)  # raises where the data do not fit the model
    return NewClients(_newcomers(population, newcomers, False), _newcomers(population, newcomers, True))


def _newcomers(population: Population, newcomers: Sequence[Client], own: bool) -> Evaluation | None:
    found: list[tuple[str, Predictive | None, Tensor]] = []
    for i, client in enumerate(newcomers):
        assert client.test is not None
        x, y = client.test
        y = population.model.likelihood.check_targets(
            torch.as_tensor(y), population.model.outputs, f"new client {i}"
        )
        try:
            model = population.new_client(client.x, client.y) if own else population.new_client()
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
        own = Federation.of([client]).train
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
    theirs = [*leaves(federation.train.x), federation.train.y]
    return all(
        torch.equal(a.double().flatten(), b[start : start + size].double().flatten())
        for a, b in zip([*leaves(x), y], theirs, strict=True)
    )


# --- between rounds --------------------------------------------------------------------------


@dataclass
class Watch(Callback):
    """Evaluates all clients every so many rounds and after each of the ``last`` ones.

    The run goes on as if nobody had looked: nothing is drawn, kept or counted. Methods that sample in a final
    pass take a shorter one here (``final``); the final model is judged with the method's own.

    >>> import torch, fedpop as fp
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> client = fp.Client(x, 2 * x[:, 0], test=(x, 2 * x[:, 0]))
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> watch = fp.Watch(every=5, last=2)
    >>> _ = fp.FedAvg(model).fit([client], rounds=10, callbacks=[watch])
    >>> [point["round"] for point in watch.points], sorted(watch.mean_of_last())[0]
    ([5, 9, 10], 'coverage')
    """

    every: int | None = None
    last: int = 10
    split: str = "test"
    final: Final = SHORT
    points: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_whole(last=self.last)
        if self.every is not None and self.every < 1:
            raise SettingsError(f"Watch: every must be at least 1, not {self.every}")
        if self.last < 0:
            raise SettingsError(f"Watch: last must be 0 or more, not {self.last}")

    def check(self, federation: Federation) -> None:
        if self.split not in federation.splits:
            raise DataError(f"no client has {self.split} data to be judged on")

    def after_round(self, run: Run, metrics: dict[str, Any]) -> bool:
        rounds = run.settings.rounds
        if (self.every and run.round % self.every == 0) or run.round > rounds - self.last:
            self.points.append(self._look(run))
        return False

    def _look(self, run: Run) -> dict[str, Any]:
        from fedpop.population import Population

        method = run.algorithm
        if isinstance(getattr(method, "final", None), Final):
            method = method.but(final=self.final)
        published = method.publish(run.server)
        now = Population(method, published, run.key, run.federation, run.store, rounds=run.round)
        costs = ("bytes_up", "bytes_down", "backbone_passes", "head_steps", "seconds")
        spent = {name: run.totals.get(name, 0.0) for name in costs}
        summary = evaluate(now, self.split, widths=False).summary()
        finite = {n: v if math.isfinite(v) else None for n, v in summary.items()}
        return {"round": run.round} | spent | finite

    def mean_of_last(self) -> dict[str, float | None]:
        """Each score averaged over the looks of the last rounds; None where one of them was not finite."""
        tail = self.points[-self.last :] if self.last else []
        names = [n for n in (tail[0] if tail else {}) if n.split("_")[0] in (*CLASSES, *REAL, "pooled")]
        out: dict[str, float | None] = {}
        for name in names:
            values = [point[name] for point in tail]
            out[name] = None if None in values else sum(values) / len(values)
        return out

    def state(self) -> dict[str, Any]:
        return {"points": self.points}

    def restore(self, state: dict[str, Any]) -> None:
        self.points = list(state["points"])
