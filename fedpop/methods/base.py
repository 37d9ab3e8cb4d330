"""The contract of a federated method: what the server keeps, what units keep and answer, what changes.

    server     broadcast(server)                       -> what an active site receives
    site       enter(units)                            -> a unit's state in its first round
               local_round(round, cohort, local)       -> Answer: vectors, new states, who is fit, what it
               cost
    on the way a Channel clips, compresses, encodes; decodes and sums (no method knows of it)
    server     server_round(server, total)             -> the next server state, from sums alone

Answers are additive: the server needs sums and a count, nothing else. That is what makes secure and
hierarchical aggregation, and one backward pass for many units, possible. A method is a frozen dataclass of
settings, stored as they were given and resolved when they are used; everything that changes is in
dictionaries of tensors, which is all that a checkpoint needs. It does not know whether it runs in the
simulator or across machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from torch import Tensor

from fedpop.checked import Positive, Range, checked
from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Example, Inputs
from fedpop.federation.participation import Everyone, Participation, Said, Uniform
from fedpop.kernels.hierarchy import Hierarchy
from fedpop.keys import Key
from fedpop.message import Answer, Channel, Choice, Guard, Tensors, Total
from fedpop.message.declared import Sent
from fedpop.methods.facts import About as About
from fedpop.methods.facts import Facts as Facts
from fedpop.methods.facts import Round as Round
from fedpop.models.base import Model
from fedpop.models.predictive import Predictive
from fedpop.questions import Question
from fedpop.settings import Setting, describe

if TYPE_CHECKING:
    from fedpop.population import Population  # the one name from above: what ``fit`` returns

Trial = Callable[["Algorithm", int], list[float]]
"""Runs so many rounds of a method; gives the log-likelihood at the start and after each round."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(Setting, ABC):
    """One federated method, with its settings. Subclasses read like their papers' pseudo-code."""

    model: Model = field(kw_only=False)
    compressor: Choice = "identity"
    """Of the vectors named in ``compressed``: one for all, by itself or by name, or a mapping from clients.
    """
    clip: Positive | None = None
    """The largest norm of a vector that is ``clipped``; longer ones are shortened, which biases their sum."""
    guard: Annotated[float, Range(above=1)] | None = 1e3
    """How many times the usual norm makes a client's message absurd, so that it is left out; None: never."""

    name: ClassVar[str]
    about: ClassVar[About]
    runs_on: ClassVar[Callable[..., Any]]
    """What ``fit`` calls. Methods know no runtime: ``fedpop`` itself, which has both, says which it is."""
    private: ClassVar[tuple[str, ...]] = ()
    """Local state that must never be in a message."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Local state that is right whether or not the answer was heard: where a chain stands, how it adapted."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """Vectors of which a unit is told what the server saw (``after_send``)."""
    uncertainty: ClassVar[bool] = False
    """Predictions integrate over parameters; otherwise intervals hold noise only, and say so."""
    participation: ClassVar[str] = "any"
    """Who may take part in a round: ``any``, ``full`` (everyone, always) or ``one`` (a relay)."""
    guarded: ClassVar[tuple[str, ...]] = ()
    """Vectors that are moves or gradients, whose norms the guard looks at; states have none that is usual."""
    compressed: ClassVar[tuple[str, ...]] = ()
    """Vectors that may be compressed without bias; a method that names none refuses a compressor."""
    clipped: ClassVar[tuple[str, ...]] = ()
    """Moves and gradients that ``clip`` bounds; those that may be compressed where there are none here."""
    plain_sums: ClassVar[tuple[str, ...]] = ()
    """Vectors whose sum without participation weights is needed beside the weighted one."""
    sends: ClassVar[Mapping[str, Sent]] = {}
    """Vectors and numbers that are not among those of ``fedpop.message.declared``, by name."""
    as_it_is: ClassVar[str] = "its update is not linear in it, or no form of it was published"
    """Why what clients send is neither compressed nor clipped, where that is so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        channel = self.channel
        if not self.compressed and not channel.transparent:
            if not self.clipped:
                raise SettingsError(
                    f"{type(self).__name__} does not compress or clip what its clients send "
                    f"({self.as_it_is}); leave compressor and clip out"
                )
            if not all(c.identity for c in channel.compressors):
                raise SettingsError(
                    f"{type(self).__name__} does not compress what its clients send ({self.as_it_is}); leave "
                    "compressor out"
                )
        for compressor in channel.compressors if self.compressed else ():
            compressor.check(self.compressed_size)

    # --- what the runtime asks before it starts -----------------------------------------------

    @cached_property
    def channel(self) -> Channel:
        """The way that this method's vectors take to the server."""
        return Channel(self.compressor, self.compressed, self.clip, self.clipped)

    def guard_for(self, told: Tensors, messages: int) -> Guard | None:
        """What looks at the messages of a round, given what it was told is usual."""
        if self.guard is None or not self.guarded or self.participation == "one":
            return None
        return Guard(self.guard, self.guarded, told, messages)

    @property
    def compressed_size(self) -> int:
        """Entries of a compressed vector."""
        return self.model.phi_layout.size + self.model.z_layout.size

    @property
    def phi_copies(self) -> int:
        """About how many vectors of phi's size a unit's round holds at once, beside the data."""
        return 0

    @property
    def draws(self) -> int:
        """Values of z that a unit's round works on together, at most."""
        return 1

    @property
    def final_draws(self) -> int:
        """Values of z in a unit's own model."""
        return 1

    @property
    def steady(self) -> bool:
        """Every round after the first costs as much per example of those who take part."""
        return True

    @property
    def wants_information(self) -> bool:
        """Whether a further stage wants the inverse information, where it can be had."""
        return False

    def warm_up(self, rounds: int) -> int:
        """Rounds of a run of so many whose theta is not to be averaged, chosen or judged as converged."""
        return 0

    @property
    def hierarchy(self) -> Hierarchy | None:
        """p(D | phi, z) p(z | beta), for methods that have a population prior."""
        return None

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name

    def prepared(self, example: Example) -> Self:
        """This method for examples of this kind."""
        return self.with_model(self.model.prepared(example))

    def restarted(self) -> Self:
        """This method for a restart from a random point."""
        return self

    def calibrated(self, trial: Trial) -> Self:
        """This method with its free settings chosen by trial rounds, where it has any."""
        return self

    def rate(self) -> float | None:
        """The step size that trial rounds find, once it is there."""
        return None

    def with_rate(self, rate: float) -> Self:
        """This method with the step size that trial rounds found."""
        raise SettingsError(f"{self.label} has no step size that trial rounds could find")

    def looked_at(self) -> Self:
        """This method for a look between rounds, where a full final pass would cost more than it tells."""
        return self

    def judged(self) -> Self:
        """This method for a verdict on theta between rounds, whose draws need not serve predictions."""
        return self

    def check(self, names: Sequence[str]) -> None:
        """Raise early when the settings do not fit these clients."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, Mapping):
                require_everyone(setting.name, value, names)

    def check_data(self, federation: Federation) -> None:
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
            raise SettingsError(
                f"{self.label} visits one client at a time: participation=fedpop.participation.Uniform(1)"
            )

    @property
    def needs_everyone(self) -> bool:
        """A round without one of those who may take part makes no sense: it is waited for."""
        return self.participation == "full"

    # --- a run -------------------------------------------------------------------------------

    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        """What everyone is asked before the rounds, in order; later ones know the results of earlier ones."""
        return ()

    @abstractmethod
    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        """The server's state before the first round, given the results of the questions."""

    def grown(self, server: Tensors, facts: Facts, known: Tensors) -> Tensors:
        """The server's state once others have joined, who were asked the questions that last: ``known`` are
        the results of these over everyone."""
        return server

    def extended(self, server: Tensors, facts: Facts, inverse: Tensor | None = None) -> Tensors:
        """The server's state at the beginning of a further stage: what it told sites of a schedule, anew.
        ``inverse`` is that of the information at the published theta, for a method that ``scores``."""
        return server

    @abstractmethod
    def broadcast(self, server: Tensors) -> Tensors:
        """What an active site receives."""

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        """The state of units that take part for the first time, stacked; ``key`` is their site's."""
        return {}

    def pace(self, k: int, facts: Facts) -> Tensors:
        """What the sites of round k are told of their rates, beside ``broadcast``."""
        return {}

    @abstractmethod
    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer | Iterable[Answer]:
        """A cohort's work, in one answer or in blocks of its units as they are ready."""

    @property
    def remembered(self) -> tuple[str, ...]:
        """Those of ``remembers`` that matter with these settings."""
        return self.remembers

    def after_send(self, local: Tensors, seen: Tensors) -> Tensors:
        """States of units that were heard, which now know what the server saw of ``remembers``."""
        return local

    @abstractmethod
    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        """The server's step; the total may be of nobody."""

    def over(self, server: Tensors) -> bool:
        """Further rounds would change nothing."""
        return False

    @abstractmethod
    def publish(self, server: Tensors) -> Tensors:
        """What predictions use."""

    # --- afterwards --------------------------------------------------------------------------

    @abstractmethod
    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """Units' own models with theta fixed; ``local`` is None for those that never took part."""

    def without_data(self, published: Tensors, cohort: Cohort, key: Key) -> Tensors:
        """The model of a unit that was never there and has no data."""
        return self.personalise(published, cohort, None, key)

    @abstractmethod
    def predict(self, published: Tensors, personal: Tensors, x: Inputs, key: Key) -> Predictive:
        """The predictive distribution at x that belongs to what ``personalise`` gave for one unit."""

    @abstractmethod
    def score(
        self, published: Tensors, cohort: Cohort, held_out: Cohort, local: Tensors, key: Key
    ) -> tuple[Tensor, Tensor]:
        """Summed log-probability of held-out examples and their number, for each unit ``[C]``."""

    def metrics(self, server: Tensors, cost: Mapping[str, float]) -> dict[str, float | None]:
        """Numbers of a round for ``metrics.jsonl`` and the progress bar; None where there is none."""
        return {}

    def drift(self, server: Tensors) -> float | None:
        """Relative change of theta between the two halves of the tail, where there is a tail."""
        return None

    def at_bound(self, published: Tensors) -> list[str]:
        """A word about each parameter on the edge of its projection set."""
        return []

    def lines(self, published: Tensors) -> list[tuple[str, str]]:
        """What was learned, in words, under short titles."""
        return []

    # --- for people --------------------------------------------------------------------------

    @checked
    def fit(
        self,
        clients: Any,
        *,
        rounds: int | None = None,
        seed: int = 0,
        participation: Said = None,
        out: str | Path | None = None,
        resume: bool = False,
        callbacks: Sequence[Any] = (),
        progress: bool | None = None,
        memory: str = "1GiB",
        checkpoint_every: int = 50,
        restarts: int = 0,
        precision: str | None = None,
        sites: Mapping[str, Sequence[str]] | None = None,
        **unknown: Any,
    ) -> Population:
        """Run this method on one machine; ``fedpop.fit`` says what each setting does."""
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        population: Population = type(self).runs_on(self, **given, **unknown)
        return population

    def replace(self, **changes: Any) -> Self:
        """A copy with other settings."""
        return replace(self, **changes)

    def with_model(self, model: Model) -> Self:
        """A copy on another form of its model."""
        return replace(self, model=model)

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, for files and for comparing runs."""
        return {"method": self.label} | {f.name: describe(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class Chosen:
    """The method that runs where another one left that open, and why it is this one."""

    method: Algorithm
    reason: str = ""


class Chooses(ABC):
    """A method whose settings leave open which method runs."""

    @abstractmethod
    def choose(self, rule: Participation, waits: bool) -> Chosen:
        """That for runs with this participation, in which rounds wait for everyone who was asked, or close on
        a quorum."""


def chosen(method: Algorithm, rule: Participation, waits: bool = True) -> Chosen:
    """What runs: the method itself, unless it leaves that open."""
    return method.choose(rule, waits) if isinstance(method, Chooses) else Chosen(method)


def require_everyone(setting: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise unless a setting that is given by name has a value for every client, and for nobody else."""
    missing = [n for n in names if n not in given]
    unknown = sorted(set(given) - set(names))
    if missing:
        raise SettingsError(
            f"{setting}: no value for client {missing[0]!r}; give one for each client, or one for all"
        )
    if unknown:
        raise SettingsError(f"{setting}: there is no client {unknown[0]!r}")


def mean_loss(cost: Mapping[str, float]) -> float | None:
    """Mean negative log-likelihood per example; None for a round that saw none."""
    examples = cost.get("examples", 0.0)
    return -cost["log_likelihood"] / examples if examples else None
