"""What the network reaches of a server, in this process: who is heard, who is not, and why."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from fedpop.flower import admission, door, node
from fedpop.flower.certificates import (
    make_authority,
    make_server_certificate,
    make_site_key,
    read_site_key,
)
from fedpop.flower.link import FleetGrid
from fedpop.flower.processes import free_port
from fedpop.flower.records import message_to_record, request_from_record, request_to_record
from fedpop.flower.requests import PROTOCOL_HEADER, SITE_HEADER, VERSION_HEADER, Request, headed
from fedpop.flower.site_folder import SiteSettings


class Federation:
    """A server's keys and door, and sites' folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.tls, self.admitted = root, root / "tls", root / "sites"
        self.tls.mkdir()
        make_authority(self.tls, "test")
        make_server_certificate(self.tls, ["127.0.0.1"])
        self.address = f"127.0.0.1:{free_port()}"
        self.sites = {name: self.site(name) for name in ("north", "south")}
        self.link = FleetGrid(self.address, self.tls, self.admitted)

    def site(self, name: str, admitted: bool = True) -> SiteSettings:
        folder = self.root / name
        folder.mkdir()
        make_site_key(folder)
        (folder / "ca.crt").write_bytes((self.tls / "ca.crt").read_bytes())
        if admitted:
            admission.admit_key(self.admitted, name, folder / "node.pub", False)
        return SiteSettings(folder, name, "rows.csv", self.address)

    def client(self) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.tls / "ca.crt"))
        return httpx.Client(base_url=f"https://{self.address}", verify=context, timeout=30, trust_env=False)

    def post(self, site: SiteSettings, path: str, request: Any, ahead: float = 0.0, **headers: str) -> Any:
        """A request that is signed with the site's key."""
        key = read_site_key(site.folder)
        stamp = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=ahead)).isoformat()
        public = public_key_to_bytes(key.public_key())
        signed = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
        }
        with self.client() as client:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            return client.post(f"/v1/fleet/{path}", content=data, headers=signed | headers)

    def activation(self, site: SiteSettings) -> ActivateNodeRequest:
        public = public_key_to_bytes(read_site_key(site.folder).public_key())
        return ActivateNodeRequest(public_key=public, heartbeat_interval=30)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    with made.link:
        yield made


def ask(federation: Federation, whom: int, number: int = 0) -> str:
    """Send a request that the node is to answer."""
    content = request_to_record(Request("train", {"round": number}, {"theta": torch.arange(3.0)}))
    message = FlowerMessage(content, whom, MessageType.TRAIN, ttl=60)
    return str(next(iter(federation.link.push_messages([message]))))


def answer(connection: node.Connection, words: str = "x") -> None:
    received = connection.receive()
    assert received is not None
    bare, tree = received
    run = bare.metadata.run_id
    whole = connection.content(run, tree)
    request = request_from_record(whole.content)
    reply = headed({"site": words, "round": request.header["round"]})
    connection.send(run, FlowerMessage(message_to_record(reply), reply_to=whole), 0.0)
    connection.done(run, tree.object_id)


