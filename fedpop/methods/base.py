"""The contract of a federated method: what the server keeps, what units keep and answer, what changes.

    server     broadcast(server)                       -> what an active site receives
    site       enter(units)                            -> a unit's state in its first round
               local_round(round, cohort, local)       -> Answer: vectors, new states, who is fit, what it
               cost
    on the way a Channel clips, compresses, encodes; decodes and sums
    server     server_round(server, total)             -> the next server state, from sums alone

Answers are additive: the server needs sums and a count, nothing else. That is what makes secure and
hierarchical aggregation, and one backward pass for many units, possible. A method is a frozen dataclass of
settings, stored as they were given and resolved when they are used; everything that changes is in
dictionaries of tensors, which is all that a checkpoint needs. It does not know whether it runs in the
simulator or across machines.

``Algorithm`` is what every method has. What only some are is a role that they derive from beside it: one
that asks everyone before the rounds (``Asks``), whose units remember what the server saw (``Remembers``),
that learns a population prior (``PopulationPrior``), and so on. Whoever runs a method asks for its roles in
one way, ``role_of(method, Asks)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from fedpop.checked import Positive, Range, checked
from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import Example, Inputs
from fedpop.federation.participation import Everyone, Participation, Said, Uniform
from fedpop.kernels.target import Hierarchy
from fedpop.keys import Key
from fedpop.message import Answer, Channel, Choice, Guard, Tensors, Total
from fedpop.message.declared import Sent
from fedpop.message.fixed_point import FixedPoint
from fedpop.message.guard import MESSAGES_FOR_A_MEDIAN, UNITS
from fedpop.models.base import Model
from fedpop.models.predictive import Predictive
from fedpop.privacy.site_noise import PrivateRound
from fedpop.questions import Question
from fedpop.server.optimisers import Constant, Schedule, Stage
from fedpop.server.robust import Robust
from fedpop.settings import Setting, complete, describe

if TYPE_CHECKING:
    from fedpop.population import Population  # the one name from above: what ``fit`` returns

R = TypeVar("R")
Trial = Callable[["Algorithm", int], list[float]]
"""Runs so many rounds of a method; gives the log-likelihood at the start and after each round."""
SMALLEST_RATE = 1e-12
"""A rate is above 0, even where a schedule has come to its end."""


@dataclass(frozen=True)
class Facts:
    """What the server knows of the federation, and of the stage of the run that a round belongs to."""

    clients: int
    rounds: int
    """The end of this stage, counted from the start of the run."""
    restart: int = 0
    start: int = 0
    """Rounds in earlier stages: above 0 in a run that was extended, or that runs until it has converged."""
    opening: int | None = None
    """The end of the first stage; None: this is the first."""
    active: float | None = None
    """How many of them a round has on average; None: all."""
    examples: float = math.inf
    """Training examples that they have together."""

    @property
    def stage(self) -> Stage:
        """What schedules go by."""
        return Stage(self.start, self.rounds)

    @property
    def first_stage(self) -> int:
        """Rounds of the first stage, which a warm-up goes by."""
        return self.rounds if self.opening is None else self.opening

    @property
    def expected(self) -> float:
        """How many of them a round has on average."""
        return float(self.clients) if self.active is None else self.active


@dataclass(frozen=True)
class Round:
    """One round as a site sees it."""

    number: int
    broadcast: Tensors
    key: Key
    """The site's own, for what must be secret: the noise of chains, the order of examples."""
    shared: Key
    """The server's, for what everyone is to draw alike."""
    coefficients: Tensor | None = None
    """Where only sums are wanted, what each unit's vector counts, ``[C]``: the answer may be one sum."""
    omega: Callable[[Tensor, int], Tensor] | None = None
    """The relative variance that the channel adds to vectors of a length, for each unit."""
    weigh: bool = False
    """Participation weights act at the site, before a message is compressed; else when it is decoded."""
    secure: FixedPoint | None = None
    """Messages become whole numbers of this form, of which nothing but a sum is seen."""
    robust: Robust | None = None
    """What the server takes in the place of a sum over single messages."""
    private: PrivateRound | None = None
    """What each unit adds is bounded, before anything is added up."""

    @property
    def pace(self) -> float:
        """What rates of local steps are multiplied by in this round (``Paced``)."""
        return float(self.broadcast["pace"]) if "pace" in self.broadcast else 1.0


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


