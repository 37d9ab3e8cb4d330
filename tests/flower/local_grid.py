"""A Grid in this process: nodes run the ClientApp at once, with a real serialisation round trip.

What can go wrong between machines can be made to: messages that are lost, late, doubled or corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Fault = Callable[[str, Message, Message], list[Message] | None]
"""``fault(site, request, reply)``: what arrives in place of the reply; None is never."""


def wire(message: Message) -> Message:
    """A message after it was bytes."""
    sent = message_to_proto(message)
    return message_from_proto(type(sent).FromString(sent.SerializeToString()))


class LocalGrid(Grid):
    """Nodes by the folders of their sites."""

    def __init__(self, app: Any, folders: Mapping[str, Any], first: int = 2**40 + 11) -> None:
        self.app = app
        self.nodes: dict[int, Context] = {}
        self.names: dict[int, str] = {}
        self.registered: dict[int, str] = {}
        self.offline: set[str] = set()
        self.first, self.count, self.now = first, 0, 0.0
        self.replies: dict[str, tuple[float, Message]] = {}
        self.fault: Fault | None = None
        self.delay: Callable[[str, Message], float] = lambda site, request: 0.0
        self.traffic: list[tuple[str, Message, Message]] = []
        """Site, request and reply, of all that was ever sent."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        for name, folder in folders.items():
            self.join(name, folder)

    def join(self, name: str, folder: Any) -> int:
        node = self.first + len(self.nodes)
        self.nodes[node] = Context(1, node, {"site": str(folder)}, RecordDict(), {})
        self.names[node] = name
        return node

    # --- time goes by when the server waits ----------------------------------------------------

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # --- the Grid --------------------------------------------------------------------------------

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.nodes if self.names[node] not in self.offline]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n, name=self.registered.get(n, "")) for n in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.count += 1
        metadata = message.metadata.__dict__
        metadata["_message_id"], metadata["_run_id"], metadata["_src_node_id"] = f"m{self.count}", 1, 1
        node = message.metadata.dst_node_id
        name = self.names[node]
        if name in self.offline:
            return f"m{self.count}"
        request = wire(message)
        try:
            reply = self.app(request, self.nodes[node])
        except Exception as error:
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reply = Message(Error(code=code, reason=repr(error)), reply_to=request)
        self.traffic.append((name, request, reply))
        arrived = [reply] if self.fault is None else self.fault(name, request, reply)
        for k, one in enumerate(arrived or []):
            one.metadata.__dict__["_reply_to_message_id"] = f"m{self.count}"
            due = self.now + self.delay(name, request)
            self.replies[f"m{self.count}{'+' * k}"] = (due, wire(one))
        return f"m{self.count}"

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted, out = set(message_ids), []
        for key in list(self.replies):
            due = self.replies[key][0]
            if key.rstrip("+") in wanted and due <= self.now:
                out.append(self.replies.pop(key)[1])
        return out
