"""Have the chains mixed, and has theta converged? Both answered at the returned theta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

WORST_RHAT = 1.05
LEAST_ESS = 100.0
WORST_GRADIENT = 5.0
WORST_DRIFT = 0.05


@dataclass(frozen=True)
class ChainDiagnostics:
    """R-hat and effective sample size of each client, the worst over the coordinates of z."""

    clients: list[str]
    rhat: Tensor
    ess: Tensor

    @property
    def unmixed(self) -> list[str]:
        """Clients whose chains have not mixed."""
        bad = (self.rhat > WORST_RHAT) | (self.ess < LEAST_ESS)
        return [c for c, b in zip(self.clients, bad.tolist(), strict=True) if b]


@dataclass(frozen=True)
class ThetaDiagnostics:
    """Where theta stands: the gradient of the objective in units of its own Monte-Carlo error, the
    relative change over the tail of the run, and parameters on the edge of a projection set."""

    phi_gradient: float | None
    beta_gradient: float | None
    drift: float | None
    at_bound: list[str]

    @property
    def warnings(self) -> list[str]:
        out = list(self.at_bound)
        for name, value in (("phi", self.phi_gradient), ("beta", self.beta_gradient)):
            if value is not None and value > WORST_GRADIENT:
                out.append(
                    f"the gradient in {name} is {value:.1f} times its Monte-Carlo error: theta has not "
                    "converged; run more rounds"
                )
        if self.drift is not None and self.drift > WORST_DRIFT:
            out.append(f"theta still moved by {100 * self.drift:.1f} % over the tail of the run")
        return out


@dataclass(frozen=True)
class Diagnostics:
    """Chains of the clients looked at, and theta."""

    chains: ChainDiagnostics
    theta: ThetaDiagnostics

    @property
    def warnings(self) -> list[str]:
        out = self.theta.warnings
        unmixed = self.chains.unmixed
        if unmixed:
            shown = ", ".join(unmixed[:5]) + (", ..." if len(unmixed) > 5 else "")
            out.append(f"chains of {len(unmixed)} client(s) have not mixed: {shown}")
        return out

    def __str__(self) -> str:
        c, t = self.chains, self.theta
        gradients = [
            f"{name} {value:.1f}"
            for name, value in (("phi", t.phi_gradient), ("beta", t.beta_gradient))
            if value is not None
        ]
        theta = [f"gradient over its Monte-Carlo error: {', '.join(gradients)}"] if gradients else []
        theta += [] if t.drift is None else [f"drift over the tail {100 * t.drift:.2f} %"]
        lines = [
            f"chains   R-hat at most {float(c.rhat.max()):.3f}, effective draws at least "
            f"{float(c.ess.min()):.0f}, over {len(c.clients)} client(s)",
            f"theta    {'; '.join(theta) or 'not looked at'}",
        ]
        return "\n".join(lines + [f"warning  {w}" for w in self.warnings])


def rhat_and_ess(draws: Tensor) -> tuple[float, float]:
    """The worst rank-normalised R-hat and bulk ESS over coordinates; draws ``[chains, n, d]``."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    ary = draws.detach().cpu().numpy().astype(np.float64)
    rhat = np.asarray(array_stats.rhat(ary, chain_axis=0, draw_axis=1))
    ess = np.asarray(array_stats.ess(ary, chain_axis=0, draw_axis=1))
    # A chain that never moved has no R-hat: that is the worst there is.
    return float(np.nan_to_num(rhat, nan=np.inf).max()), float(np.nan_to_num(ess, nan=0.0).min())


def gradient_ratio(batches: Tensor) -> float:
    """norm(mean) over its Monte-Carlo error, from independent estimates ``[B, p]`` of one gradient.

    About one when the true gradient is zero.
    """
    if batches.shape[1] == 0:
        return 0.0
    mean = batches.double().mean(0)
    error = batches.double().var(0).sum() / batches.shape[0]
    return float(mean.norm() / error.sqrt().clamp(min=1e-300))
