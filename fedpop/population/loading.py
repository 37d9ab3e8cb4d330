"""Populations out of files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from fedpop.checked import Seed, Whole, require
from fedpop.decisions import Decision
from fedpop.errors import CheckpointError
from fedpop.evaluation.verdict import verdict_of
from fedpop.federation.clients import Federation
from fedpop.files import (
    DAMAGED,
    folder_named,
    json_lines,
    read_bytes,
    read_json,
    read_sealed,
    read_tensors,
    reading,
)
from fedpop.keys import PUBLIC, Key
from fedpop.message import Tensors
from fedpop.methods import rebuild
from fedpop.methods.base import Algorithm, hierarchy_of
from fedpop.models.base import Model
from fedpop.models.spec import model_from, require_same
from fedpop.population.population import Population
from fedpop.population.saving import KEYS, POPULATION_FORMAT
from fedpop.priors import Prior, resolve
from fedpop.priors.base import moments
from fedpop.settings import describe
from fedpop.version import __version__

WHAT = "a saved population"


def load(
    path: str | Path,
    *,
    model: Model | None = None,
    clients: Any = None,
    prior: Prior | None = None,
    device: str | torch.device | None = None,
) -> Population:
    """Read a saved population back; ``fedpop.load`` says what each setting does."""
    folder = folder_named(path)
    saved, about = _described(folder), folder / "population.json"
    with reading(about, WHAT):
        digests = {_plain_name(name): str(digest) for name, digest in saved["files"].items()}
        theta_file = folder / _plain_name(saved["theta"])
        theta = read_tensors(theta_file, digests[theta_file.name])
        names = _names(saved["clients"])
    algorithm = _method(saved, about, model, prior, sum(t.numel() for t in theta.values()))
    if device is not None:
        algorithm = algorithm.replace(model=algorithm.model.on(device))
    model = algorithm.model
    device = model.initial_phi().device
    with reading(theta_file, "theta"):
        published = {n: t.to(device) for n, t in theta.items()}
        require_fits(published, algorithm)
        if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in published.values()):
            raise ValueError("theta is not finite")
    federation = None
    if clients is not None:
        federation = Federation.of(clients, model.labels)
        _require_known(federation, names, folder)
        algorithm = algorithm.prepared(federation.example)
        federation = algorithm.model.checked(federation)
    with reading(about, WHAT):
        history = []
        if saved["history"] is not None:
            lines = folder / _plain_name(saved["history"])
            history = json_lines(read_bytes(lines, digests[lines.name]), lines)
        require(Whole, rounds=saved["rounds"], learned_from=saved["learned_from"])
        population = Population(
            algorithm=algorithm,
            published=published,
            key=_key(folder, saved["private"], digests),
            federation=federation,
            history=history,
            totals={str(n): float(v) for n, v in saved["totals"].items()},
            rounds=saved["rounds"],
            drift=None if saved["drift"] is None else float(saved["drift"]),
            names=names,
            learned_from=saved["learned_from"],
            convergence=verdict_of(saved["convergence"]),
            decisions=[Decision.read(plain) for plain in saved["decisions"]],
            best_round=None if saved["best_round"] is None else int(saved["best_round"]),
            how=[(str(title), str(words)) for title, words in saved["how"]],
        )
        _ = population.convergence and population.convergence.words  # of numbers, or an error
        here = {name: i for i, name in enumerate(population.names)}  # they may come back in another order
        for name in saved["models"]:
            for who, state in _models(folder / _plain_name(name), digests[name], len(names)):
                if names[who] in here:
                    population._personal[here[names[who]]] = {n: t.to(device) for n, t in state.items()}
    return population


def _described(folder: Path) -> dict[str, Any]:
    """``population.json``, if it is of this layout."""
    about = folder / "population.json"
    if not os.path.exists(about):  # which a path that cannot be is not
        raise CheckpointError(
            f"{folder} holds no saved population (no population.json); give the folder that "
            "population.save(...) wrote"
        )
    found = read_json(about)
    if isinstance(found, dict) and "seal" not in found and "version" in found:
        raise CheckpointError(
            f"{about} was saved by fedpop {found['version']} in its own layout, which {__version__} does not "
            "read and does not migrate: fit it again, or load it with that version"
        )
    saved = read_sealed(about, WHAT)
    if saved.get("format") != POPULATION_FORMAT:
        raise CheckpointError(
            f"{about} has layout {saved.get('format')!r}, made by fedpop {saved.get('version')}; "
            f"{__version__} reads layout {POPULATION_FORMAT}: load it with that version, or fit it again"
        )
    if odd := sorted(KEYS ^ saved.keys()):
        raise CheckpointError(
            f"{about} has {'no' if odd[0] in KEYS else 'an entry'} {odd[0]!r}, unlike what this version "
            f"saves; {DAMAGED}"
        )
    return saved


def _plain_name(name: str) -> str:
    """A file of this folder, and of no other."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file beside it")
    return name


