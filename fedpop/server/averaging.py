"""Averages of the iterates theta_k, how far theta still drifts, and the gauge that averages need.

``iterate`` is the average of the paper's theorem, sum eta_k theta_k / sum eta_k over all rounds; ``tail``
is the plain mean over the last rounds (of the present stage). The tail is kept in two halves, so that their
difference tells whether theta has settled.

The gauge are directions in theta that the model cannot tell apart. With a backbone that ends in a linear
layer W and a linear head, features A W x and heads A^-T z give the same outputs. What A leaves the prior's
family alone depends on the prior: rotations (and, without a bias, a scale) for an isotropic one, any
invertible A for a full covariance, none for a diagonal one. ``aligner`` moves theta_k along them, towards the
first theta of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fedpop.checked import Fraction, OneOf
from fedpop.models.base import LinearLayout, Model
from fedpop.models.composition import Composition
from fedpop.priors.base import OfNormals, Part, Prior, matched, normals_of
from fedpop.server.optimisers import Rounds, Stage
from fedpop.settings import Setting

AVERAGES = ("tail", "iterate", "last")
Align = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Averaging(Setting):
    """Which average of theta over the rounds is published.

    Args:
        which: "tail" (the default) is the mean over the last rounds, "iterate" the one over all rounds,
            weighted by their step sizes, that the paper's theorem bounds; "last" is none.
        tail: The share of the rounds (of the present stage, where a run is extended) that makes the
            tail, above 0 and at most 1; 0.25 by default. It serves to judge the drift of theta, too.

    >>> Averaging("iterate")  # the one that the paper's theorem bounds
    Averaging(which='iterate', tail=0.25)
    """

    which: Annotated[str, OneOf(*AVERAGES)] = "tail"
    tail: Fraction = 0.25

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        zero, none = torch.zeros_like(theta), theta.new_zeros(())
        return {
            "reference": theta.clone(),
            "first": zero,
            "second": zero.clone(),
            "first_weight": none,
            "second_weight": none.clone(),
            "all": zero.clone(),
            "all_weight": none.clone(),
        }

    def update(
        self,
        state: dict[str, Tensor],
        theta: Tensor,
        eta: float,
        k: int,
        rounds: Rounds,
        align: Align,
        warm_up: int = 0,
    ) -> dict[str, Tensor]:
        """Take theta_{k+1} into account, reached with step eta in round k; nothing is, before the stage that
        ``rounds`` are, and ``warm_up`` rounds count in none."""
        first, last = Stage.of(rounds)
        if k < first:
            return state
        start = first + int((last - first) * (1 - self.tail))
        middle = (start + last) // 2
        state = dict(state)
        if (
            k == first > warm_up
        ):  # the tail of an earlier stage: until a new one begins the last iterate stands
            state |= {n: v for n, v in self.init(theta).items() if n.startswith(("first", "second"))}
        # One reference for the whole average: a second one would mix two gauges.
        if k == (warm_up if self.which == "iterate" else start):
            state["reference"] = theta.clone()
        if k < start and self.which != "iterate":
            return state
        theta = align(theta, state["reference"])
        if self.which == "iterate":
            state["all"] = state["all"] + eta * theta
            state["all_weight"] = state["all_weight"] + eta
        if k >= start:
            half = "first" if k < middle else "second"
            state[half] = state[half] + theta
            state[f"{half}_weight"] = state[f"{half}_weight"] + 1
        return state

    def value(self, state: dict[str, Tensor], theta: Tensor) -> Tensor:
        """The published theta: the average, or the last iterate where there is none yet."""
        if self.which == "iterate" and float(state["all_weight"]) > 0:
            return state["all"] / state["all_weight"]
        weight = state["first_weight"] + state["second_weight"]
        if self.which == "tail" and float(weight) > 0:
            return (state["first"] + state["second"]) / weight
        return theta

    def halves(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Means over the two halves of the tail, once both are there."""
        if float(state["first_weight"]) == 0 or float(state["second_weight"]) == 0:
            return None
        return state["first"] / state["first_weight"], state["second"] / state["second_weight"]


