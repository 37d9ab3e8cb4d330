"""One absurd message must not move everybody: what is out of all proportion is left out, and named.

A message is out of proportion when its norm is more than so many times what is usual, as a whole and per
example (of states, as a whole alone). Usual is the median over the messages of a round, the largest of all
rounds so far: the majority can never be out of proportion, and a run that converges does not become more
suspicious. The median comes from a sum: with its message each site sends a one for the power of two that its
norm lies below, and the server has counts of norms. What is usual is broadcast, so that a site judges its own
message before it sends it; where the server sees single messages it looks at them, too. A site of several
units judges each of them in the same way before it adds them up, against the median over units of all sites.
A site that holds a message back sends these counts alone, so that it cannot shut itself out for longer than
the others do. Where only a sum over clients is made, one that is far larger than usual is made again client
by client.

A norm sees what is too large. It does not see a message of the usual size with the wrong sign, noise of the
usual size, or one that is sent twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedpop.decisions import Decision
from fedpop.message.message import Answer, Message, Tensors

MESSAGES_FOR_A_MEDIAN = 5
"""Messages below which a median says nothing."""
SUM_MADE_AGAIN = 10.0
"""Times what is usual of a sum at which it is made again, client by client: that costs time, nothing else."""
FIRST_SUM = 10.0
"""What is usual of a sum per example before anything is known; in the units of a log-likelihood."""
COUNTS = "norms."
"""Before the names of counts: ``norms.J.each.3`` counts messages whose J has a norm per example of at most 8
(and more than 4), ``norms.J.whole.3`` the same of norms as they are."""
KINDS = ("each", "whole")
UNITS = "units."
"""Before the names of vectors where norms are those of single units, which a site of several adds up."""
LOWEST_POWER, HIGHEST_POWER = -160, 1023
"""Powers of two that are distinguished."""


def decision(multiple: float, messages: float) -> Decision:
    """Whether messages are guarded, with so many of them in a round."""
    if messages < MESSAGES_FOR_A_MEDIAN:
        few = f"{messages:g} message(s) in a round, and a median needs {MESSAGES_FOR_A_MEDIAN}"
        return Decision("guard", "off", few, unusual=True)
    return Decision("guard", f"at {multiple:g} times the median", "there are enough messages for a median")


class Guard:
    """What is usual of the vectors of these names, and whether one of a round is."""

    def __init__(
        self,
        multiple: float,
        names: tuple[str, ...],
        broadcast: Mapping[str, Tensor],
        messages: int,
        unseen: bool = False,
        states: bool = False,
        of: str = "",
        power: int = 1,
    ) -> None:
        self.multiple = multiple
        self.power = power
        """With which power of the number of examples an honest vector grows: 2 for sums over pairs."""
        self.states = states
        """Vectors are states: how many examples they are made of says nothing of their norms."""
        self.of = of
        """Before the names of counts and of what is usual."""
        self.unseen = unseen
        """Nobody sees a message but its site: it goes by what was broadcast alone, and always counts."""
        self.names = names if messages >= MESSAGES_FOR_A_MEDIAN or unseen else ()
        known, fused = f"usual.{of}", f"usual.sum.{of}"
        self._usual = {n: broadcast[known + n].double() for n in names if known + n in broadcast}
        self._sums = {n: float(broadcast[fused + n]) for n in names if fused + n in broadcast}
        self._fused: dict[str, float] = {}
        # Of units nothing may be known yet: a sum over several of them is longer.
        self._longer = {
            n: broadcast[f"usual.{n}"].double() for n in names if of and f"usual.{n}" in broadcast
        }

    # --- at a site ---------------------------------------------------------------------------

    def withhold(self, message: Message, examples: Tensor) -> Message:
        """The message, made of so many ``examples`` ``[S]``, with counts of its norms; without rows that are
        far longer than what was broadcast as usual."""
        seen = [n for n in self.names if n in message.vectors and not self._quiet(n, message.vectors[n])]
        if not seen:
            return message
        numbers, norms, out = dict(message.numbers), Tensors(), torch.zeros_like(message.received)
        for name in seen:
            both = norms[name] = self._norms(message.vectors[name], examples)
            some = message.received & (both[1] > 0)
            numbers |= _counts(self.of + name, both[:, some])
            # Of the round only where this process sees enough of it, and may look.
            usual = self._usual.get(name) if self.unseen else self._now(name, numbers)
            if usual is not None:
                out = out | self._absurd(both, usual.to(both), message.received)
        message = replace(message, numbers=numbers, norms=norms)
        if not bool(out.any()):
            return message
        if len(out) == 1:  # it adds its counts and nothing else
            message = replace(message, numbers={n: v for n, v in numbers.items() if n.startswith(COUNTS)})
        return replace(message.without(out), withheld=out)

    def judged(self, answer: Answer, examples: Tensor) -> tuple[Answer, Tensor]:
        """An answer of units that a site adds up, without those of which a vector is far longer than what
        was broadcast as usual, or than is usual here; which ones these are, ``[C]``. Their norms count."""
        out, cost = torch.zeros_like(answer.good), dict(answer.cost)
        for name in self.names:
            if name not in answer.vectors:
                continue
            both = self._norms(answer.vectors[name], examples)
            counts = _counts(self.of + name, both[:, answer.good & (both[1] > 0)])
            cost |= counts
            usual = self._now(name, counts)
            usual = self._longer.get(name) if usual is None else usual
            if usual is not None:
                out = out | self._absurd(both, usual.to(both), answer.good)
        return replace(answer, good=answer.good & ~out, cost=cost), out

    def _quiet(self, name: str, vectors: Tensor) -> bool:
        """Of many rows: neither is one of them too long nor most of them longer than usual, so there is
        nothing to see and nothing to learn. Two numbers tell, which is what a usual round pays."""
        if self.unseen or name not in self._usual or len(vectors) < MESSAGES_FOR_A_MEDIAN:
            return False
        norm = torch.linalg.vector_norm(vectors, dim=1)
        most, middle = torch.stack((norm.amax(), norm.median())).tolist()
        usual = float(self._usual[name][1])
        return bool(most <= self.multiple * usual and middle <= usual)

    def finds_outliers(self, answer: Answer, examples: Tensor) -> bool:
        """Whether somebody's vector is out of proportion, or a sum that was made of all at once; what the sum
        shows counts if nothing is."""
        for name in self.names:
            if name not in answer.vectors or self._quiet(name, answer.vectors[name]):
                continue
            both = self._norms(answer.vectors[name], examples)
            usual = self._now(name, _counts(self.of + name, both[:, answer.good & (both[1] > 0)]))
            if usual is not None and bool(self._absurd(both, usual.to(both), answer.good).any()):
                return True
        sizes = {n: float(torch.linalg.vector_norm(answer.sums[n])) for n in self.names if n in answer.sums}
        count = max(float(examples.sum()), 1.0) if sizes else 1.0
        if any(not v / count <= SUM_MADE_AGAIN * self._sums.get(n, FIRST_SUM) for n, v in sizes.items()):
            return True
        for name, size in sizes.items():
            self._fused[name] = max(size / count, self._fused.get(name, 0.0))
        return False

    # --- at the server -----------------------------------------------------------------------

    def suspects(self, message: Message, examples: Tensor, numbers: Mapping[str, float]) -> Tensor:
        """Which of these single messages ``[S]`` are out of proportion to what is usual of the round, by the
        counts of norms that came so far, theirs included."""
        out = torch.zeros_like(message.received)
        for name in () if self.unseen else self.names:
            if name not in message.vectors or (message.checked and name not in message.norms):
                continue  # nothing to see: the site looked
            usual = self._now(name, numbers)
            if usual is not None:
                v = message.vectors[name]
                both = message.norms[name] if name in message.norms else self._norms(v, examples)
                out = out | self._absurd(both, usual.to(both), message.received)
        return out

    def counted(self, message: Message, examples: Tensor) -> dict[str, float]:
        """Counts of the norms of these messages, by who sees them."""
        found: dict[str, float] = {}
        for name in self.names:
            if name in message.vectors:
                both = self._norms(message.vectors[name], examples)
                found |= _counts(self.of + name, both[:, message.received & (both[1] > 0)])
        return found

    def beyond(self, message: Message, examples: Tensor, counts: Mapping[str, float]) -> Tensor:
        """Which of these messages ``[S]`` are out of proportion to those that were counted."""
        out = torch.zeros_like(message.received)
        for name in self.names:
            usual = self._now(name, counts) if name in message.vectors else None
            if usual is not None:
                both = self._norms(message.vectors[name], examples)
                out = out | self._absurd(both, usual.to(both), message.received)
        return out

    def far(self, sizes: Tensor, examples: Tensor) -> Tensor:
        """Which of these sizes ``[C]``, of units that are added up at once, are far above the median."""
        both = torch.stack((sizes / self._expected(examples), sizes)).double()
        some = both[:, torch.isfinite(both).all(0) & (sizes > 0)]
        if some.shape[1] < MESSAGES_FOR_A_MEDIAN:
            return torch.zeros_like(sizes, dtype=torch.bool)
        out: Tensor = (both > self.multiple * some.median(1, keepdim=True).values).all(0)
        return out

    def _norms(self, vectors: Tensor, examples: Tensor) -> Tensor:
        """Norms per example and as they are, ``[2, S]``; those that are not finite are judged elsewhere."""
        norm = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)
        return torch.stack((norm if self.states else norm / self._expected(examples), norm))

    def _expected(self, examples: Tensor) -> Tensor:
        """How long a vector of so many examples is, in those of one."""
        return examples.clamp(min=1).double() ** self.power

    def _absurd(self, both: Tensor, usual: Tensor, there: Tensor) -> Tensor:
        return there & (both > self.multiple * usual.unsqueeze(1)).all(0)

    def _now(self, name: str, numbers: Mapping[str, float]) -> Tensor | None:
        """The median of the round, or of earlier ones if that was larger."""
        now, earlier = _median(self.of + name, numbers), self._usual.get(name)
        if now is None or earlier is None:
            return earlier if now is None else now
        return torch.maximum(now, earlier.to(now))

    def learned(self, numbers: Mapping[str, float]) -> Tensors:
        """What is usual after a round with these counts."""
        out = Tensors()
        for name in dict.fromkeys((*self._usual, *self.names)):
            now = self._now(name, numbers)
            if now is not None:
                out[f"usual.{self.of}{name}"] = now.cpu()
        for name, most in (self._sums | self._fused).items():
            most = max(most, self._sums.get(name, 0.0))
            out[f"usual.sum.{self.of}{name}"] = torch.tensor(most, dtype=torch.float64)
        return out


def _counts(name: str, both: Tensor) -> dict[str, float]:
    """How many of the norms ``[2, S]`` lie below which power of two."""
    powers = torch.log2(both).ceil().clamp(LOWEST_POWER, HIGHEST_POWER).long().tolist()
    out: dict[str, float] = {}
    for kind, row in zip(KINDS, powers, strict=True):
        for power in row:
            key = f"{COUNTS}{name}.{kind}.{power}"
            out[key] = out.get(key, 0.0) + 1.0
    return out


def _median(name: str, numbers: Mapping[str, float]) -> Tensor | None:
    """Of both norms of a round, by the counts of them, where there are enough: the power of two that half of
    them lie below."""
    found = []
    for kind in KINDS:
        begin = f"{COUNTS}{name}.{kind}."
        counts = sorted((int(n.removeprefix(begin)), c) for n, c in numbers.items() if n.startswith(begin))
        total, below = sum(c for _, c in counts), 0.0
        if total < MESSAGES_FOR_A_MEDIAN:
            return None
        for power, count in counts:
            below += count
            if 2 * below >= total:
                found.append(math.ldexp(1.0, power))
                break
    return torch.tensor(found, dtype=torch.float64)
