"""What a population prior p(z | beta) is to the rest of the library.

beta is one flat vector. A prior says how z is drawn and scored, what a client sends about it, and what the
server makes of the sum (``Prior``). What only some can do is said by what they derive from: priors made of
Normals have closed-form posteriors where heads are linear (``OfNormals``); one whose normalising constant
cannot be written down cannot be drawn from directly either, and chains on the prior itself, which take no
data, do both (``Unnormalised``, ``kernels.prior_chains``). Beside it the hyperprior p(phi, beta).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedpop.checked import Positive
from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.settings import Setting, ours

if TYPE_CHECKING:
    from fedpop.priors.normal import Normal


SCALE_REACH = 1e3
"""How far scales may go from where they start, by default: as many times below the smallest of them and
above the largest. Where they start has the data's units, so that it does not matter which these are."""
NORM_REACH = 1e6
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


class Sets(NamedTuple):
    """Projection sets: standard deviations between bounds, the mean inside a ball; None where there is none.

    A run has those that were given, or some in units of where it starts (``Prior.first_sets``), among what
    its server tells and publishes.
    """

    bounds: tuple[float, float] | None = None
    ball: float | None = None

    @classmethod
    def of(cls, tensors: Tensors) -> Sets | None:
        """Those of a run; None where there are none."""
        if "sets" not in tensors:
            return None
        low, high, ball = tensors["sets"].tolist()
        return cls((low, high), ball)


def positive(matrix: Tensor) -> Tensor:
    """The nearest matrix whose eigenvalues are at least a hundredth."""
    values, vectors = torch.linalg.eigh(matrix)
    out: Tensor = vectors * values.clamp(min=1e-2) @ vectors.mT
    return out


