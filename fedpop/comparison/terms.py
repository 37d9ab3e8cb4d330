"""What a comparison is made of: methods with their settings, and what is the same for all of them: data and
splits, budget, who takes part, seeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedpop.checked import Checked, Count, Few, OneOf, Positive, Range, Seed, Whole, require
from fedpop.errors import DataError, PrivacyError, SettingsError
from fedpop.federation.clients import Client, Federation
from fedpop.federation.participation.rules import Participation, Said
from fedpop.federation.participation.rules import resolve as resolve_participation
from fedpop.methods import known_methods
from fedpop.methods.base import Algorithm, check_participation, check_secure, usual_participation
from fedpop.methods.tables import known_method, method_from
from fedpop.models.base import Model
from fedpop.population.evaluate import check_newcomers
from fedpop.precision import PRECISIONS
from fedpop.privacy import Gaussian
from fedpop.run.private import private_method
from fedpop.settings import describe

BUDGET_ROUNDS = 500
"""The budget of every method, by default."""
RESERVED = ("name", "label", "search")
"""Words of a ``[[method]]`` table that are no settings of the method."""


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a registered method with settings, or a method as it is."""

    label: str
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    given: Algorithm | None = None
    where: str = ""

    def build(self, model: Model | None = None) -> Algorithm:
        """The method on this model."""
        if self.given is not None:
            return self.given
        assert model is not None
        return method_from(self.name, self.settings, model, self.where)


def entry_from(table: Mapping[str, Any], where: str) -> Entry:
    """A ``[[method]]`` table.

    >>> entry_from({"name": "FedAvg", "local": {"epochs": 2}}, "compare.toml").settings
    {'local': {'epochs': 2}}
    """
    name = table.get("name") if isinstance(table, Mapping) else None
    if name is None:
        raise SettingsError(f"{where}: a [[method]] without a name; known are {', '.join(known_methods())}")
    known_method(name, where)
    label = table.get("label", name)
    search = table.get("search", {})
    if not isinstance(label, str) or not isinstance(search, Mapping):
        raise SettingsError(f"{where}: method {name}: label is a text and search a table")
    settings = {k: v for k, v in table.items() if k not in RESERVED}
    return Entry(label, name, settings, search, where=f"{where}: method {label}")


def in_line(settings: Mapping[str, Any]) -> str:
    """Settings in a line.

    >>> in_line({"local": {"rate": 0.01, "epochs": 5}, "adaptive": True})
    'local (rate 0.01, epochs 5), adaptive True'
    """
    parts = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} ({in_line(value)})")
        else:
            parts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


@dataclass(frozen=True)
class Subject:
    """What methods are compared on: clients with their splits, clients never seen, and the model, if the
    methods do not bring their own."""

    clients: Federation
    newcomers: Sequence[Client] = ()
    model: Model | None = None


