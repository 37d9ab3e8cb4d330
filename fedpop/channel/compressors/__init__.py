"""Unbiased compressors of vectors, with real encodings."""

from fedpop.channel.compressors.base import Compressor
from fedpop.channel.compressors.identity import Identity
from fedpop.channel.compressors.natural import Natural
from fedpop.channel.compressors.qsgd import QSGD
from fedpop.channel.compressors.rand_k import RandK

__all__ = ["QSGD", "Compressor", "Identity", "Natural", "RandK"]
