"""How chains are run, in a round and after training."""

from fedpop.client.final import Final
from fedpop.client.sampler import Chain, Steps

__all__ = ["Chain", "Final", "Steps"]
