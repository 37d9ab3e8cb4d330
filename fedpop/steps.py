"""How theta moves and where it starts: optimisers, schedules, EM, averages, and the settings they go into."""

from fedpop.client.phi_step import PhiStep
from fedpop.questions.spectral import Spectral
from fedpop.server.anneal import Anneal
from fedpop.server.averaging import Averaging
from fedpop.server.beta_step import EM, BetaStep, EMAdam
from fedpop.server.optimisers import (
    SGD,
    Adam,
    AdamW,
    Constant,
    Cosine,
    Decay,
    MeanMove,
    NetworkAdam,
    Optimiser,
    Polynomial,
    Schedule,
)

__all__ = [
    "EM",
    "SGD",
    "Adam",
    "AdamW",
    "Anneal",
    "Averaging",
    "BetaStep",
    "Constant",
    "Cosine",
    "Decay",
    "EMAdam",
    "MeanMove",
    "NetworkAdam",
    "Optimiser",
    "PhiStep",
    "Polynomial",
    "Schedule",
    "Spectral",
]
