"""Client data in the forms people have it, checked once and packed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpop.checked import checked
from fedpop.devices import fits, rows_on
from fedpop.errors import DataError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import (
    Example,
    Inputs,
    all_finite,
    as_inputs,
    as_name,
    leaves,
    map_inputs,
    narrowed,
    owners,
    read_dataset,
    require_finite,
    rows_of,
)
from fedpop.federation.labels import Targets, as_targets, labels_of, numbered
from fedpop.federation.participation.rules import Roster
from fedpop.keys import units_of

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Client:
    """One client's data, with optional validation and test sets.

    Args:
        x: A row for each example: a tensor, an array or nested lists; or a dict or tuple of them, for a model
            of several inputs.
        y: A target for each row of x: a class's number, or a real number.
        validation: A pair (x, y) to choose settings by (``callbacks.EarlyStop``, ``fedpop tune``), or None.
        test: A pair (x, y) to be judged on (``fp.evaluate``, ``fp.compare``), or None.

    >>> Client(x=[[1.0], [2.0]], y=[0.0, 1.0], test=([[3.0]], [1.0])).test
    ([[3.0]], [1.0])
    """

    x: Any
    y: Any
    validation: tuple[Any, Any] | None = None
    test: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Table:
    """One packed table: a row of x and y per example, and the client each row belongs to.

    Args:
        x: A row for each example, of all clients.
        y: A target for each row.
        client: The name, or the number, of each row's client; rows need not be in order.

    >>> Federation.of(Table(x=[[1.0], [2.0], [3.0]], y=[0.0, 1.0, 0.0], client=["anna", "ben", "anna"]))
    Federation(2 clients, 3 training examples, sizes 1 to 2)
    """

    x: Any
    y: Any
    client: Any


@dataclass(frozen=True)
class Packed:
    """Rows of all clients, one client after the other."""

    x: Inputs
    y: Tensor
    starts: Tensor
    sizes: Tensor


def position(client: str | int, places: Mapping[str, int], whose: str) -> int:
    """Of a client by its name, or by its number, among these."""
    if str(client) in places:  # a table's whole-number ids are names too
        return places[str(client)]
    if not isinstance(client, str) and -len(places) <= client < len(places):
        return client % len(places)
    if not places:
        raise DataError(f"this {whose} is theta alone and has no clients: use new_client()")
    shown = ", ".join(map(repr, list(places)[:3]))
    raise DataError(
        f"no client {client!r} in this {whose} of {len(places)} ({shown}, ...); for a client that was not "
        "there in training use new_client()"
    )


@dataclass(frozen=True)
class Federation:
    """All clients: names, and packed data per split.

    ``Federation.of(clients)`` makes one from data as people have them.

    Args:
        names: Those of the clients, in order.
        splits: The packed rows of "train", and of "validation" and "test" where there are any.
        embedded: Whether x holds features already, computed once by a backbone that stands still.
        labels: What classes are called, where targets are words; y holds their positions.

    >>> federation = Federation.of({"anna": ([[1.0], [2.0]], [0.0, 1.0]), "ben": ([[3.0]], [1.0])})
    >>> federation
    Federation(2 clients, 3 training examples, sizes 1 to 2)
    >>> federation.index("ben")
    1
    """

    names: Sequence[str]
    splits: Mapping[str, Packed]
    embedded: bool = False
    labels: tuple[str, ...] = ()
    _index: dict[str, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        sizes = self.train.sizes
        return (
            f"Federation({len(self)} clients, {int(sizes.sum())} training examples, "
            f"sizes {int(sizes.min())} to {int(sizes.max())})"
        )

    @property
    def train(self) -> Packed:
        return self.splits["train"]

    @checked
    def index(self, client: str | int) -> int:
        """The position of a client given by name or by position."""
        if not self._index:
            self._index.update({name: i for i, name in enumerate(self.names)})
        return position(client, self._index, "federation")

    @classmethod
    def of(cls, clients: Any, labels: Sequence[str] = ()) -> Federation:
        """From a list, a mapping, a table, or a federation itself; targets that are words are among
        ``labels`` where these are known already."""
        if isinstance(clients, Federation):
            return clients
        if isinstance(clients, Table):
            return cls._of_table(clients, labels)
        if isinstance(clients, Mapping):
            named = [(as_name(name, "a client's name"), value) for name, value in clients.items()]
        elif isinstance(clients, Sequence) and not isinstance(clients, str | bytes):
            named = list(zip(usual_names(len(clients)), clients, strict=True))
        else:
            raise DataError(
                "clients must be a list of (x, y), a mapping name -> (x, y), a list of Datasets or a "
                f"fedpop.Table, not {type(clients).__name__}"
            )
        return cls._of_named(named, labels)

    @classmethod
    def _of_named(cls, named: list[tuple[str, Any]], known: Sequence[str]) -> Federation:
        if not named:
            raise DataError("there are no clients; a federation needs at least one")
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise DataError(f"client name {twice!r} appears twice")
        read: dict[str, list[tuple[Inputs, Targets, str] | None]] = {s: [] for s in SPLITS}
        for name, value in named:
            client = _as_client(value, f"client {name!r}")
            for split in SPLITS:
                where = f"client {name!r}" if split == "train" else f"client {name!r}, {split} set"
                pair = (client.x, client.y) if split == "train" else getattr(client, split)
                read[split].append(None if pair is None else _pair(pair, where))
        given = [part for parts in read.values() for part in parts if part is not None]
        labels = labels_of(((y, where) for _, y, where in given), known)
        splits: dict[str, Packed] = {}
        for split, parts in read.items():
            if any(part is not None for part in parts):
                ready = [p and (p[0], numbered(p[1], labels, p[2])) for p in parts]
                splits[split] = _pack(ready, names, split, splits.get("train"))
                if not all_finite(splits[split].x):  # asked of all at once: of each alone it would take long
                    for part in (p for p in parts if p is not None):
                        require_finite(part[0], part[2])
        return cls(names, splits, labels=labels)

    @classmethod
    def _of_table(cls, table: Table, known: Sequence[str]) -> Federation:
        x, targets = _shaped(table.x, table.y, "the table")
        labels = labels_of([(targets, "the table")], known)
        y = numbered(targets, labels, "the table")
        names, owner = owners(table.client, "the table's client column")
        if owner.shape[0] != y.shape[0]:
            raise DataError(f"the table has {y.shape[0]} rows but {owner.shape[0]} client labels")
        if not names:
            raise DataError("the table has no rows; a federation needs at least one client")
        require_finite(x, "the table", lambda row: f" (client {names[int(owner[row])]!r})")
        order = torch.argsort(owner, stable=True)
        sizes = torch.bincount(owner, minlength=len(names))
        starts = torch.cumsum(sizes, 0) - sizes
        packed = Packed(map_inputs(lambda v: v[order], x), y[order], starts, sizes)
        return cls(names, {"train": packed}, labels=labels)

    def map_targets(self, check: Any, dtype: torch.dtype) -> Federation:
        """A federation whose targets passed ``check(y, where)`` and whose x has floats of this type."""
        splits = {}
        for split, packed in self.splits.items():
            y = self._checked(packed, split, check)

            def cast(leaf: Tensor, split: str = split) -> Tensor:
                return narrowed(leaf, dtype, lambda row: f"{self._row(split, row)}: x")

            splits[split] = Packed(map_inputs(cast, packed.x), y, packed.starts, packed.sizes)
        return replace(self, splits=splits)

    def _row(self, split: str, row: int) -> str:
        """Whose row this is of the packed table, in words."""
        packed = self.splits[split]
        filled = (packed.sizes > 0).nonzero().squeeze(1)
        i = int(filled[torch.searchsorted(packed.starts[filled], row, right=True) - 1])
        extra = "" if split == "train" else f", {split} set"
        return f"client {self.names[i]!r}{extra}, row {row - int(packed.starts[i])}"

    def map_x(self, change: Callable[[Tensor], Tensor]) -> Federation:
        """A federation with every x changed in this way."""
        splits = {s: Packed(map_inputs(change, p.x), p.y, p.starts, p.sizes) for s, p in self.splits.items()}
        return replace(self, splits=splits)

    def map_inputs(self, embed: Callable[[Inputs], Inputs]) -> Federation:
        """A federation that holds features in place of x."""
        splits = {split: Packed(embed(p.x), p.y, p.starts, p.sizes) for split, p in self.splits.items()}
        return replace(self, splits=splits, embedded=True)

    def _checked(self, packed: Packed, split: str, check: Any) -> Tensor:
        try:
            y: Tensor = check(packed.y, "all clients")
            return y
        except DataError:
            # Something is wrong somewhere: look client by client, so that the error can name it.
            for i, name in enumerate(self.names):
                start, size = int(packed.starts[i]), int(packed.sizes[i])
                extra = "" if split == "train" else f", {split} set"
                check(packed.y[start : start + size], f"client {name!r}{extra}")
            raise

    @cached_property
    def units(self) -> Tensor:
        """The numbers under which clients draw, by their names, ``[b]``."""
        return units_of(self.names)

    @cached_property
    def roster(self) -> Roster:
        """Who may take part."""
        return Roster(self.units, self.names)

    @property
    def example(self) -> Example:
        """What one example looks like: all that a model needs to know of data."""
        return Example.of(self.train.x, self.labels)

    def cohort(self, ids: Tensor, device: torch.device, split: str = "train") -> Cohort:
        """The data of the clients at these positions on ``device``."""
        packed = self.splits[split]
        where = packed.sizes.device
        ids_here = ids.to(where)
        sizes = packed.sizes.index_select(0, ids_here)  # a third of the time of indexing
        whole = len(ids) == len(self) and bool((ids_here == torch.arange(len(self), device=where)).all())
        x, y = packed.x, packed.y
        if not whole:
            total = int(sizes.sum())
            shift = packed.starts.index_select(0, ids_here) - (torch.cumsum(sizes, 0) - sizes)
            shifts = torch.repeat_interleave(shift, sizes, output_size=total)
            rows = torch.arange(total, device=where) + shifts
            x, y = map_inputs(lambda v: rows_on(device, v, rows), x), rows_on(device, y, rows)
        return Cohort(
            units=self.units.index_select(0, ids.to("cpu")).to(device),
            sizes=sizes.to(device),
            x=map_inputs(lambda v: v.to(device), x),
            y=y.to(device),
            longest=int(sizes.max()) if len(sizes) else 0,
            embedded=self.embedded,
        )

    def kept_on(self, device: torch.device) -> Federation:
        """This one with its data on a device that has room for them; else they stay, and rows are copied."""
        tensors = [v for p in self.splits.values() for v in (*leaves(p.x), p.y)]
        if not fits(sum(v.nbytes for v in tensors if v.device != device), device):
            return self
        splits = {
            s: Packed(map_inputs(lambda v: v.to(device), p.x), p.y.to(device), p.starts, p.sizes)
            for s, p in self.splits.items()
        }
        return replace(self, splits=splits)

    def fingerprint(self) -> str:
        """A digest of all names and data, so that a resumed run can tell whether they changed."""
        digest = hashlib.sha256()
        for name in (*self.names, *self.labels):
            digest.update(f"{name}\n".encode())
        for split in sorted(self.splits):
            packed = self.splits[split]
            digest.update(split.encode())
            for tensor in (*leaves(packed.x), packed.y, packed.sizes):
                digest.update(str((tuple(tensor.shape), str(tensor.dtype))).encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().data)  # no copy
        return digest.hexdigest()[:32]


def usual_names(count: int) -> list[str]:
    """Names for clients that have none."""
    width = len(str(max(count - 1, 0)))
    return [f"client-{i:0{width}d}" for i in range(count)]


def _as_client(value: Any, where: str) -> Client:
    if isinstance(value, Client):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        return Client(value[0], value[1])
    if isinstance(value, torch.utils.data.Dataset):
        return Client(*read_dataset(value, where))
    what = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
    raise DataError(
        f"{where}: expected (x, y), a fedpop.Client(x, y, validation, test) or a torch Dataset of (x, y) "
        f"pairs, not {what}"
    )


def _pair(pair: Any, where: str) -> tuple[Inputs, Targets, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        shape = f" of shape {tuple(pair.shape)}" if isinstance(pair, Tensor | np.ndarray) else ""
        raise DataError(f"{where}: a pair (x, y) is needed, not a {type(pair).__name__}{shape}")
    return *_shaped(pair[0], pair[1], where), where


def _shaped(x: Any, y: Any, where: str) -> tuple[Inputs, Targets]:
    inputs, targets = as_inputs(x, where), as_targets(y, f"{where}, y")
    if targets.ndim == 0:
        raise DataError(f"{where}: y must have one entry per example")
    if rows_of(inputs) != targets.shape[0]:
        raise DataError(
            f"{where}: x has {rows_of(inputs)} rows but y has {targets.shape[0]}; "
            "they must be of equal length"
        )
    return inputs, targets


def _pack(
    parts: list[tuple[Inputs, Tensor] | None], names: Sequence[str], split: str, train: Packed | None
) -> Packed:
    example = next((p for p in parts if p is not None and p[1].shape[0]), None)
    example = example or next(p for p in parts if p is not None)
    sizes = torch.tensor([0 if p is None else p[1].shape[0] for p in parts])
    filled = [p for p in parts if p is not None and p[1].shape[0]] or [example]
    for (name, part), size in zip(zip(names, parts, strict=True), sizes.tolist(), strict=True):
        if size and part is not None:
            extra = "" if split == "train" else f", {split} set"
            like = example if train is None or not len(train.y) else (train.x, train.y)
            _same_form(part, like, f"client {name!r}{extra}")
    x = map_inputs(lambda *leaf: torch.cat([_as_like(v, leaf[0]) for v in leaf]), *(p[0] for p in filled))
    y = torch.cat([_as_like(p[1], filled[0][1]) for p in filled])
    return Packed(x, y, torch.cumsum(sizes, 0) - sizes, sizes)


def _as_like(value: Tensor, like: Tensor) -> Tensor:
    return value if value.dtype == like.dtype else value.to(torch.promote_types(value.dtype, like.dtype))


def _same_form(part: tuple[Inputs, Tensor], example: tuple[Inputs, Tensor], where: str) -> None:
    mine, theirs = part[0], example[0]
    same = type(mine) is type(theirs) and (not isinstance(mine, dict) or list(mine) == list(theirs))
    shapes = [v.shape[1:] for v in leaves(mine)]
    expected = [v.shape[1:] for v in leaves(theirs)]
    if not same or shapes != expected:
        raise DataError(
            f"{where}: examples of x have shape {[tuple(s) for s in shapes]}, other clients' have "
            f"{[tuple(s) for s in expected]}"
        )
    if part[1].shape[1:] != example[1].shape[1:]:
        raise DataError(
            f"{where}: y has shape {tuple(part[1].shape)}, other clients' entries have shape "
            f"{tuple(example[1].shape[1:])}"
        )
