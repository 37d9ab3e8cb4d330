"""What a run decided: collected from its method, its model and its prior, and what it decided by itself.

A method that decides something has ``decisions()`` of its own, which come first; where it says nothing of its
kernel, its start or its final pass, this is found from its settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from fedpop.client.final import Final
from fedpop.client.local_sgd import LocalSGD, side_by_side
from fedpop.decisions import Decision, decided
from fedpop.kernels import Hierarchy, kernel_decisions
from fedpop.message import guard
from fedpop.methods.base import Algorithm, Asks, Staged, guard_for, hierarchy_of, role_of
from fedpop.models.modules import IMAGES_PER_THREAD
from fedpop.priors.normal import COVARIANCES
from fedpop.questions import starts
from fedpop.run import stages
from fedpop.run.members import LocalMembers
from fedpop.settings import Setting
from fedpop.threads import chosen, cores

if TYPE_CHECKING:
    from fedpop.run.run import Run


def decisions_of(run: Run) -> tuple[Decision, ...]:
    """Of a run that has its server: each thing once, by whoever says it first."""
    method, hierarchy = run.algorithm, hierarchy_of(run.algorithm)
    found: dict[str, Decision] = {}
    own = () if hierarchy is None else _of_settings(run, hierarchy)
    parts = decided(method, method.model, None if hierarchy is None else hierarchy.prior)
    for decision in (*_engine(run), *parts, *own, *_of_rounds(run), *stages.decisions(run), run.threading):
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


def threading(run: Run) -> Decision:
    """How many threads a run works with."""
    if (count := run.settings.threads) is not None:
        return Decision("threads", str(count), "as asked for")
    members = run.members
    if not isinstance(members, LocalMembers):
        return Decision("threads", "1", "clients compute elsewhere")
    item = run.algorithm.model.initial_phi().element_size()
    rows = _rows_of_a_step(run.algorithm, members, run.settings.participation.expected(members.roster))
    return chosen(rows * members.plan.per_row / item, members.device)


def _rows_of_a_step(method: Algorithm, members: LocalMembers, active: float) -> float:
    """How many examples a step works on, about."""
    model, sizes = method.model, members.federation.train.sizes
    longest, plan = int(sizes.max()) if len(sizes) else 0, members.plan
    together = min(active, max(1.0, plan.budget / max(longest * plan.per_row + plan.per_client, 1.0)))
    local = [s for s in _settings_of(method) if isinstance(s, LocalSGD)]
    if not local:
        rows = together * int(sizes.sum()) / max(len(sizes), 1)
        return min(rows, IMAGES_PER_THREAD * cores()) if model.convolutional else rows
    batch = max(min(s.batch or longest, longest) for s in local)
    beside = side_by_side(model.rows_side_by_side, batch, model.phi_layout.size + model.z_layout.size)
    return batch * together if beside else batch


def _settings_of(setting: object) -> Iterator[object]:
    """Those that are part of it, however deep."""
    for f in fields(setting) if is_dataclass(setting) else ():
        value = getattr(setting, f.name)
        if isinstance(value, Setting):
            yield value
            yield from _settings_of(value)


def _of_rounds(run: Run) -> Iterator[Decision]:
    """What follows from how many there are, and from how many take part."""
    method, first = run.algorithm, run.facts.first_stage
    staged = role_of(method, Staged)
    if rounds := 0 if staged is None else staged.warm_up(first):
        noise = f"falls to its value over the first {rounds} rounds"
        yield Decision("noise variance", noise, f"it was given, and the first stage has {first} rounds")
    for name, asked in run.doubted.items():
        because = (
            f"its answers to {', '.join(dict.fromkeys(asked))} were out of all proportion to the others'"
        )
        yield Decision("left out before the rounds", name, because, unusual=True)
    if method.guard is not None and guard_for(method, {}, guard.MESSAGES_FOR_A_MEDIAN) is not None:
        roster = run.members.roster
        sites = len(roster) if roster.sites is None else len(roster.sites.unique())
        active = run.settings.participation.expected(roster)
        yield guard.decision(method.guard, min(active, sites))
