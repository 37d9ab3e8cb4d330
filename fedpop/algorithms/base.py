"""The contract of a federated method: what the server keeps, what clients keep and send, what changes.

Data flows one way: ``broadcast`` -> ``local_round`` on each cohort -> the *sum* of messages ->
``server_round``. Messages are additive, which is what makes secure and hierarchical aggregation, and one
backward pass for many clients, possible. A method is a frozen dataclass of settings; everything that
changes is in dictionaries of tensors, which is all that a checkpoint needs. It does not know whether it
runs in the simulator or across machines.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fedpop.channel import Channel, Compressor, Identity, resolve_compressor
from fedpop.errors import SettingsError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Inputs
from fedpop.federation.participation.rules import Everyone, Participation, Uniform
from fedpop.keys import Key
from fedpop.models.base import Model

if TYPE_CHECKING:
    from fedpop.federation.clients import Federation
    from fedpop.models.predictive import Predictive
    from fedpop.population import Population

Tensors = dict[str, Tensor]
Trial = Callable[["Algorithm", int], list[float]]
"""Runs so many rounds of a method; gives the log-likelihood at the start and after each round."""


@dataclass(frozen=True)
class Facts:
    """What the server knows of the federation before the first round."""

    clients: int
    rounds: int
    restart: int = 0


@dataclass(frozen=True)
class Message:
    """Sums over clients, how many clients they are from, and whether b/count applies."""

    sums: Tensors
    count: int
    ratio: bool = True

    def __add__(self, other: Message) -> Message:
        names = self.sums | other.sums
        sums = {
            n: self.sums[n] + other.sums[n]
            if n in self.sums and n in other.sums
            else (self.sums | other.sums)[n]
            for n in names
        }
        return Message(sums, self.count + other.count, self.ratio and other.ratio)

    def scaled(self, name: str, clients: int) -> Tensor:
        """The estimate of the sum over *all* clients."""
        total = self.sums[name]
        return total * (clients / self.count) if self.ratio else total


@dataclass(frozen=True)
class Info:
    """What a cohort's work cost and how it went; numbers that add up."""

    sums: dict[str, float] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()

    def __add__(self, other: Info) -> Info:
        names = {**self.sums, **other.sums}
        sums = {n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in names}
        return Info(sums, self.left_out + other.left_out)


