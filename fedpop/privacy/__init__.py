"""Secure sums and differential privacy."""

from fedpop.privacy.gaussian import Gaussian

__all__ = ["Gaussian"]
