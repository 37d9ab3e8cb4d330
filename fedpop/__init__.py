"""fedpop: personalised federated learning that knows what it does not know."""

__version__ = "0.1.0"

from fedpop.algorithms import EM, FedAvg, FedRep, FedSOUK, FedSOUL, Hyperprior, LocalSGD
from fedpop.federation.clients import Client, Federation, Table
from fedpop.federation.participation import Bernoulli, Everyone, Uniform
from fedpop.kernels import HMC, ULA, Exponential
from fedpop.models import likelihoods, links
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.modules import replace_batchnorm
from fedpop.models.split import Split
from fedpop.population import Population, load
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
    "CustomModel",
    "Decay",
    "EarlyStop",
    "Everyone",
    "Exponential",
    "FedAvg",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "Federation",
    "Hyperprior",
    "LocalSGD",
    "NormalPrior",
    "Polynomial",
    "Population",
    "SpectralStart",
    "Split",
    "Table",
    "Uniform",
    "likelihoods",
    "links",
    "load",
    "replace_batchnorm",
    "simulate",
]
