"""Adding up: answers go through the channel as they come, and only sums stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpop.channel.guard import Guard
from fedpop.channel.message import Answer, Tensors, Total
from fedpop.channel.pipeline import Channel, plain_bytes
from fedpop.errors import SettingsError
from fedpop.keys import Key


@dataclass(frozen=True)
class Heard:
    """Who was heard, ``[C]``; and each one's share of what the server saw of it, where that was asked for."""

    heard: Tensor
    seen: Tensors
    suspects: Tensor | None = None
    """Who was left out for a message out of all proportion, ``[C]``."""

    @cached_property
    def everyone(self) -> bool:
        return bool(self.heard.all())


class Tally:
    """Sums of one round or one question."""

    def __init__(
        self, channel: Channel, key: Key, remembered: tuple[str, ...] = (), guard: Guard | None = None
    ) -> None:
        self._channel, self._key, self._remembered, self._guard = channel, key, remembered, guard
        self._weighted: Tensors = {}
        self._plain: Tensors = {}
        self._named: Tensors = {}
        self._count, self._weight = 0, 0.0
        self.bytes_up = 0

    def add(
        self,
        answer: Answer,
        units: Tensor,
        weights: Tensor,
        sites: Tensor | None = None,
        lost: Tensor | None = None,
        stands_for: int = 1,
        examples: Tensor | None = None,
    ) -> Heard:
        """Carry an answer of these units, with so many ``examples`` each, and add up what arrives.

        ``sites`` says at which site each unit is; a site sends the sum over its units. Messages of units that
        are ``lost`` ``[C]`` were sent and never arrive (that of one unit is that of its site). Where each row
        is a sum that was made elsewhere, it ``stands_for`` so many units.
        """
        if sites is None and lost is None and self._taken(answer, weights, stands_for, examples):
            return Heard(answer.good, {})
        alone = sites is None
        where, place = (units, None) if sites is None else torch.unique(sites, return_inverse=True)
        if place is not None:
            require_alike(weights, place, len(where), "take part with different probabilities")
        heard, seen, suspects = answer.good, dict[str, Tensor](), None
        if lost is not None:
            heard = heard & ~(lost if place is None else _any(lost, place, len(where))[place])
        there = answer.good if place is None else _any(answer.good, place, len(where))
        for name, vectors in answer.vectors.items():
            kept = only(answer.good, vectors)
            if place is not None:
                kept = kept.new_zeros((len(where), kept.shape[1])).index_add(0, place, kept)
            arrived, size = self._carried(name, kept, where, there)
            good = torch.isfinite(arrived).all(1)
            heard = heard & (good if place is None else good[place])
            seen[name] = arrived
            self.bytes_up += size
            if self._guard is not None and name in self._guard.names and examples is not None:
                if place is not None:
                    each = examples.new_zeros(len(where)).index_add(0, place, examples)
                found = self._guard.suspects(name, arrived, examples if place is None else each, good & there)
                found = found if place is None else found[place]
                suspects, heard = found if suspects is None else suspects | found, heard & ~found
        for name, total in answer.sums.items():
            self.bytes_up += int(there.sum()) * plain_bytes(total.reshape(1, -1))
            _grow(self._weighted, name, total)
            if bool((weights == 1).all()):
                _grow(self._plain, name, total)
        if answer.sums and not torch.equal(heard, answer.good):
            raise SettingsError("a unit was refused after its vectors had been added to a sum")
        self._sum(seen, heard, weights, place, len(where), answer.named)
        self._count += stands_for * int(heard.sum())
        self._weight += stands_for * float(weights[heard].sum())
        return Heard(heard, self._shares(seen, heard, place, alone), suspects)

    def _taken(self, answer: Answer, weights: Tensor, stands_for: int, examples: Tensor | None) -> bool:
        """The short way, where everyone is fit and the channel changes nothing: sums alone, as long as they
        are finite and nobody's vector is out of proportion; else the long way finds out whose is."""
        if not self._channel.transparent or self._remembered or answer.named or not bool(answer.good.all()):
            return False
        ones = bool((weights == 1).all())
        plain = {n: v.sum(0) for n, v in answer.vectors.items()}
        weighted = plain if ones else {n: weights.to(v.dtype) @ v for n, v in answer.vectors.items()}
        if any(not math.isfinite(float(total.sum())) for total in weighted.values()):
            return False
        if self._guard is not None and examples is not None and self._guard.odd(answer, examples):
            return False
        sums = answer.sums
        self.bytes_up += sum(plain_bytes(v) for v in answer.vectors.values())
        self.bytes_up += len(weights) * sum(plain_bytes(v.reshape(1, -1)) for v in sums.values())
        for name, total in (weighted | sums).items():
            _grow(self._weighted, name, total)
        for name, total in (plain | sums if ones else plain).items():
            _grow(self._plain, name, total)
        self._count += stands_for * len(weights)
        self._weight += stands_for * (len(weights) if ones else float(weights.sum()))
        return True

    def _carried(self, name: str, vectors: Tensor, sites: Tensor, there: Tensor) -> tuple[Tensor, int]:
        """As ``Channel.carry``, for the sites that have something to say."""
        if bool(there.all()):
            return self._channel.carry(name, vectors, sites, self._key)
        seen = torch.zeros_like(vectors)
        seen[there], size = self._channel.carry(name, vectors[there], sites[there], self._key)
        return seen, size

    def _sum(
        self,
        seen: Tensors,
        heard: Tensor,
        weights: Tensor,
        place: Tensor | None,
        sites: int,
        named: Mapping[str, tuple[str, Tensor]],
    ) -> None:
        def per_site(values: Tensor) -> Tensor:
            """The coefficient of a site is that of its units, which is the same for all."""
            if place is None:
                return torch.where(heard, values, torch.zeros_like(values))
            return values.new_zeros(sites).index_put((place[heard],), values[heard])

        ones = bool((weights == 1).all())
        for name, arrived in seen.items():
            factor = per_site(weights.to(arrived.dtype))
            safe = only(factor != 0, arrived)
            total = factor @ safe
            _grow(self._weighted, name, total)
            count = factor if ones else per_site(torch.ones_like(weights).to(arrived.dtype))
            _grow(self._plain, name, total if ones else count @ safe)
        for name, (of, coefficients) in named.items():
            if place is not None:
                require_alike(coefficients, place, sites, f"count differently in {name!r}")
            factor = per_site(coefficients.to(seen[of].dtype))
            _grow(self._named, name, factor @ only(factor != 0, seen[of]))

    def _shares(self, seen: Tensors, heard: Tensor, place: Tensor | None, alone: bool) -> Tensors:
        """What each unit may remember of what the server saw: units of one site share it evenly."""
        if not self._remembered:
            return {}
        if alone or place is None:
            return {n: seen[n] for n in self._remembered}
        spoke = heard.new_zeros(int(place.max()) + 1, dtype=torch.float64).index_add(0, place, heard.double())
        return {
            n: (seen[n] / spoke.clamp(min=1).unsqueeze(1).to(seen[n].dtype))[place] for n in self._remembered
        }

    def total(self, of: int, ratio: bool) -> Total:
        """Everything heard so far, out of so many units in all."""
        return Total(self._weighted, self._plain, self._named, self._count, self._weight, of, ratio)


def _grow(sums: Tensors, name: str, more: Tensor) -> None:
    sums[name] = sums[name] + more if name in sums else more


def only(keep: Tensor, vectors: Tensor) -> Tensor:
    """Zeros in the rows that are not kept; no copy where all are."""
    if bool(keep.all()):
        return vectors
    return torch.where(keep.unsqueeze(1), vectors, torch.zeros_like(vectors))


def _any(flags: Tensor, place: Tensor, sites: int) -> Tensor:
    return flags.new_zeros(sites, dtype=torch.int64).index_add(0, place, flags.long()) > 0


def require_alike(weights: Tensor, place: Tensor, sites: int, otherwise: str) -> None:
    """Raise unless units of one site, each at its ``place`` among so many, all count the same."""
    least, most = (
        weights.new_zeros(sites).scatter_reduce(0, place, weights, how, include_self=False)
        for how in ("amin", "amax")
    )
    if not torch.equal(least, most):
        raise SettingsError(
            f"units of one site {otherwise}: a site sends one sum, which can have one weight only; give its "
            "units the same"
        )
