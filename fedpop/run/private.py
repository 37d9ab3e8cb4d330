"""Runs under differential privacy: what is refused or left off, noise on totals, and what has been spent."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.errors import PrivacyError, warn_user
from fedpop.federation.participation import Participation, Roster
from fedpop.files import read_tensors, write_tensors
from fedpop.keys import Key
from fedpop.message import Tensors, Total
from fedpop.methods.base import Algorithm
from fedpop.privacy import ledger
from fedpop.privacy.gaussian import BIT, BOUND_RATE, CLIP, SCORE, Gaussian, Normal, bound_of, system_noise

USEFUL = 0.1
"""Noise over the largest possible sum of gradients above which a run is known to learn little."""
NO_BOUND = "none: it sees each message"
ANY_LENGTH = 100_000
"""Rounds that a run without a budget may have."""


@dataclass(frozen=True)
class PrivateTerms:
    """What does not change in a run: the noise, who is sampled how, how many there are."""

    settings: Gaussian
    sigma: float
    share: float
    """The probability by which ledgers of readers are amplified; 1 where it does not apply."""
    expected: float
    """How many units a round has on average, which sums are divided by."""
    units: int
    rounds: int
    """That the budget covers."""

    def spent(self, rounds: int, exactly: bool = True) -> float:
        """epsilon against readers of theta after so many rounds."""
        by = ledger.epsilon if exactly else ledger.renyi_epsilon
        return by(self.sigma, self.share, rounds, self.settings.delta)


def terms(settings: Gaussian, rule: Participation, roster: Roster, rounds: int | None) -> PrivateTerms:
    """The noise that these rounds ask for; raises, or warns, where that cannot be useful."""
    if rounds is None:
        raise PrivacyError(
            "a private run has a number of rounds: whether it has converged is not asked of data"
        )
    if settings.against == "server":
        raise PrivacyError(
            "against='server' is about a server that sees sums only, whose noise sites add; here the server "
            "sees each message: use against='readers'"
        )
    share = rule.one_chance(roster)
    if share is None:
        raise PrivacyError("a private run has one probability for all units: participation=0.1")
    units, expected = len(roster), rule.expected(roster)
    if settings.delta > 1 / units:
        raise PrivacyError(
            f"delta = {settings.delta:g} lets one of {units} units be published; take less than {1 / units:g}"
        )
    sigma = settings.noise
    if sigma is None:
        assert settings.epsilon is not None
        sigma = ledger.noise_for(settings.epsilon, share, rounds, settings.delta)
    covered = ANY_LENGTH
    if settings.epsilon is not None:
        covered = ledger.affordable(settings.epsilon, sigma, share, settings.delta, rounds)
        if not covered:
            raise PrivacyError(
                f"one round at noise {sigma:g} spends more than epsilon = {settings.epsilon:g}"
            )
    if (ratio := sigma / expected) > USEFUL:
        enough = math.ceil(units * ratio / USEFUL)
        warn_user(
            f"noise is up to {ratio:.2g} times the largest possible sum of gradients: with {units} units, of "
            f"which {expected:g} take part in a round, little will be learned; about {enough} units would do"
        )
    return PrivateTerms(settings, sigma, share, expected, units, covered)


def private_method(method: Algorithm) -> Algorithm:
    """The method as it runs under privacy; raises where it cannot, and says why."""
    if not method.private_sums:
        raise PrivacyError(f"{method.label} is not offered under differential privacy: {method.not_private}")
    if not method.channel.transparent:
        raise PrivacyError("privacy bounds what each unit adds: leave out clip and compressor")
    return method.under_privacy()


class PrivateTotals:
    """Adds noise to totals, and counts what that spends."""

    def __init__(self, given: PrivateTerms, method: Algorithm, folder: Path | None) -> None:
        self.terms, self.folder = given, folder
        self.vectors, settings = method.private_sums, given.settings
        self.multipliers = settings.multipliers(given.sigma, self.vectors)
        self.charged = 0
        """Rounds whose noisy totals may have been seen."""
        seed = settings.insecure_seed
        self._sampling = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self.bounds: Tensors = {
            CLIP + n: torch.tensor(settings.clip, dtype=torch.float64) for n in self.vectors if n != SCORE
        }

    @property
    def exhausted(self) -> bool:
        """A further round would spend more than there is."""
        return self.charged >= self.terms.rounds

    @property
    def sampling(self) -> Key:
        """What units are drawn by: nobody who reads theta may know it, a seed of 0 would be known."""
        return Key(self._sampling, purpose="private")

    def noised(self, total: Total, method: Algorithm, broadcast: Tensors, round: int) -> Total:
        """The total that the server's step is given. With its entry it is in a file before it is used; a
        round that was begun before takes what is in the file."""
        path = None if self.folder is None else self.folder / f"round-{round:08d}.safetensors"
        if path is not None and path.exists():
            found = read_tensors(path)
            self.charged = max(self.charged, int(found.pop("charged")))
        else:
            found = self._with_noise(total, method, broadcast, round)
            self.charged += 1
            if path is not None:
                path.parent.mkdir(exist_ok=True)
                write_tensors(path, {**found, "charged": torch.tensor(self.charged)})
        self.bounds = {n: found[n] for n in self.bounds}
        scale = self.terms.units / self.terms.expected
        device = next(iter(broadcast.values())).device
        sums = {n: v.to(device) * scale for n, v in found.items() if n in self.vectors}
        like = next(iter(sums.values()))
        # What counts each unit once has their number, which is known.
        sums["n"] = like.new_tensor([float(self.terms.units)])
        return Total(
            sums, {}, {}, self.terms.units, float(self.terms.units), self.terms.units, ratio=False,
            bytes_up=total.bytes_up,
        )  # fmt: skip

    def _with_noise(self, total: Total, method: Algorithm, broadcast: Tensors, round: int) -> Tensors:
        normal, out = self._normal(round), Tensors()
        theta = next(t for t in broadcast.values() if t.is_floating_point() and t.dim() == 1)
        for name in self.vectors:
            size = method.private_size(name, broadcast)
            exact = total.plain_sum(name, theta.new_zeros(size))
            width = self.multipliers[name] * bound_of(name, size, broadcast)
            noisy = exact.double().cpu() + width * normal(size)
            out[name] = method.whitened(name, noisy.to(exact), broadcast, inverse=True).cpu()
            if name != SCORE:
                out[CLIP + name] = self._moved(name, total, normal)
        return out

    def _moved(self, name: str, total: Total, normal: Normal) -> Tensor:
        """The next bound: that with ``quantile`` of the units inside, as the noised bits have it."""
        quantile, bound = self.terms.settings.quantile, self.bounds[CLIP + name]
        if quantile is None:
            return bound
        bits = total.plain_sum(BIT + name, torch.zeros(1)).double().cpu()
        # Each is +-1/2, so that one unit adds at most that.
        noisy = bits + self.multipliers[BIT + name] * 0.5 * normal(1)
        inside = 0.5 + float(noisy) / self.terms.expected
        return bound * math.exp(-BOUND_RATE * (min(1.0, max(0.0, inside)) - quantile))

    def _normal(self, round: int) -> Normal:
        seed = self.terms.settings.insecure_seed
        if seed is None:
            return system_noise
        calls = [0]

        def draw(count: int) -> Tensor:
            calls[0] += 1
            key = Key(seed, round, f"insecure/{calls[0]}")
            return key.normal(key.server(), (count,), torch.float64)[0]

        return draw

    # --- in words, and in files --------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        return {"epsilon": self.terms.spent(self.charged, exactly=False), "epsilon_server": NO_BOUND}

    def lines(self) -> list[tuple[str, str]]:
        """What was spent, in words."""
        delta, at = self.terms.settings.delta, f"{self.charged} rounds at noise {self.terms.sigma:.3g}"
        spent = self.terms.spent(self.charged)
        return [
            ("privacy", f"epsilon {spent:.3g} at delta {delta:g} against readers of theta ({at})"),
            ("", f"against the server: {NO_BOUND}"),
        ]

    def state(self) -> Tensors:
        """What a checkpoint has to hold."""
        numbers = {"charged": self.charged, "sampling": self._sampling, "rounds": self.terms.rounds}
        out = {n: torch.tensor(v) for n, v in numbers.items()} | dict(self.bounds)
        return out | {"sigma": torch.tensor(self.terms.sigma, dtype=torch.float64)}

    def restore(self, state: Tensors) -> None:
        """Noise and budget are those that the run began with."""
        self.charged, self._sampling = int(state["charged"]), int(state["sampling"])
        sigma = float(state["sigma"])
        found = self.terms.settings.noise is None  # for the rounds of then
        rounds = int(state["rounds"]) if found else self.terms.rounds
        self.terms = replace(self.terms, sigma=sigma, rounds=rounds)
        self.multipliers = self.terms.settings.multipliers(sigma, self.vectors)
        self.bounds = {n: state[n] for n in self.bounds}

    def forget_before(self, round: int) -> None:
        """A checkpoint stands at this round: earlier totals are not needed again."""
        for path in () if self.folder is None else self.folder.glob("round-*.safetensors"):
            if int(path.stem.removeprefix("round-")) < round:
                path.unlink()


def refuse(what: str) -> None:
    """Something else wants to see the data."""
    raise PrivacyError(f"{what} would tell of the data what the budget does not cover")


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise where one of them looks at data between rounds."""
    for callback in callbacks:
        if getattr(callback, "looks_at_data", False):
            refuse(type(callback).__name__)
