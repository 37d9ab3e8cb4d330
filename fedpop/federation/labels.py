"""Targets that are words: numbered for the model, and restored in predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.federation.inputs import as_tensor
from fedpop.kinds import did_you_mean

Targets = Tensor | np.ndarray
"""Numbers, or an array of words."""


def as_targets(y: Any, where: str) -> Targets:
    """Numbers as a tensor; words as an array of them.

    >>> as_targets(["cat", "dog"], "here"), as_targets([0, 1], "here")
    (array(['cat', 'dog'], dtype='<U3'), tensor([0, 1]))
    """
    if isinstance(y, Tensor):
        return as_tensor(y, where)
    try:
        array = np.asarray(y)
    except ValueError:  # of unequal lengths
        return as_tensor(y, where)
    if array.dtype.kind not in "UO":
        return as_tensor(y, where)
    given = y if isinstance(y, list | tuple) and array.ndim == 1 else array.ravel()
    words = [isinstance(v, str) for v in given]  # NumPy makes words of numbers among words
    if not any(words):
        return as_tensor(y, where)
    if not all(words):
        row = words.index(False)
        raise DataError(f"{where}, row {row}: {given[row]!r} among words; labels are one or the other")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{where}: words are one label per example, [n], not {array.shape}")
    return array.astype(str)


def labels_of(targets: Iterable[tuple[Targets, str]], known: Sequence[str] = ()) -> tuple[str, ...]:
    """All words among targets, in order, unless they are known; () where targets are numbers."""
    found: set[str] = set()
    numbers, words = "", ""
    for y, where in targets:
        if len(y) == 0:
            continue
        if isinstance(y, Tensor):
            numbers = numbers or where
        else:
            words = words or where
            found.update(np.unique(y).tolist())
        if numbers and words and not known:
            raise DataError(f"{where}: labels are numbers at {numbers} and words at {words}; make them alike")
    if any(not word.strip() for word in found):
        raise DataError(f"{words}: an empty label; drop the rows without one")
    return tuple(known) or tuple(sorted(found))


def numbered(y: Targets, labels: Sequence[str], where: str) -> Tensor:
    """Words as their positions among the labels; numbers as they are."""
    if isinstance(y, Tensor):
        return y
    at = {label: i for i, label in enumerate(labels)}
    for row, word in enumerate(y.tolist()):
        if word not in at:
            known = (
                ", ".join(map(repr, labels[:8])) + (", ..." if len(labels) > 8 else "")
                if labels
                else "numbers"
            )
            raise DataError(
                f"{where}, row {row}: the label {word!r} was not there in training; known are {known}"
                f"{did_you_mean(word, labels)}"
            )
    return torch.tensor([at[word] for word in y.tolist()], dtype=torch.int64)
