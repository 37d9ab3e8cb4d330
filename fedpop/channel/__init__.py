"""What happens to a message between a site and the server."""

from fedpop.channel.guard import Guard
from fedpop.channel.message import Answer, Tensors, Total
from fedpop.channel.pipeline import Channel, Choice, Payload, resolve_compressor
from fedpop.channel.sent import Message, SiteSum
from fedpop.channel.tally import Heard, Tally

__all__ = [
    "Answer",
    "Channel",
    "Choice",
    "Guard",
    "Heard",
    "Message",
    "Payload",
    "SiteSum",
    "Tally",
    "Tensors",
    "Total",
    "resolve_compressor",
]
