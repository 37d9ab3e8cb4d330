"""Small federations whose sums are secure, on the Grid in this process; the simulator's run of the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedpop as fp
from fedpop.flower.certificates import make_site_key
from fedpop.flower.client import app
from fedpop.flower.deployment import Deployment, run_deployment
from fedpop.flower.remote import RoundTerms
from fedpop.flower.secure_site import confirm, identity_of
from fedpop.flower.secure_sums import SecureTerms
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods import METHODS
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.privacy.secure import public_key
from fedpop.run.run import Run, Settings
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, same_bits, transport_on
from tests.helpers import seeded
from tests.methods.conformance import SHORT

SITES = 5
NEEDED = RoundTerms(sites=SITES, timeout=30.0)


def sites(count: int = SITES, rows: int = 12, classes: bool = True) -> dict[str, fp.Client]:
    """Sites of one unit each."""
    out, g = {}, torch.Generator().manual_seed(4)
    for i in range(count):
        x = torch.randn(rows, 3, generator=g)
        y = x.sum(1) + i + 0.1 * torch.randn(rows, generator=g)
        out[f"s{i}"] = fp.Client(x, y.round().long() % 3 if classes else y)
    return out


def keyed(folders: Mapping[str, Path]) -> dict[str, bytes]:
    """Make each site's key; the list of them, which is confirmed at every site."""
    for folder in folders.values():
        make_site_key(folder)
    admitted = {name: public_key(identity_of(folder)) for name, folder in sorted(folders.items())}
    for folder in folders.values():
        confirm(folder, admitted)
    return admitted


def secured(
    root: Path, data: Mapping[str, Any] | None = None
) -> tuple[LocalGrid, SecureTerms, dict[str, Path]]:
    """Sites at a Grid, and the terms between them."""
    folders = enrol(root, sites() if data is None else data)
    return LocalGrid(app, folders), SecureTerms(keyed(folders)), folders


def method_of(name: str, classes: bool = True) -> Algorithm:
    """A method on a small model in single precision."""
    body, head = seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 3 if classes else 1), 2)
    short = SHORT if name in ("FedSOUL", "FedSOUK") and classes else {}  # else the engine is exact
    likelihood = "categorical" if classes else fp.likelihoods.Normal(0.5)
    return METHODS[name](fp.Composition(body, head, likelihood), **short)


def planned(
    name: str, rounds: int, terms: SecureTerms, waits: RoundTerms = NEEDED, classes: bool = True, **more: Any
) -> Deployment:
    return deployment(method_of(name, classes), rounds, terms=waits, secure=terms, **more)


def run_over(
    root: Path,
    name: str,
    rounds: int = 3,
    prepare: Callable[[LocalGrid], None] = lambda grid: None,
    **more: Any,
) -> tuple[fp.Population, LocalGrid]:
    grid, terms, _ = secured(root / "sites", sites(classes=more.get("classes", True)))
    prepare(grid)
    return run_deployment(planned(name, rounds, terms, **more), transport_on(grid)), grid


def simulated(name: str, rounds: int = 3, lost: Any = None, classes: bool = True) -> fp.Population:
    """The simulator's quantised sums, in which the same messages are lost."""
    data = sites(classes=classes)
    method, federation = copy.deepcopy(method_of(name, classes)), fp.Federation.of(data)
    method = method.replace(model=method.model.asking_for("float32")).prepared(federation.example)
    each = {n: [n] for n in data}
    rule = usual_participation(method)
    run = Run(
        method, method.model.checked(federation), Settings(rounds, 0, rule, sites=each, secure=FixedPoint())
    )
    names = {int(u): n for u, n in zip(federation.units, federation.names, strict=True)}
    if lost is not None:
        run.sites.lost = lambda k, units: torch.tensor([lost(k, names[int(u)]) for u in units])
    return run.execute(resume=False, progress=False)


def same_theta(one: fp.Population, other: fp.Population) -> None:
    same_bits(one.published, other.published)
