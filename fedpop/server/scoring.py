"""Scoring steps for small models: theta moves by its inverse information, at rates that fall as 1/k.

A further stage of a run begins at the theta that the last one would have published, where everyone's
information I has just been asked for (``evaluation.convergence``). With g_k the estimate of the objective's
gradient that round k brings,

    theta_{k+1} = theta_k + a_k I^-1 g_k,   a_k = 1 / (k - k_stage + k_0),

which on a quadratic is the mean of all the stage's Newton steps: no use of the same messages ends nearer. k_0
is sqrt(p/2 b/|A|): the noise of a round of |A| among b units costs a full step about p/2 b/|A| nats, so the
first one costs one. No step is longer than ``LONGEST_SCORING_STEP``, for a gradient that is out of all
proportion.

After K such steps with a share p of units in each round sqrt((1/p - 1) / K) standard errors of theta are left
of the chance of who took part; more, where units differ by more than the model has it. Units whose gradient
is no estimate can do without most of it: everyone's gradient G at the stage's beginning is known with the
information, so those who are there answer with how theirs has changed since,

    g_k = G + b/|A| sum_i [g_i(theta_k) - g_i(theta_0)],

of which the noise is in proportion to how far theta has gone (Johnson and Zhang, 2013).
"""

from __future__ import annotations

import math

from torch import Tensor

from fedpop.message import Tensors

LONGEST_SCORING_STEP = 2.0
"""Nats, half of the squared length of a step in units of the information."""
CHANCE_LEFT = 0.15
"""What may be left after a stage of the chance of who took part, as a share of how far theta has gone."""
MOST_SCORING_STEPS = 1000
"""Steps of a stage at most."""


def long_enough(share: float) -> int:
    """Steps after which that much is left, where such a share takes part in each.

    >>> long_enough(0.2), long_enough(1.0)
    (178, 1)
    """
    return min(max(math.ceil((1 / share - 1) / CHANCE_LEFT**2), 1), MOST_SCORING_STEPS)


def begun(server: Tensors, published: Tensors, inverse: Tensor | None) -> Tensors:
    """The server's state at the beginning of a stage: of scoring steps, where there is an inverse."""
    if inverse is None:
        return {n: v for n, v in server.items() if n != "inverse"}
    return server | {"phi": published["phi"], "beta": published["beta"], "inverse": inverse}


def step(theta: Tensor, gradient: Tensor, inverse: Tensor, k: int, crowd: float) -> Tensor:
    """theta after round k of the stage; ``crowd`` is b/|A|, how many units each active one stands for.

    >>> import torch
    >>> at = torch.zeros(2, dtype=torch.float64)
    >>> step(at, torch.tensor([2.0, -1.0]).double(), torch.diag(torch.tensor([0.25, 1.0]).double()), 0, 1.0)
    tensor([ 0.5000, -1.0000], dtype=torch.float64)
    """
    gradient = gradient.double()
    move = inverse @ gradient
    rate = 1 / (k + max(1, math.ceil(math.sqrt(0.5 * len(theta) * crowd))))
    length = 0.5 * rate**2 * float(gradient @ move)
    shorter = min(1.0, math.sqrt(LONGEST_SCORING_STEP / length)) if length > 0 else 1.0
    return (theta.double() + rate * shorter * move).to(theta.dtype)
