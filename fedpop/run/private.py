"""Runs under differential privacy: what is refused or left off, noise on totals, and what has been spent."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpop.errors import PrivacyError, warn_user
from fedpop.federation.participation import Active, Participation, Roster
from fedpop.files import read_tensors, write_tensors
from fedpop.keys import Key
from fedpop.message import Tensors, Total
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods.base import Algorithm
from fedpop.privacy import ledger
from fedpop.privacy.gaussian import BIT, BOUND_RATE, CLIP, SCORE, Gaussian, Normal, bound_of, system_noise
from fedpop.privacy.secure import Policy
from fedpop.privacy.site_noise import ROUNDED_LOSS, PrivateRound, honest, planned

USEFUL = 0.06
"""Noise over the largest possible sum of gradients above which a run is known to learn little."""
NO_BOUND = "none: it sees each message"
ANY_LENGTH = 100_000
"""Rounds that a run without a budget may have."""
TOO_OFTEN = 0.01
"""The chance that some unit takes part more often than noise against the server was found for; the run then
ends sooner."""


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
    secure: FixedPoint | None = None
    """Sites add the noise, on the grid of this form."""
    planned: int = 0
    """Rounds that were asked for."""

    def spent(self, rounds: int, exactly: bool = True, correction: float = 0.0) -> float:
        """epsilon against readers of theta after so many rounds."""
        if self.secure is None and exactly:
            return ledger.epsilon(self.sigma, self.share, rounds, self.settings.delta)
        return ledger.renyi_epsilon(self.sigma, self.share, rounds, self.settings.delta, correction)

    def spent_by_server(self, times: int, correction: float = 0.0) -> float:
        """epsilon against a server that sees sums, of a unit that took part so many times."""
        return ledger.renyi_epsilon(self.sigma, 1.0, times, self.settings.delta, correction)


def terms(
    settings: Gaussian,
    rule: Participation,
    roster: Roster,
    rounds: int | None,
    secure: FixedPoint | None = None,
    waits: bool = True,
) -> PrivateTerms:
    """The noise that these rounds ask for; raises, or warns, where that cannot be useful."""
    if rounds is None:
        raise PrivacyError(
            "a private run has a number of rounds: whether it has converged is not asked of data"
        )
    by_server = settings.against == "server"
    if by_server and secure is None:
        raise PrivacyError(
            "against='server' is about a server that sees sums only, whose noise sites add: it needs "
            "secure=True; here the server sees each message: use against='readers'"
        )
    share = rule.one_chance(roster)
    if share is None:
        raise PrivacyError("a private run has one probability for all units: participation=0.1")
    if not waits:  # who is heard may depend on data
        share = 1.0
    units, expected = len(roster), rule.expected(roster)
    if settings.delta > 1 / units:
        raise PrivacyError(
            f"delta = {settings.delta:g} lets one of {units} units be published; take less than {1 / units:g}"
        )
    sigma, budget, delta = settings.noise, settings.epsilon, settings.delta
    by = ledger.epsilon if secure is None else ledger.renyi_epsilon
    often = most_often(expected / units, rounds, units) if by_server else rounds
    charged = 1.0 if by_server else share
    if sigma is None:
        assert budget is not None
        sigma = ledger.noise_for(
            budget * (1 - ROUNDED_LOSS * (secure is not None)), charged, often, delta, by
        )
    covered = ANY_LENGTH
    if budget is not None and by_server:  # counted unit by unit, as the run goes
        covered = rounds if ledger.affordable(budget, sigma, 1.0, delta, often, by) else 0
    elif budget is not None:
        covered = ledger.affordable(budget, sigma, share, delta, rounds, by)
    if not covered:
        raise PrivacyError(f"one round at noise {sigma:g} spends more than epsilon = {budget:g}")
    if (ratio := sigma / expected) > USEFUL:
        enough = math.ceil(units * ratio / USEFUL)
        warn_user(
            f"noise is up to {ratio:.2g} times the largest possible sum of gradients: with {units} units, of "
            f"which {expected:g} take part in a round, little will be learned; about {enough} units would do"
        )
    return PrivateTerms(settings, sigma, share, expected, units, covered, secure, rounds)


def most_often(share: float, rounds: int, units: int) -> int:
    """Rounds that no unit of so many takes part in more of, but for a small chance.

    >>> most_often(1.0, 40, 100), most_often(0.1, 400, 1000)
    (40, 68)
    """
    from scipy import stats  # takes a second, and 50 MB

    return min(rounds, int(stats.binom.isf(TOO_OFTEN / units, rounds, share))) if share < 1 else rounds


def private_method(method: Algorithm) -> Algorithm:
    """The method as it runs under privacy; raises where it cannot, and says why."""
    if not method.private_sums:
        raise PrivacyError(f"{method.label} is not offered under differential privacy: {method.not_private}")
    if not method.channel.transparent:
        raise PrivacyError("privacy bounds what each unit adds: leave out clip and compressor")
    return method.under_privacy()


ENTRY = ("charged", "correction", "units", "times")
"""What both ledgers are made of, in a file with the noisy total that it is of."""


class PrivateTotals:
    """Says what sites do in a private round, adds noise to totals where sites do not, and counts what that
    spends."""

    def __init__(self, given: PrivateTerms, method: Algorithm, folder: Path | None) -> None:
        self.terms, self.folder = given, folder
        self.vectors, settings = method.private_sums, given.settings
        self.multipliers = settings.multipliers(given.sigma, self.vectors)
        self.charged = 0
        """Rounds whose noisy totals may have been seen."""
        self.correction = 0.0
        """For whole numbers, of all these."""
        self.times: Counter[int] = Counter()
        """By units' hashes, rounds that they took part in."""
        seed = settings.insecure_seed
        self._sampling = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self._next = 0.0
        self.bounds: Tensors = {
            CLIP + n: torch.tensor(settings.clip, dtype=torch.float64) for n in self.vectors if n != SCORE
        }

    @property
    def exhausted(self) -> bool:
        """A further round would spend more than there is."""
        given, budget = self.terms, self.terms.settings.epsilon
        if self.charged >= given.rounds:
            return True
        if budget is None or given.secure is None:
            return False
        each = self.correction / max(1, self.charged)
        if given.settings.against == "server":
            most = max(self.times.values(), default=0) + 1
            return given.spent_by_server(most, self.correction + each) > budget
        return given.spent(self.charged + 1, False, self.correction + each) > budget

    @property
    def sampling(self) -> Key:
        """What units are drawn by: nobody who reads theta may know it, a seed of 0 would be known."""
        return Key(self._sampling, purpose="private")

    def round(self, method: Algorithm, broadcast: Tensors, active: Active, sites: int) -> PrivateRound:
        """What so many sites are told of a round with these units."""
        adaptive, secure = self.terms.settings.quantile is not None, self.terms.secure
        if secure is None or self.unopened(sites):
            return PrivateRound(adaptive)
        sizes = {n: method.private_size(n, broadcast) for n in self.vectors}
        bounds = {n: bound_of(n, size, broadcast) for n, size in sizes.items()}
        for name in (n for n in self.multipliers if n.startswith(BIT)):
            sizes[name], bounds[name] = 1, 0.5
        steps, widths, correction = planned(
            self.multipliers, bounds, sizes, len(active.ids), sites, secure.bits
        )
        self._require_fine(correction)
        self._next = correction
        return PrivateRound(adaptive, steps, widths, honest(sites), self.terms.settings.insecure_seed)

    def unopened(self, sites: int) -> bool:
        """So few sites' sum is not opened: nobody is asked, and the server adds noise to nothing, so that
        readers do not see how few they were."""
        return self.terms.secure is not None and sites < Policy().minimum_sites

    def _require_fine(self, correction: float) -> None:
        """Raise where rounding would take a noticeable part of the budget."""
        given, all_rounds = self.terms, correction * self.terms.planned
        lost = given.spent_by_server(given.planned, all_rounds) - given.spent_by_server(given.planned)
        if lost > ROUNDED_LOSS * (given.settings.epsilon or 1.0):
            raise PrivacyError(
                f"the grid is too coarse: noise as whole numbers would cost {lost:.2g} of epsilon; use "
                "secure=True, or more noise"
            )

    def noised(
        self,
        total: Total,
        method: Algorithm,
        broadcast: Tensors,
        round: int,
        active: Active | None = None,
        roster: Roster | None = None,
        sites: int = 0,
    ) -> Total:
        """The total that the server's step is given. With its entry it is in a file before it is used; a
        round that was begun before takes what is in the file."""
        path = None if self.folder is None else self.folder / f"round-{round:08d}.safetensors"
        # A sum that was not opened has nobody's noise, and readers are not to see which one that was.
        by_sites = self.terms.secure is not None and not self.unopened(sites) and total.count > 0
        if path is not None and path.exists():
            found = read_tensors(path)
            entry = {n: found.pop(n) for n in ENTRY}
            if int(entry["charged"]) > self.charged:
                self._count(entry)
        else:
            found = self._with_noise(total, method, broadcast, round, by_sites)
            self.charged += 1
            if active is not None and roster is not None:
                self.times.update(roster.units[active.ids].tolist())
            self.correction += self._next if by_sites else 0.0
            if path is not None:
                path.parent.mkdir(exist_ok=True)
                write_tensors(path, {**found, **self._entry()})
        self.bounds = {n: found[n] for n in self.bounds}
        units = self.terms.units if roster is None else len(roster)
        scale = self.terms.units / self.terms.expected
        device = next(iter(broadcast.values())).device
        sums = {n: v.to(device) * scale for n, v in found.items() if n in self.vectors}
        like = next(iter(sums.values()))
        # What counts each unit once has their number, which is known.
        sums["n"] = like.new_tensor([float(units)])
        return Total(
            sums, {}, {}, units, float(units), units, ratio=False, bytes_up=total.bytes_up
        )  # fmt: skip

    def _entry(self) -> Tensors:
        """What the ledgers say now."""
        return {
            "charged": torch.tensor(self.charged),
            "correction": torch.tensor(self.correction, dtype=torch.float64),
            "units": torch.tensor(list(self.times), dtype=torch.int64),
            "times": torch.tensor(list(self.times.values()), dtype=torch.int64),
        }

    def _count(self, entry: Tensors) -> None:
        self.charged, self.correction = int(entry["charged"]), float(entry["correction"])
        self.times = Counter(dict(zip(entry["units"].tolist(), entry["times"].tolist(), strict=True)))

    def _with_noise(
        self, total: Total, method: Algorithm, broadcast: Tensors, round: int, by_sites: bool
    ) -> Tensors:
        normal, out = self._normal(round), Tensors()
        theta = next(t for t in broadcast.values() if t.is_floating_point() and t.dim() == 1)
        for name in self.vectors:
            size = method.private_size(name, broadcast)
            exact = total.plain_sum(name, theta.new_zeros(size))
            noisy = exact.double().cpu()
            if not by_sites:
                width = self.multipliers[name] * bound_of(name, size, broadcast)
                noisy = noisy + width * normal(size)
            out[name] = method.whitened(name, noisy.to(exact), broadcast, inverse=True).cpu()
            if name != SCORE:
                out[CLIP + name] = self._moved(name, total, normal, by_sites)
        return out

    def _moved(self, name: str, total: Total, normal: Normal, by_sites: bool) -> Tensor:
        """The next bound: that with ``quantile`` of the units inside, as the noised bits have it."""
        quantile, bound = self.terms.settings.quantile, self.bounds[CLIP + name]
        if quantile is None:
            return bound
        bits = total.plain_sum(BIT + name, torch.zeros(1)).double().cpu()
        # Each is +-1/2, so that one unit adds at most that.
        noisy = bits if by_sites else bits + self.multipliers[BIT + name] * 0.5 * normal(1)
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

    @property
    def by_server(self) -> float | None:
        """epsilon against the server; None where it sees each message."""
        if self.terms.secure is None:
            return None
        return self.terms.spent_by_server(max(self.times.values(), default=0), self.correction)

    def metrics(self) -> dict[str, Any]:
        """Of the rounds so far, by a bound that costs nothing, and of all that were asked for."""
        given, end = self.terms, max(self.charged, min(self.terms.rounds, self.terms.planned))
        at_the_end = given.spent(end, correction=self.correction / max(1, self.charged) * end)
        so_far, server = given.spent(self.charged, False, self.correction), self.by_server
        return {
            "epsilon": float(min(so_far, at_the_end)),
            "epsilon_end": float(at_the_end),
            "epsilon_server": NO_BOUND if server is None else float(server),
        }

    def lines(self) -> list[tuple[str, str]]:
        """What was spent, in words."""
        delta, at = self.terms.settings.delta, f"{self.charged} rounds at noise {self.terms.sigma:.3g}"
        spent, server = self.terms.spent(self.charged, correction=self.correction), self.by_server
        most = max(self.times.values(), default=0)
        words = NO_BOUND if server is None else f"epsilon {server:.3g}, a unit being in {most} at most"
        return [
            ("privacy", f"epsilon {spent:.3g} at delta {delta:g} against readers of theta ({at})"),
            ("", f"against the server: {words}"),
        ]

    def state(self) -> Tensors:
        """What a checkpoint has to hold."""
        numbers = {"sampling": self._sampling, "rounds": self.terms.rounds}
        out = {n: torch.tensor(v) for n, v in numbers.items()} | dict(self.bounds) | self._entry()
        return out | {"sigma": torch.tensor(self.terms.sigma, dtype=torch.float64)}

    def restore(self, state: Tensors) -> None:
        """Noise and budget are those that the run began with."""
        self._sampling = int(state["sampling"])
        self._count(state)
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
