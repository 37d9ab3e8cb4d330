"""The spectral start: phi from second moments of the data, in two additive messages before round one.

For y = x' phi z + noise with z of any law, and C = E[x x'], a client's cross products

    S_i = v v' - sum_j y_j^2 x_j x_j',   v = sum_j x_j y_j,   x whitened by C^-1/2

have expectation N_i (N_i - 1) phi E[z z'] phi' (in whitened coordinates): the sum over pairs of *different*
examples, so that noise does not enter. The top d eigenvectors span phi. A client with fewer than
two examples adds nothing; a minimum size keeps what two examples would reveal from being sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpop.channel import Channel
from fedpop.errors import ModelError
from fedpop.federation.cohort import Cohort
from fedpop.keys import Key
from fedpop.models.base import LinearLayout, Model
from fedpop.models.composition import Composition


def applies(model: Model) -> bool:
    """A linear backbone and a linear head with one output, both without bias."""
    return (
        isinstance(model, Composition)
        and type(model.backbone) is nn.Linear
        and model.backbone.bias is None
        and isinstance(model.z_layout, LinearLayout)
        and not model.z_layout.bias
        and model.outputs == 1
        and model.phi_layout.names[:1] == ("backbone.weight",)
    )


@dataclass(frozen=True)
class SpectralStart:
    """Two phases with everyone: ``moments`` for whitening, ``spectral`` for the cross products.

    >>> from torch import nn
    >>> import fedpop as fp
    >>> linear = fp.Composition(nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False), "normal")
    >>> fp.FedSOUL(linear, spectral=SpectralStart(minimum=5)).phases
    ('moments', 'spectral', 'train')
    """

    minimum: int = 2

    def local(
        self,
        phase: str,
        model: Model,
        broadcast: dict[str, Tensor],
        cohort: Cohort,
        channel: Channel,
    ) -> dict[str, Tensor]:
        """This cohort's summed message."""
        if not isinstance(cohort.x, Tensor):
            raise ModelError("a spectral start needs x as one tensor")
        x = cohort.pad(cohort.x).to(torch.float64)
        if phase == "moments":
            x, kept = self._kept(x, cohort.sizes >= self.minimum, x.square().sum((1, 2)))
            second = torch.einsum("c,cni,cnj->ij", kept, x, x)
            count = (kept * cohort.sizes).sum().reshape(1)
            sums = {"second": second.reshape(-1), "count": count}
        else:
            x = x @ broadcast["whitener"]
            y = cohort.pad(working_response(model, cohort.y)).to(torch.float64)
            size = x.square().sum((1, 2)) * y.square().sum((1, 2))  # no entry of S_i is larger
            x, kept = self._kept(x, cohort.sizes >= max(self.minimum, 2), size)
            v = torch.einsum("cni,cno->ci", x, y)
            cross = torch.einsum("c,ci,cj->ij", kept, v, v)
            own = torch.einsum("c,cni,cno,cnj->ij", kept, x, y.square(), x)
            pairs = (kept * cohort.sizes * (cohort.sizes - 1)).sum().reshape(1)
            sums = {"cross": (cross - own).reshape(-1), "pairs": pairs}
        # Sent in single precision: second moments need no more, and bytes count.
        return {n: channel.fused(n, s.float(), len(cohort)).double() for n, s in sums.items()}

    @staticmethod
    def _kept(x: Tensor, large: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Clients that are large enough and whose message, of this size, is finite; others' x is zero."""
        kept = large & torch.isfinite(size.float())
        return torch.where(kept[:, None, None], x, torch.zeros_like(x)), kept.to(x.dtype)

    def whitener(self, sums: dict[str, Tensor]) -> Tensor:
        """C^-1/2 from the summed second moments."""
        k = int(sums["second"].shape[0] ** 0.5 + 0.5)
        moment = sums["second"].reshape(k, k) / sums["count"].clamp(min=1)
        values, vectors = torch.linalg.eigh(moment)
        floor = values.max() * 1e-8
        out: Tensor = vectors * values.clamp(min=floor).rsqrt() @ vectors.mT
        return out

    def phi(self, sums: dict[str, Tensor], whitener: Tensor, phi: Tensor, width: int) -> Tensor:
        """phi with the spectral backbone, scaled so that E[z z'] = I; unchanged without any pairs."""
        if float(sums["pairs"]) == 0:
            return phi
        k = whitener.shape[0]
        values, vectors = torch.linalg.eigh(sums["cross"].reshape(k, k) / sums["pairs"])
        order = values.argsort(descending=True)[:width]
        # Negative or tiny eigenvalues are noise: such a direction still needs some length to move.
        top = values[order].clamp(min=1e-2 * float(values.abs().max()))
        weight = (vectors[:, order] * top.sqrt()).mT @ whitener
        return torch.cat((weight.reshape(-1).to(phi.dtype), phi[weight.numel() :]))


def working_response(model: Model, y: Tensor) -> Tensor:
    """y linearised at eta = 0: y itself for a Normal likelihood, 4 (y - 1/2) for a Bernoulli one."""
    zero = torch.zeros_like(y)
    if model.likelihood.name == "normal":
        return y
    mean = model.likelihood.mean(zero, {})
    return (y - mean) / model.likelihood.curvature(zero, {})


def natural_units(model: Model, phi: Tensor) -> Tensor:
    """The natural size of a change of each coordinate of phi: its tensor's root mean square."""
    overall = float(phi.square().mean().sqrt()) if phi.numel() else 1.0
    unit = torch.ones_like(phi)
    for name, span in model.phi_layout.spans().items():
        size = float(phi[span].square().mean().sqrt())
        # log-variances live on a scale of one; a tensor of zeros says nothing of its own scale.
        known = 1.0 if name.startswith("likelihood.") else model.phi_layout.unit(name)
        unit[span] = known or size or overall or 1.0
    return unit


def redrawn(model: Model, phi: Tensor, key: Key) -> Tensor:
    """Another random start: every tensor drawn anew with its own mean and standard deviation."""
    noise = key.normal(key.server(phi.device), (phi.numel(),), phi.dtype)[0]
    out = phi.clone()
    for span in model.phi_layout.spans().values():
        part = phi[span]
        if part.numel() > 1:
            out[span] = part.mean() + part.std() * noise[span]
    return out
