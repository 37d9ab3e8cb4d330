"""A site's node: one process that speaks Flower's fleet protocol with the site's key and answers requests.

``python -m fedpop.flower.node SITE`` is what ``fedpop site join`` starts. It runs only what is installed at
the site: of what the server sends it takes records of fedpop's, and asks for no app. torch and fedpop are
imported once; data are read again only where their file is another one. There is no port at the site.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedpop.errors import FedpopError, PayloadError, SettingsError
from fedpop.flower.admission import Reason
from fedpop.flower.certificates import check_connection, read_site_key
from fedpop.flower.logs import log_to
from fedpop.flower.processes import FAILED_CODE, Stopped, stop_on_signals
from fedpop.flower.records import message_to_record, request_from_record
from fedpop.flower.requests import (
    PROCESS_HEADER,
    PROTOCOL,
    PROTOCOL_HEADER,
    SITE_HEADER,
    VERSION_HEADER,
    refusal,
)
from fedpop.flower.site import Site, open_site
from fedpop.flower.site_folder import SiteSettings, read_site
from fedpop.site.refusal import Code
from fedpop.version import __version__

log = logging.getLogger("fedpop.site")

QUICK_SECONDS, SLOW_SECONDS = 0.2, 5.0
"""Seconds between questions for messages while a run is on, and when nothing came for long; a server that
holds the question makes both needless."""
RUN_SECONDS = 60.0
"""Seconds after its last message for which a run is taken to be on."""
HELD_SECONDS = 1.0
"""A question that took as long as this was held."""
RECONNECT_SECONDS = (0.5, 3.0)
"""Seconds before a server that was not there is tried again: the first time, and at most."""
REFUSED_SECONDS = 10.0
"""Seconds before a site that was refused knocks again: it may have been admitted."""
REST_SECONDS, GROWN_BYTES = 300.0, 2**25
"""A process that has had no message for so long begins anew where it takes so much more memory than at its
start: libraries that a run or a formula needed, and its data, are not held until the next one."""
TAKEN_OVER_SECONDS = 300.0
"""Seconds before it does where another process took part with its key since."""


class NotHeard(Exception):
    """The server does not hear this site, and says why."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class Lost(Exception):
    """The server does not know this node any longer: it was started again."""


class Rested(Exception):
    """There has been nothing to do for long, and much memory is held for it."""


class Rest:
    """When this process began to rest, and what it took at its start."""

    def __init__(self) -> None:
        self._begun, self.since = resident(), time.monotonic()

    def worked(self) -> None:
        self.since = time.monotonic()

    def check(self) -> None:
        """Raise ``Rested`` where this process had better begin anew."""
        if time.monotonic() - self.since > REST_SECONDS and resident() - self._begun > GROWN_BYTES:
            raise Rested


def resident() -> int:
    """Bytes of memory that this process has; nothing where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _Headers:
    """Who asks, beside what Flower's nodes say."""

    def __init__(self, **headers: str) -> None:
        self._headers = headers

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        for name, value in self._headers.items():
            context.request.headers[name] = value
        return call_next(context)


