"""fedpop: personalised federated learning that knows what it does not know."""

__version__ = "0.1.0"

from fedpop.algorithms import EM, FedAvg, FedRep, FedSOUK, FedSOUL, Hyperprior, LocalSGD
from fedpop.federation.clients import Client, Federation, Table
from fedpop.federation.participation import Bernoulli, Everyone, Uniform
from fedpop.kernels import HMC, ULA, Exponential, JumpHMC, MixtureDraw
from fedpop.models import likelihoods
from fedpop.models.composition import Composition
from fedpop.models.modules import replace_batchnorm
from fedpop.models.split import Split
from fedpop.population import Population, load
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import Normal as NormalPrior
from fedpop.runtime.callbacks import Callback, EarlyStop
from fedpop.runtime.simulate import simulate
from fedpop.server.averaging import Averaging
from fedpop.server.optimisers import SGD, Adam
from fedpop.server.schedules import Constant, Cosine, Decay, Polynomial
from fedpop.server.start import SpectralStart

__all__ = [
    "EM",
    "HMC",
    "SGD",
    "ULA",
    "Adam",
    "Averaging",
    "Bernoulli",
    "Callback",
    "Client",
    "Composition",
    "Constant",
    "Cosine",
    "Decay",
    "EarlyStop",
    "Energy",
    "Everyone",
    "Exponential",
    "FedAvg",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "Federation",
    "Hyperprior",
    "JumpHMC",
    "LocalSGD",
    "Mixture",
    "MixtureDraw",
    "NormalPrior",
    "Polynomial",
    "Population",
    "SpectralStart",
    "Split",
    "Table",
    "Uniform",
    "likelihoods",
    "load",
    "replace_batchnorm",
    "simulate",
]
