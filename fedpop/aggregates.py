"""Sums that hostile messages cannot move far: ``fit(..., aggregate=aggregates.TrimmedMean())``."""

from fedpop.server.robust import Krum, Median, TrimmedMean

__all__ = ["Krum", "Median", "TrimmedMean"]
