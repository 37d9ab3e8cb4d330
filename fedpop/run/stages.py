"""How many rounds a run has, and whether they were enough.

A run is a row of stages, each with a constant phase, decay and averaged tail (``server.optimisers``).
With ``rounds`` it has one; a finished run that is resumed with more gets a further one, up to the new number.
Without ``rounds`` stages follow one another, each as long as all before it together, until the verdict at the
end of one is that theta has converged, or 8,000 rounds are over. A method that knows itself to be at the end
(``EndsByItself.over``) ends a run in the midst of a stage, and is judged there. Which stages a run has had
is in its checkpoints, so a run that was killed goes on to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedpop.decisions import Decision
from fedpop.errors import CheckpointError, EstimateError
from fedpop.evaluation.convergence import ToTheOptimum, obstacle, small
from fedpop.evaluation.verdict import Distance, Verdict, loss_trend
from fedpop.methods.base import hierarchy_of
from fedpop.priors.base import Sets, normals_of
from fedpop.run.personal_models import FinalPass
from fedpop.server.optimisers import Stage

if TYPE_CHECKING:
    from fedpop.run.run import Run

FIRST_STAGE = 250
"""Rounds of the first stage of a run without ``rounds``."""
LONGEST_RUN = 8000
"""Rounds after which a run without ``rounds`` ends in any case."""
LONGEST_UNJUDGED_RUN = 500
"""Rounds of a run without ``rounds`` whose method reports nothing that a verdict could be made of."""
JUDGED_FROM = {True: 20, False: 100}
"""Rounds from which a run is judged when it ends, with closed-form posteriors and without: a verdict costs
about as much as a few rounds with, some twenty without."""
MOST_JUDGED_CLIENTS = 1000
"""Clients above which a distance is not computed from draws: each of them would be worked on by itself."""
WARNED_NATS = 1.0
"""Nats below a local optimum at which a run of so many rounds as were asked for ends with a warning."""


def planned(saved: Sequence[int], rounds: int | None) -> list[int]:
    """Ends of the stages of a run that has (or plans) these, and is to have so many rounds.

    >>> planned([], 300), planned([300], 300), planned([300], 900), planned([], None)
    ([300], [300], [300, 900], [250])
    """
    if not saved:
        return [FIRST_STAGE if rounds is None else rounds]
    if rounds is None or rounds == saved[-1]:
        return list(saved)
    if rounds < saved[-1]:
        raise CheckpointError(
            f"cannot resume: the saved run has {saved[-1]} rounds, more than rounds={rounds}; give as many "
            "or more, or another output folder"
        )
    return [*saved, rounds]


def stage_at(ends: Sequence[int], round: int) -> Stage:
    """The stage of a run in which it is after so many rounds; the last one at its end.

    >>> stage_at([250, 500], 250), stage_at([250, 500], 500)
    (Stage(start=250, end=500), Stage(start=250, end=500))
    """
    starts = [0, *ends[:-1]]
    return next(
        (Stage(s, e) for s, e in zip(starts, ends, strict=True) if round < e), Stage(starts[-1], ends[-1])
    )


@dataclass(frozen=True)
class Judgement:
    """A verdict on theta, and what finding it gave and cost."""

    verdict: Verdict | None = None
    inverse: Tensor | None = None
    """Of the information at theta, where the verdict is by distance."""
    seconds: float = 0.0


def judged(run: Run, thorough: bool = False) -> Judgement:
    """Whether the theta that a run would publish now has converged: in nats for small models, by the training
    loss of the present stage for others."""
    started, method, hierarchy = time.perf_counter(), run.algorithm, hierarchy_of(run.algorithm)
    published = method.publish(run.server)
    known = hierarchy is not None and small(hierarchy, published["phi"], published["beta"])
    few = run.members.units <= MOST_JUDGED_CLIENTS
    if hierarchy is not None and known and (hierarchy.closed_form or few):
        key = run.secret.at(round=run.round, purpose="verdict")
        question = ToTheOptimum(hierarchy)
        with suppress(EstimateError):  # somebody does not answer, or is not finite
            found = run.ask(question, published, key, FinalPass(brief=not thorough, afresh=True))[0]
            return Judgement(found.distance, found.inverse, time.perf_counter() - started)
    return Judgement(loss_trend(run.history, stage_at(run.ends, run.round).start))


def decisions(run: Run) -> Iterator[Decision]:
    """How long the run is, where that was left open, and by what its theta is judged."""
    rounds, hierarchy, clients = run.settings.rounds, hierarchy_of(run.algorithm), run.members.units
    if rounds is None:
        first = f"{FIRST_STAGE}, {FIRST_STAGE}, {2 * FIRST_STAGE}, ..."
        yield Decision("rounds", f"{first} until converged, {LONGEST_RUN:,} at most", "none were given")
    exact, published = hierarchy is not None and hierarchy.closed_form, run.algorithm.publish(run.server)
    why = f"{run.algorithm.label} has no marginal likelihood"
    if hierarchy is not None:
        why = obstacle(hierarchy, published["phi"], published["beta"]) or ""
    if rounds is not None and rounds < JUDGED_FROM[exact]:
        yield Decision("verdict", "none", f"{rounds} rounds, fewer than {JUDGED_FROM[exact]}")
    elif why:
        yield Decision("verdict", "by the training loss", why)
    elif exact:
        yield Decision("verdict", "in nats, exact", "posteriors are closed-form, and theta is small")
    elif clients <= MOST_JUDGED_CLIENTS:
        yield Decision("verdict", "in nats, from draws", "posteriors are not closed-form, and theta is small")
    else:
        many = f"{clients} clients, more than {MOST_JUDGED_CLIENTS}, would each be worked on by itself"
        yield Decision("verdict", "by the training loss", many, unusual=True)


def undecided(verdict: Verdict | None) -> bool:
    """A brief look did not tell."""
    return verdict is not None and verdict.converged is None


def next_end(round: int, verdict: Verdict | None) -> int | None:
    """The end of the next stage of a run without ``rounds`` after this one's verdict; None where it is
    over."""
    # A distance that all of a final pass cannot tell from nothing will not be known better after more rounds.
    if isinstance(verdict, Distance) and undecided(verdict):
        return None
    done = round >= LONGEST_UNJUDGED_RUN if verdict is None else bool(verdict.converged)
    return None if done or round >= LONGEST_RUN else min(2 * round, LONGEST_RUN)


def worth_judging(run: Run) -> bool:
    """Whether the theta that a run returns is worth a verdict: not where the run was too short, or where
    validation data chose theta."""
    if run.best_round is not None:
        return False
    hierarchy = hierarchy_of(run.algorithm)
    least = JUDGED_FROM[hierarchy is not None and hierarchy.closed_form]
    return run.round >= least or run.over


def advice(run: Run) -> str | None:
    """One line for a run that is known to have ended too soon, or where it could not go on."""
    verdict, rounds, asked = run.verdict, run.round, run.settings.rounds
    if (bound := _at_upper_bound(run)) is not None:
        return f"{run.label} after {rounds} rounds: {bound}"
    if verdict is None or verdict.converged:
        return None
    after = f"{run.label} after {rounds} rounds: {verdict.words}"
    hierarchy = hierarchy_of(run.algorithm)
    normals = None if hierarchy is None else normals_of(hierarchy.prior)
    given = normals is not None and normals.scale is not None and normals.learns_scale
    first = "leave out the prior's scale, or " if given else ""
    if run.over:
        found = after.removesuffix("; run more rounds")
        other = "fedpop.FedSOUL(engine='sampled')" if run.asked is None else "engine='sampled'"
        return f"{found}, and its search cannot go on from there; {first}try restarts=3 or {other}"
    if asked is None and (verdict.converged is None or rounds < LONGEST_RUN):
        return after  # draws cannot tell, or a callback ended it
    if asked is None:
        return f"{after}. More than these are not run unless rounds=... says so"
    if not isinstance(verdict, Distance) or verdict.converged is None or rounds < JUDGED_FROM[False]:
        return None
    if not verdict.upwards and verdict.nats < WARNED_NATS:
        return None
    how = f"rounds={2 * rounds}" + (" with resume=True in the same folder" if run.folder is not None else "")
    return f"{after}: {first}{how}, or leave rounds out"


def _at_upper_bound(run: Run) -> str | None:
    """A scale of the prior that would be larger if it might; at its lower bound clients are all alike."""
    hierarchy, published = hierarchy_of(run.algorithm), run.algorithm.publish(run.server)
    normals = None if hierarchy is None else normals_of(hierarchy.prior)
    if hierarchy is None or normals is None or not normals.learns_scale:
        return None
    bounds, _ = Sets.of(published) or (normals.bounds, None)
    if bounds is None or normals.scales(published["beta"])[1] < 0.9999 * bounds[1]:
        return None
    if run.round < JUDGED_FROM[hierarchy.closed_form] and not run.over:
        return None  # a few rounds may be anywhere
    if hierarchy.prior.bounds is not None:
        advice = "leave bounds out, or raise the upper one"
    elif hierarchy.prior.scale is not None:
        advice = "leave scale out"
    else:
        advice = "standardise the data, or give bounds=(..., ...) that reach further"
    return f"the prior's scale is at its upper bound, {bounds[1]:.3g}; {advice}"
