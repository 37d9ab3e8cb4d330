"""The table of ``fedpop methods``: the paper's columns, one row for each method."""

from __future__ import annotations

from collections.abc import Iterable

from fedpop.algorithms import METHODS
from fedpop.algorithms.base import Algorithm
from fedpop.experiments.features import DRAWS, Features, by_formula, features, small_model
from fedpop.report.html import Sheet

COLUMNS = (
    "method",
    "partial",
    "personal",
    "bounds",
    "uncertainty",
    "com.",
    "memory",
    "measured",
    "kept",
    "instance of FedPop",
)
PARTIAL = {"any": "yes", "full": "no", "one": "one at a time"}


def feature_tables(methods: Iterable[type[Algorithm]] | None = None) -> tuple[Sheet, Sheet, str]:
    """Features, references, and the words that explain the numbers.

    >>> import fedpop as fp
    >>> feature_tables([fp.FedSOUL])[0].rows[0][:6]
    ('FedSOUL', 'yes', 'yes', 'yes', 'yes', 'both')
    """
    model = small_model()
    d, d_phi = model.z_layout.size, model.phi_layout.size
    measured = [features(m, model) for m in (METHODS.values() if methods is None else methods)]
    note = (
        "partial: a round may do with some of the clients. com.: several local steps between messages, "
        "unbiased compression of what is sent, or both. bounds: convergence is proved. memory: numbers "
        f"that a client's predictions read; measured on a live client with d = {d}, d_phi = {d_phi} and "
        f"M = {DRAWS}, and in brackets what the formula gives. kept: numbers that it holds between rounds."
    )
    table = Sheet(COLUMNS, [_row(f, by_formula(f.memory, d, d_phi)) for f in measured])
    return table, Sheet(("method", "reference"), [(f.name, f.reference) for f in measured]), note


def _row(f: Features, formula: int) -> tuple[str, ...]:
    marks = ("yes" if flag else "no" for flag in (f.personalised, f.bounds, f.uncertainty))
    numbers = (f.memory, f"{f.to_predict} ({formula})", str(f.between_rounds))
    return (f.name, PARTIAL[f.participation], *marks, f.communication, *numbers, f.instance or "-")
