"""``fedpop.load``: what a folder holds, a population or a fit of a mixed model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedpop.checked import checked
from fedpop.models.base import Model
from fedpop.population.loading import load as load_population
from fedpop.priors import Prior

MIXED = "mixed.json"
"""A folder with this file holds a fit of a mixed model."""
FIT = "fit"
"""Where a federation's run has it."""


@checked
def load(
    path: str | Path,
    *,
    model: Model | None = None,
    clients: Any = None,
    prior: Prior | None = None,
    device: str | torch.device | None = None,
) -> Any:
    """Read a saved population, or a saved fit of a mixed model, back.

    A user-defined method, kernel or prior is found by its name once the module that defines it is imported.

    Args:
        path: The folder that ``Population.save``, or a fit's ``save``, was given; of a federation its
            ``run/population``, or of one that is about a formula its ``run``.
        model: The model again, where its modules are not torch's own layers or it is a function
            (``CustomModel``): neither can be saved in a file without code.
        clients: The data again, to sample clients whose draws were not saved. Each must be one of the
            population's by name; of a public population, which has no names, all are new to it.
        prior: An energy prior again, where its network is not made of torch's own layers.
        device: Where to compute: "cpu", "cuda"; None (the default) where the model is, or on the CPU.

    >>> import tempfile, torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> clients = [(torch.ones(3, 1), torch.arange(3.0))] * 2
    >>> population = fp.FedSOUL(model).fit(clients, rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = fp.load(population.save(folder))
    >>> again
    Population(FedSOUL, 2 clients, 2 rounds)
    """
    try:
        mixed = [folder for folder in (Path(path), Path(path) / FIT) if (folder / MIXED).is_file()]
    except OSError:  # a path that cannot be, which is said below
        mixed = []
    if mixed:
        return import_module("fedpop.mixed.fit").MixedFit.load(mixed[0])
    return load_population(path, model=model, clients=clients, prior=prior, device=device)
