"""Data: sets of images by name, tasks on them and on user data, and partitions."""

from fedpop.data.catalogue import DATASETS, Dataset
from fedpop.data.folder_task import FolderTask
from fedpop.data.image_task import FullImageTask, ImageTask
from fedpop.data.images import Images, ImageSet, open_images
from fedpop.data.table_task import TableTask
from fedpop.data.user_data import FunctionTask
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
    "FolderTask",
    "FullImageTask",
    "FunctionTask",
    "ImageSet",
    "ImageTask",
    "Images",
    "Partition",
    "Scheme",
    "Shards",
    "TableTask",
    "open_images",
    "share_sizes",
]