def until(done: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


# --- who is heard --------------------------------------------------------------------------------


def test_a_message_and_its_reply(federation: Federation) -> None:
    """A held question is answered as soon as there is a message; what was sent is forgotten at the end."""
    with node.connected(federation.sites["north"]) as north:
        names = {n.node_id: n.name for n in federation.link.get_nodes()}
        assert names == {north.node.node_id: "north"}
        sent = list[str]()
        later = threading.Timer(0.3, lambda: sent.append(ask(federation, north.node.node_id, 3)))
        later.start()
        answer(north, "north")
        later.join()
        found = until(lambda: list(federation.link.pull_messages(sent)))
        assert found[0].metadata.reply_to_message_id == sent[0]
        assert '"round": 3' in str(found[0].content.config_records["fedpop"]["json"])
    assert not list(federation.link.get_nodes())
    assert not federation.link._state.object_store.store


def test_nothing_but_the_fleet_is_there(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Control, no Runtime, no documentation: for nobody, whatever key they have."""
    routes = [p for _, p in PROTOBUF_REQUEST_TYPES if p.removeprefix(door.ROUTE) not in door.ROUTES]
    assert len(routes) > 50
    assert any("start-run" in r for r in routes)
    assert any("acquire-task" in r for r in routes)
    monkeypatch.setattr(door, "REFUSAL_SECONDS", 0.0)
    with federation.client() as client:
        for path in [*routes, "/docs", "/redoc", "/openapi.json", "/", "/v1/responses"]:
            for found in (client.post(path, content=b""), client.get(path)):
                assert found.status_code == 403, path
                assert found.json()["detail"] == "this port is for sites of a federation"
        assert client.get("/health").status_code == 200
    assert federation.post(federation.sites["north"], "register-node", b"").status_code == 403


def test_why_a_site_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REFUSAL_SECONDS", 0.0)
    north, stranger = federation.sites["north"], federation.site("stranger", admitted=False)

    def why(site: SiteSettings, **more: Any) -> tuple[str, str]:
        found = federation.post(site, "activate-node", federation.activation(site), **more).json()
        return found["reason"], found["detail"]

    assert why(stranger)[0] == "not admitted"
    assert "fedpop server admit" in why(stranger)[1]
    assert why(north, **{SITE_HEADER: "south"})[0] == "wrong name"
    reason, words = why(north, **{PROTOCOL_HEADER: "999", VERSION_HEADER: "9.0.0"})
    assert reason == "version"
    assert "the site has fedpop 9.0.0" in words
    assert "install fedpop 9.0.0 at the server" in words
    assert why(north, ahead=60.0)[0] == "clock"
    assert "60 s ahead of" in why(north, ahead=60.0)[1] or "59 s ahead of" in why(north, ahead=60.0)[1]
    assert why(north, ahead=-400.0)[0] == "clock"
    assert why(north, **{FLEET_HTTP_SIGNATURE_HEADER: b64encode(b"no").decode()})[0] == "forged"
    assert why(north, **{FLEET_HTTP_PUBLIC_KEY_HEADER: "?"})[0] == "not admitted"
    admission.end_key(federation.admitted, "north")
    assert why(north) == ("revoked", "the admission of site 'north' was revoked")
    admission.admit_key(federation.admitted, "north", stranger.folder / "node.pub", False)
    assert "another key was admitted for site 'north'" in why(north)[1]


def test_a_site_speaks_for_itself(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REFUSAL_SECONDS", 0.0)
    with node.connected(federation.sites["north"]) as north:
        other = PullMessagesRequest(node=north.node)
        assert federation.post(federation.sites["south"], "pull-messages", other).status_code == 401
        activation = federation.activation(federation.sites["north"])
        found = federation.post(federation.sites["south"], "activate-node", activation)
        assert found.json()["reason"] == "forged"


# --- who is no longer heard ----------------------------------------------------------------------


def test_a_revoked_site_is_told_at_once(federation: Federation) -> None:
    """Also one whose question is held."""
    with node.connected(federation.sites["north"]) as north:
        threading.Timer(0.3, lambda: admission.end_key(federation.admitted, "north")).start()
        begun = time.monotonic()
        with pytest.raises(node.NotHeard, match="revoked"):
            north.receive()
        assert time.monotonic() - begun < door.HOLD_SECONDS
        assert not [n for n in federation.link.get_nodes() if federation.link.admits(n)]


def test_who_is_revoked_in_the_middle_of_a_reply_is_not_waited_for(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.connected(federation.sites["north"]) as north:
        sent = ask(federation, north.node.node_id)

        def revoked(*_: Any, **__: Any) -> None:
            admission.end_key(federation.admitted, "north")
            raise node.NotHeard("revoked", "in between")

        monkeypatch.setattr(node, "push_objects", revoked)
        with pytest.raises(node.NotHeard, match="in between"):
            answer(north)
        found = until(lambda: list(federation.link.pull_messages([sent])))
        assert found[0].has_error()


def test_a_replaced_key_ends_the_old_one(federation: Federation) -> None:
    new = federation.site("later", admitted=False)
    with node.connected(federation.sites["north"]) as old:
        admission.admit_key(federation.admitted, "north", new.folder / "node.pub", replace=True)
        with pytest.raises(node.NotHeard, match="another key was admitted"):
            old.receive()
        with node.connected(replace(new, name="north")) as north:
            known = {n.node_id for n in federation.link.get_nodes() if federation.link.admits(n)}
            assert known == {north.node.node_id}


def test_a_later_process_takes_over_and_is_sent_what_was_not_answered(federation: Federation) -> None:
    with node.connected(federation.sites["north"]) as first:
        sent = ask(federation, first.node.node_id)
        assert first.receive() is not None  # it is killed now
        with node.connected(federation.sites["north"]) as second:
            answer(second)
            assert until(lambda: list(federation.link.pull_messages([sent])))
            with pytest.raises(node.NotHeard, match="another process") as caught:
                first.receive()
            assert caught.value.reason == "taken over"


def test_a_message_that_ends_its_site_is_not_sent_for_ever(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HOLD_SECONDS", 0.2)
    with node.connected(federation.sites["north"]) as north:
        ask(federation, north.node.node_id)
        given = [north.receive() is not None for _ in range(door.SENT_AGAIN + 3)]
        assert given == [True] * (door.SENT_AGAIN + 1) + [False, False]


# --- load ----------------------------------------------------------------------------------------


def test_bodies_are_not_longer_than_they_may_be(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "REQUEST_BYTES", 1000)
    found = federation.post(federation.sites["north"], "push-object", bytes(2000))
    assert found.status_code == 413
    assert federation.post(federation.sites["north"], "push-object", b"\xff" * 10).status_code == 400


def test_connections_that_show_no_key_are_closed(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STRANGER_SECONDS", 0.3)
    context = ssl.create_default_context(cafile=str(federation.tls / "ca.crt"))
    host, port = federation.address.split(":")
    plain = socket.create_connection((host, int(port)))
    with context.wrap_socket(plain, server_hostname=host) as silent:
        silent.settimeout(20)
        silent.send(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
        assert silent.recv(100) == b""


def test_strangers_make_room_for_sites(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they speak TLS, or open connections and say nothing: a handshake takes memory."""
    monkeypatch.setattr(door, "STRANGER_CONNECTIONS", 3)
    context = ssl.create_default_context(cafile=str(federation.tls / "ca.crt"))
    host, port = federation.address.split(":")
    with node.connected(federation.sites["north"]) as north:
        silent = [socket.create_connection((host, int(port))) for _ in range(10)]
        for each in silent[:7]:
            each.settimeout(20)
            with suppress(ConnectionResetError):
                assert each.recv(100) == b""
        many = []
        for _ in range(10):
            plain = socket.create_connection((host, int(port)))
            many.append(context.wrap_socket(plain, server_hostname=host))
        assert len(federation.link._door._listener.strangers) <= 3
        ask(federation, north.node.node_id)
        answer(north)
        for each in (*silent, *many):
            each.close()


def test_who_has_most_connections_makes_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGER_CONNECTIONS", 3)
    port = free_port()
    with door.Listener("127.0.0.1", port) as listener:
        listener.listen()

        def knock(source: str) -> tuple[socket.socket, socket.socket]:
            there = socket.create_connection(("127.0.0.1", port), 20, source_address=(source, 0))
            return there, listener.accept()[0]

        both = [knock(f"127.0.0.{k}") for k in (2, 3, 3, 3, 4)]
        closed = []
        for there, _ in both:
            there.settimeout(0.2)
            try:
                closed.append(there.recv(1) == b"")
            except TimeoutError:
                closed.append(False)
        assert closed == [False, True, True, False, False]
        listener.known(both[0][1].fileno())
        assert [host for _, host in listener.strangers.values()] == ["127.0.0.3", "127.0.0.4"]
        for pair in both:
            for each in pair:
                each.close()


def test_a_site_waits_where_it_asks_too_often() -> None:
    caller = door.Caller("north")
    assert not any(caller.wait(0.0) for _ in range(int(door.REQUESTS_AT_ONCE)))
    assert caller.wait(0.0) == pytest.approx(1 / door.REQUESTS_PER_SECOND)
    assert caller.wait(60.0) == 0.0
