"""Markov kernels on z, one file each, and the loop that runs them."""

from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, State, Trace, Transition, Tuning, run
from fedpop.kernels.exponential import Exponential
from fedpop.kernels.hmc import HMC
from fedpop.kernels.target import Target
from fedpop.kernels.ula import ULA
from fedpop.models.base import Model
from fedpop.priors.base import Prior

__all__ = [
    "HMC",
    "ULA",
    "Exponential",
    "Kernel",
    "State",
    "Target",
    "Trace",
    "Transition",
    "Tuning",
    "resolve_kernel",
    "run",
]

_BY_NAME: dict[str, type[Kernel]] = {"ula": ULA, "exponential": Exponential, "hmc": HMC}


def resolve_kernel(kernel: Kernel | str | None, model: Model, prior: Prior | None = None) -> Kernel:
    """A kernel from itself, from its name, or the one that suits the model's head and the prior.

    A linear head with a Normal likelihood has a Gaussian posterior, which the exponential step draws
    from exactly; everything else gets HMC.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel is None or kernel == "auto":
        conjugate = model.known_linear and model.likelihood.name == "normal"
        return Exponential() if conjugate else HMC()
    if kernel.lower() not in _BY_NAME:
        raise SettingsError(f"unknown kernel {kernel!r}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[kernel.lower()]()
