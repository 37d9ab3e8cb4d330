"""Chains that follow their posteriors while theta moves.

Between two visits of a client theta has moved, and its posterior with it: where that is narrow, in hundreds
of dimensions, a round's few transitions do not bring the chain home, and its draws count all the same. So a
chain is carried with the mode of its log-posterior, and with its width:

    z <- new mode + L_new^-T L_old' (z - old mode),

L L' being the curvature at the mode under the prior; the old mode, and the prior's scale of then, are stored
with the chain. The map is a function of theta, the data and what was stored, never of z, so the chain keeps
what it has found of the posterior's shape; with theta at rest it is the identity. The posterior is that of
the round: features with their dropout or shifted images, where there are such, since a second pass without
would cost a third of a round.

L_old is made of this round's examples, at the old mode. Where a round works on a batch of them these are
others than the old mode was found for: at it they are fitted badly and their curvature is large, so that
chains would be widened in every round, and the learned scale with them, without end. There the chain is
stored as L_old' (z - old mode), of the examples of then.

The mode is found by steps Q^-1 slope from the stored one, with Nesterov's extrapolation and restarts; Q
bounds the curvature, so none of them overshoots. A client stands still once slope' Q^-1 slope is below
``MODE_TOLERANCE`` for each dimension. Where Q is far above the curvature a looser one leaves the mode far
behind, and the learned scale swings. A client's first chain, or one that stores no state, starts at the mode
reached from the prior's mean plus noise of the curvature there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedpop.kernels.base import Kernel
from fedpop.kernels.target import BlockPrecision, Target
from fedpop.keys import Key
from fedpop.models.local import LinearLikelihood

MODE_TOLERANCE = 1e-4
"""Of slope' Q^-1 slope, for each dimension of z: a hundredth of a standard deviation by Q."""
MODE_STEPS, FIRST_MODE_STEPS = 30, 100
"""Steps at most from a stored mode, and from the prior's mean."""


def follows(kernel: Kernel, target: Target) -> bool:
    """A linear head under one Normal has one mode, and its curvature a bound; exact draws need no help."""
    return target.linear and target.prior.component is target.prior and not kernel.independent(target)


def mode_from(target: Target, start: Tensor, steps: int) -> tuple[Tensor, int]:
    """The mode ``[C, d]`` of every client's log-posterior, climbed from ``start``; and gradients it took."""
    local = target.likelihood
    assert isinstance(local, LinearLikelihood)
    if local.likelihood.bound(local.params) is None:  # Newton's steps found it when Q was made
        return target.newton_mode, 0
    factor, d = target.block_precision, start.shape[1]
    mode, ahead, t = start, start, start.new_ones((len(start), 1))
    moving = torch.ones_like(t, dtype=torch.bool)
    for k in range(steps):
        slope = target.grad(ahead.unsqueeze(1)).squeeze(1)
        step = factor.solve(slope.unsqueeze(1)).squeeze(1)
        arrived = moving & ((slope * step).sum(1, keepdim=True) <= MODE_TOLERANCE * d)
        mode, moving = torch.where(arrived, ahead, mode), moving & ~arrived
        if not bool(moving.any()):
            return mode, k + 1
        new = ahead + step
        # Extrapolating past the mode: start over from here.
        t = torch.where((slope * (new - mode)).sum(1, keepdim=True) < 0, torch.ones_like(t), t)
        longer = (1 + (1 + 4 * t.square()).sqrt()) / 2
        ahead = torch.where(moving, new + (t - 1) / longer * (new - mode), ahead)
        mode, t = torch.where(moving, new, mode), longer
    return mode, steps


def first_place(target: Target, units: Tensor, chains: int, key: Key) -> tuple[Tensor, Tensor, int]:
    """Where chains start that have no past, ``[C, K, d]``; the mode, and gradients it took."""
    local = target.likelihood
    assert isinstance(local, LinearLikelihood)
    centre = target.prior.mu(target.beta).expand(len(units), -1)
    mode, spent = mode_from(target, centre, FIRST_MODE_STEPS)
    factor = BlockPrecision.of(target.add_prior(local.curvature_at(mode)))
    noise = key.normal(units, (chains, mode.shape[1]), mode.dtype)
    return mode.unsqueeze(1) + factor.root_transposed(noise), mode, spent + 1


def carried(
    target: Target,
    z: Tensor,
    old: Tensor,
    scale: Tensor,
    white: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Chains z ``[C, K, d]`` moved along with their mode ``[C, d]`` and their width, which was found under
    prior standard deviations ``scale`` ``[C, d]``; the new mode, and gradients it took. ``white`` ``[C, K,
    d]`` is what was stored of those whose examples are ``drawn`` ``[C]`` anew.

    A chain that this would leave far less probable than it was stays: its place was not by the old mode.
    """
    mode, spent = mode_from(target, old, MODE_STEPS)
    # Client by client: nobody's chain may depend on whether another's has moved, not even by rounding.
    rest = (mode == old).all(1) & (scale == target.prior.unit(target.beta)).all(1)
    if bool(rest.all()):
        return z, mode, spent
    apart = whitened(target, old, z - old.unsqueeze(1), scale)
    if white is not None and drawn is not None:
        apart = torch.where(drawn[:, None, None], white, apart)
    new = mode.unsqueeze(1) + _coloured(target, mode, apart)
    before, after = target.value(z), target.value(new)
    stays = rest.unsqueeze(1) | ~(after > before - z.shape[2])
    return torch.where(stays.unsqueeze(2), z, new), mode, spent + 4


def whitened(target: Target, mode: Tensor, apart: Tensor, scale: Tensor) -> Tensor:
    """L' apart, from the curvature at the mode ``[C, d]`` under a prior of these standard deviations."""
    local = target.likelihood
    assert isinstance(local, LinearLikelihood)
    if target.prior.covariance == "full":
        return apart
    curvature = local.curvature_at(mode)
    blocks, q = curvature.shape[1], curvature.shape[-1]
    was = curvature.double() + torch.diag_embed(scale.double().square().reciprocal().reshape(-1, blocks, q))
    root = torch.linalg.cholesky_ex(was)[0].to(apart.dtype)
    rows = apart.unflatten(-1, (blocks, q)).transpose(1, 2)
    return torch.matmul(rows, root).transpose(1, 2).flatten(-2)


def _coloured(target: Target, mode: Tensor, white: Tensor) -> Tensor:
    """L^-T white, from the curvature at the mode under the prior."""
    local = target.likelihood
    assert isinstance(local, LinearLikelihood)
    if target.prior.covariance == "full":
        return white
    return BlockPrecision.of(target.add_prior(local.curvature_at(mode))).root_transposed(white)
