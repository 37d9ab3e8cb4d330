"""Unbiased compressors of what clients send."""

from fedpop.channel.compressors import QSGD, Compressor, Identity, Natural, RandK

__all__ = ["QSGD", "Compressor", "Identity", "Natural", "RandK"]