def _names(names: Any) -> list[str]:
    if (
        not isinstance(names, list)
        or any(not isinstance(n, str) for n in names)
        or len(set(names)) < len(names)
    ):
        raise TypeError("clients are a list of different names")
    return names


def _method(
    saved: dict[str, Any], about: Path, model: Model | None, prior: Prior | None, values: int
) -> Algorithm:
    """The method with its model: out of the file as far as they were not given again. ``values`` is how many
    theta has."""
    with reading(about, WHAT):
        own = model_from(saved["model"], values) if model is None else model
        if model is not None:
            require_same(saved["model"], model)
        own = own.knowing(saved["known"])
        own = own.at_precision(own.chosen_precision())
        given = {} if prior is None else {"prior": prior}
        if prior is not None:
            _require_same_prior(saved, prior, own)
        return rebuild(saved["algorithm"], saved["method"], own, **given)


def _require_same_prior(saved: dict[str, Any], prior: Prior, model: Model) -> None:
    """Raise where a prior given again is not the one whose parameters were saved."""
    then, now = saved["algorithm"].get("prior"), json.loads(json.dumps(describe(prior)))
    if then is None:
        raise CheckpointError(f"a population of {saved['method']} has no prior to be given again")
    if isinstance(then, str):
        then = json.loads(json.dumps(describe(resolve(then, model.prior_covariance()))))
    kinds = [str(plain["kind"]).rpartition(":")[2] for plain in (now, then)]  # its module may have moved
    odd = sorted(n for n in then.keys() & now.keys() if n != "kind" and then[n] != now[n])
    if kinds[0] != kinds[1] or odd:
        shown = [
            ", ".join(f"{n}={plain[n]!r}" for n in odd[:3] if kinds[0] == kinds[1]) for plain in (now, then)
        ]
        raise CheckpointError(
            f"the prior is not the saved one: {kinds[0]}({shown[0]}) now, {kinds[1]}({shown[1]}) then"
        )


def require_fits(published: Tensors, algorithm: Algorithm) -> None:
    """Raise where theta is not one of this method and model."""
    phi, layout = published["phi"], algorithm.model.phi_layout
    if phi.shape != (layout.size,):
        raise CheckpointError(
            f"the saved phi has {phi.numel()} entries, the model {layout.size}: it does not fit this model"
        )
    if (hierarchy := hierarchy_of(algorithm)) is not None:
        mean, _ = moments(hierarchy.prior, published["beta"], published)
        size = algorithm.model.z_layout.size
        if mean.shape != (size,):
            raise CheckpointError(f"the saved prior has {mean.numel()} dimensions, z {size}: they do not fit")


def _require_known(federation: Federation, names: list[str], folder: Path) -> None:
    """Raise where a client given again is none of the population's: under another name it is another one."""
    saved = set(names)
    strange = [n for n in federation.names if n not in saved]
    if names and strange:
        raise CheckpointError(
            f"client {strange[0]!r} is not among the {len(names)} clients of {folder} ({names[0]!r}, ...); "
            "give clients under the names they had, and those never seen to population.new_client(x, y)"
        )


def _key(folder: Path, name: str | None, digests: dict[str, str]) -> Key:
    """The sites' own key where it was saved, else everybody's."""
    if name is None:
        return PUBLIC
    private = folder / _plain_name(name)
    read_bytes(private, digests[private.name])
    with reading(private, "a sites' key"):
        plain = read_json(private)
        require(Seed, seed=plain["seed"])
        return Key(plain["seed"], purpose=str(plain["purpose"]))


def _models(path: Path, digest: str, clients: int) -> list[tuple[int, Tensors]]:
    """Whose models these are, and each one's own."""
    with reading(path, "clients' models"):
        tensors = read_tensors(path, digest)
        ids = tensors.pop("clients").tolist()
        if len(set(ids)) < len(ids) or not all(0 <= i < clients for i in ids):
            raise ValueError(f"rows of other clients than the {clients} in population.json")
        rows = {n.removeprefix("model."): t.split(1) for n, t in tensors.items()}
        if any(len(r) != len(ids) for r in rows.values()):
            raise ValueError("tensors of different numbers of clients")
        return [(i, {n: r[k] for n, r in rows.items()}) for k, i in enumerate(ids)]
