"""Named parameters and their links: natural values for people, free ones for chains and optimisers.

phi and z live on a free scale, the whole real line, where the population prior is Normal and every step is
allowed; a function given by the user sees natural values. A positive parameter is the exponential of its
free value (so that its prior is log-normal), one of the unit interval the logistic function of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from fedpop.checked import OneOf, checked, require
from fedpop.errors import ModelError
from fedpop.models.modules import Layout


@dataclass(frozen=True)
class Link:
    """A monotone map from the real line to the natural scale, and back.

    Args:
        name: The word by which it is asked for.
        low: The lower end of the natural scale, which is not reached.
        high: The upper end, which is not reached.
        natural: The map from free values to natural ones.
        free: The map back.
        free_name: What the free scale of ``{}`` is called, such as "log {}".

    >>> LINKS["positive"].natural(torch.tensor(0.0))
    tensor(1.)
    """

    name: str
    low: float
    high: float
    natural: Callable[[Tensor], Tensor]
    free: Callable[[Tensor], Tensor]
    free_name: str


LINKS: dict[str, Link] = {
    "real": Link("real", -math.inf, math.inf, lambda u: u, lambda v: v, "{}"),
    "positive": Link("positive", 0.0, math.inf, torch.exp, torch.log, "log {}"),
    "unit": Link("unit", 0.0, 1.0, torch.sigmoid, torch.logit, "logit {}"),
}


@dataclass(frozen=True)
class Parameter:
    """Where a parameter starts, and its link.

    Args:
        start: The initial value on the natural scale, inside its ends: a number, or an array of them.
        link: "real" (the default), "positive" or "unit".

    >>> Parameter(2.0, "positive") == positive(2.0)
    True
    """

    start: Any
    link: str = "real"
    value: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            value = torch.as_tensor(self.start, dtype=torch.float64).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"a parameter starts at numbers, not at {self.start!r}") from error
        require(Annotated[str, OneOf(*LINKS)], link=self.link)
        link = LINKS[self.link]
        inside = torch.isfinite(value) & (value > link.low) & (value < link.high)
        if not bool(inside.all()):
            bad = float(value[~inside].flatten()[0])
            where = "finite" if self.link == "real" else f"between {link.low:g} and {link.high:g}"
            raise ModelError(f"{self.link}({bad:g}): the initial value must be {where}, ends excluded")
        object.__setattr__(self, "value", value)


@checked
def real(start: Any) -> Parameter:
    """A parameter that may be any number.

    Args:
        start: Its initial value: a finite number, or an array of them.

    >>> real(-1.5)
    Parameter(start=-1.5, link='real')
    """
    return Parameter(start, "real")


@checked
def positive(start: Any) -> Parameter:
    """A parameter above zero, such as a rate or a standard deviation; its free scale is the logarithm.

    Args:
        start: Its initial value, above zero: a number, or an array of them.

    >>> positive([0.5, 2.0])
    Parameter(start=[0.5, 2.0], link='positive')
    """
    return Parameter(start, "positive")


@checked
def unit(start: Any) -> Parameter:
    """A parameter between zero and one, such as a probability; its free scale is the logit.

    Args:
        start: Its initial value, between zero and one, ends excluded: a number, or an array of them.

    >>> unit(0.25)
    Parameter(start=0.25, link='unit')
    """
    return Parameter(start, "unit")


@dataclass(frozen=True)
class LinkedLayout(Layout):
    """A flat vector of free values, with natural values under their names as views.

    ``LinkedLayout.of_parameters`` makes one from parameters by name.

    Args:
        names: Of the parameters, in the vector's order.
        shapes: The shape of each, () for a number.
        links: The name of each one's link.

    >>> layout = LinkedLayout.of_parameters({"ka": positive(2.0), "share": unit(0.5)})
    >>> layout.views(torch.tensor([0.0, 0.0]))
    {'ka': tensor(1.), 'share': tensor(0.5000)}
    """

    links: tuple[str, ...] = ()

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Parameter]) -> LinkedLayout:
        shapes = tuple(tuple(p.value.shape) for p in parameters.values())
        return cls(tuple(parameters), shapes, tuple(p.link for p in parameters.values()))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        free = super().views(flat)
        return {
            name: LINKS[link].natural(part)
            for (name, part), link in zip(free.items(), self.links, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        free = {n: LINKS[link].free(tensors[n]) for n, link in zip(self.names, self.links, strict=True)}
        return super().flatten(free) if free else torch.zeros(0)

    def unit(self, name: str) -> float | None:
        # Logarithms and logits change by about one, whatever they are; any other number by its own size.
        return None if self.link_of(name).name == "real" else 1.0

    def link_of(self, name: str) -> Link:
        return LINKS[self.links[self.names.index(name)]]
