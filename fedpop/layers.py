"""Layers, and changes to them, that make a network fit to be federated."""

from fedpop.models.image_layers import CropFlip, Standardise
from fedpop.models.modules import replace_batchnorm

__all__ = ["CropFlip", "Standardise", "replace_batchnorm"]