class Connection:
    """A node that is active at its server."""

    def __init__(self, client: FleetHttpClient, key: bytes, insecure: bool) -> None:
        self._client, self.lost = client, ""
        if insecure:
            _asked(client.RegisterNode, RegisterNodeFleetRequest(public_key=key))
        begun = ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self.node = Node(node_id=_asked(client.ActivateNode, begun).node_id)
        self._heart = HeartbeatSender(self._beat)
        self._heart.start()

    def _beat(self) -> bool:
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            self._client.SendNodeHeartbeat(request)
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError:
            return True  # the next question for messages is told the same, and says so
        return True

    def close(self) -> None:
        if self._heart.is_running:
            self._heart.stop()
        try:
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        except (httpx.HTTPError, RuntimeError):
            return

    def receive(self) -> tuple[FlowerMessage, Any] | None:
        """A message without its content, and the tree of that; None where there is none."""
        found = _asked(self._client.PullMessages, PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        return message_from_proto(found.messages_list[0]), found.message_object_trees[0]

    def content(self, run: int, tree: Any) -> FlowerMessage:
        pull = make_pull_object_fn_protobuf(lambda r: _asked(self._client.PullObject, r), self.node, run)
        whole = pull_and_inflate_object_from_tree(tree, pull, lambda number: None, return_type=FlowerMessage)
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole

    def send(self, run: int, reply: FlowerMessage, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            parts, tree = get_all_nested_objects(reply), get_object_tree(reply)
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            found = _asked(self._client.PushMessages, request)
            push = make_push_object_fn_protobuf(
                lambda r: _asked(self._client.PushObject, r), self.node, run, found.session_id
            )
            push_objects(parts, push, object_ids_to_push=set(found.objects_to_push))

    def done(self, run: int, number: str) -> None:
        """The message was answered: its content may go. Not before, as it may have to be sent again."""
        confirm = make_confirm_message_received_fn_protobuf(
            lambda r: _asked(self._client.ConfirmMessageReceived, r), self.node, run
        )
        confirm(number)


def _asked(call: Callable[[Any], Any], request: Any) -> Any:
    """The server's answer, or why there is none."""
    try:
        return call(request)
    except httpx.HTTPStatusError as error:
        try:
            said = error.response.json()
        except ValueError:
            said = {}
        reason, words = str(said.get("reason", "")), str(said.get("detail", error))
        if reason in set(Reason):
            raise NotHeard(reason, words) from error
        raise Lost(words) from error


@contextmanager
def connected(settings: SiteSettings) -> Iterator[Connection]:
    """The site's node, active while this is entered."""
    certificates = None if settings.insecure else (settings.folder / "ca.crt").read_bytes()
    private = generate_key_pairs()[0] if settings.insecure else read_site_key(settings.folder)
    public = private.public_key()
    says = {SITE_HEADER: settings.name, PROCESS_HEADER: secrets.token_hex(8)}
    says |= {PROTOCOL_HEADER: str(PROTOCOL), VERSION_HEADER: __version__}
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
        _Headers(**says),
    ]
    with FleetHttpClient.from_server_address(
        settings.server, settings.insecure, certificates, interceptors
    ) as client:
        connection = Connection(client, public_key_to_bytes(public), settings.insecure)
        try:
            yield connection
        finally:
            connection.close()


def join(settings: SiteSettings) -> None:
    """Take part until stopped, or ``Rested``."""
    site, rest = open_site(settings.folder, lasting=True), Rest()
    said, wait = "", RECONNECT_SECONDS[0]
    while True:
        rest.check()
        pause, words = wait, ""
        try:
            with connected(settings) as connection:
                log.info("connected to %s", settings.server)
                said, wait = "", RECONNECT_SECONDS[0]
                _serve(connection, site, rest)
        except NotHeard as error:
            pause = TAKEN_OVER_SECONDS if error.reason == Reason.ELSEWHERE else REFUSED_SECONDS
            words = f"the server refuses this site ({error.reason}): {error}"
        except Lost as error:
            log.info("the server does not know this node any longer: %s", error)
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            pause, wait = wait, min(2 * wait, RECONNECT_SECONDS[1])
            words = _unreachable(settings, error)
        if words and words != said:
            log.warning("%s; the site tries on", words)
            said = words
        time.sleep(jittered(pause))


def _unreachable(settings: SiteSettings, error: Exception) -> str:
    """Why the server is not reached."""
    if not settings.insecure:
        try:
            if check_connection(settings.server, settings.folder / "ca.crt"):
                return f"the connection to {settings.server} broke ({type(error).__name__})"
        except SettingsError as reason:
            return str(reason)
    return f"the server {settings.server} is not there"


def _serve(connection: Connection, site: Site, rest: Rest) -> None:
    last, pause = time.monotonic(), QUICK_SECONDS
    while True:
        begun = time.monotonic()
        received = connection.receive()
        now = time.monotonic()
        if received is not None:
            _answer(connection, site, *received)
            rest.worked()
            last, pause = time.monotonic(), QUICK_SECONDS
            continue
        rest.check()
        if now - begun < HELD_SECONDS:
            pause = QUICK_SECONDS if now - last < RUN_SECONDS else min(SLOW_SECONDS, 1.5 * pause)
            time.sleep(jittered(pause))


def _answer(connection: Connection, site: Site, bare: FlowerMessage, tree: Any) -> None:
    run = bare.metadata.run_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, connection.node.node_id, 1
    message = connection.content(run, tree)
    begun = time.monotonic()
    reply = FlowerMessage(message_to_record(reply_to(message, site)), reply_to=message)
    connection.send(run, reply, time.monotonic() - begun)
    connection.done(run, tree.object_id)


def reply_to(message: FlowerMessage, site: Site) -> Any:
    """What the site answers; a record that is none of fedpop's is refused."""
    try:
        request = request_from_record(message.content)
    except PayloadError as error:
        return refusal(str(error), Code.UNREADABLE)
    return site.answer(request)


def jittered(seconds: float) -> float:
    """About so long, for each site another time: they must not all come at once."""
    return seconds * (0.5 + secrets.randbelow(1000) / 1000)


def process(arguments: list[str]) -> int:
    """What the node's process does, and its exit code."""
    parser = argparse.ArgumentParser(prog="fedpop.flower.node")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    stop_on_signals()
    settings = read_site(given.folder)
    log_to(settings.folder / "site.log")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        join(settings)
    except Stopped:
        return 0
    except Rested:
        log.info("nothing to do for %.0f min: the process begins anew, in less memory", REST_SECONDS / 60)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except FedpopError as error:
        log.error("%s", error)
        return FAILED_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(process(sys.argv[1:]))
