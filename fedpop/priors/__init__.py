"""Population priors p(z | beta), one file each, and the hyperprior on beta."""

from __future__ import annotations

from fedpop.priors.base import Hyperprior, OfNormals, Part, Prior, Unnormalised
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import COVARIANCES, Normal
from fedpop.settings import named

__all__ = [
    "Energy",
    "Hyperprior",
    "Mixture",
    "Normal",
    "OfNormals",
    "Part",
    "Prior",
    "Unnormalised",
    "resolve",
]


def resolve(prior: Prior | str, covariance: str = "isotropic") -> Prior:
    """A prior from itself or from its name.

    Args:
        prior: A prior, or the name of one: "normal", "mixture", "energy", or "isotropic", "diagonal" or
            "full" for a Normal one with that covariance.
        covariance: That of "normal" and "mixture"; "isotropic" by default.

    >>> resolve("diagonal").covariance, resolve("mixture").name
    ('diagonal', 'Mixture')
    """
    if isinstance(prior, Prior):
        return prior
    if prior in COVARIANCES:
        return Normal(covariance=prior)
    cls = named(Prior, prior, "prior")
    return cls(covariance=covariance) if issubclass(cls, Normal | Mixture) else cls()
