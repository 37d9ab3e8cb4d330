"""What a population prior p(z | beta) is to the rest of the library.

beta is one flat vector. A prior says how z is drawn and scored, what a client sends about it, and what the
server makes of the sum. What only some priors can do is asked for by ``component`` (closed-form
posteriors), ``forms`` (of I) and ``em``. A prior whose normalising constant cannot be written down
(``normalised``) cannot be drawn from directly either; chains on the prior itself, which take no data, do
both (``kernels.prior_chains``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.priors.declared import check_declared
from fedpop.settings import Setting

if TYPE_CHECKING:
    from fedpop.priors.normal import Normal


REACH = 1e3
"""How far scales may go from where they start, unless told: as many times below the smallest of them and
above the largest. Where they start has the data's units, so that it does not matter which these are."""
FAR = 1e6
"""The same of norms: so many times the largest scale, or what they start at."""


def in_words(v: float) -> str:
    """A size with three digits after the point, or three that count.

    >>> in_words(1.41549), in_words(0.0), in_words(0.00057), in_words(571691.25)
    ('1.415', '0.000', '0.00057', '5.72e+05')
    """
    return f"{v:.3f}" if v == 0 or 0.01 <= v < 1e5 else f"{v:.3g}"


def check_scale(scale: float | None, bounds: tuple[float, float] | None) -> None:
    """Raise unless bounds, if any, leave room between them, and the scale lies inside."""
    if bounds is None:
        return
    if not bounds[0] < bounds[1]:
        raise SettingsError(f"scale bounds must satisfy 0 < low < high, not {bounds}")
    if scale is not None and not bounds[0] <= scale <= bounds[1]:
        raise SettingsError(f"scale {scale} lies outside its bounds {bounds}")


def into_ball(v: Tensor, radius: float | None) -> Tensor:
    """The nearest vector that is no longer than this."""
    if radius is None:
        return v
    length = float(torch.linalg.vector_norm(v))
    return v if length <= radius else v * (radius / length)


class Guess(NamedTuple):
    """What a fixed guess Q of a posterior's precision says at draws of z: ``step`` is Q^-1 times the slope
    of the log-posterior at each, ``[C, S, d]``, ``variance`` the diagonal of Q^-1, ``[C, d]``, and ``cov``
    all of it, ``[C, d, d]``, for those who need it."""

    step: Tensor
    variance: Tensor
    cov: Tensor | None = None


def positive(matrix: Tensor) -> Tensor:
    """The nearest matrix whose eigenvalues are at least a hundredth."""
    values, vectors = torch.linalg.eigh(matrix)
    out: Tensor = vectors * values.clamp(min=1e-2) @ vectors.mT
    return out


class Part(NamedTuple):
    """One Normal of a prior that is a mixture of them: log weight, family, and its own beta."""

    log_weight: Tensor
    normal: Normal
    beta: Tensor


