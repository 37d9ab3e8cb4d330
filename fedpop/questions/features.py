"""How large features are: the prior's scale, or shape, at which the head's outputs have variance one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpop.errors import ModelError
from fedpop.federation.cohort import Cohort
from fedpop.federation.inputs import leaves
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.models.base import LinearLayout, Model, with_ones
from fedpop.questions.base import Question, Units

LEAST_EXAMPLES = 2
"""Units with fewer examples add nothing to moments: they would be their data."""
COLLINEAR = 1e-10
"""An eigenvalue of the moments of features whose mean square is one, below which they are multiples of each
other: rounding leaves 1e-15 of sums in double precision, and (1e-7)^2 of columns in single precision."""
SCHWARZ_SLACK = 1 + 1e-6
"""Of rounding, where products of sums are compared with each other."""
FEATURE_ROWS = 64
"""Examples of a unit that are used: one number is asked for, and a pass over all images of many clients
would take as long as several rounds."""


@dataclass(frozen=True)
class FeatureScale(Question[Tensors]):
    """The sum of squares of everyone's features at phi, of a few dozen examples each, and their number."""

    model: Model
    phi: Tensor
    bounds: tuple[float, float] | None
    name: ClassVar[str] = "feature scale"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": self.phi}

    guarded: ClassVar[tuple[str, ...]] = ("size",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        return (vectors["size"] >= 0).all(1)

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        phi, cohort = asked["phi"], units.cohort.thinned(FEATURE_ROWS)
        with torch.no_grad():
            features = self.model.features(phi, cohort)
        size = phi.new_zeros(len(cohort), dtype=torch.float64)
        if isinstance(features, Tensor):
            features = self.model.split_offset(features)[0]
        for leaf in leaves(features):
            if leaf.is_floating_point():
                rows = leaf.double().square().unsqueeze(-1).flatten(1).sum(1)
                size = size.index_add(0, cohort.owner, rows)
        good = torch.isfinite(size.to(phi.dtype))  # one broken client must not set everyone's scale
        return Answer(good, {"size": torch.stack((size, cohort.sizes.double()), 1)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        size, count = total.plain_sum("size", self.phi.new_zeros(2, dtype=torch.float64)).tolist()
        low, high = self.bounds or (0.0, math.inf)
        scale = math.sqrt(count / size) if size > 0 and math.isfinite(size) else 1.0
        return {"scale": self.phi.new_tensor(min(max(scale, low), high), dtype=torch.float64)}


@dataclass(frozen=True)
class FeatureMoments(Question[Tensors]):
    """Sums of f f' (``whole``), or of f's squares, over everyone's features at phi, with a one for a bias;
    and the number of examples.

    For priors with a scale in each direction: known are ``spread`` and ``shape`` of z, see ``shapes``. A
    covariate in raw units, or far from zero, would otherwise start with a spread that is far too narrow along
    directions of which a client's rows say little, and grows slowly there.
    """

    model: Model
    phi: Tensor
    whole: bool
    name: ClassVar[str] = "feature moments"
    quorum: ClassVar[float] = 0.0  # a start can be made without those who are not finite

    guarded: ClassVar[tuple[str, ...]] = ("moments",)

    def possible(self, vectors: Tensors) -> Tensor | None:
        sent = vectors["moments"]
        if not self.whole:
            return (sent >= 0).all(1)
        q = head_layout(self.model)[1]
        return (sent[:, -1] >= 0) & moments_possible(sent[:, :-1].unflatten(1, (q, q)))

    @property
    def shows_rows(self) -> int:
        return LEAST_EXAMPLES

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": self.phi}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        phi, cohort = asked["phi"], units.cohort.thinned(FEATURE_ROWS)
        f = cohort.pad(head_features(self.model, phi, cohort)[0])
        second = (f.mT @ f).flatten(1) if self.whole else f.square().sum(1)
        moments = torch.cat((second, cohort.sizes.double().unsqueeze(1)), 1)
        good = torch.isfinite(moments.to(phi.dtype)).all(1)
        return Answer(good, {"moments": moments * (cohort.sizes >= LEAST_EXAMPLES).unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> Tensors:
        outputs, q = head_layout(self.model)
        shape = (q, q) if self.whole else (q,)
        sent = total.plain_sum("moments", self.phi.new_zeros(math.prod(shape) + 1, dtype=torch.float64))
        if not float(sent[-1]) or not float(sent[:-1].abs().max()) > 0:
            return {}
        return shapes(sent[:-1].reshape(shape) / sent[-1], 1.0, outputs)


def moments_possible(second: Tensor) -> Tensor:
    """Which of these ``[S, q, q]`` can be sums of f f': no entry is more than the diagonal allows."""
    size = second.diagonal(dim1=1, dim2=2)
    most = SCHWARZ_SLACK * size.unsqueeze(1) * size.unsqueeze(2)
    return (size >= 0).all(1) & (second.square() <= most).flatten(1).all(1)


def head_layout(model: Model) -> tuple[int, int]:
    """Outputs of a linear head, and columns of what each of them weighs, a bias among them."""
    assert isinstance(model.z_layout, LinearLayout)
    return model.z_layout.outputs, model.z_layout.size // model.z_layout.outputs


def head_features(model: Model, phi: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor | None]:
    """Those columns for every row ``[n, q]`` in double precision, and what is added to the outputs."""
    assert isinstance(model.z_layout, LinearLayout)
    with torch.no_grad():
        features = model.features(phi, cohort)
    if not isinstance(features, Tensor):
        raise ModelError("a linear head needs one tensor of features per example")
    features, offset = model.split_offset(features)
    return (with_ones(features) if model.z_layout.bias else features).double(), offset


def shapes(second: Tensor, variance: float, outputs: int) -> Tensors:
    """Where z starts if outputs z'f are to have this variance, from the features' second moments ``[q, q]``,
    or from their squares ``[q]`` alone.

    ``spread``: a standard deviation for each coordinate of z, as if they were independent; ``shape``: the
    covariance of z for one output, in proportion to the inverse of the moments, so that it does not matter
    in which units and from which origin features are counted. Along a direction in which there are no
    features (a column that is always zero, or all levels of a category beside a bias) it is as wide as in
    the mean.
    """
    diagonal = second.diagonal() if second.dim() == 2 else second
    share, nothing = variance / len(diagonal), diagonal <= 1e-24 * diagonal.max()
    unit = torch.where(nothing, diagonal.max(), diagonal).rsqrt()
    spread = {"spread": math.sqrt(share) * unit.repeat(outputs)}
    if second.dim() == 1:
        return spread
    values, vectors = torch.linalg.eigh(unit[:, None] * second * unit)
    wide = torch.where(values > COLLINEAR, values, 1.0).rsqrt()
    root = unit[:, None] * vectors * wide
    return spread | {"shape": share * root @ root.mT}
