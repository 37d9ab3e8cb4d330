"""What the network reaches of a server: Flower's fleet protocol, for admitted sites, and nothing else.

Nothing here answers who submits runs, registers keys, asks for tasks or for documentation: there are no such
routes, at this address or another. A request is read once it is signed with an admitted key; who shows none
soon loses the connection, and makes room for the next where there are many. A site that asks for messages
is answered when there is one (or after ``HOLD_SECONDS`` seconds), so that nobody has to ask often.
"""

from __future__ import annotations

import asyncio
import binascii
import datetime as dt
import json
import logging
import socket
import ssl
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.servicer.fleet import fleet_handlers as fleet
from google.protobuf.message import DecodeError
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedpop.errors import SettingsError
from fedpop.flower.admission import Admission, Reason
from fedpop.flower.certificates import BEHIND, CLOCK_AHEAD
from fedpop.flower.requests import (
    PROCESS_HEADER,
    PROTOCOL,
    PROTOCOL_HEADER,
    SITE_HEADER,
    THE_SITE,
    VERSION_HEADER,
    why_not_understood,
)

log = logging.getLogger("fedpop.server")

ROUTE = "/v1/fleet/"
REQUEST_BYTES = 2**25
"""Bytes of a request at most: vectors travel in pieces of 20 MiB."""
STRANGER_SECONDS = 10.0
"""Seconds in which a connection has to show an admitted key."""
STRANGER_CONNECTIONS = 256
"""Connections at a time that have not; a handshake takes a third of a megabyte."""
SITE_CONNECTIONS = 16
"""Connections of one site."""
REQUESTS_PER_SECOND, REQUESTS_AT_ONCE = 400.0, 2000.0
"""Requests of a site in a second, and how many may come at once: more of them wait."""
REFUSAL_SECONDS = 1.0
"""Seconds before a refusal: whoever tries again and again has to wait."""
HOLD_SECONDS = 20.0
"""Seconds that a site's question for messages is held; Flower's nodes give up after 30."""
SENT_AGAIN = 2
"""Times that a message is handed out again whose reply did not come: what it asks for may be what ends the
site's process."""
PROTOBUF = "application/x-protobuf"

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Handler = Callable[[Any, Any], Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, reason: str, words: str) -> None:
        super().__init__(words)
        self.status, self.reason = status, reason


@dataclass
class Caller:
    """A key that may ask, and what is known of who does."""

    name: str
    """Of the site; nothing without keys."""
    process: str = ""
    """The one that was activated last, by the number that it gave itself."""
    budget: float = REQUESTS_AT_ONCE
    since: float = 0.0
    connections: set[H11Protocol] = field(default_factory=set)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wait(self, now: float) -> float:
        """Seconds that its next request has to wait."""
        self.budget = min(REQUESTS_AT_ONCE, self.budget + REQUESTS_PER_SECOND * (now - self.since)) - 1
        self.since = now
        return max(0.0, -self.budget / REQUESTS_PER_SECOND)


def _activate(request: Any, state: Any) -> Any:
    node = state.get_node_id_by_public_key(request.public_key)
    if node is not None:
        state.deactivate_node(node)  # whoever was there before: its process has ended, or is told so
    return fleet.activate_node(request, state)


ROUTES: dict[str, tuple[type[Any], Handler]] = {
    "activate-node": (ActivateNodeRequest, _activate),
    "deactivate-node": (DeactivateNodeRequest, fleet.deactivate_node),
    "send-node-heartbeat": (SendNodeHeartbeatRequest, fleet.send_node_heartbeat),
    "pull-messages": (PullMessagesRequest, lambda r, s: fleet.pull_messages(r, s, s.object_store)),
    "push-messages": (PushMessagesRequest, fleet.push_messages),
    "push-object": (PushObjectRequest, fleet.push_object),
    "pull-object": (PullObjectRequest, fleet.pull_object),
    "confirm-message-received": (
        ConfirmMessageReceivedRequest,
        lambda r, s: fleet.confirm_message_received(r, s, s.object_store),
    ),
}
APP: dict[str, tuple[type[Any], Handler]] = {
    "get-run": (GetRunRequest, fleet.get_run),
    "get-fab": (GetFabRequest, fleet.get_fab),
}
"""What only Flower's stock nodes ask for: the app that they run."""
ANYBODY: dict[str, tuple[type[Any], Handler]] = {
    "register-node": (RegisterNodeFleetRequest, lambda r, s: fleet.register_node(r, s, False)),
    "unregister-node": (UnregisterNodeFleetRequest, lambda r, s: fleet.unregister_node(r, s, False)),
}
"""Without keys every node says itself who it is."""


