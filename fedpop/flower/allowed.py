"""What a site answers beside the rounds: questions and formulas by name, as its settings list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedpop.errors import SettingsError
from fedpop.mixed.formula import Tokens, parse, scanned
from fedpop.mixed.study import SITE, FormulaStudy
from fedpop.questions import Question
from fedpop.settings import all_of
from fedpop.site.refusal import Code, Refusal
from fedpop.site.study import Study

WEIGHTS = "; weights = "
"""Between a formula and the weights that rows may have in it."""


@dataclass(frozen=True)
class Allowed:
    """Names of questions, formulas, and columns; None allows all that the site knows."""

    questions: Sequence[str] | None = None
    formulas: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    """Columns that a formula may name, its grouping factors among them."""

    def check(self, where: str) -> None:
        """Raise where a name is no question's, or a text no formula: it would allow nothing."""
        known = sorted({q.name for q in all_of(Question) if isinstance(getattr(q, "name", None), str)})
        for name in self.questions or ():
            if name not in known:
                raise SettingsError(f"{where}: unknown question {name!r}; known are {', '.join(known)}")
        for text in self.formulas or ():
            _read(text)

    def require_question(self, question: Question[Any]) -> None:
        if self.questions is not None and question.name not in self.questions:
            raise Refusal(
                f"the question {question.name!r} is not among those that site.toml allows", Code.QUESTION
            )

    def require_study(self, study: Study) -> None:
        if not isinstance(study, FormulaStudy):
            return
        if self.columns is not None:
            named = dict.fromkeys([*study.columns, *study.formula.group_columns])
            if other := [name for name in named if name not in self.columns and name != SITE]:
                raise Refusal(
                    f"the column {other[0]!r} is not among those that site.toml allows formulas to name",
                    Code.STUDY,
                )
        if self.formulas is None:
            return
        weights = "" if study.weights is None else f"{WEIGHTS}{study.weights.text}"
        asked = f"{study.formula.text}{weights}"
        if _read(asked) not in map(_read, self.formulas):
            raise Refusal(f"the formula {asked!r} is not among those that site.toml allows", Code.STUDY)


def _read(text: str) -> tuple[Tokens, Tokens]:
    """A formula's tokens, and those of its weights: spaces make no difference."""
    formula, _, weights = text.partition(WEIGHTS)
    parse(formula)
    return scanned(formula), scanned(weights)
