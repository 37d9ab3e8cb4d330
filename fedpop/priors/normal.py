"""The population prior N(mu, Sigma): isotropic (the paper's), diagonal or full covariance.

beta is one flat vector: mu, then the scale in coordinates that are free of constraints. Those are
log sigma (one number, or one per coordinate), or, for a full covariance Sigma = L L', the lower
triangle of L with logarithms on its diagonal.

What a client sends is its score I = (I_mu, I_scale), with u = L^-1 (z - mu):

    I_mu    = E[Sigma^-1 (z - mu)]       = E[g],            g = grad_z log p(D | z)
    I_scale = E[norm(u)^2 - d]           = E[u . L'g]       (isotropic: the gradient in log sigma)
              E[u^2 - 1]                 = E[u * L'g]       (diagonal)
              E[u u' - 1]                = E[u (L'g)']      (full, symmetrised)

The left column is Fisher's identity as in the paper (its equation for I_k); the right one follows by
integration by parts under the posterior and has no noise at all for a client without data. Any fixed mix
A left + (1 - A) right is unbiased too; ``mixed`` takes A = Lambda Q^-1, with Lambda the likelihood's
curvature and Q that of the posterior. That is the left form with z + Q^-1 slope in place of one z: each draw
makes a Newton step towards the mode. It is free of noise when the posterior is Gaussian, and where a chain
lags behind theta it errs by less than the draws do (Q bounds the curvature), while the right form, whose g
grows with the distance, may err by any amount.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedpop.checked import OneOf, Positive
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.priors.base import Guess, OfNormals, Part, Sets, check_scale, in_words, into_ball, positive

COVARIANCES = ("isotropic", "diagonal", "full")
FARTHEST_FACTOR = 1e12
"""Entries of a factor beyond so many times the upper bound are projected as if they were there."""
REMEDY = "set by the prior's bounds, or by the scale it was given to start at"


@dataclass(frozen=True)
class Normal(OfNormals):
    """A Normal population prior; mean and scale are each learned or fixed.

    Args:
        covariance: "isotropic" (the paper's, the default), "diagonal" or "full".
        mean: Where entries of mu start, or stay, from the model's own centre; from 0 (the default) a
            mean that is learned starts where normal targets put it.
        scale: The first standard deviation. None has data choose: outputs of variance one, or the spread
            of normal targets; it is 1 after a spectral start, and for a ``CustomModel``.
        learn_mean: False keeps the mean where it starts.
        learn_scale: False keeps the scale where it starts.
        bounds: Standard deviations (eigenvalues of Sigma^1/2, if full) stay between these; None has them stay
            within a factor of 1,000 of where they start, a million of a ``scale`` that was given.
        ball: The largest norm of mu, onto which a longer one is projected; None is a million standard
            deviations.

    >>> Normal(covariance="diagonal", scale=0.5).size(3)
    6
    """

    covariance: Annotated[str, OneOf(*COVARIANCES)] = "isotropic"
    mean: float = 0.0
    scale: Positive | None = None
    learn_mean: bool = True
    learn_scale: bool = True
    bounds: tuple[Positive, Positive] | None = None
    ball: Positive | None = None

    name: ClassVar[str] = "Normal"
    forms: ClassVar[tuple[str, ...]] = ("left", "right", "mixed")
    em: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self.scale, self.bounds)

    @property
    def learns_scale(self) -> bool:
        return self.learn_scale

    @property
    def component(self) -> Normal:
        return self

    # --- the flat vector ---------------------------------------------------------------------

    def scale_size(self, d: int) -> int:
        return {"isotropic": 1, "diagonal": d, "full": d * (d + 1) // 2}[self.covariance]

    def size(self, d: int) -> int:
        return d + self.scale_size(d)

    def dimension(self, beta: Tensor) -> int:
        """d from the length of beta."""
        n = beta.shape[-1]
        if self.covariance == "isotropic":
            return n - 1
        if self.covariance == "diagonal":
            return n // 2
        return int((math.sqrt(9 + 8 * n) - 3) / 2 + 0.5)

    def init(self, mu: Tensor, scale: float, key: Key | None = None) -> Tensor:
        """beta with this mean and the same standard deviation everywhere; nothing in it is random."""
        d = mu.shape[0]
        if self.covariance != "full":
            return torch.cat((mu, mu.new_full((self.scale_size(d),), math.log(scale))))
        return self.pack(mu, torch.eye(d, dtype=mu.dtype, device=mu.device) * scale)

    def pack(self, mu: Tensor, factor: Tensor) -> Tensor:
        """beta from a mean and a lower-triangular factor of Sigma (full covariance)."""
        d = mu.shape[0]
        free = factor.tril(-1) + torch.diag(factor.diagonal().log())
        rows, cols = torch.tril_indices(d, d, device=mu.device)
        return torch.cat((mu, free[rows, cols]))

    def rescaled(self, beta: Tensor, scale: float) -> Tensor:
        return self.init(self.mu(beta), scale)

    def spread_out(self, beta: Tensor, sd: Tensor, shape: Tensor | None = None) -> Tensor:
        if self.covariance == "isotropic":
            return super().spread_out(beta, sd)
        if self.covariance == "diagonal":
            return torch.cat((self.mu(beta), sd.log()))
        factor = sd.diag() if shape is None else torch.linalg.cholesky(shape)
        return self.pack(self.mu(beta), torch.block_diag(*[factor] * (len(sd) // len(factor))))

    def mu(self, beta: Tensor) -> Tensor:
        return beta[: self.dimension(beta)]

    def sd(self, beta: Tensor) -> Tensor:
        """Marginal standard deviations, ``[d]``."""
        d = self.dimension(beta)
        if self.covariance == "full":
            return self.factor(beta).square().sum(1).sqrt()
        return beta[d:].exp().expand(d)

    def factor(self, beta: Tensor) -> Tensor:
        """L with Sigma = L L', as a ``[d, d]`` matrix."""
        d = self.dimension(beta)
        if self.covariance != "full":
            return torch.diag(self.sd(beta))
        rows, cols = torch.tril_indices(d, d, device=beta.device)
        free = beta.new_zeros((d, d)).index_put((rows, cols), beta[d:])
        return free.tril(-1) + torch.diag(free.diagonal().exp())

    def sigma(self, beta: Tensor) -> Tensor:
        """Sigma as a ``[d, d]`` matrix."""
        return (factor := self.factor(beta)) @ factor.mT

    def parts(self, beta: Tensor) -> list[Part]:
        return [Part(beta.new_zeros(()), self, beta)]

    def replaced(self, beta: Tensor, betas: Sequence[Tensor]) -> Tensor:
        return betas[0]

    def lines(self, beta: Tensor, states: Tensors) -> list[str]:
        return [f"{self.name}, {self.covariance}: {self.words(beta)}"]

    def words(self, beta: Tensor) -> str:
        """Mean and scale in words."""
        sd = self.sd(beta)
        low, high = float(sd.min()), float(sd.max())
        span = in_words(low) if low == high else f"{in_words(low)} to {in_words(high)}"
        return f"norm of mean {in_words(float(self.mu(beta).norm()))}, sd {span}"

    # --- density and draws -------------------------------------------------------------------

    def whiten(self, beta: Tensor, v: Tensor) -> Tensor:
        """L^-1 v along the last axis."""
        if self.covariance != "full":
            return v / self.sd(beta)
        flat = v.reshape(-1, v.shape[-1]).mT
        out: Tensor = torch.linalg.solve_triangular(self.factor(beta), flat, upper=False).mT
        return out.reshape(v.shape)

    def colour(self, beta: Tensor, v: Tensor, transpose: bool = False) -> Tensor:
        """L v (or L' v) along the last axis."""
        if self.covariance != "full":
            return v * self.sd(beta)
        factor = self.factor(beta)
        return v @ (factor if transpose else factor.mT)

    def sample(self, beta: Tensor, noise: Tensor) -> Tensor:
        """z from standard normal noise ``[..., d]``."""
        return self.mu(beta) + self.colour(beta, noise)

    def draw(self, beta: Tensor, units: Tensor, key: Key, chains: int) -> Tensor:
        return self.sample(beta, key.normal(units, (chains, self.dimension(beta)), beta.dtype))

    def cover(self, beta: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        return self.sample(beta, noise)

    def log_cover(self, beta: Tensor, z: Tensor) -> Tensor:
        return self.log_prob(beta, z)

    def value_and_grad(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """log p(z | beta) and its gradient in z."""
        centred = z - self.mu(beta)
        if self.covariance == "full":
            grad = -centred @ self.precision(beta)
        elif self.covariance == "isotropic":
            grad = centred * -torch.exp(-2 * beta[-1])
        else:
            grad = -centred / self.sd(beta).square()
        constant = self._log_det(beta) + 0.5 * z.shape[-1] * math.log(2 * math.pi)
        return torch.add(-constant, (grad * centred).sum(-1), alpha=0.5), grad

    def _log_det(self, beta: Tensor) -> Tensor:
        if self.covariance == "full":
            return self.factor(beta).diagonal().log().sum()
        d = self.dimension(beta)
        return beta[d:].sum() * (d if self.covariance == "isotropic" else 1)

    def unit(self, beta: Tensor) -> Tensor:
        return self.sd(beta)

    def precision(self, beta: Tensor) -> Tensor:
        """Sigma^-1 as a ``[d, d]`` matrix."""
        if self.covariance == "full":
            return torch.cholesky_inverse(self.factor(beta))
        return torch.diag(self.sd(beta).square().reciprocal())

    # --- what a client sends -----------------------------------------------------------------

    def score(
        self, beta: Tensor, z: Tensor, likelihood_grad: Tensor, form: str, guess: Guess | None = None
    ) -> Tensor:
        """I averaged over draws: z and g ``[C, S, d]`` to ``[C, size]``; see the module's text.

        ``mixed`` needs a fixed ``guess`` of the posterior, a full covariance all of its Q^-1.
        """
        if self.covariance == "isotropic":
            return self._isotropic_score(beta, z, likelihood_grad, form, guess)
        centred, share = z - self.mu(beta), torch.ones_like(z[0, 0])
        share = share if self.covariance == "diagonal" else torch.diag(share)
        if form == "left":
            vector = self._times_precision(beta, centred)
        elif form == "right":
            vector, share = likelihood_grad, torch.zeros_like(share)
        elif form == "mixed" and guess is not None:
            # A = Lambda Q^-1 = I - P Q^-1; in whitened coordinates A is `share`.
            vector = self._times_precision(beta, centred + guess.step)
            if self.covariance == "diagonal":
                share = share - guess.variance / self.sd(beta).square()
            else:
                assert guess.cov is not None
                share = share - self.whiten(beta, self.whiten(beta, guess.cov).mT)
        else:
            raise SettingsError(f"the form of I is 'left', 'right' or 'mixed', not {form!r}")
        u, v = self.whiten(beta, centred), self.colour(beta, vector, True)
        part = self._scale_part(u, v) - (share if self.covariance == "diagonal" else self._pick(share))
        return torch.cat((vector.mean(1), part), dim=-1)

    def _isotropic_score(self, beta: Tensor, z: Tensor, g: Tensor, form: str, guess: Guess | None) -> Tensor:
        """The same with one scale for all: u . L'v is (z - mu) . v, and of ``share`` the trace is all that
        counts."""
        d = z.shape[-1]
        centred, precision = z - beta[:d], torch.exp(-2 * beta[d])
        share: Tensor | float
        if form == "left":
            vector, share = centred * precision, float(d)
        elif form == "right":
            vector, share = g, 0.0
        elif form == "mixed" and guess is not None:
            vector = (centred + guess.step) * precision
            share = d - guess.variance.sum(-1, keepdim=True) * precision
        else:
            raise SettingsError(f"the form of I is 'left', 'right' or 'mixed', not {form!r}")
        scale = (centred * vector).sum((1, 2)).unsqueeze(1) / z.shape[1] - share
        return torch.cat((vector.mean(1), scale), dim=-1)

    def moments_score(self, beta: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
        """I when the posterior is known: mean ``[C, d]`` and covariance ``[C, d, d]`` of z."""
        centred = mean - self.mu(beta)
        second = cov + centred.unsqueeze(-1) * centred.unsqueeze(-2)
        white = self.whiten(beta, self.whiten(beta, second).mT)
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        return torch.cat((self._times_precision(beta, centred), self._pick(white - identity)), dim=-1)

    def expected_score(self, beta: Tensor, log_weight: Tensor, means: Tensor, covs: Tensor) -> Tensor:
        return self.moments_score(beta, means[:, 0], covs[:, 0])

    def _times_precision(self, beta: Tensor, v: Tensor) -> Tensor:
        """Sigma^-1 v along the last axis."""
        if self.covariance == "full":
            return v @ self.precision(beta)
        return v / self.sd(beta).square()

    def _scale_part(self, u: Tensor, v: Tensor) -> Tensor:
        """The part of E[u v'] that belongs to the scale's coordinates."""
        if self.covariance == "isotropic":
            return (u * v).sum(-1).mean(1, keepdim=True)
        if self.covariance == "diagonal":
            return (u * v).mean(1)
        outer = torch.einsum("csi,csj->cij", u, v) / u.shape[1]
        return self._pick(0.5 * (outer + outer.mT))

    def _pick(self, matrix: Tensor) -> Tensor:
        d = matrix.shape[-1]
        if self.covariance == "isotropic":
            return matrix.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        if self.covariance == "diagonal":
            return matrix.diagonal(dim1=-2, dim2=-1)
        rows, cols = torch.tril_indices(d, d, device=matrix.device)
        return matrix[..., rows, cols]

    def whitened_score(self, beta: Tensor, score: Tensor, inverse: bool = False) -> Tensor:
        """Scores ``[..., size]`` in units of their standard deviations under the prior, and back: L' I_mu,
        and the scale's part over the root of its variance (2 d in all; 2 a coordinate, 1 off the diagonal).
        """
        d = self.dimension(beta)
        mean, part = score[..., :d], score[..., d:]
        if self.covariance == "isotropic":
            spread = part.new_full((1,), math.sqrt(2 * d))
        elif self.covariance == "diagonal":
            spread = part.new_full((d,), math.sqrt(2))
        else:
            rows, cols = torch.tril_indices(d, d, device=beta.device)
            spread = torch.where(rows == cols, math.sqrt(2), 1.0).to(part)
        if not inverse:
            return torch.cat((self.colour(beta, mean, True), part / spread), dim=-1)
        if self.covariance == "full":
            flat = mean.reshape(-1, d).mT
            mean = torch.linalg.solve_triangular(self.factor(beta).mT, flat, upper=True).mT.reshape(
                mean.shape
            )
        else:
            mean = mean / self.sd(beta)
        return torch.cat((mean, part * spread), dim=-1)

    # --- what the server does with it --------------------------------------------------------

    def gradient(self, beta: Tensor, score: Tensor) -> Tensor:
        """The gradient in the coordinates of beta that belongs to a (sum of) scores."""
        d = self.dimension(beta)
        if self.covariance == "full":
            # d log p / dL = tril(L^-T u u') - diag(1 / L_jj), and L_jj enters by its logarithm.
            factor = self.factor(beta)
            excess = self._symmetric(score[d:])
            full = torch.linalg.solve_triangular(factor.mT, excess, upper=True).tril()
            scale = full.diagonal() * factor.diagonal()
            rows, cols = torch.tril_indices(d, d, device=beta.device)
            score = torch.cat((score[:d], (full.tril(-1) + torch.diag(scale))[rows, cols]))
        return self.mask(score)

    def mask(self, v: Tensor) -> Tensor:
        """Zero where a parameter is fixed."""
        d = self.dimension(v)
        return torch.cat((v[:d] * float(self.learn_mean), v[d:] * float(self.learn_scale)))

    def units(self, beta: Tensor) -> Tensor:
        """mu moves in units of the prior's scale, as do rows of a factor; log-scales in units of one."""
        unit, d, sd = torch.ones_like(beta), self.dimension(beta), self.sd(beta)
        unit[:d] = sd
        if self.covariance == "full":
            rows, cols = torch.tril_indices(d, d, device=beta.device)
            unit[d:] = torch.where(rows == cols, 1.0, sd[rows])
        return unit

    def _symmetric(self, packed: Tensor) -> Tensor:
        d = int((math.sqrt(1 + 8 * packed.shape[0]) - 1) / 2 + 0.5)
        rows, cols = torch.tril_indices(d, d, device=packed.device)
        lower = packed.new_zeros((d, d)).index_put((rows, cols), packed)
        return lower + lower.tril(-1).mT

    def log_scale(self, v: Tensor) -> Tensor:
        """Of beta, or a score ``[..., size]``, the coordinates that are logarithms of a scale; they do not
        stand alone in a full covariance."""
        return v[..., self.dimension(v) :]

    def em_step(self, beta: Tensor, score: Tensor, rate: float, floor: Tensor | float = 0.0) -> Tensor:
        """A step of stochastic-approximation EM from the score *averaged* over clients.

        It needs nothing beyond I: mu += rate Sigma I_mu, Sigma += rate (second moment - Sigma). The
        step of mu would vanish with Sigma, so it is taken with at least ``floor`` as variance.
        """
        d = self.dimension(beta)
        mu, i_mu, i_scale = beta[:d], score[:d], score[d:]
        if self.covariance == "isotropic":
            return self._isotropic_em(beta, i_mu, float(i_scale), float(rate), float(floor))
        sd, shift = self.sd(beta), torch.zeros_like(mu)
        em_shift = shift
        if self.learn_mean:
            variance, full = sd.square(), self.covariance == "full"
            em_shift = rate * (self.colour(beta, self.colour(beta, i_mu, True)) if full else variance * i_mu)
            shift = torch.where(variance >= floor, em_shift, rate * floor * i_mu)
        if not self.learn_scale:
            return torch.cat((mu + shift, beta[d:]))
        if self.covariance == "full":
            white = self.whiten(beta, em_shift)
            identity = torch.eye(d, dtype=beta.dtype, device=beta.device)
            inner = identity + rate * self._symmetric(i_scale) - torch.outer(white, white)
            factor = self.factor(beta) @ torch.linalg.cholesky(positive(inner))
            return self.pack(mu + shift, factor)
        # A single round may not shrink a variance below a hundredth: noise could make it negative.
        growth = (1 + rate * i_scale - (em_shift / sd).square()).clamp(min=1e-2)
        return torch.cat((mu + shift, beta[d:] + 0.5 * growth.log()))

    def _isotropic_em(self, beta: Tensor, i_mu: Tensor, i_scale: float, rate: float, floor: float) -> Tensor:
        """The same where all but mu is numbers."""
        d = i_mu.shape[0]
        mu, scale, learned = beta[:d], float(beta[d].exp()), float(self.learn_mean)
        variance = scale * scale
        mu = torch.add(mu, i_mu, alpha=learned * rate * max(variance, floor))
        if not self.learn_scale:
            return torch.cat((mu, beta[d:]))
        moved = learned * rate**2 * variance * float(torch.dot(i_mu, i_mu))
        return torch.cat((mu, beta[d:] + 0.5 * math.log(max(1 + (rate * i_scale - moved) / d, 1e-2))))

    # --- projection sets: every standard deviation inside bounds, the mean inside a ball ------

    def scales(self, beta: Tensor) -> tuple[float, float, float]:
        sd = torch.linalg.svdvals(self.factor(beta)) if self.covariance == "full" else self.sd(beta)
        return float(sd.min()), float(sd.max()), float(self.mu(beta).norm())

    def project(self, beta: Tensor, sets: Sets | None = None) -> Tensor:
        bounds, ball = sets or (self.bounds, self.ball)
        d = self.dimension(beta)
        mu = into_ball(beta[:d], ball)
        if bounds is None:
            return torch.cat((mu, beta[d:]))
        low, high = bounds
        if self.covariance != "full":
            return torch.cat((mu, beta[d:].clamp(math.log(low), math.log(high))))
        # What is so far outside that it would overflow is as far inside afterwards as what is not.
        rows, cols = torch.tril_indices(d, d, device=beta.device)
        edge, free = high * FARTHEST_FACTOR, beta[d:].double()
        free = torch.where(rows == cols, free.clamp(max=math.log(edge)), free.clamp(-edge, edge))
        factor = self.factor(torch.cat((mu.double(), free)))
        values = torch.linalg.svdvals(factor)
        if bool((values >= low).all() & (values <= high).all()):
            return torch.cat((mu, beta[d:]))
        left, values, _ = torch.linalg.svd(factor)
        # The triangular factor by QR: Sigma itself would lose what is a millionth of its largest entry.
        upper = torch.linalg.qr((left * values.clamp(low, high)).mT).R
        return self.pack(mu.double(), upper.mT * upper.diagonal().sign()).to(beta.dtype)

    def boxed(self, beta: Tensor, sets: Sets | None = None) -> Tensor:
        """The nearest beta whose coordinates each lie between bounds, about those of the projection sets: of
        these no coordinate depends on another. Of a full covariance, bounds on the diagonal of its factor."""
        bounds, ball = sets or (self.bounds, self.ball)
        if self.covariance != "full" or bounds is None:
            return self.project(beta, sets)
        d, (low, high) = self.dimension(beta), bounds
        rows, cols = torch.tril_indices(d, d, device=beta.device)
        inside = beta[d:].clamp(math.log(low), math.log(high))
        return torch.cat((into_ball(beta[:d], ball), torch.where(rows == cols, inside, beta[d:])))

    def at_bound(self, beta: Tensor, sets: Sets | None = None) -> list[str]:
        (bounds, ball), out = sets or (self.bounds, self.ball), []
        least, most, norm = self.scales(beta)
        if bounds is not None and least <= bounds[0] * 1.0001:
            out.append(f"the prior's scale is at its lower bound {bounds[0]:g} ({REMEDY})")
        if bounds is not None and most >= bounds[1] * 0.9999:
            out.append(f"the prior's scale is at its upper bound {bounds[1]:g} ({REMEDY})")
        if ball is not None and norm >= ball * 0.9999:
            out.append(f"the prior's mean is at the edge of its ball, {ball:g}")
        return out
