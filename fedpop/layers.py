"""Layers, and changes to them, that make a network fit to be federated."""

from fedpop.models.augment import CropFlip
from fedpop.models.modules import replace_batchnorm
from fedpop.models.standardise import Standardise

__all__ = ["CropFlip", "Standardise", "replace_batchnorm"]