@dataclass(frozen=True)
class Footprint:
    """What planning has to know of a method: how much is in memory at once, and what rounds cost."""

    compressed: int
    """Entries of a compressed vector."""
    phi_copies: int = 0
    """About how many vectors of phi's size a unit's round has in memory at once, beside the data."""
    draws: int = 1
    """Values of z that a unit's round works on together, at most."""
    final_draws: int = 1
    """Values of z in a unit's own model."""
    steady: bool = True
    """Every round after the first costs as much per example of those who take part."""
    rows: int | None = None
    """Of how many examples of a unit, at most, where a round does not work on all."""


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
    """What ``fit`` calls. Methods know no runtime: ``fedpop.names``, which has both, says which it is."""
    private: ClassVar[tuple[str, ...]] = ()
    """Local state that must never be in a message."""
    uncertainty: ClassVar[bool] = False
    """Predictions integrate over parameters; otherwise intervals hold noise only, and say so."""
    of_classes: ClassVar[bool] = False
    """Targets have to be classes."""
    participation: ClassVar[str] = "any"
    """Who may take part in a round: ``any``, ``full`` (everyone, always) or ``one`` (a relay)."""
    guarded: ClassVar[tuple[str, ...]] = ()
    """Vectors whose norms the guard looks at: moves, gradients, or states."""
    sends_states: ClassVar[bool] = False
    """They are states, whose norms do not grow with the number of examples."""
    compressed: ClassVar[tuple[str, ...]] = ()
    """Vectors that may be compressed without bias; a method that names none refuses a compressor."""
    clipped: ClassVar[tuple[str, ...]] = ()
    """Moves and gradients that ``clip`` bounds; those that may be compressed where there are none here."""
    plain_sums: ClassVar[tuple[str, ...]] = ()
    """Vectors whose sum without participation weights is needed beside the weighted one."""
    sends: ClassVar[Mapping[str, Sent]] = {}
    """Vectors and numbers that are not among those of ``fedpop.message.declared``, by name."""
    private_sums: ClassVar[tuple[str, ...]] = ()
    """Vectors that are sent under differential privacy, each unit's shortened to a bound; a method that names
    none refuses it. Moves that count n_i times count once then."""
    not_private: ClassVar[str] = "what its clients send has no bound under which it stays what it is"
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
            compressor.check(self.footprint.compressed)

    # --- what the runtime asks before it starts -----------------------------------------------

    @cached_property
    def channel(self) -> Channel:
        """The way that this method's vectors take to the server."""
        return Channel(self.compressor, self.compressed, self.clip, self.clipped)

    @property
    def footprint(self) -> Footprint:
        return Footprint(compressed=self.model.phi_layout.size + self.model.z_layout.size)

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name

    def prepared(self, example: Example) -> Self:
        """This method for examples of this kind."""
        return replace(self, model=self.model.prepared(example))

    def check(self, names: Sequence[str]) -> None:
        """Raise early when the settings do not fit these clients."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, Mapping):
                require_everyone(setting.name, value, names)

    @classmethod
    def needs_single(cls) -> str:
        """Why the server has to see single messages, which secure sums hide; "" where sums will do."""
        if cls.participation == "one":
            return "is a relay: one client's message goes to the next"
        clear = [name for name, sent in cls.sends.items() if sent.clear]
        return f"reads each site's {clear[0]}" if clear else ""

    def sees_single(self) -> str:
        """The same of this method with its settings."""
        if not all(c.identity for c in self.channel.compressors):
            name = self.channel.compressors[0].name
            return (
                f"compresses by {name}, whose scale or support differs between sites, so that no sum of what "
                "they send is one of vectors; leave compressor out, fewer bits (secure=16) compress such sums"
            )
        return type(self).needs_single()

    # --- under differential privacy ----------------------------------------------------------

    def under_privacy(self) -> Self:
        """This method without what looks at data beside ``private_sums``; raises where that was asked for."""
        return replace(self, guard=None)

    def private_size(self, name: str, broadcast: Tensors) -> int:
        """Entries of such a vector."""
        return self.footprint.compressed

    def whitened(self, name: str, v: Tensor, broadcast: Tensors, inverse: bool = False) -> Tensor:
        """Such vectors ``[..., D]`` in the units in which they are bounded, and back from there."""
        return v

    # --- a run -------------------------------------------------------------------------------

    @abstractmethod
    def init(self, facts: Facts, key: Key, known: Tensors) -> Tensors:
        """The server's state before the first round, given the results of the questions."""

    @abstractmethod
    def broadcast(self, server: Tensors) -> Tensors:
        """What an active site receives."""

    def enter(self, units: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        """The state of units that take part for the first time, stacked; ``key`` is their site's."""
        return {}

    @abstractmethod
    def local_round(self, round: Round, cohort: Cohort, local: Tensors) -> Answer | Iterable[Answer]:
        """A cohort's work, in one answer or in blocks of its units as they are ready."""

    @abstractmethod
    def server_round(self, server: Tensors, total: Total, facts: Facts, key: Key) -> Tensors:
        """The server's step; the total may be of nobody."""

    @abstractmethod
    def publish(self, server: Tensors) -> Tensors:
        """What predictions use."""

    # --- afterwards --------------------------------------------------------------------------

    @abstractmethod
    def personalise(self, published: Tensors, cohort: Cohort, local: Tensors | None, key: Key) -> Tensors:
        """Units' own models with theta fixed; ``local`` is None for those that never took part."""

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
        threads: int | None = None,
        device: str | torch.device | None = None,
        sites: Mapping[str, Sequence[str]] | None = None,
        secure: bool | int = False,
        privacy: Any = None,
        aggregate: Any = None,
    ) -> Population:
        """Run this method on one machine; ``fedpop.fit`` says more of each setting.

        Args:
            clients: Their data, as a list, a mapping, a ``fp.Table`` or a ``fp.Federation``.
            rounds: How many; None (the default) until theta has converged.
            seed: Of all random numbers, 0 by default.
            participation: Who takes part in a round; None (the default) for everyone.
            out: A folder for the run's files; None (the default) writes nothing.
            resume: Go on from the checkpoints in ``out``; not by default.
            callbacks: What happens between rounds; nothing by default.
            progress: Show a bar; None (the default) on a terminal only.
            memory: What a round may take beside the data, "1GiB" by default.
            checkpoint_every: Rounds between checkpoints, 50 by default.
            restarts: Further runs from other starts, of which the best is returned; 0 by default.
            precision: That of the backbone; None (the default) for the model's own.
            threads: How many torch works with; None (the default) for as many as suit the work.
            device: Where to compute; None (the default) where the model is.
            sites: Names of sites with those of their clients; None (the default) has each by itself.
            secure: Add messages up as secure sums do; not by default.
            privacy: ``fp.privacy.Gaussian(...)`` for differential privacy of what is learned; None (the
                default) for none.
            aggregate: One of ``fp.aggregates`` in the place of the sum over messages; None (the default) is
                the sum.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        complete()
        population: Population = type(self).runs_on(self, **given)
        return population

    def replace(self, **changes: Any) -> Self:
        """A copy with other settings."""
        return replace(self, **changes)

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, for files and for comparing runs."""
        return {"method": self.label} | {f.name: describe(getattr(self, f.name)) for f in fields(self)}