class Prior(Setting, ABC):
    """A family p(z | beta); frozen dataclasses of settings, everything that changes is in beta."""

    name: ClassVar[str]
    forms: ClassVar[tuple[str, ...]] = ("left",)
    """Forms of I that it can send; see ``priors.normal``."""
    em: ClassVar[bool] = False
    """Steps of EM can be made from I alone (``em_step``)."""
    normalised: ClassVar[bool] = True
    """log p(z | beta) is known with its constant, and ``draw`` is exact; see ``Unnormalised``."""
    covariance: str = "isotropic"
    """``isotropic``, ``diagonal`` or ``full``: the shape of ``precision``."""

    mean: float
    scale: float | None
    """Where beta starts; None leaves it to the data."""
    bounds: tuple[float, float] | None
    ball: float | None
    """The projection sets; None leaves them to where beta starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_declared(self)

    @property
    def component(self) -> Normal | None:
        """The family of which this prior is a mixture, itself for a Normal; None where posteriors are not
        closed-form."""
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

    @abstractmethod
    def mu(self, beta: Tensor) -> Tensor:
        """A centre, ``[d]``: the mean where it is known."""

    @abstractmethod
    def sd(self, beta: Tensor) -> Tensor:
        """Marginal standard deviations ``[d]``, where they are known, or what stands for them."""

    @abstractmethod
    def lines(self, beta: Tensor, states: Tensors) -> list[str]:
        """What was learned, in words; ``states`` are what the server keeps for it."""

    # --- density and draws -------------------------------------------------------------------

    @abstractmethod
    def value_and_grad(self, beta: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """log p(z | beta), up to a constant unless ``normalised``, and its gradient in z."""

    def log_prob(self, beta: Tensor, z: Tensor) -> Tensor:
        return self.value_and_grad(beta, z)[0]

    def draw(self, beta: Tensor, units: Tensor, key: Key, chains: int) -> Tensor:
        """z ~ p(. | beta) for these units, ``[C, K, d]``, where there are exact draws."""
        raise SettingsError(f"{self.name} priors have no exact draws; chains on the prior make them")

    def unit(self, beta: Tensor) -> Tensor:
        """The natural unit of z, ``[d]``: unit^-2 bounds (or stands for) the curvature of -log p."""
        return self.sd(beta)

    def precision(self, beta: Tensor) -> Tensor:
        """The same as a ``[d, d]`` matrix, which full covariances need."""
        return torch.diag(self.unit(beta).square().reciprocal())

    def cover(self, beta: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        """Exact draws of a law that covers p(. | beta), what a chain may jump to: a Normal one by default.
        From standard normal noise ``[..., d]`` and uniform numbers ``[...]``."""
        return self.mu(beta) + self.sd(beta) * noise

    def log_cover(self, beta: Tensor, z: Tensor) -> Tensor:
        """The log-density of that law, up to a constant."""
        return -0.5 * ((z - self.mu(beta)) / self.sd(beta)).square().sum(-1)

    # --- what a client sends, and what the server does with it -------------------------------

    @abstractmethod
    def score(
        self, beta: Tensor, z: Tensor, likelihood_grad: Tensor, form: str, guess: Guess | None = None
    ) -> Tensor:
        """I averaged over draws: z and grad_z log p(D | z) ``[C, S, d]`` to ``[C, size]``."""

    def gradient(self, beta: Tensor, score: Tensor) -> Tensor:
        """The gradient in the coordinates of beta that belongs to a (sum of) scores."""
        return self.mask(score)

    def mask(self, v: Tensor) -> Tensor:
        """Zero where a parameter is fixed."""
        return v

    def units(self, beta: Tensor) -> Tensor:
        """The natural size of a change of each coordinate of beta, for gradient steps."""
        return torch.ones_like(beta)

    def em_step(self, beta: Tensor, score: Tensor, rate: float, floor: Tensor | float = 0.0) -> Tensor:
        """A step of stochastic-approximation EM from the score averaged over clients."""
        raise SettingsError(f"{self.name} priors have no EM step; use beta_step=fedpop.steps.Adam()")

    # --- projection sets: those of the run, or else those that were given ----------------------

    def scales(self, beta: Tensor) -> tuple[float, float, float]:
        """The smallest and the largest standard deviation in any direction, and the norm of the mean."""
        sd = self.sd(beta)
        return float(sd.min()), float(sd.max()), float(self.mu(beta).norm())

    def first_sets(self, beta: Tensor) -> Tensor:
        """Those of a run that starts from this beta: as given, or in units of the start."""
        least, most, norm = self.scales(beta)
        reach = (
            SCALE_REACH if self.scale is None else NORM_REACH
        )  # a scale that was given may be in other units
        low, high = self.bounds or (least / reach, most * reach)
        ball = self.ball or NORM_REACH * max(most, norm / SCALE_REACH)
        return torch.tensor((low, high, ball), dtype=torch.float64, device=beta.device)

    @abstractmethod
    def project(self, beta: Tensor, sets: Sets | None = None) -> Tensor:
        """The nearest beta inside them; itself where there are none."""

    @abstractmethod
    def at_bound(self, beta: Tensor, sets: Sets | None = None) -> list[str]:
        """Which parameters sit on the edge of one."""


class Part(NamedTuple):
    """One Normal of a prior that is a mixture of them: log weight, family, and its own beta."""

    log_weight: Tensor
    normal: Normal
    beta: Tensor


class OfNormals(Prior):
    """A mixture of Normals, or one of them.

    Posteriors are mixtures of Gaussians where the log-likelihood is quadratic in z. A class with another
    density says ``component = None``.
    """

    @property
    @abstractmethod
    def component(self) -> Normal | None: ...

    @property
    def learns_scale(self) -> bool:
        return True

    @abstractmethod
    def parts(self, beta: Tensor) -> Sequence[Part]:
        """The Normals, with their weights."""

    @abstractmethod
    def replaced(self, beta: Tensor, betas: Sequence[Tensor]) -> Tensor:
        """The same weights over other Normals."""

    @abstractmethod
    def expected_score(self, beta: Tensor, log_weight: Tensor, means: Tensor, covs: Tensor) -> Tensor:
        """I when the posterior is a known mixture of Gaussians, one for each of ``parts``: log-weights
        ``[C, K]``, means ``[C, K, d]`` and covariances ``[C, K, d, d]``."""

    def spread_out(self, beta: Tensor, sd: Tensor, shape: Tensor | None = None) -> Tensor:
        """A starting beta with these standard deviations ``[d]``, or with one that stands for them; where
        covariances are full and a ``shape [q, q]`` is known, blocks of it."""
        return self.rescaled(beta, float(sd.log().mean().exp()))

    def matched(self, beta: Tensor, reference: Tensor) -> Tensor:
        """The same density, labelled as in another beta, so that the two can be averaged."""
        return beta


class Unnormalised(Prior):
    """A density of which the constant is not known.

    The server runs chains on it, which estimate the constant's gradient and make draws.
    """

    normalised: ClassVar[bool] = False
    chains: int
    steps: int
    ship: int
    """The server's chains, their transitions a round, states shipped to clients."""

    @abstractmethod
    def check_chains(self, beta: Tensor, z: Tensor) -> None:
        """Raise where the chains say that there is no density."""


