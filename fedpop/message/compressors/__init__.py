"""Unbiased compressors of vectors, with real encodings."""

from fedpop.message.compressors.base import Compressor, Identity
from fedpop.message.compressors.natural import Natural
from fedpop.message.compressors.qsgd import QSGD
from fedpop.message.compressors.rand_k import RandK

__all__ = ["QSGD", "Compressor", "Identity", "Natural", "RandK"]
