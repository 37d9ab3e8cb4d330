"""Markov kernels on z, one file each, and the loop that runs them."""

from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, State, Trace, Transition, Tuning, mirrored, run
from fedpop.kernels.exponential import Exponential
from fedpop.kernels.hmc import HMC
from fedpop.kernels.mala import MALA
from fedpop.kernels.mass import Mass
from fedpop.kernels.sgld import SGLD
from fedpop.kernels.target import Target
from fedpop.kernels.ula import ULA
from fedpop.models.base import Model

__all__ = [
    "HMC",
    "MALA",
    "SGLD",
    "ULA",
    "Exponential",
    "Kernel",
    "Mass",
    "State",
    "Target",
    "Trace",
    "Transition",
    "Tuning",
    "mirrored",
    "resolve_kernel",
    "run",
]

_BY_NAME: dict[str, type[Kernel]] = {k.__name__.lower(): k for k in (ULA, Exponential, HMC, MALA, SGLD)}


def resolve_kernel(kernel: Kernel | str | None, model: Model) -> Kernel:
    """A kernel from itself, from its name, or the one that suits the model's head.

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
