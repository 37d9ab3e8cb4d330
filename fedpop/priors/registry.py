"""Priors by name."""

from __future__ import annotations

from fedpop.errors import SettingsError
from fedpop.priors.base import Prior
from fedpop.priors.energy import Energy
from fedpop.priors.mixture import Mixture
from fedpop.priors.normal import COVARIANCES, Normal

NAMES = ("normal", *COVARIANCES, "mixture", "energy")


def resolve(prior: Prior | str, covariance: str = "isotropic") -> Prior:
    """A prior from itself or from its name, with this covariance unless the name says it.

    >>> resolve("diagonal").covariance
    'diagonal'
    """
    if isinstance(prior, Prior):
        return prior
    if prior == "normal":
        return Normal(covariance=covariance)
    if prior == "mixture":
        return Mixture(covariance=covariance)
    if prior == "energy":
        return Energy()
    if prior in COVARIANCES:
        return Normal(covariance=prior)
    raise SettingsError(f"unknown prior {prior!r}; known are {', '.join(NAMES)}")
