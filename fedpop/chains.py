"""How chains are run, in a round and after training."""

from fedpop.client.final import Final
from fedpop.client.local_steps import Steps
from fedpop.client.sampler import Chain

__all__ = ["Chain", "Final", "Steps"]
