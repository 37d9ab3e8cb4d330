"""Replies made into sums, in the order of sites: who cannot be added up is left out, and named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedpop.channel import Answer, Channel, Guard, Message, Tally, Tensors, Total
from fedpop.channel.guard import norm_of
from fedpop.errors import EstimateError, PayloadError
from fedpop.keys import Key, unit_of
from fedpop.population.sites import add_up
from fedpop.runtime.flower.letters import Letter, Reply, message_in

ABSURD = "its message was out of all proportion"


@dataclass(frozen=True)
class Sums:
    """What the server sees of a round or a question: sums, what they cost, and why sites are not in them."""

    total: Total
    cost: Mapping[str, float]
    size: int
    """Bytes of the messages that count."""
    reasons: dict[str, str]
    read: frozenset[str]
    """Sites whose replies could be read, whatever was in them."""
    suspects: tuple[str, ...] = ()
    """Those among them whose messages were out of all proportion."""
    usual: Tensors = field(default_factory=dict)
    """What the guard has learned is usual."""


@dataclass
class Gathering:
    """Adds up sites' vectors; remembers the form that they had."""

    device: torch.device
    forms: dict[str, dict[str, int]] = field(default_factory=dict)
    """Lengths of vectors, by name, of rounds and of each question."""

    def sums(
        self,
        what: str,
        channel: Channel,
        kind: torch.dtype,
        letters: Mapping[str, Letter],
        replies: Mapping[str, Reply],
        weights: Mapping[str, float],
        of: int,
        ratio: bool = False,
        guard: Guard | None = None,
        examples: Mapping[str, int] | None = None,
        varied: bool = False,
    ) -> Sums:
        """Sums of what arrived; ``guard`` looks at a round's messages together, by sites' ``examples``. Where
        names are ``varied`` a vector of a name that others do not send is nothing strange."""
        reasons, messages, vectors = dict[str, str](), dict[str, Message](), dict[str, Tensors]()
        norms: dict[str, dict[str, float]] = {}
        for name in sorted(replies, key=unit_of):
            try:
                messages[name] = message_in(replies[name], letters[name])
                vectors[name] = _finite(messages[name].vectors(channel, unit_of(name), kind))
                norms[name] = _withheld(replies[name])
            except PayloadError as error:
                reasons[name] = str(error)
        fit = {n: v for n, v in vectors.items() if messages[n].units}
        held_back = {n for n in vectors if norms[n]}
        reasons |= dict.fromkeys(vectors.keys() - fit.keys(), "its numbers are not finite")
        reasons |= dict.fromkeys(held_back, f"{ABSURD}; it held it back")
        reasons |= self._misshapen(what, fit) if not varied else {}
        suspects, usual = set(held_back), Tensors()
        if guard is not None:
            norms = {n: norms[n] for n in held_back} | {
                n: {v: norm_of(own[v]) for v in guard.names if v in own}
                for n, own in fit.items()
                if n not in reasons
            }
            found = guard.suspected(norms, examples or {})
            reasons |= dict.fromkeys(found - held_back, ABSURD)
            suspects, usual = suspects | found, guard.learned()
        tally, cost, size = Tally(Channel(), Key(0)), dict[str, float](), 0
        for name, own in fit.items():
            if name not in reasons:
                self._add(tally, name, own, messages[name], weights[name])
                add_up(cost, messages[name].cost)
                size += messages[name].size
        read, absurd = frozenset(vectors), tuple(sorted(suspects))
        return Sums(tally.total(of, ratio), cost, size, reasons, read, absurd, usual)

    def _add(self, tally: Tally, name: str, own: Tensors, message: Message, weight: float) -> None:
        rows = {n: v.unsqueeze(0).to(self.device) for n, v in own.items()}
        named = {
            n: (of, torch.tensor([c], dtype=torch.float64, device=self.device))
            for n, (of, c) in message.named.items()
        }
        unit = torch.tensor([unit_of(name)], device=self.device)
        answer = Answer(torch.ones_like(unit, dtype=torch.bool), rows, named=named)
        tally.add(answer, unit, torch.tensor([weight], device=self.device), stands_for=message.units)

    def _misshapen(self, what: str, vectors: Mapping[str, Tensors]) -> dict[str, str]:
        """Who sends vectors of another form than was sent before, or, the first time, than most send."""
        forms = {name: {n: len(v) for n, v in sorted(own.items())} for name, own in vectors.items()}
        if not forms:
            return {}
        kinds = Counter(json.dumps(form) for form in forms.values()).most_common()
        usual = self.forms.get(what)
        if usual is None or not all(n in usual for form in forms.values() for n in form):
            if len(kinds) > 1 and kinds[0][1] == kinds[1][1]:
                told = "; ".join(f"{name} {form}" for name, form in sorted(forms.items())[:4])
                raise EstimateError(f"sites do not agree on what they send ({told}): check their models")
            usual = (usual or {}) | json.loads(kinds[0][0])
            self.forms[what] = usual
        names = set(json.loads(kinds[0][0]))
        fits = {name: set(form) == names and form.items() <= usual.items() for name, form in forms.items()}
        return {
            name: f"it sent {form or 'nothing'} (entries), not { {n: usual[n] for n in sorted(names)} }"
            for name, form in forms.items()
            if not fits[name]
        }


def _withheld(reply: Reply) -> dict[str, float]:
    """Norms of vectors that a site held back, having judged itself."""
    try:
        return {str(n): float(v) for n, v in reply.about.get("withheld", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise PayloadError(f"it is not readable ({type(error).__name__})") from error


def _finite(vectors: Tensors) -> Tensors:
    for name, vector in vectors.items():
        if not bool(torch.isfinite(vector).all()):
            raise PayloadError(f"its {name} is not finite")
    return vectors