@dataclass(frozen=True)
class About:
    """What cannot be read off a method's code, for the table of ``fedpop methods``."""

    reference: str
    personalised: bool
    local_steps: bool = True
    """Clients take several steps between messages."""
    bounds: bool = True
    """Guarantees of convergence are known, as the paper's table has it."""
    memory: str = "d + d_phi"
    """Numbers that a client's predictions read, M draws where there are draws."""
    instance: str = ""
    """Of which choices in FedPop it is the case or the limit, if of any."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """One federated method, with its settings. Subclasses read like their papers' pseudo-code."""

    model: Model = field(kw_only=False)
    compressor: Compressor | str | Sequence[Compressor | str] = field(default_factory=Identity)
    """Of the messages named in ``compressed``: by itself, by name, or one for each client."""

    name: ClassVar[str]
    about: ClassVar[About]
    private: ClassVar[tuple[str, ...]] = ()
    """Local state that must never be in a message."""
    uncertainty: ClassVar[bool] = False
    """Predictions integrate over parameters; otherwise intervals hold noise only, and say so."""
    marginal: ClassVar[bool] = False
    """It has a marginal likelihood, by which restarts are compared."""
    participation: ClassVar[str] = "any"
    """Who may take part in a round: ``any``, ``full`` (everyone, always) or ``one`` (a relay)."""
    compressed: ClassVar[tuple[str, ...]] = ()
    """Messages that may be compressed without bias; a method that names none refuses a compressor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", resolve_compressor(self.compressor))
        if not self.compressed and any(not c.identity for c in self.compressors):
            raise SettingsError(
                f"{self.name} does not compress what its clients send (its update is not linear in it, or no "
                "form of it was published); leave the compressor out"
            )
        for compressor in set(self.compressors) if self.compressed else ():
            compressor.check(self.compressed_size)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """One for all, or one for each client."""
        given = resolve_compressor(self.compressor)
        return given if isinstance(given, tuple) else (given,)

    @property
    def compressed_size(self) -> int:
        """Entries of a compressed message."""
        return self.model.phi_layout.size + self.model.z_layout.size

    @property
    def phi_copies(self) -> int:
        """About how many vectors of phi's size a client's round holds at once, beside the data."""
        return 0

    @property
    def steady(self) -> bool:
        """Every round after the first costs as much per example of those who take part."""
        return True

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that run once, with everyone, before the rounds; the last one is the rounds."""
        return ("train",)

    @abstractmethod
    def init(self, facts: Facts, key: Key) -> Tensors:
        """The server's state before anything was heard."""

    @abstractmethod
    def broadcast(self, phase: str, server: Tensors) -> Tensors:
        """What an active client receives."""

    def enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        """The local state of clients that take part for the first time, stacked."""
        return {}

    @abstractmethod
    def local_round(
        self,
        phase: str,
        broadcast: Tensors,
        cohort: Cohort,
        local: Tensors,
        channel: Channel,
        key: Key,
    ) -> tuple[Tensors, Message, Info]:
        """A cohort's work: new local states, the sum of its messages, and what it cost."""

    @abstractmethod
    def server_round(
        self, phase: str, server: Tensors, total: Message | None, facts: Facts, key: Key
    ) -> Tensors:
        """The server's step; ``total`` is None when nobody took part."""

    def channel(self, key: Key) -> Channel:
        """The way that messages of a round take to the server."""
        given = self.compressors
        return Channel(given if isinstance(self.compressor, tuple) else given[0], self.compressed, key)

    @abstractmethod
    def publish(self, server: Tensors) -> Tensors:
        """What predictions use."""

    @abstractmethod
    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """A client's own model (a cohort of one) with theta fixed; ``local`` is None for a newcomer."""

    @abstractmethod
    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        """The predictive distribution at x that belongs to what ``personalise`` gave."""

    @abstractmethod
    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> Tensors:
        """Additive scores on held-out examples: ``log_prob`` and ``examples``."""

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name

    def calibrated(self, trial: Trial) -> Algorithm:
        """This method with its free settings chosen by trial rounds, where it has any."""
        return self

    def check(self, clients: int) -> None:
        """Raise early when the settings do not fit the federation."""
        if isinstance(self.compressor, tuple) and len(self.compressor) != clients:
            raise SettingsError(
                f"{len(self.compressor)} compressors for {clients} clients; give one for all or one each"
            )

    def check_data(self, federation: Federation) -> None:  # noqa: B027
        """Raise early when a client's data do not suffice for this method."""

    @classmethod
    def usual_participation(cls) -> Participation:
        """Who takes part when nothing is said."""
        return Uniform(1) if cls.participation == "one" else Everyone()

    def check_participation(self, rule: Participation) -> None:
        """Raise unless this method allows this rule."""
        everyone, one = isinstance(rule, Everyone), isinstance(rule, Uniform) and rule.size == 1
        if self.participation == "full" and not everyone:
            raise SettingsError(f"{self.label} needs every client in every round: participation=None")
        if self.participation == "one" and not one:
            raise SettingsError(f"{self.label} visits one client at a time: participation=fedpop.Uniform(1)")

    def check_restarts(self) -> None:
        """Raise unless runs of this method can be compared by their marginal likelihood."""
        if not self.marginal:
            raise SettingsError(f"restarts are compared by marginal likelihood, which {self.label} has not")

    def metrics(self, server: Tensors, info: Info) -> dict[str, float | None]:
        """Numbers of a round for ``metrics.jsonl`` and the progress bar; None where there is none."""
        return {}

    def drift(self, server: Tensors) -> float | None:
        """Relative change of theta between the two halves of the tail, where there is a tail."""
        return None

    def fit(self, clients: Any, **settings: Any) -> Population:
        """Run this method on one machine; ``fedpop.simulate`` has the settings."""
        from fedpop.runtime.simulate import simulate

        return simulate(self, clients, **settings)

    def but(self, **changes: Any) -> Any:
        """A copy with other settings."""
        return replace(self, **changes)

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, for files and for comparing runs."""
        out: dict[str, Any] = {"method": self.label}
        out.update({f.name: _plain(getattr(self, f.name)) for f in fields(self)})
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, Model):
        return repr(value)
    if isinstance(value, nn.Module):
        from fedpop.models.spec import module_spec

        return {"kind": "Module", "spec": module_spec(value), "shown": repr(value)}
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__} | inner
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):  # data among the settings: enough to tell whether they are the same
        digest = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        return f"{value.dtype} {tuple(value.shape)} sha256 {digest}"
    return value


def mean_loss(info: Info) -> float | None:
    """Mean negative log-likelihood per example; None for a round that saw none."""
    examples = info.sums.get("examples", 0.0)
    return -info.sums["log_likelihood"] / examples if examples else None


def leave_out(good: Tensor, cohort: Cohort) -> tuple[int, ...]:
    """Ids of the clients whose update is not finite."""
    return tuple(cohort.ids[~good].tolist())


def weighted_sum(values: Tensor, weights: Tensor, good: Tensor) -> Tensor:
    """Sum over clients of weight times value ``[C, D]``, leaving out clients that are not good."""
    kept = torch.where(good.unsqueeze(-1), values, torch.zeros_like(values))
    return (weights.to(values.dtype).unsqueeze(-1) * kept).sum(0)


def sent(
    channel: Channel, cohort: Cohort, good: Tensor, values: dict[str, Tensor], plain: Sequence[str] = ()
) -> tuple[Tensor, Message]:
    """The message of a cohort out of each client's own vectors ``[C, D]``, and who is in it: clients whose
    vectors are not finite, or cannot be sent, are not. ``plain`` names those that are summed without
    weights."""
    safe = {n: torch.where(good.unsqueeze(1), v, torch.zeros_like(v)) for n, v in values.items()}
    seen = {n: channel(n, v, cohort.ids) for n, v in safe.items()}
    for v in seen.values():
        good = good & torch.isfinite(v).all(1)
    ones = torch.ones_like(cohort.weights)
    weights = {n: ones if n in plain else cohort.weights for n in seen}
    return good, Message({n: weighted_sum(v, weights[n], good) for n, v in seen.items()}, int(good.sum()))


def require_whole(**numbers: Any) -> None:
    """Raise unless these settings are whole numbers."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise SettingsError(f"{name} must be a whole number, not {value!r}")


def split_cohort(cohort: Cohort) -> Iterable[Cohort]:
    """One cohort per client; its rows are views."""
    start = 0
    for i, size in enumerate(cohort.sizes.tolist()):
        one = slice(i, i + 1)
        rows = slice(start, start + size)
        yield cohort.take(rows, cohort.ids[one], cohort.sizes[one], cohort.weights[one])
        start += size
