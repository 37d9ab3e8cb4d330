"""Markov kernels on z, one file each, and the loop that runs them."""

from fedpop.errors import SettingsError
from fedpop.kernels.base import Kernel, Pass, State, Transition, Tuning, mirrored, run
from fedpop.kernels.exponential import Exponential
from fedpop.kernels.hmc import HMC
from fedpop.kernels.jumps import JumpHMC
from fedpop.kernels.mala import MALA
from fedpop.kernels.mass import Mass
from fedpop.kernels.mixture_draw import MixtureDraw
from fedpop.kernels.sgld import SGLD
from fedpop.kernels.target import Target
from fedpop.kernels.ula import ULA
from fedpop.models.base import Model
from fedpop.priors.base import Prior

__all__ = [
    "HMC",
    "MALA",
    "SGLD",
    "ULA",
    "Exponential",
    "JumpHMC",
    "Kernel",
    "Mass",
    "MixtureDraw",
    "Pass",
    "State",
    "Target",
    "Transition",
    "Tuning",
    "mirrored",
    "resolve_kernel",
    "run",
]

_BY_NAME: dict[str, type[Kernel]] = {
    k.__name__.lower(): k for k in (ULA, Exponential, HMC, MALA, SGLD, JumpHMC, MixtureDraw)
}


def resolve_kernel(kernel: Kernel | str | None, model: Model, prior: Prior | None = None) -> Kernel:
    """A kernel from itself, from its name, or the one that suits the model's head and the prior.

    A linear head with a Normal likelihood and a Normal prior has a Gaussian posterior, which the
    exponential step draws from exactly; under a mixture of Normals it is a mixture of Gaussians, drawn
    from exactly too. Everything else gets HMC, with jumps where the prior may have several modes.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel is None or kernel == "auto":
        conjugate = model.known_linear and model.likelihood.name == "normal"
        single = prior is None or prior.component is prior
        if conjugate and prior is not None and prior.component is not None and not single:
            return MixtureDraw()
        if not single:
            return JumpHMC()
        return Exponential() if conjugate else HMC()
    if kernel.lower() not in _BY_NAME:
        raise SettingsError(f"unknown kernel {kernel!r}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[kernel.lower()]()
