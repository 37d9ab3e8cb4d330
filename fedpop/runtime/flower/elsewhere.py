"""Members of a run at other sites: the rounds and questions of a ``Run``, by letter."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Round
from fedpop.channel import Answer, Channel, Message, Tally, Tensors
from fedpop.checked import Count, OneOf, Positive, require
from fedpop.client.store import LocalStore
from fedpop.errors import EstimateError, PayloadError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active, Participation, Roster, Uniform
from fedpop.keys import Key, unit_of, units_of
from fedpop.population.sites import Outcome, Update, add_up
from fedpop.runtime.flower.letters import Letter, Reply, digest_of, message_in
from fedpop.runtime.flower.post import Post
from fedpop.runtime.members import Asking, Members
from fedpop.version import __version__

log = logging.getLogger("fedpop.server")

R = TypeVar("R")
WEIGHTS = ("rule", "observed")


@dataclass(frozen=True)
class Terms:
    """When a round is over, and how sites count.

    >>> Terms(quorum=0.5, timeout=120.0).enough(4)(2)
    True
    """

    sites: int = 1
    """Sites that must be there before a round is begun."""
    quorum: float = 1.0
    """The share of those asked whose replies close a round."""
    timeout: float = 600.0
    """Seconds after which it is closed in any case, unless the method needs everyone."""
    weights: str = "rule"
    """``observed``: each site counts one over the share of rounds in which it was heard."""

    def __post_init__(self) -> None:
        require(Count, sites=self.sites)
        require(Positive, quorum=self.quorum, timeout=self.timeout)
        require(Annotated[str, OneOf(*WEIGHTS)], weights=self.weights)
        if self.quorum > 1:
            raise SettingsError(f"quorum is a share of the sites asked, at most 1, not {self.quorum}")

    def enough(self, asked: int) -> Callable[[int], bool]:
        return lambda heard: heard >= self.quorum * asked


@dataclass
class Member:
    """What the server knows of a site."""

    units: int
    splits: list[str]
    heard: int = -1
    """Its last round that counted."""
    times: int = 0
    """Rounds in which it was heard."""
    rounds: int = 0
    """Rounds since it is here."""
    noted: list[str] | None = None
    """Questions to which its answer counted."""


class Elsewhere(Members):
    """Sites that letters go to."""

    def __init__(self, method: Algorithm, post: Post, experiment: str, terms: Terms, seed: int) -> None:
        self._post, self._terms, self._seed = post, terms, seed
        self._everyone = method.needs_everyone
        self.experiment, self.device = experiment, method.model.initial_phi().device
        self.sites: dict[str, Member] = {}
        """By name, in the order in which they came."""
        self._forms: dict[str, dict[str, int]] = {}
        """Lengths of vectors, by name, of rounds and of each question."""
        self._round, self._best, self._recall = -1, -1, False
        self._metrics: dict[str, Any] = {}

    # --- who there is ------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:  # type: ignore[override]
        return list(self.sites)

    @property
    def units(self) -> int:
        return sum(site.units for site in self.sites.values())

    @property
    def federation(self) -> Federation | None:
        return None

    @property
    def splits(self) -> Collection[str]:
        return {split for site in self.sites.values() for split in site.splits}

    @property
    def store(self) -> LocalStore | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"experiment": self.experiment}

    def fresh(self) -> Members:
        raise SettingsError("trial rounds are not run across sites: give the step size, rate=...")

    def wait(self, everyone: bool = False, patience: float = math.inf) -> list[str]:
        """Who is there, once it is enough of them, or patience is at its end; says for whom it waits."""
        least, told = self._terms.sites, -math.inf
        end = self._post.now() + patience
        while True:
            here = self._post.present()
            for name in here:
                about = self._post.sites[name].about
                site = self.sites.setdefault(name, Member(0, []))
                site.units, site.splits = int(about["units"]), list(about["splits"])
            missing = sorted(set(self.sites) - set(here)) if everyone else []
            if (len(here) >= least and not missing) or self._post.now() > end:
                return here
            if self._post.now() - told >= 30:
                whom = ", ".join(missing) or f"{least - len(here)} more site(s)"
                log.info("waiting for %s; here: %s", whom, ", ".join(here) or "nobody")
                told = self._post.now()
            self._post.pause()

    def active(self, rule: Participation, key: Key, round: int) -> Active:
        """As in the simulator, by names, among those who are there and not busy with an earlier round."""
        here = self.wait(everyone=self._everyone)
        free = [n for n in here if not self._post.busy(n)] or here
        units, key = units_of(self.names), key.at(round=round, purpose="participation")
        there = torch.tensor([n in free for n in self.names])
        if isinstance(rule, Uniform):
            ids = there.nonzero().squeeze(1)
            drawn = Uniform(min(rule.size, len(ids))).draw(Roster(units[ids]), key)
            active = Active(ids[drawn.ids], drawn.weights, drawn.ratio)
        else:
            drawn = rule.draw(Roster(units), key)
            kept = there[drawn.ids]
            active = Active(drawn.ids[kept], drawn.weights[kept], drawn.ratio)
        if self._terms.weights == "rule":
            return active
        each = [self.sites[self.names[i]] for i in active.ids.tolist()]
        weights = torch.tensor([(s.rounds + 1) / (s.times + 1) for s in each], dtype=torch.float32)
        return Active(active.ids, weights, ratio=False)

    # --- rounds ------------------------------------------------------------------------------

    def _about(self, name: str, **more: Any) -> dict[str, Any]:
        """What every letter says: which round of the site's counted last, among others."""
        site = self.sites[name]
        own = {"heard": site.heard, "noted": site.noted or [], "best": self._best, "seed": self._seed}
        return {"version": __version__, "experiment": self.experiment} | own | more

    def round(self, method: Algorithm, round: Round, active: Active) -> Outcome:
        names = [self.names[i] for i in active.ids.tolist()]
        weights = dict(zip(names, active.weights.tolist(), strict=True))
        digest = digest_of(round.broadcast)
        letters = {
            name: Letter("train", self._about(name, round=round.number, digest=digest), round.broadcast)
            for name in names
        }
        timeout = None if self._everyone else self._terms.timeout
        enough = (lambda heard: False) if self._everyone else self._terms.enough(len(letters))
        replies = self._post.deliver(letters, timeout, enough)
        self._round = round.number
        return self._tallied(method, "train", method.channel, letters, replies, weights, active.ratio)

    def _tallied(
        self,
        method: Algorithm,
        what: str,
        channel: Channel,
        letters: Mapping[str, Letter],
        replies: Mapping[str, Reply],
        weights: Mapping[str, float],
        ratio: bool,
    ) -> Outcome:
        """Sums of what arrived, in the order of sites; who cannot be added up is left out and named."""
        reasons, kind = self._post.reasons, method.model.initial_phi().dtype
        messages, vectors = dict[str, Message](), dict[str, Tensors]()
        for name in sorted(replies, key=unit_of):
            try:
                messages[name] = message_in(replies[name], letters[name])
                vectors[name] = _finite(messages[name].vectors(channel, unit_of(name), kind))
            except PayloadError as error:
                reasons[name] = str(error)
        fit = {n: v for n, v in vectors.items() if messages[n].units}
        reasons |= dict.fromkeys(vectors.keys() - fit.keys(), "its numbers are not finite")
        reasons |= self._misshapen(what, fit)
        tally, cost, size = Tally(Channel(), Key(0)), dict[str, float](), 0
        for name, own in fit.items():
            if name in reasons:
                continue
            message = messages[name]
            rows = {n: v.unsqueeze(0).to(self.device) for n, v in own.items()}
            named = {
                n: (of, torch.tensor([c], dtype=torch.float64, device=self.device))
                for n, (of, c) in message.named.items()
            }
            unit = torch.tensor([unit_of(name)], device=self.device)
            weight = torch.tensor([weights[name]], device=self.device)
            answer = Answer(torch.ones_like(unit, dtype=torch.bool), rows, named=named)
            tally.add(answer, unit, weight, stands_for=message.units)
            add_up(cost, message.cost)
            size += message.size
        for name, why in sorted(reasons.items()):
            log.warning("%s was left out: %s", name, why)
        heard = [n for n in letters if n not in reasons]
        place = {name: i for i, name in enumerate(self.sites)}
        self._metrics = {
            "heard": heard,
            "reasons": dict(sorted(reasons.items())),
            "late": sum(self._post.late.values()),
        }
        ids = torch.tensor([place[n] for n in heard], dtype=torch.int64)
        left_out = tuple(place[n] for n in letters if n in reasons)
        return Outcome(tally.total(self.units, ratio), cost, left_out, size, [(ids, {})])

    def _misshapen(self, what: str, vectors: Mapping[str, Tensors]) -> dict[str, str]:
        """Who sends vectors of another form than was sent before, or, the first time, than most send."""
        forms = {name: {n: len(v) for n, v in sorted(own.items())} for name, own in vectors.items()}
        if not forms:
            return {}
        kinds = Counter(json.dumps(form) for form in forms.values()).most_common()
        usual = self._forms.get(what)
        if usual is None or not all(n in usual for form in forms.values() for n in form):
            if len(kinds) > 1 and kinds[0][1] == kinds[1][1]:
                told = "; ".join(f"{name} {form}" for name, form in sorted(forms.items())[:4])
                raise EstimateError(f"sites do not agree on what they send ({told}): check their models")
            usual = (usual or {}) | json.loads(kinds[0][0])
            self._forms[what] = usual
        names = set(json.loads(kinds[0][0]))
        fits = {name: set(form) == names and form.items() <= usual.items() for name, form in forms.items()}
        return {
            name: f"it sent {form or 'nothing'} (entries), not { {n: usual[n] for n in sorted(names)} }"
            for name, form in forms.items()
            if not fits[name]
        }

    def keep(self, updates: Iterable[Update], entered: bool = True) -> None:
        """A round has counted: the sites that were heard are told so in their next letter."""
        if not entered:
            return
        heard = {self.names[i] for ids, _ in updates for i in ids.tolist()}
        for name, site in self.sites.items():
            site.rounds += 1
            site.times += name in heard
            site.heard = self._round if name in heard else site.heard

    def bytes_down(self, told: Tensors, ids: Tensor) -> int:
        return len(ids) * sum(t.numel() * t.element_size() for t in told.values())

    def metrics(self) -> dict[str, Any]:
        return self._metrics

    # --- questions ---------------------------------------------------------------------------

    def ask(self, asking: Asking[R]) -> tuple[R, Outcome]:
        question, known = asking.question, asking.known
        names = [n for n, s in self.sites.items() if asking.split is None or asking.split in s.splits]
        asked = {f"known.{n}": t for n, t in known.items()} if asking.models else {}
        asked |= {} if asking.models else {f"asked.{n}": t for n, t in question.ask(known).items()}
        asked |= {f"broadcast.{n}": t for n, t in asking.broadcast.items()}
        about = {
            "question": question.name,
            "facts": asdict(asking.facts),
            "key": [asking.key.round, asking.key.purpose],
            "models": asking.models,
        }
        if question.quorum == 1.0:
            self.wait(everyone=True, patience=self._terms.timeout)
        letters = {name: Letter("ask", self._about(name, **about), asked) for name in names}
        replies = self._post.deliver(letters, self._terms.timeout, lambda heard: False)
        done = self._tallied(
            asking.method, question.name, Channel(), letters, replies, dict.fromkeys(names, 1.0), ratio=False
        )
        of = sum(self.sites[n].units for n in names)
        if done.total.count < question.quorum * of:
            told = "; ".join(f"{n}: {why}" for n, why in sorted(self._post.reasons.items())[:5])
            raise EstimateError(
                f"{question.name}: {done.total.count} of {of} units could be heard, not enough ({told})"
            )
        for name in names:
            if name not in self._post.reasons:
                site = self.sites[name]
                site.noted = sorted({*(site.noted or []), question.name})
        cost = dict(done.cost) | {"bytes_down": float(len(names) * _size(asked))}
        outcome = Outcome(done.total, cost, done.left_out, done.bytes_up, [])
        return question.finish(known, done.total), outcome

    def finish(self, published: Tensors, rounds: int) -> list[str]:
        """Give everyone who is there the theta that was learned; says who has it."""
        here = self._post.present()
        told = {"recall": self._recall, "rounds": rounds, "learned_from": self.units}
        letters = {n: Letter("finish", self._about(n, **told), published) for n in here if n in self.sites}
        return sorted(self._post.deliver(letters, self._terms.timeout, lambda heard: False))

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> Tensors:
        plain = {
            "sites": {n: asdict(s) for n, s in self.sites.items()},
            "forms": self._forms,
            "best": self._best,
            "late": self._post.late,
        }
        return {"elsewhere": torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)}

    def restore(self, state: Tensors) -> None:
        plain = json.loads(bytes(state["elsewhere"].tolist()))
        here = {n: s for n, s in self.sites.items() if n not in plain["sites"]}
        self.sites = {n: Member(**s) for n, s in plain["sites"].items()} | here
        self._forms, self._best, self._post.late = plain["forms"], plain["best"], plain["late"]

    def remember(self) -> Tensors:
        self._best = self._round
        return {"round": torch.tensor(self._best)}

    def recall(self, remembered: Tensors) -> None:
        self._best, self._recall = int(remembered["round"]), True


def _finite(vectors: Tensors) -> Tensors:
    for name, vector in vectors.items():
        if not bool(torch.isfinite(vector).all()):
            raise PayloadError(f"its {name} is not finite")
    return vectors


def _size(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
