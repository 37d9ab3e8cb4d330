"""Populations out of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedpop.algorithms import rebuild
from fedpop.checked import checked
from fedpop.errors import CheckpointError
from fedpop.evaluation.verdict import verdict_of
from fedpop.federation.clients import Federation
from fedpop.files import read_json, read_tensors
from fedpop.keys import Key
from fedpop.models.base import Model
from fedpop.models.spec import model_from, require_same
from fedpop.population.population import Population
from fedpop.priors import Prior
from fedpop.version import __version__


@checked
def load(
    path: str | Path, *, model: Model | None = None, clients: Any = None, prior: Prior | None = None
) -> Population:
    """Read a population back. ``model`` (or an energy ``prior``) is needed when its modules are not torch's
    own layers, or when it is a function (``CustomModel``), which cannot be kept in a file without code;
    ``clients`` gives back the data, for clients whose draws were not saved. A method, kernel or prior of your
    own is found by its name once the module that defines it is imported.

    >>> import tempfile, torch, fedpop as fp
    >>> model = fp.Composition(None, torch.nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> population = fp.FedSOUL(model).fit([(torch.ones(3, 1), torch.ones(3))], rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = fp.load(population.save(folder))
    >>> again
    Population(FedSOUL, 1 clients, 2 rounds)
    """
    folder = Path(path)
    if not (folder / "population.json").exists():
        raise CheckpointError(f"{folder} holds no saved population (no population.json)")
    saved = read_json(folder / "population.json")
    if "known" not in saved:
        raise CheckpointError(
            f"{folder} was saved by fedpop {saved.get('version', '(unknown)')}, whose settings and random "
            f"numbers are not those of {__version__}; fit it again, or load it with that version"
        )
    if model is None:
        model = model_from(saved["model"])
    else:
        require_same(saved["model"], model)
    model = model.knowing(saved["known"])
    model = model.at_precision(model.chosen_precision())
    given = {} if prior is None else {"prior": prior}
    algorithm = rebuild(saved["algorithm"], saved["method"], model, **given)
    federation = None
    if clients is not None:
        federation = Federation.of(clients, model.labels)
        algorithm = algorithm.prepared(federation.example)
        federation = algorithm.model.checked(federation)
    device = model.initial_phi().device
    theta = read_tensors(folder / "theta.safetensors", saved["theta"])
    published = {n: t.to(device) for n, t in theta.items()}
    if published["phi"].shape != (model.phi_layout.size,):
        raise CheckpointError("the saved phi does not fit this model")
    history = []
    if (folder / "history.jsonl").exists():
        history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    population = Population(
        algorithm=algorithm,
        published=published,
        key=Key(saved["seed"], purpose=saved["purpose"]),
        federation=federation,
        history=history,
        totals=saved["totals"],
        rounds=saved["rounds"],
        drift=saved["drift"],
        names=saved["clients"],
        learned_from=saved["learned_from"],
        convergence=verdict_of(saved.get("convergence")),
        kept=saved.get("kept"),
    )
    for file in sorted((folder / "clients").glob("*.safetensors")):
        name = saved["clients"][int(file.stem)]
        if name in population.names:  # clients may come back in another order
            state = {n: t.to(device) for n, t in read_tensors(file).items()}
            population._personal[population.names.index(name)] = state
    return population