# --- what runs a method ----------------------------------------------------------------------


def role_of(method: Algorithm, kind: type[R]) -> R | None:
    """A method in one of its roles, or None.

    >>> import fedpop as fp
    >>> from torch import nn
    >>> method = fp.FedAvg(fp.Composition(None, nn.Linear(1, 1), "normal"))
    >>> role_of(method, Paced) is method, role_of(method, Asks)
    (True, None)
    """
    return method if isinstance(method, kind) else None


def usual_participation(method: type[Algorithm] | Algorithm) -> Participation:
    """Who takes part when nothing is said."""
    return Uniform(1) if method.participation == "one" else Everyone()


def check_secure(method: Algorithm) -> None:
    """Raise unless this method's server needs nothing but sums."""
    if why := method.sees_single():
        raise SettingsError(f"secure sums hide single messages, and {method.label} {why}")


def check_robust(method: Algorithm) -> None:
    """Raise unless a centre of messages, times their number, may stand for a sum of this method's."""
    remembers = role_of(method, Remembers)
    if method.participation != "any" or method.plain_sums or (remembers and remembers.remembers):
        raise SettingsError(
            f"aggregate= takes a centre of messages for their sum; {method.label} needs the sum itself"
        )


def check_participation(method: Algorithm, rule: Participation) -> None:
    """Raise unless this method allows this rule."""
    everyone, one = isinstance(rule, Everyone), isinstance(rule, Uniform) and rule.size == 1
    if method.participation == "full" and not everyone:
        raise SettingsError(f"{method.label} needs every client in every round: participation=None")
    if method.participation == "one" and not one:
        raise SettingsError(
            f"{method.label} visits one client at a time: participation=fedpop.participation.Uniform(1)"
        )


