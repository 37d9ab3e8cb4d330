"""Small federations whose sums are secure, for the Grid in this process, and the simulator's run of the same."""

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

SITES = 5
NEEDED = RoundTerms(sites=SITES, timeout=30.0)


def sites(count: int = SITES, rows: int = 12) -> dict[str, fp.Client]:
    """Sites of one unit each, with normal responses."""
    out, g = {}, torch.Generator().manual_seed(4)
    for i in range(count):
        x = torch.randn(rows, 3, generator=g)
        out[f"s{i}"] = fp.Client(x, x.sum(1) + i + 0.1 * torch.randn(rows, generator=g))
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


def method_of(name: str) -> Algorithm:
    body, head = seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2)
    return METHODS[name](fp.Composition(body, head, fp.likelihoods.Normal(0.5)))


def planned(
    name: str, rounds: int, terms: SecureTerms, waits: RoundTerms = NEEDED, **more: Any
) -> Deployment:
    return deployment(method_of(name), rounds, terms=waits, secure=terms, **more)


def run_over(
    root: Path,
    name: str,
    rounds: int = 3,
    prepare: Callable[[LocalGrid], None] = lambda grid: None,
    **more: Any,
) -> tuple[fp.Population, LocalGrid]:
    grid, terms, _ = secured(root / "sites")
    prepare(grid)
    return run_deployment(planned(name, rounds, terms, **more), transport_on(grid)), grid


def simulated(name: str, rounds: int = 3, lost: Any = None, data: Any = None) -> fp.Population:
    """The simulator's quantised sums, in which the same messages are lost."""
    data = sites() if data is None else data
    method, federation = copy.deepcopy(method_of(name)), fp.Federation.of(data)
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
