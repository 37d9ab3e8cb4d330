"""Draws from a population prior: exact ones where there are, else chains on the prior itself, which take no
data.

An energy-based prior p(z | beta) = exp(-E(z)) / Z(beta) has no exact draws, and the gradient of its log-
density lacks that of log Z: E_{z' ~ p(. | beta)}[grad_beta E(z')]. The server estimates it with chains of
its own on the prior, which go on from round to round (persistent contrastive divergence, Tieleman 2008).
The same chains start clients off, and are what a newcomer without data is drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedpop.kernels.base import Pass, Tuning, run
from fedpop.kernels.hmc import JumpHMC
from fedpop.kernels.target import Target
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.models.local import NoData
from fedpop.priors.base import Prior, Unnormalised

PRIOR_WARM_UP = 50
"""Transitions from the base, or from chains at another beta, to where draws can be used."""
PRIOR_THINNING = 5
"""Transitions for each draw that people see."""
NORMALISER_TRANSITIONS = 40
"""Transitions behind independent estimates of log Z's gradient."""


def draw(
    prior: Prior, beta: Tensor, units: Tensor, key: Key, chains: int, states: Tensor | None = None
) -> Tensor:
    """z ~ p(. | beta) for these units, ``[C, K, d]``; ``states`` are draws that the server shipped."""
    if prior.normalised:
        return prior.draw(beta, units, key, chains)
    if states is None:
        return _warmed(prior, beta, _base(prior, beta, units, key, chains), key, units)[0]
    uniform = key.uniform(units, (chains,), torch.float64)
    return states[(uniform * len(states)).long().clamp(max=len(states) - 1)]


def final_draws(
    prior: Prior, beta: Tensor, units: Tensor, key: Key, count: int, states: Tensor | None = None
) -> Tensor:
    """Draws that people see, ``[C, count, d]``: from the server's chains, taken to this beta and run on."""
    if not isinstance(prior, Unnormalised):
        return prior.draw(beta, units, key, count)
    if states is None:
        z = _base(prior, beta, units, key, prior.chains)
    else:
        z = states.expand(len(units), *states.shape)
    z, tuning = _warmed(prior, beta, z, key, units)
    needed = -(-count // z.shape[1])
    out = _run(prior, beta, z, tuning, needed * PRIOR_THINNING, key.at(purpose="final"), units, adapt=False)
    return out.draws[:, PRIOR_THINNING - 1 :: PRIOR_THINNING].flatten(1, 2)[:, :count]


# --- the server's share ----------------------------------------------------------------------


def first_states(prior: Unnormalised, beta: Tensor, key: Key) -> Tensors:
    """What the server stores besides beta: chains from the base, taken to this beta, and their step."""
    units = key.server(beta.device)
    z, tuning = _warmed(prior, beta, _base(prior, beta, units, key, prior.chains), key, units)
    return {"states": z[0], "log_step": tuning.log_step, "updates": tuning.updates}


def normaliser(prior: Unnormalised, beta: Tensor, states: Tensors, key: Key) -> tuple[Tensor, Tensors]:
    """What one unit's score lacks, E[grad_beta E] over this round's draws, and where the chains now are."""
    key, units, z = key.at(purpose="negative"), key.server(beta.device), states["states"]
    prior.check_chains(beta, z)
    tuning = Tuning(states["log_step"], states["updates"])
    out = _run(prior, beta, z.unsqueeze(0), tuning, prior.steps, key, units, adapt=True)
    prior.check_chains(beta, out.state.z)
    # Others are shipped next time.
    new = out.state.z[0].roll(prior.ship, 0)
    states = {"states": new, "log_step": out.tuning.log_step, "updates": out.tuning.updates}
    return _energy_grad(prior, beta, out.draws.flatten(1, 2))[0], states


def normaliser_batches(prior: Prior, beta: Tensor, states: Tensors, key: Key, count: int) -> Tensor:
    """Independent estimates of what one unit's score lacks, ``[count, size]``."""
    if not isinstance(prior, Unnormalised):
        return beta.new_zeros((count, beta.shape[0]))
    units, stored = key.server(beta.device), states.get("states")
    z = _base(prior, beta, units, key, prior.chains) if stored is None else stored.unsqueeze(0)
    z, tuning = _warmed(prior, beta, z, key, units)
    out = _run(prior, beta, z, tuning, NORMALISER_TRANSITIONS, key.at(purpose="batches"), units, adapt=False)
    each = z.shape[1] // count
    groups = out.draws[0, :, : each * count].unflatten(1, (count, each))
    return _energy_grad(prior, beta, groups.transpose(0, 1).flatten(1, 2))


def shipped(prior: Unnormalised, states: Tensors) -> Tensors:
    """What sites receive of it, with theta."""
    return {"states": states["states"][: prior.ship]}


def _energy_grad(prior: Prior, beta: Tensor, z: Tensor) -> Tensor:
    """grad_beta of the mean energy of draws ``[C, S, d]``, ``[C, size]``."""
    return -prior.score(beta, z, z, "left")


def _base(prior: Prior, beta: Tensor, units: Tensor, key: Key, chains: int) -> Tensor:
    noise = key.at(purpose="base").normal(units, (chains, prior.dimension(beta)), beta.dtype)
    return prior.cover(beta, noise, noise[..., 0])


def _warmed(prior: Prior, beta: Tensor, z: Tensor, key: Key, units: Tensor) -> tuple[Tensor, Tuning]:
    tuning = Tuning.fresh(len(units), JumpHMC.initial_log_step, z)
    for part in range(PRIOR_WARM_UP // 10):
        out = _run(prior, beta, z, tuning, 10, key.at(purpose=f"warm-{part}"), units, adapt=True)
        z, tuning = out.state.z, out.tuning
    return z, tuning


def _run(
    prior: Prior, beta: Tensor, z: Tensor, tuning: Tuning, steps: int, key: Key, units: Tensor, *, adapt: bool
) -> Pass:
    with torch.no_grad():
        return run(JumpHMC(), Target(NoData(), prior, beta), z, tuning, steps, key, units, adapt=adapt)
