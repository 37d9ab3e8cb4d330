"""What people give: clients' names, torch Datasets, and x as a tensor, a tuple or a dict of tensors, treated
alike by these few functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.errors import DataError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """What one example looks like, without any of its values: the names of x's parts (none for a single
    tensor, numbers for a tuple), their shapes and types.

    >>> Example.of({"age": torch.zeros(5), "image": torch.zeros(5, 3, 8, 8)}).shapes
    ((), (3, 8, 8))
    """

    names: tuple[str | int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    labels: tuple[str, ...] = ()
    """What classes are called, where targets are words."""
    least: int = 0
    """The least whole number that stands in for one: lengths of sequences, say, are not zero."""

    def at_least(self, least: int) -> Example:
        return replace(self, least=least)

    @classmethod
    def of(cls, x: Inputs, labels: tuple[str, ...] = ()) -> Example:
        names = None if isinstance(x, Tensor) else tuple(x) if isinstance(x, dict) else tuple(range(len(x)))
        parts = leaves(x)
        return cls(names, tuple(tuple(v.shape[1:]) for v in parts), tuple(v.dtype for v in parts), labels)

    def zeros(self, count: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        """So many such examples, all of zeros, or of the least whole numbers; floating-point parts in this
        type."""
        parts = [
            torch.zeros((count, *shape), dtype=dtype, device=device)
            if own.is_floating_point
            else torch.full((count, *shape), self.least, dtype=own, device=device)
            for shape, own in zip(self.shapes, self.dtypes, strict=True)
        ]
        if self.names is None:
            return parts[0]
        if all(isinstance(name, int) for name in self.names):
            return tuple(parts)
        return {str(name): part for name, part in zip(self.names, parts, strict=True)}


def leaves(x: Inputs) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, dict) else list(x)


def map_inputs(fn: Callable[..., Tensor], *xs: Inputs) -> Inputs:
    """Apply ``fn`` to corresponding leaves."""
    first = xs[0]
    if isinstance(first, Tensor):
        return fn(*xs)
    if isinstance(first, dict):
        return {k: fn(*(x[k] for x in xs)) for k in first}  # type: ignore[call-overload,index]
    return tuple(fn(*parts) for parts in zip(*xs, strict=True))


def rows_of(x: Inputs) -> int:
    return leaves(x)[0].shape[0]


def as_inputs(x: Any, where: str) -> Inputs:
    """Tensors from tensors, arrays or nested numbers; ragged leaves are refused."""
    out: Inputs
    if isinstance(x, Tensor) and (x.is_nested or x.dim()):  # the usual case, for as many clients as there are
        return _real(x.detach(), f"{where}, x")
    if isinstance(x, dict):
        out = {str(k): as_tensor(v, f"{where}, x[{k!r}]") for k, v in x.items()}
    elif isinstance(x, tuple):
        out = tuple(as_tensor(v, f"{where}, x[{j}]") for j, v in enumerate(x))
    else:
        out = as_tensor(x, f"{where}, x")
    if not leaves(out) or any(leaf.dim() == 0 for leaf in leaves(out)):
        raise DataError(f"{where}: x must have one row per example")
    if len({leaf.shape[0] for leaf in leaves(out)}) > 1:
        raise DataError(f"{where}: the parts of x have different numbers of rows")
    return out


def all_finite(x: Inputs) -> bool:
    return all(bool(torch.isfinite(v).all()) for v in leaves(x) if torch.is_floating_point(v))


def require_finite(x: Inputs, where: str, owner: Callable[[int], str] = lambda row: "") -> None:
    """Raise at the first row that is not finite; ``owner`` may add whose it is."""
    for leaf in leaves(x):
        if torch.is_floating_point(leaf):
            finite = torch.isfinite(leaf.unsqueeze(-1)).flatten(1).all(dim=1)
            if not bool(finite.all()):
                row = int((~finite).nonzero()[0, 0])
                raise DataError(
                    f"{where}, row {row}{owner(row)}: x is NaN or infinite; drop the row or fill it in"
                )


def as_tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return _real(value.detach(), where)
    try:
        array = np.asarray(value)
        if array.dtype == object:
            raise DataError(f"{where}: rows of unequal length, or values that are not numbers")
        return _real(torch.as_tensor(np.ascontiguousarray(array)), where)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: cannot be read as numbers ({error})") from error


def _real(value: Tensor, where: str) -> Tensor:
    if value.is_complex():
        raise DataError(f"{where}: complex numbers; give their real and imaginary parts as two columns")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise DataError(
            f"{where}: a sparse, nested or quantised tensor; give it as a dense one, .to_dense(), or padded"
        )
    if value.is_meta:
        raise DataError(f"{where}: a tensor on the device 'meta' holds no numbers")
    if value.is_floating_point() and value.dtype.itemsize < 2:
        raise DataError(f"{where}: numbers of type {value.dtype}; give them as x.float()")
    return value


def narrowed(value: Tensor, dtype: torch.dtype, where: Callable[[int], str]) -> Tensor:
    """Floats in this type; a number that it cannot hold is refused, in the row that ``where`` names."""
    if not torch.is_floating_point(value):
        return value
    out = value.to(dtype)
    if torch.finfo(value.dtype).max > torch.finfo(dtype).max:
        lost = torch.isfinite(value) & ~torch.isfinite(out)
        if bool(lost.any()):
            at = tuple(lost.nonzero()[0].tolist())
            raise DataError(
                f"{where(at[0])} holds {float(value[at]):g}, which the model's {str(dtype)[6:]} cannot "
                f"(its largest is {torch.finfo(dtype).max:.3g}): rescale the data, or make the model double"
            )
    return out


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
