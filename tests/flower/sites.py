"""Small federations at separate sites, for the Grid in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.deployment import Deployment, run_deployment
from fedpop.flower.remote import RoundTerms
from fedpop.flower.site_folder import SECRET
from fedpop.flower.transport import Transport
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.run.settings import Settings
from tests.flower.local_grid import LocalGrid

DATA: dict[str, Any] = {}
"""What ``data_of`` gives, by site."""
MODELS: dict[str, Any] = {}


def data_of(site: str) -> Any:
    return DATA[site]


def enrol(root: Path, data: Mapping[str, Any], seed: int = 0, modules: str = "") -> dict[str, Path]:
    """A folder for each site; all of them share a secret, as clients of the simulator do."""
    DATA.update(data)
    folders = {}
    for name in data:
        folder = root / name
        folder.mkdir(parents=True)
        where = 'data = "tests.flower.sites:data_of"\nspectral_rows = 2\nminimum = 1\nsingle_rows = true\n'
        named = f'modules = ["{modules}"]\n' if modules else ""
        (folder / "site.toml").write_text(f'name = "{name}"\n{where}{named}')
        (folder / SECRET).write_text(f"{seed}\n")
        folders[name] = folder
    return folders


def transport_on(grid: LocalGrid, **more: Any) -> Transport:
    return Transport(grid, clock=grid.clock, sleep=grid.sleep, **more)


def deployment(method: Algorithm, rounds: int, seed: int = 0, rule: Any = None, **more: Any) -> Deployment:
    rule = usual_participation(method) if rule is None else rule
    settings = Settings(rounds, seed, rule, checkpoint_every=1)
    copied = copy.deepcopy(method)
    return Deployment("test", lambda example: copied, settings, **{"terms": RoundTerms(sites=1)} | more)


def across(
    method: Algorithm, data: Mapping[str, Any], root: Path, rounds: int = 10, **more: Any
) -> tuple[fp.Population, LocalGrid]:
    """A run over the Grid in this process."""
    grid = LocalGrid(app, enrol(root, data, more.get("seed", 0)))
    more = {"terms": RoundTerms(sites=len(data))} | more
    return run_deployment(deployment(method, rounds, **more), transport_on(grid)), grid


def here(
    method: Algorithm, data: Mapping[str, Any], rounds: int = 10, seed: int = 0, rule: Any = None
) -> Any:
    """The simulator's run of the same, with cohorts of one, summed in site order."""
    sites = {name: [name] for name in data}
    return copy.deepcopy(method).fit(
        data, rounds=rounds, seed=seed, participation=rule, sites=sites, progress=False, precision="float32"
    )


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].nan_to_num(), other[name].nan_to_num()), name
