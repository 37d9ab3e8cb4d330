"""What is asked of everyone beside the rounds: one small noun, and the questions that methods start with."""

from fedpop.questions.base import Question, Table, Units

__all__ = ["Question", "Table", "Units"]
