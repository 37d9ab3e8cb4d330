"""Requests and replies over Flower's Grid: sites by their names, deadlines, late replies dropped.

Flower knows nodes by numbers that are new for every key, so each node is asked for its site's name first.
``send_and_receive`` waits for the slowest and polls every three seconds: this has another poll loop.
What comes after its request's deadline is dropped and counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.serverapp import Grid

from fedpop.errors import PayloadError
from fedpop.flower.records import message_from_record, request_to_record
from fedpop.flower.requests import THE_SITE, Request, code_of, refusal, why_not_understood
from fedpop.message import Message
from fedpop.site.refusal import Code

log = logging.getLogger("fedpop.server")

TYPES = {"hello": MessageType.QUERY, "train": MessageType.TRAIN}
"""Flower's types for kinds of requests; questions, and the end, are evaluations."""
Enough = Callable[[Mapping[str, Message]], bool]
"""Whether these replies, by site, are enough; refusals are among them."""
GREETINGS_WAITED = 5
"""How many times as long as a refusal a greeting without an answer is waited for."""
NODE_GONE = 5
"""Flower's error code for a node whose heartbeat has stopped."""


@dataclass(frozen=True)
class ConnectedSite:
    """A site that has replied with its name: its node, and the reply's header."""

    node: int
    header: Mapping[str, Any]


@dataclass(frozen=True)
class Pending:
    """A request that has not been answered."""

    site: str
    until: float


