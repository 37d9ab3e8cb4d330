"""Labelled examples dealt out to clients: pure functions of labels, settings and a seed."""

from fedpop.federation.partitions.base import Partition, Scheme, share_sizes
from fedpop.federation.partitions.by_class import ByClass
from fedpop.federation.partitions.by_key import ByKey
from fedpop.federation.partitions.dirichlet import Dirichlet
from fedpop.federation.partitions.iid import IID
from fedpop.federation.partitions.shards import Shards

__all__ = ["IID", "ByClass", "ByKey", "Dirichlet", "Partition", "Scheme", "Shards", "share_sizes"]
