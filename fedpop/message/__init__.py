"""What happens to a message between a site and the server."""

from fedpop.message.channel import Channel, Choice, resolve_compressor
from fedpop.message.declared import Sent
from fedpop.message.guard import Guard
from fedpop.message.message import Aggregate, Answer, Message, Payload, Tensors, Total

__all__ = [
    "Aggregate",
    "Answer",
    "Channel",
    "Choice",
    "Guard",
    "Message",
    "Payload",
    "Sent",
    "Tensors",
    "Total",
    "resolve_compressor",
]
