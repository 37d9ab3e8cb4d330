"""Layers, and changes to them, that make a network fit to be federated."""

from fedpop.models.augment import CropFlip
from fedpop.models.modules import replace_batchnorm

__all__ = ["CropFlip", "replace_batchnorm"]
