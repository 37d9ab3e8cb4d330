"""The questions before the rounds: asked of everyone; those that last, of whoever comes later too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedpop.client.cost import WORK
from fedpop.message import Tensors
from fedpop.questions import Question
from fedpop.run.members import Asking

if TYPE_CHECKING:
    from fedpop.run.run import Run


def ask_first(run: Run) -> Tensors:
    """What is known before the first round."""
    known: Tensors = {}
    for question in run.algorithm.questions(run.facts, run.key):
        known |= _asked(run, question, known)
    return known


def welcome(run: Run) -> None:
    """Whoever came after the questions is asked those that last, and the server counts who is there. All
    else about them is as of a client that takes part for the first time."""
    known: Tensors = {}
    if late := run.members.newcomers():
        for question in run.algorithm.questions(run.facts, run.key):
            known |= _asked(run, question, known, late) if question.lasting else {}
    if known or run.members.units != run.counted:
        run.server = run.algorithm.grown(run.server, run.facts, known)
    run.counted = run.members.units


def _asked(run: Run, question: Question[Tensors], known: Tensors, late: Sequence[str] = ()) -> Tensors:
    key = run.secret.at(round=0, purpose=question.name)
    result, total = run.members.ask(Asking(question, known, key, run.algorithm, late=tuple(late)))
    run.members.commit(entered=False)
    run.spend({name: total.numbers.get(name, 0.0) for name in (*WORK, "bytes_down")})
    run.spend({"bytes_up": total.bytes_up})
    return result
