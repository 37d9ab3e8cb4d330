"""A small population that several tests ask."""

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.population import Population
from tests.helpers import linear_model, population_data

NOISE = 0.3
Clients = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="session")
def clients() -> Clients:
    data, _, _ = population_data(8, 6, 3, 2, NOISE)
    named = {f"site-{i}": c for i, c in enumerate(data)}
    named["empty"] = (torch.zeros(0, 3), torch.zeros(0))
    return named


@pytest.fixture(scope="session")
def fitted(clients: Clients) -> fp.Population:
    return fp.FedSOUL(linear_model(3, 2, NOISE), engine="sampled").fit(clients, rounds=120)


@pytest.fixture
def population(fitted: fp.Population) -> fp.Population:
    """The same theta with nothing computed yet."""
    return Population(
        fitted.algorithm,
        fitted.published,
        fitted.key,
        fitted.federation,
        fitted.store,
        fitted.history,
        fitted.totals,
        fitted.rounds,
        fitted.drift,
    )
