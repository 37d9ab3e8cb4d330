"""Validation and test examples set aside, client by client, before anything else looks at the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpop.checked import Factor, Seed, checked
from fedpop.errors import DataError, SettingsError
from fedpop.federation.clients import Federation, Packed
from fedpop.federation.inputs import map_inputs
from fedpop.keys import Key


@checked
def hold_out(clients: Any, *, test: Factor = 0.2, validation: Factor = 0.0, seed: Seed = 0) -> Federation:
    """These clients with a share of each one's examples set aside, drawn by the seed alone.

    A client keeps at least one example to train on; shares are rounded to whole examples.

    Args:
        clients: As for ``fp.fit``, without validation or test sets of their own.
        test: The share of each client's examples to be judged on, 0.2 unless told.
        validation: The share to choose settings by; none unless told.
        seed: Which examples are set aside, 0 unless told; a client's do not depend on the others.

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
