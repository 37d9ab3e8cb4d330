"""Sites' messages added up to a total, in the order of sites; who cannot be added is left out, and named."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpop.errors import EstimateError, PayloadError, SettingsError
from fedpop.flower.requests import Request, require_answer
from fedpop.keys import unit_of
from fedpop.message import Aggregate, Channel, Guard, Message, Tensors, Total
from fedpop.message.declared import HEADER, require_declared
from fedpop.message.guard import COUNTS

log = logging.getLogger("fedpop.server")

ABSURD = "its message was out of all proportion"
IMPOSSIBLE = (
    "its answer cannot be: a size, a count or a sum of squares is negative, or products exceed squares"
)


@dataclass(frozen=True)
class Aggregated:
    """What came of requests: the total, and why sites are not in it."""

    total: Total
    reasons: dict[str, str]
    read: frozenset[str]
    """Sites whose messages could be read, whatever was in them."""
    suspects: tuple[str, ...] = ()
    """Those whose messages were out of all proportion."""


@dataclass
class Aggregator:
    """Adds up sites' messages; remembers their form."""

    device: torch.device
    forms: dict[str, dict[str, int]] = field(default_factory=dict)
    """Lengths of vectors, by name, of rounds and of each question."""

    def aggregate(
        self,
        what: str,
        channel: Channel,
        kind: torch.dtype,
        requests: Mapping[str, Request],
        messages: Mapping[str, Message],
        *,
        of: int,
        weights: Mapping[str, float] | None = None,
        ratio: bool = False,
        guard: Guard | None = None,
        units: Guard | None = None,
        examples: Mapping[str, int] | None = None,
        varied: bool = False,
        sends: Mapping[str, object] | None = None,
        possible: Callable[[Tensors], Tensor | None] | None = None,
    ) -> Aggregated:
        """The total of what arrived; ``guard`` looks at a round's messages together, by sites' ``examples``,
        or at answers to a question, whose norms nobody counts but here, and which are ``possible`` or not.
        Where names are ``varied`` a vector of a name that others do not send is nothing strange."""
        reasons, seen = dict[str, str](), dict[str, Message]()
        for name in sorted(messages, key=unit_of):
            try:
                message = require_answer(messages[name], requests[name], name)
                _require_declared(message, sends or {})
                applied = 1.0 if weights is None else weights[name]
                seen[name], longer = channel.bounded(_finite(channel.receive(message, kind)), applied)
                if longer:
                    log.warning("%s: %s came longer than clip allows, and was clipped", name, longer)
            except PayloadError as error:
                reasons[name] = str(error)
        fit = {n: m for n, m in seen.items() if int(m.units)}
        withheld = {n for n, m in seen.items() if m.withheld is not None and bool(m.withheld)}
        reasons |= dict.fromkeys(seen.keys() - fit.keys(), "its numbers are not finite")
        reasons |= dict.fromkeys(withheld, f"{ABSURD}; the site withheld it")
        reasons |= self._misshapen(what, {n: m.vectors for n, m in fit.items()}) if not varied else {}
        impossible = {n for n in fit if n not in reasons and _impossible(fit[n], possible)}
        reasons |= dict.fromkeys(impossible, IMPOSSIBLE)
        suspects, usual = withheld | impossible, Tensors()
        if guard is not None:
            counts = Aggregate()
            rows = {n: torch.tensor([(examples or {}).get(n, 1)]) for n in fit}
            for name in withheld | {n for n in fit if n not in reasons}:
                asked = possible is not None and name in fit
                counts.number(guard.counted(fit[name], rows[name]) if asked else _counts(seen[name]))
            judged = guard.suspects if possible is None else guard.beyond
            for name, message in fit.items():
                if name not in reasons and bool(judged(message, rows[name], counts.numbers)):
                    reasons[name] = ABSURD
                    suspects.add(name)
            usual = guard.learned(counts.numbers)
            if units is not None:
                usual |= units.learned(counts.numbers)
        aggregate = Aggregate()
        for name, message in fit.items():
            if name not in reasons:
                weight = torch.tensor([1.0 if weights is None else weights[name]], device=self.device)
                aggregate.add(message.to(self.device), weight)
        total = aggregate.total(of, ratio, usual=usual)
        return Aggregated(total, reasons, frozenset(seen), tuple(sorted(suspects)))

    def _misshapen(self, what: str, vectors: Mapping[str, Tensors]) -> dict[str, str]:
        """Who sends vectors of another form than was sent before, or, the first time, than most send."""
        forms = {name: {n: v.shape[1] for n, v in sorted(each.items())} for name, each in vectors.items()}
        if not forms:
            return {}
        kinds = Counter(json.dumps(form) for form in forms.values()).most_common()
        usual = self.forms.get(what)
        if usual is None or not all(n in usual for form in forms.values() for n in form):
            if len(kinds) > 1 and kinds[0][1] == kinds[1][1]:
                sent = "; ".join(f"{name} {form}" for name, form in sorted(forms.items())[:4])
                raise EstimateError(f"sites do not agree on what they send ({sent}): check their models")
            usual = (usual or {}) | json.loads(kinds[0][0])
            self.forms[what] = usual
        names = set(json.loads(kinds[0][0]))
        fits = {name: set(form) == names and form.items() <= usual.items() for name, form in forms.items()}
        return {
            name: f"it sent {form or 'nothing'} (entries), not { {n: usual[n] for n in sorted(names)} }"
            for name, form in forms.items()
            if not fits[name]
        }


def _counts(message: Message) -> dict[str, float]:
    return {n: v for n, v in message.numbers.items() if n.startswith(COUNTS)}


def _impossible(message: Message, possible: Callable[[Tensors], Tensor | None] | None) -> bool:
    found = None if possible is None else possible(message.vectors)
    return found is not None and not bool(found)


def _finite(message: Message) -> Message:
    for name, vector in message.vectors.items():
        if not bool(torch.isfinite(vector).all()):
            raise PayloadError(f"its {name} is not finite")
    return message


def _require_declared(message: Message, sends: Mapping[str, object]) -> None:
    try:
        require_declared(message, sends)
    except SettingsError as error:
        raise PayloadError(str(error)) from error
    if unknown := message.header.keys() - HEADER.keys():
        raise PayloadError(f"its header says {sorted(unknown)[0]!r}, which is not declared")