class Listener(socket.socket):
    """Where connections come from, TLS or not. Of those that have not shown an admitted key there are few:
    then the oldest of the address that has most of them makes room for the next."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
        self._strangers: dict[int, tuple[socket.socket, str]] = {}
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((host.strip("[]"), port))
        except OSError as error:
            self.close()
            raise SettingsError(f"port {port} of {host} cannot be had ({error.strerror})") from error

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        strangers = self.strangers
        if len(strangers) >= STRANGER_CONNECTIONS:
            ((most, _),) = Counter(host for _, host in strangers.values()).most_common(1)
            oldest = next(number for number, (_, host) in strangers.items() if host == most)
            with suppress(OSError):
                strangers.pop(oldest)[0].shutdown(socket.SHUT_RDWR)
        strangers[connection.fileno()] = connection, address[0]
        self._strangers = strangers
        return connection, address

    @property
    def strangers(self) -> dict[int, tuple[socket.socket, str]]:
        """Open connections, and where they are from, the oldest first."""
        return {n: found for n, found in self._strangers.items() if found[0].fileno() == n}

    def known(self, number: int) -> None:
        """The connection of this file number is a site's."""
        self._strangers.pop(number, None)


class Door:
    """The server's ASGI application."""

    def __init__(self, state: Any, admission: Admission | None, heard: Callable[[], None]) -> None:
        self._state, self._admission, self._heard = state, admission, heard
        self._callers: dict[bytes, Caller] = {}
        self._listener: Listener | None = None
        self._timers: dict[H11Protocol, asyncio.TimerHandle] = {}
        """Of connections that have not shown a key."""
        self._owners: dict[H11Protocol, Caller] = {}
        self._routes = ROUTES | (ANYBODY if admission is None else {})
        self._again: dict[str, int] = {}
        self._told: dict[tuple[str, str], float] = {}
        self._closing = False

    def offer_app(self) -> None:
        """Answer Flower's stock nodes, too."""
        self._routes = self._routes | APP

    # --- connections ---------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> Listener:
        """Where connections to this door are accepted."""
        self._listener = Listener(host, port)
        return self._listener

    def opened(self, connection: H11Protocol) -> None:
        wait = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._close, connection)
        self._timers[connection] = wait

    def closed(self, connection: H11Protocol) -> None:
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()
        if (owner := self._owners.pop(connection, None)) is not None:
            owner.connections.discard(connection)

    def _close(self, connection: H11Protocol) -> None:
        self.closed(connection)
        connection.transport.abort()

    def _known(self, connection: H11Protocol | None, caller: Caller) -> None:
        """The connection is a site's."""
        if connection is None or connection in self._owners:
            return
        self.closed(connection)
        if self._listener is not None:
            self._listener.known(connection.transport.get_extra_info("socket").fileno())
        while len(caller.connections) >= SITE_CONNECTIONS:
            self._close(next(iter(caller.connections)))
        caller.connections.add(connection)
        self._owners[connection] = caller

    # --- requests ------------------------------------------------------------------------------

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        kind, status, more = PROTOBUF, 200, list[tuple[bytes, bytes]]()
        try:
            body = await self._answer(scope, receive)
            if body is None:  # whoever asked has gone
                return
            kind = "application/json" if scope["path"] == "/health" else PROTOBUF
        except Refused as error:
            status, kind = error.status, "application/json"
            body = json.dumps({"code": 0, "detail": str(error), "reason": error.reason}).encode()
            more = [(b"connection", b"close")]
        except FlowerError as error:
            known = API_ERROR_MAP[error.code]
            status, kind = known.http_status_code, "application/json"
            log.info("Flower refused %s: %s", scope["path"], error.message)
            body = json.dumps(error.to_json(known.public_message)).encode()
        except Exception:
            status, kind = 500, "application/json"
            log.exception("a request failed")
            body = json.dumps({"detail": "the server's log says more"}).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> bytes | None:
        path, connection = scope["path"], scope.get("state", {}).get("connection")
        if scope["method"] == "GET" and path == "/health":
            return b'{"status": "ok"}'
        route = self._routes.get(path.removeprefix(ROUTE)) if path.startswith(ROUTE) else None
        if scope["method"] != "POST" or route is None:
            await asyncio.sleep(REFUSAL_SECONDS)
            raise Refused(403, "no such route", "this port is for sites of a federation")
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        try:
            key, caller = self._signed(headers)
        except Refused as error:
            self._tell(headers, error)
            await asyncio.sleep(REFUSAL_SECONDS)
            raise
        self._known(connection, caller)
        if (wait := caller.wait(time.monotonic())) > 0:
            await asyncio.sleep(wait)
        kind, handler = route
        request = await _read(kind, headers, receive)
        node = self._own(key, caller, request, headers)
        if kind is PullMessagesRequest:
            self._reopen(node, ours=PROCESS_HEADER in headers)
            if not await self._message_for(node, caller, receive):
                return None
            self._signed(headers, waited=HOLD_SECONDS)  # it may have been revoked since
            self._own(key, caller, request, headers)
        answer = handler(request, self._state)
        if kind in (ActivateNodeRequest, PushMessagesRequest, PushObjectRequest):
            self._heard()
        return bytes(answer.SerializeToString())

    def _signed(self, headers: Mapping[str, bytes], waited: float = 0.0) -> tuple[bytes, Caller]:
        """Whose request it is; a Refused where it is none of an admitted site's, or not its own."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            time_stamp = headers[TIMESTAMP_HEADER]
            signed = dt.datetime.fromisoformat(time_stamp.decode("ascii"))
            age = (dt.datetime.now(dt.UTC) - signed).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error) as error:
            raise Refused(401, Reason.NOT_ADMITTED, "the request is not signed with a site's key") from error
        name = "" if self._admission is None else self._admission.name_of(key)
        try:
            if not verify_signature(bytes_to_public_key(key), time_stamp, signature):
                raise Refused(401, Reason.FORGED, "the signature is not that of the key")
        except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
            raise Refused(401, Reason.FORGED, "that is no key of a site's") from error
        if name is None:
            assert self._admission is not None
            raise Refused(403, *self._admission.why_not(key))
        if not -CLOCK_AHEAD < age < BEHIND + waited:
            words = f"{abs(age):.0f} s {'behind' if age > 0 else 'ahead of'}"
            why = f"the site's clock is {words} the server's: set both, best by NTP"
            raise Refused(401, Reason.CLOCK, why)
        called = headers.get(SITE_HEADER, name.encode()).decode("latin-1")
        if name and called != name:
            why = f"the key was admitted for site {name!r}, and this one calls itself {called!r}"
            raise Refused(403, Reason.NAME, why)
        spoken = headers.get(PROTOCOL_HEADER, b"").decode("latin-1")
        if spoken and spoken != str(PROTOCOL):
            version = headers.get(VERSION_HEADER, b"").decode("latin-1")[:32]
            there = {"protocol": int(spoken) if spoken.isdecimal() else 0, "version": version}
            raise Refused(403, Reason.VERSION, str(why_not_understood(there, THE_SITE)))
        return key, self._callers.setdefault(key, Caller(name))

    def _own(self, key: bytes, caller: Caller, request: Any, headers: Mapping[str, bytes]) -> int:
        """The node that the request is about, which is the caller's."""
        process = headers.get(PROCESS_HEADER, b"").decode("latin-1")
        if isinstance(request, ActivateNodeRequest | RegisterNodeFleetRequest):
            if request.public_key != key:
                raise Refused(401, Reason.FORGED, "a node is activated with its own key")
            if isinstance(request, ActivateNodeRequest):
                caller.process = process
                caller.woken.set()
            return 0
        node = int(request.node.node_id if hasattr(request, "node") else request.node_id)
        if self._state.get_node_id_by_public_key(key) != node:
            raise Refused(401, "node", "the node is not known: it has to be activated")
        if process != caller.process:
            why = "another process takes part with this site's key since; stop one of them"
            raise Refused(409, Reason.ELSEWHERE, why)
        if isinstance(request, PushMessagesRequest):
            if (
                any(m.metadata.src_node_id != node for m in request.messages_list)
                or not request.messages_list
            ):
                raise Refused(403, Reason.FORGED, "a site answers for itself")
        elif isinstance(request, ConfirmMessageReceivedRequest):
            message = self._messages().get(request.message_object_id)
            if message is not None and message.metadata.dst_node_id != node:
                raise Refused(403, Reason.FORGED, "the message is not this site's")
        return node

    def _tell(self, headers: Mapping[str, bytes], error: Refused) -> None:
        """Log who was refused, and why; not more than once in a minute."""
        called = headers.get(SITE_HEADER, b"").decode("latin-1")[:64]
        who = (called if called.isprintable() else "", str(error.reason))
        now = time.monotonic()
        if now - self._told.get(who, -60.0) >= 60:
            self._told = {w: t for w, t in self._told.items() if now - t < 60} | {who: now}
            log.warning("refused%s: %s (%s)", f" {who[0]}" if who[0] else "", error, error.reason)

    # --- messages --------------------------------------------------------------------------------

    def _messages(self) -> dict[str, Any]:
        """Messages to nodes by their numbers."""
        found: dict[str, Any] = self._state.message_ins_store
        return found

    def _has_message(self, node: int) -> bool:
        with self._state.lock:
            every = [m.metadata for m in self._messages().values()]
        return any(m.dst_node_id == node and not m.delivered_at for m in every)

    def _reopen(self, node: int, ours: bool) -> None:
        """A process that asks for messages works on none: what it, or the one before it, received and has not
        answered is handed out again. A site gives the same reply to the same request."""
        if not ours:
            return
        with self._state.lock:
            replies = self._state.message_ins_id_to_message_res_id
            for number, message in self._messages().items():
                if message.metadata.dst_node_id != node or not message.metadata.delivered_at:
                    continue
                reply = replies.get(number)
                if reply is not None and whole(self._state, reply):
                    continue
                if self._again.get(number, 0) < SENT_AGAIN:
                    self._again[number] = self._again.get(number, 0) + 1
                    message.metadata.delivered_at = ""
                    if reply is not None:  # a part of it came
                        self._state.message_res_store.pop(replies.pop(number), None)

    async def _message_for(self, node: int, caller: Caller, receive: Receive) -> bool:
        """Wait until there is a message for the node, or long enough; False where it has gone meanwhile: a
        message that it was given would be lost."""
        end = time.monotonic() + HOLD_SECONDS
        process = caller.process
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not self._closing and not self._has_message(node) and (left := end - time.monotonic()) > 0:
                caller.woken.clear()
                woken = asyncio.ensure_future(caller.woken.wait())
                await asyncio.wait({gone, woken}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if gone.done() or caller.process != process or not self._admits(caller):
                    break
            return not gone.done()
        finally:
            gone.cancel()

    def _admits(self, caller: Caller) -> bool:
        return self._admission is None or caller.name in self._admission.keys.admitted.values()

    def wake(self) -> None:
        """There are messages, or other sites are admitted: whoever is held looks again."""
        for caller in self._callers.values():
            caller.woken.set()

    def close(self) -> None:
        """Nobody is held any longer."""
        self._closing = True
        self.wake()

    def forget(self, numbers: Iterable[str]) -> None:
        """These messages were answered."""
        for number in numbers:
            self._again.pop(number, None)


def whole(state: Any, message: str) -> bool:
    """Whether all of a message has arrived."""
    store, ahead = state.object_store, [message]
    with store.lock_store:
        while ahead:
            entry = store.store.get(ahead.pop())
            if entry is None or not entry.is_available:
                return False
            ahead += entry.child_object_ids
    return True


async def _read(kind: type[Any], headers: Mapping[str, bytes], receive: Receive) -> Any:
    """The request, which is not longer than it may be."""
    large = Refused(413, "too large", f"a request has at most {REQUEST_BYTES} bytes")
    length = headers.get("content-length", b"0")
    if not length.isdigit() or int(length) > REQUEST_BYTES:
        raise large
    parts, size = list[bytes](), 0
    while True:
        event = await asyncio.wait_for(receive(), 60.0)
        if event["type"] == "http.disconnect":
            raise Refused(400, "gone", "the request did not arrive")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > REQUEST_BYTES:
            raise large
        if not event.get("more_body"):
            break
    request = kind()
    try:
        request.ParseFromString(b"".join(parts))
    except DecodeError as error:
        raise Refused(400, "unreadable", "that is no request of Flower's") from error
    return request


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connections_of(door: Door) -> type[H11Protocol]:
    """Uvicorn's connections, which the door counts."""

    class Connection(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            self.app_state = {"connection": self}
            super().connection_made(transport)
            door.opened(self)

        def connection_lost(self, error: Exception | None) -> None:
            door.closed(self)
            super().connection_lost(error)

    return Connection


class Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait long for strangers' handshakes."""

    async def create_server(self, *given: Any, **more: Any) -> Any:
        if isinstance(more.get("ssl"), ssl.SSLContext):
            more["ssl_handshake_timeout"] = STRANGER_SECONDS
        return await super().create_server(*given, **more)