def normals_of(prior: Prior) -> OfNormals | None:
    """The prior, where it is made of Normals."""
    return prior if isinstance(prior, OfNormals) and prior.component is not None else None


def widened(prior: Prior, beta: Tensor, factor: float) -> Tensor:
    """beta with all standard deviations about its centre, or its centres, multiplied by this."""
    normals = normals_of(prior)
    if normals is None:
        raise SettingsError(f"{prior.name} priors are not made of Normals, whose width can be changed")
    betas = []
    for _, normal, own in normals.parts(beta):
        mu = normal.mu(own)
        if normal.covariance == "full":
            betas.append(normal.pack(mu, factor * normal.factor(own)))
        else:
            betas.append(torch.cat((mu, own[len(mu) :] + math.log(factor))))
    return normals.replaced(beta, betas)


def matched(prior: Prior, beta: Tensor, reference: Tensor) -> Tensor:
    """The same density, labelled as in another beta, so that the two can be averaged."""
    normals = normals_of(prior)
    return beta if normals is None else normals.matched(beta, reference)


def moments(prior: Prior, beta: Tensor, states: Tensors) -> tuple[Tensor, Tensor]:
    """Mean and standard deviations of z, ``[d]`` each: those of the server's chains, where there are any."""
    if prior.normalised or "states" not in states:
        return prior.mu(beta), prior.sd(beta)
    return states["states"].mean(0), states["states"].std(0)


# --- a prior of one's own --------------------------------------------------------------------

GOES_WITH = {
    "component": "component = None, unless posteriors are Gaussian",
    "em": "em = False, unless it has an em_step",
    "forms": 'forms = ("left",), the forms of I that score can make',
    "score": "score(), what a client sends of beta",
    "sd": "sd(), its standard deviations",
    "sample": "sample(), its draws from standard normal noise",
}
"""What belongs to one density and no other, and how it is said."""


def check_declared(prior: Prior) -> None:
    """Raise where a class has a density of its own and would inherit what belongs to another's: its closed
    forms would be wrong."""
    cls = type(prior)
    if not cls.normalised and not issubclass(cls, Unnormalised):
        raise SettingsError(
            f"{cls.__name__} says normalised = False: let it derive from fedpop.priors.Unnormalised, which "
            "says what the server's chains on it need"
        )
    order = [c for c in cls.__mro__ if "value_and_grad" in vars(c)]
    if ours(order[0]):
        return
    needed = dict(GOES_WITH)
    if cls.em:
        needed["em_step"] = "em_step(), since it says em = True"
    if prior.component is not None:
        needed["expected_score"] = "expected_score(), since it says that posteriors are Gaussian"
    heir = next(
        (c for c in order[1:] if not getattr(vars(c)["value_and_grad"], "__isabstractmethod__", 0)), None
    )
    if heir is None:  # from Prior itself, whose abstract methods have asked for most of this
        needed = {n: why for n, why in needed.items() if n in ("em_step", "expected_score")}
        needed |= {"draw": "draw(), unless it is fedpop.priors.Unnormalised"} if cls.normalised else {}
    theirs = cls.__mro__[cls.__mro__.index(heir or order[-1]) :]
    missing = [why for n, why in needed.items() if not _said(cls, n, theirs)]
    if missing:
        whose = "nobody" if heir is None else heir.__name__
        raise SettingsError(
            f"{cls.__name__} has a density of its own (value_and_grad), and would have from {whose} what "
            f"does not belong to it; let it say too: {'; '.join(missing)}"
        )


def _said(cls: type, name: str, theirs: tuple[type, ...]) -> bool:
    names = (name, "draw") if name == "sample" else (name,)
    return any(n in vars(c) for c in cls.__mro__ if c not in theirs for n in names)


