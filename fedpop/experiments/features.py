"""The paper's feature table, out of the code: what each method supports, and a live client's memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fedpop.algorithms.base import Algorithm, Tensors
from fedpop.algorithms.fedsouk import Final
from fedpop.keys import Key
from fedpop.models.composition import Composition
from fedpop.models.likelihoods import Normal
from fedpop.population import Population

DRAWS = 5
"""The M of the table: draws of z, or samples of w, that predictions average over."""
CLIENTS, EXAMPLES, INPUTS, FEATURES = 4, 6, 7, 3


@dataclass(frozen=True)
class Features:
    """A row: words from the method's class, numbers from a client of a small federation."""

    name: str
    reference: str
    participation: str
    personalised: bool
    bounds: bool
    uncertainty: bool
    communication: str
    memory: str
    instance: str
    to_predict: int
    """Numbers that a client's predictions read, model and draws."""
    between_rounds: int
    """Numbers that a client holds from one round to the next."""


class _Read(dict[str, Tensor]):
    """Tensors that note which of them were asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def numbers(self) -> int:
        return sum(super(_Read, self).__getitem__(name).numel() for name in self.names)


def small_model() -> Composition:
    """d = 3 and d_phi = 21, in double precision so that no step size overflows by accident."""
    backbone = nn.Linear(INPUTS, FEATURES, bias=False, dtype=torch.float64)
    head = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    key, server = Key(0, purpose="features"), Key(0).server()
    with torch.no_grad():
        for name, p in (("backbone", backbone.weight), ("head", head.weight)):
            p.copy_(key.at(purpose=name).normal(server, tuple(p.shape), torch.float64)[0])
    return Composition(backbone, head, Normal(1.0))


def live(method: type[Algorithm], model: Composition) -> Population:
    """A method after a few rounds with a few clients, with ``DRAWS`` draws where it draws."""
    key, ids = Key(0, purpose="data"), torch.arange(CLIENTS)
    x = key.at(purpose="x").normal(ids, (EXAMPLES, INPUTS), torch.float64)
    y = key.at(purpose="y").normal(ids, (EXAMPLES,), torch.float64)
    known = {f.name for f in fields(method)}
    wanted: dict[str, Any] = {
        "final": Final(chains=1, draws=DRAWS),
        "samples": DRAWS,
        "burn_in": 0,
        "thin": 1,
    }
    if "final" in known:
        wanted.pop("burn_in")
    settings = {name: value for name, value in wanted.items() if name in known}
    clients = list(zip(x, y, strict=True))
    return method(model, **settings).fit(clients, rounds=2 * DRAWS, progress=False)


def features(method: type[Algorithm], model: Composition) -> Features:
    """One method's row.

    >>> import fedpop as fp
    >>> row = features(fp.FedSOUL, small_model())
    >>> row.memory, row.to_predict  # five draws of three numbers, and phi
    ('M d + d_phi', 36)
    """
    population = live(method, model)
    assert population.store is not None
    client = int((population.store.slots >= 0).nonzero()[0]) if population.store.used else 0
    published, personal = _Read(population.published), _Read(population._model_of(client))
    population.algorithm.predict(published, personal, torch.ones(1, INPUTS, dtype=torch.float64), Key(0))
    about = method.about
    scheme = {(True, True): "both", (True, False): "local steps", (False, True): "compression"}
    return Features(
        name=method.name,
        reference=about.reference,
        participation=method.participation,
        personalised=about.personalised,
        bounds=about.bounds,
        uncertainty=method.uncertainty,
        communication=scheme.get((about.local_steps, bool(method.compressed)), "none"),
        memory=about.memory,
        instance=about.instance,
        to_predict=published.numbers() + personal.numbers(),
        between_rounds=sum(t[0].numel() for t in population.store.tensors.values()),
    )


def by_formula(memory: str, d: int, d_phi: int, draws: int = DRAWS) -> int:
    """The number that a formula in M, d and d_phi stands for."""
    known = {
        "d + d_phi": d + d_phi,
        "M (d + d_phi)": draws * (d + d_phi),
        "M d + d_phi": draws * d + d_phi,
    }
    return known[memory]
