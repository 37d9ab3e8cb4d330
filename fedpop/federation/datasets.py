"""Clients' names and torch Datasets as people have them: read item by item, refused where they do not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError
from fedpop.federation.inputs import as_tensor


def as_name(value: Any, where: str) -> str:
    """A client's name as text.

    >>> as_name("anna", "here"), as_name(7, "here")
    ('anna', '7')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        raise DataError(f"{where} is {value!r}: every client has a name; drop its rows or give it one")
    if isinstance(value, tuple | list | dict | set | Tensor):
        raise DataError(f"{where} is {value!r}: a name is a text or a whole number")
    return as_text(str(value), where)


def as_text(text: str, where: str) -> str:
    """A text that can be written to a file: half of a surrogate pair is no character.

    >>> as_text("\\ud800", "here")
    Traceback (most recent call last):
    fedpop.errors.DataError: here is '\\ud800', which is not text; rename it
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} is {text!r}, which is not text; rename it") from None
    return text


def owners(column: Any, where: str) -> tuple[Sequence[str], Tensor]:
    """The names of clients, and the position among them of each row's, ``[n]``."""
    if not isinstance(column, Tensor) and np.asarray(column).dtype.kind in "OSU":
        values = column if isinstance(column, list | tuple) else np.asarray(column).tolist()
        seen: dict[str, int] = {}
        places = [
            seen.setdefault(as_name(v, f"{where}, row {row}"), len(seen)) for row, v in enumerate(values)
        ]
        return list(seen), torch.tensor(places, dtype=torch.int64)
    ids = as_tensor(column, where)
    if ids.dim() != 1:
        raise DataError(f"{where} has one name per row, [n], not shape {tuple(ids.shape)}")
    if ids.is_floating_point() and not bool(torch.isfinite(ids).all()):
        row = int((~torch.isfinite(ids)).nonzero()[0, 0])
        as_name(None, f"{where}, row {row}")
    distinct, owner = torch.unique(ids, return_inverse=True)
    return [str(v) for v in distinct.tolist()], owner


def read_dataset(dataset: Any, where: str) -> tuple[Any, Any]:
    """x and y of a map-style Dataset of pairs."""
    if isinstance(dataset, torch.utils.data.TensorDataset):
        *xs, y = dataset.tensors
        if not xs:
            raise DataError(f"{where}: a TensorDataset of one tensor has no y; give TensorDataset(x, y)")
        return (xs[0] if len(xs) == 1 else tuple(xs)), y
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{where}: an IterableDataset has no length; make it a list of (x, y) first")
    items = []
    for j in range(len(dataset)):
        try:
            items.append(dataset[j])
        except (IndexError, KeyError) as error:
            detail = f"says it has {len(dataset)} items, but has no item {j}"
            raise DataError(f"{where}: the Dataset {detail}") from error
    if not items:
        raise DataError(
            f"{where}: an empty Dataset does not say what its examples look like; give empty tensors "
            "of the right shape, (x[:0], y[:0])"
        )
    for j, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            what = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise DataError(f"{where}, item {j}: every item of a Dataset must be a pair (x, y), not {what}")
    first = items[0][0]
    x: Any
    if isinstance(first, dict):
        for j, (one, _) in enumerate(items):
            if not isinstance(one, dict) or set(one) != set(first):
                raise DataError(
                    f"{where}, item {j}: x has other parts than item 0, {sorted(map(str, first))}"
                )
        x = {k: _stacked([i[0][k] for i in items], f"{where}, x[{k!r}]") for k in first}
    elif isinstance(first, tuple):
        for j, (one, _) in enumerate(items):
            if not isinstance(one, tuple) or len(one) != len(first):
                raise DataError(f"{where}, item {j}: x has other parts than item 0, which has {len(first)}")
        x = tuple(_stacked([i[0][k] for i in items], f"{where}, x[{k}]") for k in range(len(first)))
    else:
        x = _stacked([i[0] for i in items], f"{where}, x")
    targets = [i[1] for i in items]
    return x, targets if all(isinstance(v, str) for v in targets) else _stacked(targets, f"{where}, y")


def _stacked(values: Sequence[Any], where: str) -> Tensor:
    tensors = [as_tensor(v, f"{where}, item {j}") for j, v in enumerate(values)]
    for j, one in enumerate(tensors):
        if one.shape != tensors[0].shape:
            raise DataError(
                f"{where}, item {j}: shape {tuple(one.shape)}, but {tuple(tensors[0].shape)} in item 0; all "
                "examples have one shape"
            )
    return torch.stack(tensors)
