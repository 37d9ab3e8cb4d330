"""Data by name: images, found or fetched and held as bytes, tasks made of them, and partitions."""

from fedpop.data.catalogue import DATASETS, Dataset
from fedpop.data.image_task import FullImageTask, ImageTask
from fedpop.data.images import Images, ImageSet, open_images
from fedpop.federation.partitions import (
    IID,
    ByClass,
    ByKey,
    Dirichlet,
    Partition,
    Scheme,
    Shards,
    share_sizes,
)

__all__ = [
    "DATASETS",
    "IID",
    "ByClass",
    "ByKey",
    "Dataset",
    "Dirichlet",
    "FullImageTask",
    "ImageSet",
    "ImageTask",
    "Images",
    "Partition",
    "Scheme",
    "Shards",
    "open_images",
    "share_sizes",
]
