"""Unbiased compressors of what clients send."""

from fedpop.message.compressors import QSGD, Compressor, Identity, Natural, RandK

__all__ = ["QSGD", "Compressor", "Identity", "Natural", "RandK"]
