"""Validation and test examples set aside, client by client, and whole clients, before anything else reads
the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Factor, Seed, checked
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Client, Federation, Packed
from fedpop.federation.inputs import map_inputs
from fedpop.keys import Key


@checked
def hold_out(clients: Any, *, test: Factor = 0.2, validation: Factor = 0.0, seed: Seed = 0) -> Federation:
    """These clients with a share of each one's examples set aside, drawn by the seed alone.

    A client keeps at least one example to train on; shares are rounded to whole examples.

    Args:
        clients: As for ``fp.fit``, without validation or test sets.
        test: The share of each client's examples to be judged on (default: 0.2).
        validation: The share to choose settings by (default: none).
        seed: Which examples are set aside (default: 0); a client's do not depend on the others.

    >>> import torch, fedpop as fp
    >>> federation = fp.hold_out([(torch.ones(10, 2), torch.zeros(10))], test=0.3, validation=0.2)
    >>> {name: len(packed.y) for name, packed in federation.splits.items()}
    {'train': 5, 'validation': 2, 'test': 3}
    """
    federation = Federation.of(clients)
    if set(federation.splits) != {"train"}:
        raise DataError("these clients already have validation or test sets; they are used as they are")
    if not 0 < test + validation < 1:
        raise SettingsError(f"shares lie in [0, 1) and leave something to train on, not {test}, {validation}")
    packed = federation.train
    key = Key(seed, purpose="hold-out")
    rows: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for i, n in enumerate(packed.sizes.tolist()):
        order = torch.argsort(key.uniform(federation.units[i : i + 1], (n,), torch.float64)[0])
        order = order + int(packed.starts[i])
        most = max(n - 1, 0)
        tested = min(round(test * n), most)
        checked = min(round(validation * n), most - tested)
        for name, part in (
            ("test", order[:tested]),
            ("validation", order[tested : tested + checked]),
            ("train", order[tested + checked :]),
        ):
            rows[name].append(part.sort().values)
    splits = {}
    for name, parts in rows.items():
        sizes = torch.tensor([len(part) for part in parts])
        if name == "train" or int(sizes.sum()):
            chosen = torch.cat(parts)
            x = map_inputs(lambda v, c=chosen: v[c], packed.x)
            splits[name] = Packed(x, packed.y[chosen], torch.cumsum(sizes, 0) - sizes, sizes)
    return replace(federation, splits=splits)


def set_apart(clients: Federation, new: int, seed: int) -> tuple[Federation, list[Client]]:
    """These clients without ``new`` of them, drawn by the seed, and those with their sets.

    >>> import torch
    >>> federation = hold_out({name: (torch.ones(5, 2), torch.zeros(5)) for name in "abc"})
    >>> known, apart = set_apart(federation, 1, seed=0)
    >>> len(known), len(apart), len(apart[0].y), len(apart[0].test[1])
    (2, 1, 4, 1)
    """
    if not 0 <= new < len(clients):
        raise SettingsError(f"{new} new clients asked for, but there are {len(clients)} in all")
    if not new:
        return clients, []
    key = Key(seed, purpose="new-clients")
    order = key.uniform(clients.units, (1,), torch.float64)[:, 0].argsort()
    chosen, remaining = order[:new].sort().values, order[new:].sort().values
    here = torch.device("cpu")
    splits, apart = {}, [dict[str, Any]() for _ in range(new)]
    for split, packed in clients.splits.items():
        cohort = clients.cohort(remaining, here, split)
        sizes = packed.sizes[remaining]
        splits[split] = Packed(cohort.x, cohort.y, torch.cumsum(sizes, 0) - sizes, sizes)
        for own, i in zip(apart, chosen.tolist(), strict=True):
            alone = clients.cohort(torch.tensor([i]), here, split)
            own[split] = (alone.x, alone.y)
    known = replace(clients, names=[clients.names[i] for i in remaining.tolist()], splits=splits, _index={})
    return known, [Client(*own.pop("train"), **{s: p for s, p in own.items() if len(p[1])}) for own in apart]