def needs_everyone(method: Algorithm) -> bool:
    """A round without one of those who may take part makes no sense: it is waited for."""
    return method.participation == "full"


def guard_for(method: Algorithm, broadcast: Tensors, messages: int, unseen: bool = False) -> Guard | None:
    """What looks at the messages of a round, given what was broadcast as usual. Where they are ``unseen`` it
    counts their norms in any case, which the form of their sum follows."""
    if unseen and method.guarded:
        multiple, states = method.guard or math.inf, method.sends_states
        return Guard(multiple, method.guarded, broadcast, messages, unseen, states)
    if method.guard is None or not method.guarded or method.participation == "one":
        return None
    return Guard(method.guard, method.guarded, broadcast, messages, states=method.sends_states)


def units_guard_for(method: Algorithm, broadcast: Tensors, units: int) -> Guard | None:
    """What looks at the units of a site before it adds them up."""
    if method.guard is None or not method.guarded or method.participation == "one":
        return None
    several = max(units, MESSAGES_FOR_A_MEDIAN)  # it goes by what was broadcast where there are few
    return Guard(method.guard, method.guarded, broadcast, several, states=method.sends_states, of=UNITS)


# --- roles: what only some methods are -------------------------------------------------------


class Asks(ABC):
    """Everyone is asked before the rounds."""

    @abstractmethod
    def questions(self, facts: Facts, key: Key) -> Sequence[Question[Tensors]]:
        """What, in order; later questions know the results of earlier ones."""

    def grown(self, server: Tensors, facts: Facts, known: Tensors) -> Tensors:
        """The server's state once others have joined, who were asked the questions that last: ``known`` are
        the results of these over everyone."""
        return server


class ChecksData(ABC):
    """Clients' data may not suffice."""

    @abstractmethod
    def check_data(self, federation: Federation) -> None:
        """Raise early, or warn."""


