"""Markov kernels on z, one file each, and the loop that runs them."""

from collections.abc import Sequence

from fedpop.decisions import Decision
from fedpop.kernels.base import Kernel, Pass, State, Transition, Tuning, run
from fedpop.kernels.exponential import Exponential
from fedpop.kernels.hmc import HMC, JumpHMC
from fedpop.kernels.mala import MALA
from fedpop.kernels.mass import Mass
from fedpop.kernels.mass import decision as mass_decision
from fedpop.kernels.mixture_draw import MixtureDraw
from fedpop.kernels.sgld import SGLD
from fedpop.kernels.target import Hierarchy, Target
from fedpop.kernels.ula import ULA
from fedpop.models.base import Model
from fedpop.priors.base import Prior
from fedpop.settings import named

__all__ = [
    "HMC",
    "MALA",
    "SGLD",
    "ULA",
    "Exponential",
    "Hierarchy",
    "JumpHMC",
    "Kernel",
    "Mass",
    "MixtureDraw",
    "Pass",
    "State",
    "Target",
    "Transition",
    "Tuning",
    "resolve_kernel",
    "run",
]


def resolve_kernel(kernel: Kernel | str | None, model: Model, prior: Prior) -> Kernel:
    """A kernel from itself, from its name, or the one that suits the model's head and the prior.

    A linear head with a quadratic log-likelihood and a Normal prior has a Gaussian posterior, which the
    exponential step draws from exactly; under a mixture of Normals it is a mixture of Gaussians, drawn
    from exactly too. Everything else gets HMC, with jumps where the prior may have several modes, and with
    two leapfrog steps where each of them is a pass through a network.

    Args:
        kernel: A kernel, its name such as "ula", or None (or "auto") for the one that suits.
        model: Whose head and likelihood it is to suit.
        prior: The population prior that it is to suit.

    >>> import fedpop as fp
    >>> from torch import nn
    >>> model = fp.Composition(None, nn.Linear(3, 1), "bernoulli")
    >>> resolve_kernel(None, model, fp.priors.Normal()), resolve_kernel("ula", model, fp.priors.Normal())
    (HMC(leapfrog=5), ULA(step_size=0.8, decay=0.0))
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel is not None and kernel != "auto":
        return named(Kernel, kernel, "kernel")()
    single = prior.component is prior
    if model.linear and model.likelihood.quadratic and prior.component is not None:
        return Exponential() if single else MixtureDraw()
    if not single:
        return JumpHMC()
    return HMC(leapfrog=2) if model.deep else HMC()


def kernel_decisions(kernel: Kernel | str | None, model: Model, prior: Prior) -> Sequence[Decision]:
    """Which kernel it is, where ``kernel`` left that open, and which mass matrix, where one adapts.

    >>> import fedpop as fp
    >>> from torch import nn
    >>> model = fp.Composition(None, nn.Linear(3, 1), "bernoulli")
    >>> for decision in kernel_decisions(None, model, fp.priors.Normal()):
    ...     print(decision)
    kernel: HMC(leapfrog=5) (posteriors are not closed-form)
    mass matrix: curvature (the head is linear, so that its curvature is known)
    """
    chosen, single, out = resolve_kernel(kernel, model, prior), prior.component is prior, list[Decision]()
    if kernel is None or kernel == "auto":
        why = "posteriors are not closed-form" + ("" if single else ", and the prior may have several modes")
        if model.linear and model.likelihood.quadratic and prior.component is not None:
            why = f"posteriors are {'Gaussian' if single else 'mixtures of Gaussians'}: it draws exactly"
        out.append(Decision("kernel", str(chosen), why))
    return [*out, mass_decision(model.linear, model.z_layout.size)] if chosen.adapts_mass else out