class Source(ABC):
    """Where a seed's subject comes from."""

    @abstractmethod
    def make(self, seed: int) -> Subject: ...

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain values that tell it from any other."""


@dataclass(frozen=True)
class Given(Source):
    """The same data for every seed."""

    subject: Subject

    def make(self, seed: int) -> Subject:
        return self.subject

    def describe(self) -> dict[str, Any]:
        new = self.subject.newcomers
        about = {"data": self.subject.clients.fingerprint(), "new_clients": len(new)}
        return about | ({"new_data": Federation.of(list(new)).fingerprint()} if new else {})


@dataclass(frozen=True)
class Terms(Checked):
    """What is the same for all methods of a comparison."""

    rounds: Count | None = None
    passes: Positive | None = None
    participation: Said = None
    every: Count | None = None
    last: Whole = 10
    precision: Annotated[str, OneOf(*PRECISIONS)] | None = None
    """What backbones run in; the model's setting by default."""
    privacy: Gaussian | None = None
    """The budget of every run."""
    secure: bool | Annotated[int, Range(least=16, most=32)] = False
    """As ``fit`` takes it: secure sums, of so many bits where it is a number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds is not None and self.passes is not None:
            raise SettingsError("a budget is a number of rounds or of backbone passes, not both")
        if self.privacy is not None and self.passes is not None:
            raise PrivacyError(
                "what so many passes are in rounds depends on how many examples clients have, which no "
                "budget covers: give rounds"
            )
        if self.rounds is None and self.passes is None:
            object.__setattr__(self, "rounds", BUDGET_ROUNDS)
        if self.participation is not None:
            object.__setattr__(self, "participation", resolve_participation(self.participation))

    def rule(self, method: type[Algorithm] | Algorithm) -> Participation:
        """Who takes part: what was asked for, or what the method must have."""
        if self.participation is None or method.participation != "any":
            return usual_participation(method)
        return resolve_participation(self.participation)

    def describe(self) -> dict[str, Any]:
        budget: dict[str, Any] = {"rounds": self.rounds} if self.passes is None else {"passes": self.passes}
        who = None if self.participation is None else resolve_participation(self.participation).describe()
        about = budget | {"participation": who, "every": self.every, "last": self.last}
        about |= {} if self.precision is None else {"precision": self.precision}
        about |= {} if self.privacy is None else {"privacy": describe(self.privacy)}
        return about | ({"secure": self.secure} if self.secure else {})


def seeds_of(seeds: Few | Sequence[Seed]) -> list[int]:
    """3 is 0, 1, 2; a list is itself.

    >>> seeds_of(3), seeds_of([7])
    ([0, 1, 2], [7])
    """
    require(Few | Sequence[Seed], seeds=seeds)
    out = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not out or len(set(out)) < len(out):
        raise SettingsError(f"seeds are a number of them or different whole numbers, not {seeds!r}")
    return out


def entries_of(methods: Sequence[Algorithm] | Mapping[str, Algorithm]) -> list[Entry]:
    """Methods as they are, under their labels."""
    for method in methods.values() if isinstance(methods, Mapping) else methods:
        if not isinstance(method, Algorithm):
            raise SettingsError(f"compare takes methods such as fp.FedAvg(model), not {method!r}")
    named = list(methods.items()) if isinstance(methods, Mapping) else [(m.label, m) for m in methods]
    entries = [Entry(label, given=method) for label, method in named]
    check_labels(entries)
    return entries


def check_labels(entries: Sequence[Entry], where: str = "") -> None:
    labels = [e.label for e in entries]
    if not labels:
        raise SettingsError(f"{where}there is no method to compare")
    if not all(label.strip() and label.isprintable() for label in labels):
        raise SettingsError(f"{where}a method's label is a word or several on one line, not {min(labels)!r}")
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise SettingsError(
            f"{where}two methods are called {twice[0]}; give each a label of its own (a mapping of labels to "
            "methods, or label = ... in a file)"
        )


def check(subject: Subject, entries: Sequence[Entry], terms: Terms) -> None:
    """Raise before any work where a comparison cannot be made."""
    if "test" not in subject.clients.splits:
        raise DataError(
            "methods are compared on test examples, and no client has any: give fedpop.Client(x, y, test=(x, "
            "y)), or set some aside with fedpop.hold_out(clients) or, in a file, by test = ...; a client of "
            "one example keeps it to train on"
        )
    check_newcomers(subject.newcomers, subject.clients)
    models = {}
    for entry in entries:
        model = check_entry(entry, subject, terms).model
        models[id(model)] = model
    for model in models.values():  # data that do not fit are reported before anything is written
        model.prepared(subject.clients.example).with_targets(subject.clients)


def check_entry(entry: Entry, subject: Subject, terms: Terms) -> Algorithm:
    """The method of an entry, whose settings fit these clients and who is to take part; errors begin with
    where the settings were given."""
    method = entry.build(subject.model)
    rule = terms.rule(method)
    rule.check(subject.clients.roster)
    try:
        method.check(subject.clients.names)
        check_participation(method, rule)
        if terms.privacy is not None:
            private_method(method)
        if terms.secure:
            check_secure(method)
    except SettingsError as error:
        raise type(error)(f"{entry.where}: {error}" if entry.where else str(error)) from error
    return method
