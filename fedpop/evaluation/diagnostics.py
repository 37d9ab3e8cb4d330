"""Have the chains mixed, and has theta converged? Both answered at the returned theta.

Whether theta has converged is a ``Verdict``: in nats where the model is small (``convergence``), by the
training loss elsewhere. The ratio of the gradient to its Monte-Carlo error is shown beside it but decides
nothing: it depends on how many draws there are, passes a flat direction in which nats are missing and fails
a steep one where none are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedpop.client.phi_step import PhiGradient
from fedpop.evaluation.louis import NOISE_PARTS
from fedpop.evaluation.verdict import Verdict
from fedpop.federation.cohort import Cohort
from fedpop.kernels import Hierarchy, prior_chains
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.questions import Question, Units

WORST_RHAT, LEAST_ESS = 1.05, 100.0
"""Of chains that have mixed."""
RHAT_CUTS = (1.01, 1.02, WORST_RHAT, 1.1)
ESS_CUTS = (LEAST_ESS, 200.0, 400.0, 1000.0)
"""Where counts of units are cut: what the server hears is how many there are between them."""


@dataclass(frozen=True)
class ChainDiagnostics:
    """How many units' chains have mixed. R-hat and effective draws are the worst over a unit's coordinates
    of z; they are known at its site, and counted."""

    units: int
    rhat_below: dict[float, int]
    """Units with an R-hat of at most so much."""
    ess_above: dict[float, int]
    """Units with at least so many effective draws."""
    unmixed: int
    """Units with an R-hat above 1.05, or with fewer than 100 effective draws."""

    def __str__(self) -> str:
        rhat = next((f"at most {v:g}" for v, n in self.rhat_below.items() if n == self.units), "above 1.1")
        most = [v for v, n in self.ess_above.items() if n == self.units]
        ess = f"at least {most[-1]:.0f}" if most else "fewer than 100"
        if self.unmixed:
            mixed = f"{self.units - self.unmixed} of {self.units} client(s) mixed"
            return f"{mixed} (R-hat {rhat}, effective draws {ess})"
        return f"R-hat {rhat}, effective draws {ess}, over {self.units} client(s)"


@dataclass(frozen=True)
class ThetaDiagnostics:
    """Where theta stands: the gradient of the objective in units of its own Monte-Carlo error, the
    relative change over the tail of the run, parameters on the edge of a projection set, and the verdict."""

    phi_gradient: float | None
    beta_gradient: float | None
    drift: float | None
    at_bound: list[str]
    verdict: Verdict | None = None
    """Whether theta has converged; None where nothing tells."""

    @property
    def warnings(self) -> list[str]:
        doubts = self.verdict is not None and not self.verdict.converged
        return list(self.at_bound) + ([self.verdict.words] if doubts and self.verdict is not None else [])


@dataclass(frozen=True)
class Diagnostics:
    """Chains of the clients asked, and theta."""

    chains: ChainDiagnostics
    theta: ThetaDiagnostics

    @property
    def warnings(self) -> list[str]:
        out = self.theta.warnings
        if self.chains.unmixed:
            out.append(
                f"chains of {self.chains.unmixed} client(s) have not mixed; Population.mixing tells whose"
            )
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
        sure = t.verdict is not None and t.verdict.converged
        said = [f"theta    {t.verdict.words}"] if sure and t.verdict is not None else []
        lines = [
            f"chains   {c}",
            *said,
            f"{'' if said else 'theta':<8} {'; '.join(theta) or 'not computed'}",
        ]
        return "\n".join(lines + [f"warning  {w}" for w in self.warnings])


@dataclass(frozen=True)
class ChainsAndGradient(Question[Diagnostics]):
    """Counts of units whose chains have mixed, and theta's gradient from half-chains: sums, both of them.

    ``whole``: everyone is asked, so that the gradient is that of the objective.
    """

    hierarchy: Hierarchy
    drift: float | None
    at_bound: tuple[str, ...]
    whole: bool
    name: ClassVar[str] = "diagnostics"

    def ask(self, known: Tensors) -> Tensors:
        return {n: known[n] for n in ("phi", "beta")}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort, draws = units.cohort, units.personal()["draws"]
        pairs = [rhat_and_ess(own) for own in draws]
        counts = [float(sum(r <= v for r, _ in pairs)) for v in RHAT_CUTS]
        counts += [float(sum(e >= v for _, e in pairs)) for v in ESS_CUTS]
        counts.append(float(sum(not mixed(*pair) for pair in pairs)))
        everyone = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
        sums = {"counts": torch.tensor(counts, dtype=torch.float64, device=cohort.device)}
        if self.whole:
            sums |= self._gradients(asked, cohort, draws, everyone)
        return Answer(everyone, sums=sums)

    def _gradients(self, asked: Tensors, cohort: Cohort, draws: Tensor, everyone: Tensor) -> Tensors:
        model, prior, beta = self.hierarchy.model, self.hierarchy.prior, asked["beta"]
        phi = asked["phi"].detach().requires_grad_(asked["phi"].numel() > 0)
        half = draws.shape[2] // 2 or 1
        # Half-chains as batches; the middle draw of an odd number is in neither.
        parts = torch.cat((draws[:, :, :half], draws[:, :, -half:]), dim=1)
        batches = min(NOISE_PARTS, parts.shape[1])
        ones = everyone.to(beta.dtype)
        i, j = [], []
        for part in parts[:, :batches].unbind(1):
            features = model.features(phi, cohort)
            j.append(PhiGradient(model, None, part).fused(phi, features, cohort, None, everyone, ones)[2])
            i.append(prior.gradient(beta, prior.score(beta, part, part, "left").sum(0)))
        return {"I": torch.stack(i).flatten(), "J": torch.stack(j).flatten()}

    def finish(self, known: Tensors, total: Total) -> Diagnostics:
        counts = [int(c) for c in total.weighted["counts"].tolist()]
        rhat = dict(zip(RHAT_CUTS, counts[: len(RHAT_CUTS)], strict=True))
        ess = dict(zip(ESS_CUTS, counts[len(RHAT_CUTS) : -1], strict=True))
        chains = ChainDiagnostics(total.count, rhat, ess, counts[-1])
        if not self.whole:
            return Diagnostics(chains, ThetaDiagnostics(None, None, self.drift, list(self.at_bound)))
        phi, beta, prior = known["phi"], known["beta"], self.hierarchy.prior
        i = total.weighted["I"].reshape(-1, beta.shape[0])
        j = total.weighted["J"].reshape(len(i), -1)
        hyper = self.hierarchy.hyperprior
        key = Key(0, purpose="diagnostics")
        lacking = prior_chains.normaliser_batches(prior, beta, known, key, len(i)) * total.count
        i = i + prior.mask(lacking) + prior.mask(hyper.beta_grad(prior, beta))
        j = j + hyper.phi_grad(phi)
        theta = ThetaDiagnostics(
            phi_gradient=gradient_ratio(j) if phi.numel() else None,
            beta_gradient=gradient_ratio(i),
            drift=self.drift,
            at_bound=list(self.at_bound),
        )
        return Diagnostics(chains, theta)


def mixed(rhat: float, ess: float) -> bool:
    """Whether a unit's chains have mixed, by its worst coordinate."""
    return rhat <= WORST_RHAT and ess >= LEAST_ESS


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