class Prior(Setting, ABC):
    """A family p(z | beta); frozen dataclasses of settings, everything that changes is in beta."""

    name: ClassVar[str]
    forms: ClassVar[tuple[str, ...]] = ("left",)
    """Forms of I that it can send; see ``priors.normal``."""
    em: ClassVar[bool] = False
    """Steps of EM can be made from I alone."""
    normalised: ClassVar[bool] = True
    """log p(z | beta) is known with its constant, and ``draw`` is exact; otherwise the server runs chains."""
    chains: int = 0
    steps: int = 0
    ship: int = 0
    """Of a prior that is not normalised: the server's chains, their transitions a round, states shipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_declared(self)

    mean: float
    scale: float | None
    """Where beta starts; None leaves it to the data."""
    bounds: tuple[float, float] | None
    ball: float | None
    """The projection sets; None leaves them to where beta starts."""

    @property
    def covariance(self) -> str:
        """``isotropic``, ``diagonal`` or ``full``: the shape of ``precision``."""
        return "isotropic"

    @property
    def component(self) -> Normal | None:
        """The family of which this prior is a mixture (``parts``), itself for a Normal, or None."""
        return None

    # --- the flat vector ---------------------------------------------------------------------

    @abstractmethod
    def size(self, d: int) -> int:
        """The length of beta for z of d dimensions."""

    @abstractmethod
    def dimension(self, beta: Tensor) -> int:
        """d from the length of beta."""

    @abstractmethod
    def init(self, mu: Tensor, scale: float, key: Key | None = None) -> Tensor:
        """beta around this mean with this scale; ``key`` for what has to start at random."""

    @abstractmethod
    def rescaled(self, beta: Tensor, scale: float) -> Tensor:
        """A starting beta, made with scale one, at another scale."""

    def spread_out(self, beta: Tensor, sd: Tensor, shape: Tensor | None = None) -> Tensor:
        """A starting beta with these standard deviations ``[d]``, or with one that stands for them; where
        covariances are full and a ``shape [q, q]`` is known, blocks of it."""
        return self.rescaled(beta, float(sd.log().mean().exp()))

    def widened(self, beta: Tensor, factor: float) -> Tensor:
        """beta with all standard deviations about its centre, or its centres, multiplied by this."""
        parts = self.parts(beta)
        if parts is None:
            raise SettingsError(f"{self.name} priors are not made of Normals, whose width can be changed")
        betas = []
        for _, normal, own in parts:
            mu = normal.mu(own)
            if normal.covariance == "full":
                betas.append(normal.pack(mu, factor * normal.factor(own)))
            else:
                betas.append(torch.cat((mu, own[len(mu) :] + math.log(factor))))
        return self.replaced(beta, betas)

    @abstractmethod
    def mu(self, beta: Tensor) -> Tensor:
        """A centre, ``[d]``: the mean where it is known."""

    @abstractmethod
    def sd(self, beta: Tensor) -> Tensor:
        """Marginal standard deviations ``[d]``, where they are known, or what stands for them."""

    def summary(self, beta: Tensor, states: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and standard deviations of z, ``[d]`` each; ``states`` are what the server keeps for it."""
        return self.mu(beta), self.sd(beta)

    @abstractmethod
    def lines(self, beta: Tensor, states: Tensors) -> list[str]:
        """What was learned, in words."""

    def parts(self, beta: Tensor) -> Sequence[Part] | None:
        """This prior as a mixture of Normals; None where it is not one."""
        return None

    def replaced(self, beta: Tensor, betas: Sequence[Tensor]) -> Tensor:
        """The same weights over other Normals."""
        raise SettingsError(f"{self.name} priors are not made of Normals")

    def matched(self, beta: Tensor, reference: Tensor) -> Tensor:
        """The same density, labelled as in another beta, so that the two can be averaged."""
        return beta

    # --- density and draws -------------------------------------------------------------------

    @abstractmethod
    def value_and_grad(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """log p(z | beta), up to a constant unless ``normalised``, and its gradient in z."""

    def log_prob(self, beta: Tensor, z: Tensor) -> Tensor:
        return self.value_and_grad(beta, z)[0]

    def draw(self, beta: Tensor, units: Tensor, key: Key, chains: int) -> Tensor:
        """z ~ p(. | beta) for these units, ``[C, K, d]``, where there are exact draws."""
        raise SettingsError(f"{self.name} priors have no exact draws; chains on the prior make them")

    def check_chains(self, beta: Tensor, z: Tensor) -> None:
        """Raise where chains on a prior that is not normalised say that it has no density."""

    @abstractmethod
    def unit(self, beta: Tensor) -> Tensor:
        """The natural unit of z, ``[d]``: unit^-2 bounds (or stands for) the curvature of -log p."""

    def precision(self, beta: Tensor) -> Tensor:
        """The same as a ``[d, d]`` matrix, which full covariances need."""
        return torch.diag(self.unit(beta).square().reciprocal())

    @abstractmethod
    def cover(self, beta: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        """Exact draws of a law that covers p(. | beta): what a chain may jump to. From standard
        normal noise ``[..., d]`` and uniform numbers ``[...]``."""

    @abstractmethod
    def log_cover(self, beta: Tensor, z: Tensor) -> Tensor:
        """The log-density of that law, up to a constant."""

    # --- what a client sends, and what the server does with it -------------------------------

    @abstractmethod
    def score(
        self, beta: Tensor, z: Tensor, likelihood_grad: Tensor, form: str, guess: Guess | None = None
    ) -> Tensor:
        """I averaged over draws: z and grad_z log p(D | z) ``[C, S, d]`` to ``[C, size]``."""

    def expected_score(self, beta: Tensor, log_weight: Tensor, means: Tensor, covs: Tensor) -> Tensor:
        """I when the posterior is a known mixture of Gaussians, one for each of ``parts``: log-weights
        ``[C, K]``, means ``[C, K, d]`` and covariances ``[C, K, d, d]``."""
        raise SettingsError(f"with {self.name} priors posteriors are not closed-form")

    def gradient(self, beta: Tensor, score: Tensor) -> Tensor:
        """The gradient in the coordinates of beta that belongs to a (sum of) scores."""
        return self.mask(score)

    def mask(self, v: Tensor) -> Tensor:
        """Zero where a parameter is fixed."""
        return v

    def units(self, beta: Tensor) -> Tensor:
        """The natural size of a change of each coordinate of beta, for gradient steps."""
        return torch.ones_like(beta)

    def scale_score(self, score: Tensor) -> Tensor | None:
        """Of beta, or a score ``[..., size]``, the coordinates that are logarithms of a scale; None where
        they do not stand alone."""
        return None

    @property
    def learns_scale(self) -> bool:
        return True

    def em_step(self, beta: Tensor, score: Tensor, rate: float, floor: Tensor | float = 0.0) -> Tensor:
        """A step of stochastic-approximation EM from the score averaged over clients."""
        raise SettingsError(f"{self.name} priors have no EM step; use beta_step=fedpop.steps.Adam()")

    def scales(self, beta: Tensor) -> tuple[float, float, float]:
        """The smallest and the largest standard deviation in any direction, and the norm of the mean."""
        sd = self.sd(beta)
        return float(sd.min()), float(sd.max()), float(self.mu(beta).norm())

    def first_sets(self, beta: Tensor) -> Tensor:
        """Bounds and ball of a run that starts from this beta: as given, or in units of the start."""
        least, most, norm = self.scales(beta)
        reach = REACH if self.scale is None else FAR  # a scale that was given may be in other units
        low, high = self.bounds or (least / reach, most * reach)
        ball = self.ball or FAR * max(most, norm / REACH)
        return torch.tensor((low, high, ball), dtype=torch.float64, device=beta.device)

    def within(self, sets: Tensor) -> Self:
        """This prior with the projection sets of a run."""
        low, high, ball = sets.tolist()
        return replace(self, bounds=(low, high), ball=ball)  # type: ignore[type-var]

    @abstractmethod
    def project(self, beta: Tensor) -> Tensor:
        """The nearest beta inside the projection sets; itself where there are none."""

    def boxed(self, beta: Tensor) -> Tensor:
        """The nearest beta whose coordinates each lie between bounds, about those of the projection sets: of
        these no coordinate depends on another."""
        return self.project(beta)

    @abstractmethod
    def at_bound(self, beta: Tensor) -> list[str]:
        """Which parameters sit on the edge of a projection set."""