@dataclass(frozen=True)
class Hyperprior(Setting):
    """log p(phi, beta), flat by default: phi and mu Normal around 0, log sigma Normal around a value.

    Args:
        phi_scale: The standard deviation of phi around 0; None (the default) is flat.
        mean_scale: That of the prior's mean around 0, for Normal priors; None (the default) is flat.
        log_scale: The mean and the standard deviation of log sigma, for Normal priors that are isotropic
            or diagonal; None (the default) is flat. Give it where clients are few.

    >>> import torch
    >>> Hyperprior(phi_scale=2.0).phi_grad(torch.tensor([4.0]))
    tensor([-1.])
    """

    phi_scale: Positive | None = None
    mean_scale: Positive | None = None
    log_scale: tuple[float, Positive] | None = None

    def check(self, prior: Prior) -> None:
        """Raise unless this is a hyperprior for such a prior."""
        if prior.covariance == "full" and self.log_scale is not None:
            raise SettingsError("a hyperprior on the scale is there for isotropic or diagonal priors")
        if self.on_beta and prior.component is not prior:
            raise SettingsError(
                f"a hyperprior on the prior's mean or scale is there for Normal priors, not {prior.name}"
            )

    @property
    def on_beta(self) -> bool:
        """It says something about the prior's mean or scale."""
        return self.mean_scale is not None or self.log_scale is not None

    def plus_phi(self, phi: Tensor, j: Tensor) -> Tensor:
        """A gradient in phi, with this one's added where there is one."""
        return j if self.phi_scale is None else j + self.phi_grad(phi)

    def plus_beta(self, prior: Prior, beta: Tensor, i: Tensor) -> Tensor:
        """A score, with this one's added where there is one."""
        return i + self.beta_grad(prior, beta) if self.on_beta else i

    def value(self, prior: Prior, phi: Tensor, beta: Tensor) -> float:
        """log p(phi, beta), up to a constant."""
        out, d = 0.0, prior.dimension(beta)
        if self.phi_scale is not None:
            out -= 0.5 * float(phi.square().sum()) / self.phi_scale**2
        if self.mean_scale is not None:
            out -= 0.5 * float(beta[:d].square().sum()) / self.mean_scale**2
        if self.log_scale is not None:
            centre, spread = self.log_scale
            out -= 0.5 * float((beta[d:] - centre).square().sum()) / spread**2
        return out

    def curvature(self, prior: Prior, phi: Tensor, beta: Tensor) -> Tensor:
        """-hess log p(phi, beta), which is diagonal, ``[p, p]``."""
        of_phi, of_beta, d = torch.zeros_like(phi), torch.zeros_like(beta), prior.dimension(beta)
        if self.phi_scale is not None:
            of_phi += self.phi_scale**-2
        if self.mean_scale is not None:
            of_beta[:d] += self.mean_scale**-2
        if self.log_scale is not None:
            of_beta[d:] += self.log_scale[1] ** -2
        return torch.diag(torch.cat((of_phi, of_beta)))

    def phi_grad(self, phi: Tensor) -> Tensor:
        return torch.zeros_like(phi) if self.phi_scale is None else -phi / self.phi_scale**2

    def stiffness(self, prior: Prior, beta: Tensor, floor: float) -> float:
        """How far one full EM step would carry beta along this gradient, relative to where it pulls:
        above one, steps must be shortened or they overshoot."""
        largest = 0.0
        if self.mean_scale is not None:
            largest = max(float(prior.sd(beta).square().max()), floor) / self.mean_scale**2
        if self.log_scale is not None:
            largest = max(largest, 0.5 / self.log_scale[1] ** 2)
        return largest

    def beta_grad(self, prior: Prior, beta: Tensor) -> Tensor:
        """In the coordinates of the score: they are beta's own for the scales this is allowed for."""
        grad = torch.zeros_like(beta)
        if not self.on_beta:
            return grad
        d = prior.dimension(beta)
        if self.mean_scale is not None:
            grad[:d] = -beta[:d] / self.mean_scale**2
        if self.log_scale is not None:
            centre, spread = self.log_scale
            grad[d:] = (centre - beta[d:]) / spread**2
        return grad
