"""Federations in which something goes wrong, and the simulator's run of the same faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import (
    request_from_record,
)
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.run.run import Run, Settings
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, transport_on
from tests.methods.conformance import four, made

TERMS = RoundTerms(sites=4, timeout=30.0)


def train(name: str, message: Message) -> int | None:
    """The round that a request to this site asks for; None of any other request."""
    request = request_from_record(message.content)
    return int(request.header["round"]) if request.kind == "train" else None


def run(
    tmp_path: Path, prepare: Any, rounds: int = 4, terms: RoundTerms = TERMS, **more: Any
) -> tuple[fp.Population, LocalGrid]:
    grid = LocalGrid(app, enrol(tmp_path, four("softmax")))
    prepare(grid)
    method = more.pop("method", None) or made("FedSOUL", "softmax")
    return run_deployment(deployment(method, rounds, terms=terms, **more), transport_on(grid)), grid


def with_lost(lost: Any, rounds: int = 4, name: str = "FedSOUL") -> fp.Population:
    """The simulator's run in which the same messages are lost, summed in the same order."""
    method, data = made(name, "softmax"), four("softmax")
    federation = fp.Federation.of(data)
    method = method.prepared(federation.example)
    settings = Settings(rounds, 0, fp.participation.Everyone(), sites={n: [n] for n in data})
    simulation = Run(method, method.model.checked(federation), settings)
    names = {int(u): n for u, n in zip(federation.units, federation.names, strict=True)}
    simulation.sites.lost = lambda k, units: torch.tensor([lost(k, names[int(u)]) for u in units])
    return simulation.execute(resume=False, progress=False)


# --- the same round twice --------------------------------------------------------------------------


def requests_to(grid: LocalGrid, site: str) -> list[Request]:
    return [request_from_record(m.content) for s, m, _ in grid.traffic if s == site]
