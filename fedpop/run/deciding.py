"""What a run decided: collected from its method, its model and its prior, and what it decided by itself.

A method that decides something has ``decisions()`` of its own, which come first; where it says nothing of its
kernel, its start or its final pass, this is found from its settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fedpop.client.final import Final
from fedpop.decisions import Decision, decided
from fedpop.kernels import Hierarchy, kernel_decisions
from fedpop.message import guard
from fedpop.methods.base import Asks, Staged, guard_for, hierarchy_of, role_of
from fedpop.priors.normal import COVARIANCES
from fedpop.questions import starts
from fedpop.run import stages

if TYPE_CHECKING:
    from fedpop.run.run import Run


def decisions_of(run: Run) -> tuple[Decision, ...]:
    """Of a run that has its server: each thing once, by whoever says it first."""
    method, hierarchy = run.algorithm, hierarchy_of(run.algorithm)
    found: dict[str, Decision] = {}
    own = () if hierarchy is None else _of_settings(run, hierarchy)
    parts = decided(method, method.model, None if hierarchy is None else hierarchy.prior)
    for decision in (*_engine(run), *parts, *own, *_of_rounds(run), *stages.decisions(run)):
        found.setdefault(decision.what, decision)
    return tuple(found.values())


def _engine(run: Run) -> Iterator[Decision]:
    """What runs, where the method left that open."""
    if run.engine:
        chosen, because = run.engine.split(": ", 1)
        yield Decision("engine", chosen, because)


def _of_settings(run: Run, hierarchy: Hierarchy) -> Iterator[Decision]:
    """What settings of a method with a population prior left open."""
    method, model, prior = run.algorithm, run.algorithm.model, hierarchy.prior
    given: dict[str, Any] = {f.name: getattr(method, f.name) for f in fields(method)}
    name = given.get("prior")
    if isinstance(name, str) and name not in COVARIANCES and prior.component is not None:
        yield model.covariance_decision()
    if given.get("start") == "auto":
        asks = role_of(method, Asks)
        yield starts.decision(() if asks is None else asks.questions(run.facts, run.key), prior)
    if "kernel" in given:
        yield from kernel_decisions(given["kernel"], model, prior)
    final = given.get("final")
    if isinstance(final, Final) and final.draws is None:
        size = model.z_layout.size
        draws = f"{final.chains} chains of {final.each(size)} draws"
        yield Decision("final pass", draws, f"z has {size} dimension(s)")


def _of_rounds(run: Run) -> Iterator[Decision]:
    """What follows from how many there are, and from how many take part."""
    method, first = run.algorithm, run.facts.first_stage
    staged = role_of(method, Staged)
    if rounds := 0 if staged is None else staged.warm_up(first):
        noise = f"falls to its value over the first {rounds} rounds"
        yield Decision("noise variance", noise, f"it was given, and the first stage has {first} rounds")
    if method.guard is not None and guard_for(method, {}, guard.MESSAGES_FOR_A_MEDIAN) is not None:
        roster = run.members.roster
        sites = len(roster) if roster.sites is None else len(roster.sites.unique())
        active = run.settings.participation.expected(roster)
        yield guard.decision(method.guard, min(active, sites))