class Remembers:
    """Units' states do not only follow from whether their answer was received."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """Local state that is right in any case: where a chain stands, how it adapted."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """Vectors of which a unit remembers what the server saw."""

    @property
    def remembered(self) -> tuple[str, ...]:
        """Those that matter with these settings."""
        return self.remembers

    def after_send(self, local: Tensors, seen: Tensors) -> Tensors:
        """States of units whose messages were received, given what the server saw."""
        return local


@dataclass(frozen=True, kw_only=True)
class Paced:
    """Rates of local steps change over the rounds.

    All rates of a round are the schedule's factor times those given (``Round.pace``); the server broadcasts
    it, as a site does not know how many rounds there are. What follows training (fine-tuning, a newcomer's
    own epochs) has the rates given.
    """

    schedule: Schedule = field(default_factory=Constant)

    def pace(self, k: int, facts: Facts) -> Tensors:
        """What the sites of round k receive beside ``broadcast``."""
        if isinstance(self.schedule, Constant):
            return {}
        factor = max(self.schedule.factor(k, facts.stage), SMALLEST_RATE)
        return {"pace": torch.tensor(factor, dtype=torch.float64)}


class Staged(ABC):
    """What the server keeps goes by the stage of a run."""

    def warm_up(self, rounds: int) -> int:
        """Rounds of a run of so many whose theta is not to be averaged, chosen or judged as converged."""
        return 0

    @property
    def wants_information(self) -> bool:
        """Whether a further stage wants the inverse information, where it can be had."""
        return False

    @abstractmethod
    def extended(self, server: Tensors, facts: Facts, inverse: Tensor | None = None) -> Tensors:
        """The server's state at the beginning of a further stage: what it broadcasts of a schedule, anew.
        ``inverse`` is that of the information at the published theta, where it was wanted."""


class EndsByItself(ABC):
    """Rounds come to an end by themselves."""

    @abstractmethod
    def over(self, server: Tensors) -> bool:
        """Further rounds would change nothing."""


class FindsRate(ABC):
    """A step size may be found by trial rounds before the first one."""

    @abstractmethod
    def calibrated(self, trial: Trial) -> Algorithm:
        """This method with the step size that they find, where it was left open."""

    @abstractmethod
    def rate(self) -> float | None:
        """The step size, once it is there."""

    @abstractmethod
    def with_rate(self, rate: float) -> Algorithm:
        """This method with this one."""


class PopulationPrior(ABC):
    """p(D | phi, z) p(z | beta): z has a prior, of which beta is learned."""

    @property
    @abstractmethod
    def hierarchy(self) -> Hierarchy: ...

    @abstractmethod
    def restarted(self) -> Algorithm:
        """This method for a restart from a random point."""

    @abstractmethod
    def for_evaluation(self) -> Algorithm:
        """This method for a look between rounds, where a full final pass would cost more than it shows."""

    @abstractmethod
    def for_verdict(self) -> Algorithm:
        """This method for a verdict on theta between rounds, whose draws need not serve predictions."""

    @abstractmethod
    def without_data(self, published: Tensors, cohort: Cohort, key: Key) -> Tensors:
        """The models of units that never took part and have no data."""

    @abstractmethod
    def lines(self, published: Tensors) -> list[tuple[str, str]]:
        """What was learned, in words, under short titles."""

    def how(self) -> list[tuple[str, str]]:
        """How it is learned."""
        return []

    @abstractmethod
    def at_bound(self, published: Tensors) -> list[str]:
        """A word about each parameter on the edge of its projection set."""

    def drift(self, server: Tensors) -> float | None:
        """Relative change of theta between the two halves of the tail, where there is a tail."""
        return None


def hierarchy_of(method: Algorithm) -> Hierarchy | None:
    """Of a method with a population prior."""
    found = role_of(method, PopulationPrior)
    return None if found is None else found.hierarchy


@dataclass(frozen=True)
class Chosen:
    """The method that runs where another one left that open, and why it is this one."""

    method: Algorithm
    reason: str = ""


class Chooses(ABC):
    """Settings leave open which method runs."""

    @abstractmethod
    def choose(self, rule: Participation, waits: bool) -> Chosen:
        """That for runs with this participation, in which rounds wait for everyone who was asked, or close on
        a quorum."""


def chosen(method: Algorithm, rule: Participation, waits: bool = True) -> Chosen:
    """What runs: the method itself, unless it leaves that open."""
    choosing = role_of(method, Chooses)
    return Chosen(method) if choosing is None else choosing.choose(rule, waits)


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
