"""fedpop: personalised federated learning that knows what it does not know."""

from fedpop.algorithms import (
    APFL,
    DGLMC,
    EM,
    FSGLD,
    L2GD,
    QLSD,
    SCAFFOLD,
    Distillation,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedBE,
    FedPer,
    FedProx,
    FedRep,
    FedSOUK,
    FedSOUL,
    Final,
    Hyperprior,
    LGFedAvg,
    LocalOnly,
    LocalSGD,
    PerFedAvg,
    PFedMe,
    Steps,
)
from fedpop.channel import QSGD, Compressor, Identity, Natural, RandK
from fedpop.evaluation.protocol import Evaluation, Watch, evaluate
from fedpop.experiments.comparison import Comparison, compare
from fedpop.federation.clients import Client, Federation, Table
from fedpop.federation.held_out import hold_out
from fedpop.federation.participation.availability import Availability
from fedpop.federation.participation.rules import Bernoulli, Everyone, Uniform
from fedpop.kernels import HMC, MALA, SGLD, ULA, Exponential, JumpHMC, MixtureDraw
from fedpop.models import likelihoods, links
from fedpop.models.augment import CropFlip
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.modules import replace_batchnorm
from fedpop.models.split import Split
from fedpop.population import Population, load
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import Normal as NormalPrior
from fedpop.runtime.callbacks import Callback, EarlyStop
from fedpop.runtime.simulate import simulate
from fedpop.server.averaging import Averaging
from fedpop.server.optimisers import SGD, Adam, Average
from fedpop.server.schedules import Constant, Cosine, Decay, Polynomial
from fedpop.server.start import SpectralStart
from fedpop.version import __version__ as __version__

__all__ = [
    "APFL",
    "DGLMC",
    "EM",
    "FSGLD",
    "HMC",
    "L2GD",
    "MALA",
    "QLSD",
    "QSGD",
    "SCAFFOLD",
    "SGD",
    "SGLD",
    "ULA",
    "Adam",
    "Availability",
    "Average",
    "Averaging",
    "Bernoulli",
    "Callback",
    "Client",
    "Comparison",
    "Composition",
    "Compressor",
    "Constant",
    "Cosine",
    "CropFlip",
    "CustomModel",
    "Decay",
    "Distillation",
    "Ditto",
    "EarlyStop",
    "Energy",
    "Evaluation",
    "Everyone",
    "Exponential",
    "FedAvg",
    "FedAvgFT",
    "FedBE",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSOUK",
    "FedSOUL",
    "Federation",
    "Final",
    "Hyperprior",
    "Identity",
    "JumpHMC",
    "LGFedAvg",
    "LocalOnly",
    "LocalSGD",
    "Mixture",
    "MixtureDraw",
    "Natural",
    "NormalPrior",
    "PFedMe",
    "PerFedAvg",
    "Polynomial",
    "Population",
    "RandK",
    "SpectralStart",
    "Split",
    "Steps",
    "Table",
    "Uniform",
    "Watch",
    "compare",
    "evaluate",
    "hold_out",
    "likelihoods",
    "links",
    "load",
    "replace_batchnorm",
    "simulate",
]
