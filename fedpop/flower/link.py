"""A server's side of Flower in the process of the run: what nodes and messages there are, the door that
admitted sites reach, and the Grid that the run sends its requests over.

Flower's own SuperLink would serve whoever submits runs and asks for tasks at the same address, and would
start a process for each; here there is one run, which is begun by this process and by nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, SubStatus
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager

from fedpop.errors import SettingsError
from fedpop.flower.admission import Admission
from fedpop.flower.certificates import split_address
from fedpop.flower.door import STRANGER_CONNECTIONS, Door, Loop, connections_of, whole

log = logging.getLogger("fedpop.server")

ADMISSION_SECONDS = 1.0
"""Seconds after which it is looked who is admitted."""


class FleetGrid(Grid):
    """The server's side, open while it is entered."""

    def __init__(self, listen: str, tls: Path | None, admitted: Path | None, app: Fab | None = None) -> None:
        self._address, self._tls, self._app = split_address(listen), tls, app
        self._admission = None if admitted is None else Admission(admitted, log.warning)
        objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
        manager = NoOpFederationManager(simulation=False)
        self._state: Any = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, objects).state()
        self._named: dict[bytes, str] = {}
        """Sites that may take part, as they were seen last."""
        self._news = threading.Event()
        self._door = Door(self._state, self._admission, self._news.set)
        self._run = self._begun()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _begun(self) -> int:
        """The number of the run, which is this process's."""
        app = self._app
        if app is not None:
            self._state.store_fab(app)
            self._door.offer_app()
        name: tuple[str | None, str | None, str | None] = (None, None, None)
        if app is not None:
            name = (*get_metadata_from_config(get_fab_config(app.content)), app.hash_str)
        run = int(
            self._state.create_run(*name, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        )
        self._task = self._state.get_run_info(run_ids=[run])[0].primary_task_id
        if self._state.claim_task(self._task) is None or not self._state.activate_task(self._task):
            raise SettingsError("Flower did not begin the run; is this the version that was tested?")
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, self._task
        return run

    # --- open and closed -------------------------------------------------------------------------

    def __enter__(self) -> FleetGrid:
        host, port = self._address
        self._register()  # all of them before the first one knocks
        listener = self._door.listen(host, port)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        config = uvicorn.Config(
            self._door,
            http=connections_of(self._door),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=STRANGER_CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        if self._tls is not None:
            config.ssl_certfile = str(self._tls / "server.crt")
            config.ssl_keyfile = str(self._tls / "server.key")
            config.ssl_version = ssl.PROTOCOL_TLS_SERVER
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="door", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise SettingsError(f"nobody can reach {host}:{port}; the log says why")
            time.sleep(0.01)
        return self

    def _serve(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            self._loop = runner.get_loop()
            runner.run(self._served(listener))

    async def _served(self, listener: socket.socket) -> None:
        looking = asyncio.ensure_future(self._look())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            looking.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._door.close)
        self._server.should_exit = True
        self._thread.join(10)
        self._state.finish_task(self._task, SubStatus.COMPLETED, "")

    async def _look(self) -> None:
        """What has to be done again and again, beside requests."""
        while True:
            await asyncio.sleep(ADMISSION_SECONDS)
            self._state.acknowledge_task_heartbeat(self._task)
            try:
                if self._register():
                    self._door.wake()
            except Exception:
                log.exception("who is admitted could not be read")

    def _register(self) -> bool:
        """Nodes of all keys that are admitted, and of no others; whether that is news."""
        if self._admission is None:
            return False
        admitted, state = dict(self._admission.keys.admitted), self._state
        changed = False
        for key, name in admitted.items():
            node = state.get_node_id_by_public_key(key)
            if node is None:
                state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)
            elif state.nodes[node].name != name:
                state.nodes[node].name = name
            if self._named.get(key) != name:
                log.info("site %s may take part", name)
                changed = True
        for key in self._named.keys() - admitted.keys():
            log.warning("site %s may no longer take part with its key", self._named[key])
            state.deactivate_node(state.get_node_id_by_public_key(key))
            changed = True
        self._named = admitted
        return changed

    def sleep(self, seconds: float) -> None:
        """At most so long: less where something has come."""
        if self._news.wait(seconds):
            self._news.clear()

    def admits(self, node: Any) -> bool:
        """Whether a node has an admitted key, and the name that it was admitted for."""
        return self._admission is None or self._admission.name_of(node.public_key) == node.name

    # --- the Grid ----------------------------------------------------------------------------------

    def get_nodes(self) -> Iterable[NodeInfo]:
        return list(self._state.get_node_info(node_ids=sorted(self._state.get_nodes(self._run))))

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = [self._push(message) for message in messages]
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._door.wake)
        return numbers

    def _push(self, message: Message) -> Any:
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            tree, state = get_object_tree(message), self._state
            contents = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
            bare = remove_content_from_message(message)
        with state.lock:  # nobody is handed a message of which a part is missing
            session = state.start_session(self._run)
            stored, missing = state.store_message_and_object_tree(bare, tree, session)
            for number in missing:
                state.store_object(self._run, session, number, contents[number])
        return message.metadata.message_id if stored else None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        state, replies = self._state, self._state.message_ins_id_to_message_res_id
        with state.lock:
            wanted = set[str]()
            for number in message_ids:
                reply = replies.get(number)
                if reply is not None and not whole(state, reply):
                    if self._is_there(number):
                        continue  # the rest of it is on its way
                    state.message_res_store.pop(replies.pop(number), None)
                wanted.add(number)
            found = state.get_message_res(message_ids=wanted, run_id=self._run)
            answered = {m.metadata.reply_to_message_id for m in found}
            state.delete_messages(message_ins_ids=answered)
        self._door.forget(answered)
        for number in answered:
            state.object_store.delete(number)
        return [self._inflated(message) for message in found]

    def _is_there(self, number: str) -> bool:
        """Whether the node that a message went to may yet answer it."""
        message = self._state.message_ins_store.get(number)
        node = None if message is None else self._state.nodes.get(message.metadata.dst_node_id)
        return node is not None and (node.online_until or 0.0) > time.time()

    def _inflated(self, message: Message) -> Any:
        number, store = message.metadata.message_id, self._state.object_store
        if message.has_error():
            store.delete(number)
            return message
        parts = {t.object_id for t in iterate_object_tree(store.get_object_tree(number))}
        inflated: Any = inflate_object_from_contents(number, {part: store.get(part) for part in parts})
        inflated.metadata.__dict__["_message_id"] = number
        store.delete(number)
        return inflated

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        return self._state.get_run_info(run_ids=[self._run])[0]

    def create_message(self, *given: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        raise NotImplementedError