@dataclass(frozen=True)
class Gauge:
    """Where W (and the bias beside it) lies in phi, for a model that has this freedom."""

    weight: slice
    bias: slice | None
    width: int
    layout: LinearLayout
    prior: OfNormals

    @classmethod
    def of(cls, model: Model, prior: Prior) -> Gauge | None:
        """The gauge of a model, or None when it has none that we know of."""
        made, normal = normals_of(prior), prior.component
        if made is None or normal is None:
            return None  # an energy's network would have to turn with z
        if not isinstance(model, Composition) or not isinstance(model.z_layout, LinearLayout):
            return None
        last, name = model.backbone, "backbone"
        while isinstance(last, nn.Sequential) and len(last):
            name, last = f"{name}.{len(last) - 1}", last[-1]
        spans = model.phi_layout.spans()
        weight = spans.get(f"{name}.weight")
        if type(last) is not nn.Linear or weight is None or prior.covariance == "diagonal":
            return None
        if last.bias is not None and f"{name}.bias" not in spans:
            return None  # a frozen bias cannot follow
        if not normal.learn_mean and prior.mean != 0:
            return None
        layout = model.z_layout
        if prior.covariance == "full" and (layout.bias or layout.outputs > 1):
            return None
        return cls(weight, spans.get(f"{name}.bias"), last.out_features, layout, made)

    def matrix(self, phi: Tensor) -> Tensor:
        """W with its bias as a further column."""
        weight = phi[self.weight].reshape(self.width, -1)
        if self.bias is None:
            return weight
        return torch.cat((weight, phi[self.bias].unsqueeze(1)), dim=1)

    def transform(self, phi: Tensor, beta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """theta after features have become A times themselves."""
        moved = a @ self.matrix(phi)
        phi = phi.clone()
        if self.bias is not None:
            phi[self.bias] = moved[:, -1]
            moved = moved[:, :-1]
        phi[self.weight] = moved.reshape(-1)
        inverse = torch.linalg.inv(a)
        moved_parts = [self._part(part, a, inverse) for part in self.prior.parts(beta)]
        return phi, self.prior.replaced(beta, moved_parts)

    def _part(self, part: Part, a: Tensor, inverse: Tensor) -> Tensor:
        """One Normal of the prior, for heads that are A^-T z."""
        normal, beta = part.normal, part.beta
        mu = normal.mu(beta).reshape(self.layout.outputs, -1)
        rows = mu[:, : self.width] @ inverse
        mu = torch.cat((rows, mu[:, self.width :]), dim=1).reshape(-1)
        if normal.covariance == "full":
            sigma = inverse.mT @ normal.sigma(beta) @ inverse
            return normal.pack(mu, torch.linalg.cholesky(sigma))
        scale = torch.linalg.matrix_norm(a) / self.width**0.5  # a is a multiple of a rotation
        return torch.cat((mu, beta[-1:] - scale.log()))

    def align(self, phi: Tensor, beta: Tensor, phi_to: Tensor, beta_to: Tensor) -> tuple[Tensor, Tensor]:
        """The equivalent of theta that is nearest to another one."""
        here, there = self.matrix(phi), self.matrix(phi_to)
        if self.prior.covariance == "full":
            a = torch.linalg.lstsq(here.mT, there.mT).solution.mT
            return self.transform(phi, beta, a)
        left, _, right = torch.linalg.svd(there @ here.mT)
        a = left @ right
        normal = self.prior.component
        if not self.layout.bias and normal is not None and normal.learn_scale:
            a = a * (self._log_scale(beta) - self._log_scale(beta_to)).exp()
        return self.transform(phi, beta, a)

    def _log_scale(self, beta: Tensor) -> Tensor:
        """log sigma of an isotropic prior; its mean over components, by their weights."""
        parts = self.prior.parts(beta)
        return torch.stack([p.log_weight.exp() * p.beta[-1] for p in parts]).sum()


def aligner(model: Model, prior: Prior) -> Callable[[Tensor, Tensor], Tensor]:
    """``align(theta, reference)`` on theta = (phi, beta): along the gauge where there is one, and with a
    mixture's components in the reference's order."""

    def align(theta: Tensor, reference: Tensor) -> Tensor:
        gauge, size = Gauge.of(model, prior), model.phi_layout.size
        phi, beta = theta[:size], theta[size:]
        if gauge is not None:
            phi, beta = gauge.align(phi, beta, reference[:size], reference[size:])
        return torch.cat((phi, matched(prior, beta, reference[size:])))

    return align
