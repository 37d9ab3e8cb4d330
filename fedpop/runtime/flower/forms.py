"""The form of an example in plain values, as sites tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedpop.federation.inputs import Example


def example_from(plain: Mapping[str, Any]) -> Example:
    """An example's form out of plain values.

    >>> example_from({"names": None, "shapes": [[3]], "dtypes": ["float32"]}).shapes
    ((3,),)
    """
    names = None if plain["names"] is None else tuple(plain["names"])
    shapes = tuple(tuple(int(n) for n in shape) for shape in plain["shapes"])
    return Example(names, shapes, tuple(getattr(torch, str(kind)) for kind in plain["dtypes"]))


def plain_example(example: Example) -> dict[str, Any]:
    """An example's form in plain values.

    >>> plain_example(Example.of(torch.zeros(5, 3)))
    {'names': None, 'shapes': [[3]], 'dtypes': ['float32']}
    """
    return {
        "names": None if example.names is None else list(example.names),
        "shapes": [list(shape) for shape in example.shapes],
        "dtypes": [str(kind).removeprefix("torch.") for kind in example.dtypes],
    }
