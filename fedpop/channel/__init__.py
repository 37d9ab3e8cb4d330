"""What happens to a message between a site and the server."""

from fedpop.channel.guard import Guard
from fedpop.channel.message import Aggregate, Answer, Message, Payload, Tensors, Total
from fedpop.channel.pipeline import Channel, Choice, resolve_compressor

__all__ = [
    "Aggregate",
    "Answer",
    "Channel",
    "Choice",
    "Guard",
    "Message",
    "Payload",
    "Tensors",
    "Total",
    "resolve_compressor",
]
