"""Questions before anything is agreed on: what do examples at the sites look like?

They are asked of whoever is there, by letters that carry the settings of the data in the place of a method,
and answered from rows that are not coded yet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedpop.errors import EstimateError, SettingsError
from fedpop.flower.gathering import Gathering
from fedpop.flower.letters import Letter
from fedpop.flower.post import Post
from fedpop.message import Channel, Message, Tensors
from fedpop.methods.asking import question_told
from fedpop.questions import Question
from fedpop.version import __version__

log = logging.getLogger("fedpop.server")


@dataclass(frozen=True)
class Survey:
    """Carries questions about sites' data to the first ``least`` sites or more."""

    post: Post
    experiment: str
    data: Mapping[str, Any]
    """What the settings say of the data."""
    least: int

    def __call__(self, question: Question[Any], known: Tensors) -> Any:
        """What is made of the answers."""
        asked = {f"asked.{name}": tensor for name, tensor in question.ask(known).items()}
        told, more = question_told(question, asked)
        about: dict[str, Any] = {"version": __version__, "experiment": self.experiment}
        about |= {"data": dict(self.data), "question": question.name, "told": told, "key": [0, question.name]}
        letter = Letter("ask", about, asked | more)
        replies = self.post.survey(letter, self.least)
        for name, reply in sorted(replies.items()):  # whose vectors are not everyone's
            log.info("%s, %s: %s", name, question.name, "; ".join(reply.payloads))
        gathered = Gathering(torch.device("cpu")).gathered(
            question.name,
            Channel(),
            torch.float64,
            dict.fromkeys(replies, letter),
            replies,
            of=len(replies),
            varied=question.varied,
            sends=question.sends,
        )
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(gathered.reasons.items()))
        if len(gathered.reasons) > (1 - question.quorum) * len(replies):
            raise EstimateError(f"{question.name}: not enough of {len(replies)} sites could be heard ({why})")
        if why:
            log.warning("%s: left out were %s", question.name, why)
        try:
            return question.finish(known, gathered.total)
        except SettingsError as error:
            raise SettingsError(f"{error}{_unlike(replies)}") from error


def _unlike(replies: Mapping[str, Message]) -> str:
    """Which sites answered with other vectors than most."""
    kinds = Counter(tuple(sorted(reply.payloads)) for reply in replies.values())
    usual = kinds.most_common(1)[0][0]
    odd = [name for name, reply in sorted(replies.items()) if tuple(sorted(reply.payloads)) != usual]
    return f"; unlike the others: {', '.join(odd)}" if odd else ""