class Transport:
    """Who is there; requests to sites, and their replies."""

    def __init__(
        self,
        grid: Grid,
        *,
        poll: float = 0.25,
        greeting: float = 60.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        admits: Callable[[Any], bool] = lambda node: True,
    ) -> None:
        self._grid, self._admits = grid, admits
        self.hello = Request("hello", {})
        """The first request to a new node."""
        self._poll, self._greeting, self._clock, self._sleep = poll, greeting, clock, sleep
        self.sites: dict[str, ConnectedSite] = {}
        self._registered: set[int] = set()
        """Nodes that belong to a site, or did."""
        self._greeted: dict[int, float] = {}
        """When a node that has not answered is to be greeted again."""
        self._hellos: dict[str, int] = {}
        self._pending: dict[str, Pending] = {}
        self.refused: dict[str, str] = {}
        """Sites that say that they cannot take part, and why."""
        self.unconfirmed: dict[str, str] = {}
        """Those at which somebody has to confirm the list of sites first."""
        self.late: dict[str, int] = {}
        """Replies that came after their deadline, or twice, by site."""
        self.reasons: dict[str, str] = {}
        """Why sites have no reply in the last ``send``."""
        self.lost: set[str] = set()
        """Those of them whose node went away."""
        self.silent: set[str] = set()
        """Those of them who are there and did not answer in time."""
        self.on_wait: Callable[[str, Collection[str]], None] = lambda what, whom: None
        """Called with what is asked and who has not answered yet."""

    def sibling(self) -> Transport:
        """Another one on the same Grid, without any sites yet."""
        other = Transport(
            self._grid,
            poll=self._poll,
            greeting=self._greeting,
            clock=self._clock,
            sleep=self._sleep,
            admits=self._admits,
        )
        other.on_wait = self.on_wait
        return other

    def greet_all(self, hello: Request) -> None:
        """Send everyone a new first request; a site is there once it has answered it."""
        self.hello, self.sites = hello, {}
        self._registered, self._greeted, self._hellos, self.refused = set(), {}, {}, {}

    # --- who is there ------------------------------------------------------------------------

    def _online(self) -> dict[int, str]:
        """Admitted nodes whose heartbeat is fresh, and the names that their keys were registered for."""
        now = self._clock()
        return {
            n.node_id: n.name
            for n in self._grid.get_nodes()
            if (not n.online_until or n.online_until > now) and self._admits(n)
        }

    def present(self) -> list[str]:
        """Sites whose heartbeat is fresh, in the order of their names; new nodes are greeted, and belong to
        them once they have answered. Nobody waits for that."""
        now, nodes = self._clock(), self._online()
        due = [n for n in nodes if n not in self._registered and self._greeted.get(n, -math.inf) <= now]
        if due:
            for node, request in zip(
                due,
                self._push([(n, self.hello) for n in due], GREETINGS_WAITED * self._greeting),
                strict=True,
            ):
                self._greeted[node] = now + GREETINGS_WAITED * self._greeting  # a slow one is not asked twice
                if request is not None:
                    self._hellos[request] = node
        if self._hellos:
            for message in self._grid.pull_messages(list(self._hellos)):
                request = message.metadata.reply_to_message_id
                if request in self._hellos:
                    node = self._hellos.pop(request)
                    self._register(node, nodes.get(node, ""), _message_of(message))
        return sorted(name for name, site in self.sites.items() if site.node in nodes)

    def _register(self, node: int, registered: str, reply: Message) -> None:
        name = str(reply.header.get("site", ""))
        why = self._why_not(reply, name, registered)
        if why is not None:
            log.warning("node %d (%s) cannot take part: %s", node, name or registered or "no name", why)
            self._greeted[node] = self._clock() + self._greeting  # then again: it may have been mended
            if name and reply.refused is not None:
                about = self.unconfirmed if code_of(reply) is Code.TRUST else self.refused
                about[name] = reply.refused
            return
        log.info("site %s is here", name)
        self._registered.add(node)
        self.refused.pop(name, None)
        self.unconfirmed.pop(name, None)
        self.sites[name] = ConnectedSite(node, reply.header)

    def _why_not(self, reply: Message, name: str, registered: str) -> str | None:
        """Why a node cannot be taken for a site of this name."""
        if reply.refused is not None:
            return reply.refused
        if (why := why_not_understood(reply.header, THE_SITE)) is not None:
            return why
        if reply.header.get("study") != self.hello.header["study_digest"]:
            return "it received another study"
        if self.hello.header.get("drawn") and len(reply.header.get("hashes", ())) != reply.header.get(
            "units"
        ):
            return "it sends no hashes of its units' names"
        return _misnamed(name, registered)

    def busy(self, site: str) -> bool:
        """It still works on a request that may yet be answered."""
        now = self._clock()
        return any(p.site == site and p.until > now for p in self._pending.values())

    def alive(self, node: int) -> bool:
        """Its heartbeat is fresh."""
        return node in self._online()

    def drop_late(self) -> None:
        """Take what came too late: whoever sent it is free again."""
        if pending := self._open():
            for message in self._grid.pull_messages(pending):
                self._sort(message, {}, {})

    def now(self) -> float:
        return self._clock()

    def pause(self) -> None:
        """A moment, before it is checked again who is there."""
        self._sleep(4 * self._poll)

    # --- requests and replies ----------------------------------------------------------------

    def send(
        self, requests: Mapping[str, Request], timeout: float | None, enough: Enough
    ) -> dict[str, Message]:
        """Replies to these requests, by site, as soon as there are ``enough`` of them or time is up (None:
        until everyone has answered). Refusals are in ``reasons``."""
        there = {name: request for name, request in requests.items() if name in self.sites}
        self.reasons = {name: "it is not there" for name in requests if name not in there}
        self.lost = set(self.reasons)
        found = self._exchange(
            {name: (self.sites[name].node, request) for name, request in there.items()}, timeout, enough
        )
        accepted = {}
        for name, reply in found.items():
            if (why := reply.refused) is None:
                accepted[name] = reply
                continue
            self.reasons[name] = why
            if code_of(reply).greet:
                self._forget(name)
                self.lost.add(name)
        self.silent = there.keys() - found.keys()
        for name in self.silent:
            self.reasons[name] = "it did not answer in time"
        return accepted

    def _forget(self, name: str) -> None:
        """A site whose node went away, or that does not know the study, is greeted again when it is back."""
        if name in self.sites:
            self._registered.discard(self.sites.pop(name).node)
        self._greeted = {}

    def retry_lost(
        self,
        requests: Mapping[str, Request],
        replies: Mapping[str, Message],
        timeout: float | None,
        back: Callable[[list[str]], bool],
        silent: bool = False,
        enough: Enough = lambda replies: False,
    ) -> dict[str, Message]:
        """Replies of those, too, whose node went away meanwhile, once they are ``back``, and of those who
        were ``silent``, where they are wanted: the same request again, to which a site that had worked on it
        gives the same reply."""
        accepted, reasons = dict(replies), dict(self.reasons)
        while lost := sorted((self.lost | (self.silent if silent else set())) & requests.keys()):
            if enough(accepted):
                break
            log.info("%s must answer, and went away or was silent for long", ", ".join(lost))
            if not back(lost):
                break
            accepted |= self.send({n: requests[n] for n in lost}, timeout, enough)
            reasons = {n: why for n, why in reasons.items() if n not in lost} | self.reasons
        self.reasons = reasons
        return accepted

    def _exchange(
        self,
        requests: Mapping[str, tuple[int, Request]],
        timeout: float | None,
        enough: Enough,
    ) -> dict[str, Message]:
        start, patience = self._clock(), timeout or 24 * 3600.0
        # A request outlives its round: what a slow site answers is then known to be late, not lost.
        ids = self._push(list(requests.values()), 2 * patience)
        waiting = {i: name for i, name in zip(ids, requests, strict=True) if i is not None}
        found: dict[str, Message] = {}
        logged, what = start, _what(requests)
        while waiting:
            self.on_wait(what, waiting.values())
            for message in self._grid.pull_messages([*waiting, *self._open()]):
                self._sort(message, waiting, found)
            if not waiting or enough(found):
                break
            now = self._clock()
            if timeout is not None and now - start >= timeout:
                break
            if now - logged >= 60:
                log.info("waiting for %s", ", ".join(sorted(waiting.values())))
                logged = now
            self._sleep(self._poll)
        self.on_wait(what, ())
        until = start + 2 * patience
        self._pending |= {i: Pending(name, until) for i, name in waiting.items()}
        return found

    def _push(self, requests: Sequence[tuple[int, Request]], ttl: float) -> list[str | None]:
        messages = [
            FlowerMessage(
                content=request_to_record(request),
                dst_node_id=node,
                message_type=TYPES.get(request.kind, MessageType.EVALUATE),
                ttl=ttl,
                group_id=str(request.header.get("round", request.kind)),
            )
            for node, request in requests
        ]
        return list(self._grid.push_messages(messages))

    def _open(self) -> list[str]:
        """Requests of earlier rounds that may yet be answered."""
        now = self._clock()
        silent = {p.site for p in self._pending.values() if p.until <= now}
        self._pending = {i: p for i, p in self._pending.items() if p.until > now}
        for site in silent:
            self._forget(site)  # a dead node is listed for a while: it has to show that it lives
        return list(self._pending)

    def _sort(self, message: Any, waiting: dict[str, str], found: dict[str, Message]) -> None:
        """A reply goes by the request that it answers: an error's sender is not the site."""
        request = message.metadata.reply_to_message_id
        if request in waiting:
            found[waiting.pop(request)] = _message_of(message)
        elif request in self._pending:
            site = self._pending.pop(request).site
            if code_of(_message_of(message)).greet:
                self._forget(site)
                return
            self.late[site] = self.late.get(site, 0) + 1
            log.info("a late reply of %s was dropped", site)


def _what(requests: Mapping[str, tuple[int, Request]]) -> str:
    """What is asked, in words."""
    for _, request in requests.values():
        if request.kind == "train":
            return f"round {request.header['round'] + 1}"
        if request.kind == "unmask":
            return "opening a sum"
        return f"question {request.header['question']}" if request.kind == "ask" else "giving theta to all"
    return "nothing"


def _misnamed(name: str, registered: str) -> str | None:
    """What is wrong with the name in a site's reply."""
    if not name:
        return "its reply has no name"
    if registered and registered != name:
        return f"it says that it is {name!r}, but its key was registered for {registered!r}"
    return None


def _message_of(message: Any) -> Message:
    """The message of a reply; one that cannot be read is a refusal."""
    if message.has_error():
        code = Code.GONE if message.error.code == NODE_GONE else Code.FAILED
        return refusal(f"its node failed (Flower's error {message.error.code})", code)
    try:
        return message_from_record(message.content)
    except PayloadError as error:
        return refusal(f"its reply could not be read: {error}", Code.UNREADABLE)
