"""A server that cheats: every honest site refuses, and its log says what was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message as FlowerMessage
from torch import nn

import fedpop as fp
from fedpop.errors import SecureSumError
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, request_from_record, request_to_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request, digest_for, digest_for_all, digest_of, versions
from fedpop.message import Message
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt, Mode, Offer, Session
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import planned, secured, sites
from tests.flower.sites import deployment, transport_on
from tests.helpers import seeded

pytest.importorskip("Crypto")


@dataclass
class Cheat:
    """A server that has seen all bytes of a run, and asks the same sites again."""

    grid: LocalGrid
    requests: Mapping[str, Request]
    """Those of the last round."""

    @property
    def attempt(self) -> Attempt:
        first = next(iter(self.requests.values()))
        return Attempt.of(first.header["secure"]["attempt"])

    @property
    def next(self) -> Attempt:
        """What an honest server would ask next."""
        return replace(self.attempt, index=self.attempt.index + 1, number=self.attempt.number + 1)

    def train(self, attempt: Attempt, round: int | None = None) -> dict[str, Message]:
        """Replies to this attempt at a round, which says truly what is broadcast."""
        replies = {}
        for name, request in self.requests.items():
            header: dict[str, Any] = {**request.header, "round": attempt.index if round is None else round}
            plain = {**header["secure"], "attempt": attempt.plain()}
            right = replace(request, header=header | {"secure": plain})
            now = replace(attempt, broadcast=digest_for_all(right))
            replies[name] = self.ask(
                name, replace(right, header=header | {"secure": plain | {"attempt": now.plain()}})
            )
            self.last = now
        return replies

    def unmask(self, name: str, attempt: Attempt, heard: list[str], shares: Mapping[str, bytes]) -> Message:
        tensors = {n: torch.from_numpy(np.frombuffer(b, dtype=np.uint8).copy()) for n, b in shares.items()}
        about = {"experiment": "test", "attempt": attempt.plain(), "heard": heard}
        return self.ask(name, Request("unmask", versions() | about, tensors))

    def ask(self, name: str, request: Request) -> Message:
        node = self.grid.first + int(name[1:])
        sent = FlowerMessage(request_to_record(request), dst_node_id=node, message_type="evaluate")
        sent.metadata.__dict__.update(_message_id="m", _run_id=1, _src_node_id=1)
        return message_from_record(self.grid.app(sent, self.grid.nodes[node]).content)


@pytest.fixture
def cheat(tmp_path: Path) -> Cheat:
    grid, terms, _ = secured(tmp_path)
    run_deployment(planned("FedAvg", 2, terms), transport_on(grid))
    requests = {}
    for name, sent, _reply in grid.traffic:
        read = request_from_record(sent.content)
        if read.kind == "train":
            requests[name] = read
    return Cheat(grid, requests)


def swapped(offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """The server's own key in the place of a site's, with a signature of its own."""
    mine = Session.begin("test", "s1", b"the server's own identity").offer
    return (offers[0], mine, *offers[2:])


def invented(offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    return (*offers, Session.begin("test", "s9", b"the server's own identity").offer)


CHEATS: dict[str, tuple[Callable[[Attempt], Attempt], str]] = {
    "a swapped key": (lambda a: replace(a, offers=swapped(a.offers)), "'s1' is not signed by 's1'"),
    "an invented site": (lambda a: replace(a, offers=invented(a.offers)), "'s9' is not on this site's list"),
    "few sites": (lambda a: replace(a, offers=a.offers[:2], colluders=0), "a sum needs 3"),
    "a small minimum": (lambda a: replace(a, minimum=1), "this site's minimum_sites is 3"),
    "no colluders": (lambda a: replace(a, colluders=0), "this site assumes 1"),
    "a replayed round": (lambda a: replace(a, index=a.index - 1), "was answered in another attempt"),
    "an old number": (lambda a: replace(a, number=0), "take a new number"),
}


@pytest.mark.parametrize("what", list(CHEATS))
def test_every_honest_site_refuses_and_logs(
    what: str, cheat: Cheat, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = CHEATS[what]
    caplog.clear()
    for name, reply in cheat.train(change(cheat.next)).items():
        mine = {"s1"} if what == "a swapped key" else {"s2", "s3", "s4"} if what == "few sites" else set()
        assert reply.payloads == {}
        assert reply.refused is not None
        if name not in mine:  # of whom it is said that they are somebody else, or not there
            assert words in reply.refused
    assert words in caplog.text


def test_a_round_has_one_name_and_one_mode(cheat: Cheat, caplog: pytest.LogCaptureFixture) -> None:
    """Under another name, index or mode one round would be answered once more, over other sites."""
    now = cheat.next
    assert all(reply.payloads for reply in cheat.train(now).values())
    for again in (
        replace(now, number=now.number + 1, kind="train once more"),
        replace(now, number=now.number + 1, index=now.index + 1),
        replace(now, number=now.number + 1, mode=Mode.EVERYONE),
    ):
        replies = cheat.train(again, round=now.index)
        assert all("refused" in r.header and r.payloads == {} for r in replies.values())
    assert caplog.text.count("and not at what was sent with it") == 2 * len(cheat.requests)
    assert caplog.text.count("this is summed in mode drop-out, not everyone") == len(cheat.requests)


# --- questions -------------------------------------------------------------------------------------


@pytest.fixture
def curious(tmp_path: Path) -> Cheat:
    """One that has asked eight sites for the moments with which a linear model starts, and has the bytes."""
    grid, terms, _ = secured(tmp_path, sites(8, classes=False))
    model = fp.Composition(None, seeded(nn.Linear(3, 1), 2), fp.likelihoods.Normal())
    waits = RoundTerms(sites=8, timeout=20.0)
    run_deployment(deployment(fp.FedSOUL(model), 1, terms=waits, secure=terms), transport_on(grid))
    asked = [(name, request_from_record(sent.content)) for name, sent, _ in grid.traffic]
    moments = {n: r for n, r in asked if r.header.get("question") == "least squares"}
    assert len(moments) == 8
    return Cheat(grid, moments)


def last_number(cheat: Cheat) -> int:
    every = [request_from_record(sent.content).header for _, sent, _ in cheat.grid.traffic]
    return max(h["secure"]["attempt"]["number"] for h in every if "attempt" in h.get("secure", {}))


def question_again(
    cheat: Cheat, names: list[str], change: Callable[[Request], Request] = lambda r: r, **more: Any
) -> dict[str, Message]:
    """The question of these sites once more, in an attempt that says truly what it is about."""
    right = {n: change(cheat.requests[n]) for n in names}
    first = right[names[0]]
    offers = tuple(o for o in cheat.attempt.offers if o.site in names)
    index = int.from_bytes(digest_for_all(first)[:6], "big")
    about = {"kind": f"ask/{first.header['question']}", "index": index, "number": last_number(cheat) + 1}
    about |= {"offers": offers, "colluders": len(names) // 3, "broadcast": digest_for_all(first)}
    now = replace(cheat.attempt, **about | more)
    replies = {}
    for name, request in right.items():
        its = {**request.header["secure"], "attempt": now.plain()}
        replies[name] = cheat.ask(name, replace(request, header={**request.header, "secure": its}))
    return replies


def with_tensor(request: Request) -> Request:
    return replace(request, tensors={**request.tensors, "asked.nothing": torch.ones(1)})


def thinner(request: Request) -> Request:
    """One site is asked of no unit but its first."""
    return replace(request, header={**request.header, "units": [0]})


def renamed(request: Request) -> Request:
    return replace(request, header={**request.header, "question": "least squares, again"})


ALL = [f"s{i}" for i in range(8)]
FEW = "was summed over a cohort that differs by s7 only"


@pytest.mark.parametrize(
    ("names", "change", "more", "words"),
    [
        (ALL[:7], lambda r: r, {}, FEW),
        (ALL[:7], with_tensor, {}, FEW),
        (ALL, thinner, {}, "would tell of the others"),
        (ALL, renamed, {}, "is 'least squares'"),
        (ALL, lambda r: r, {"mode": Mode.DROP_OUT}, "this is summed in mode everyone, not drop-out"),
        (ALL, lambda r: r, {"index": 0}, "and not at what was sent with it"),
    ],
    ids=["one less", "one less in other words", "one unit", "another name", "a list to choose", "an index"],
)
def test_a_question_over_nearly_the_same_rows_is_refused(
    names: list[str],
    change: Callable[[Request], Request],
    more: dict[str, Any],
    words: str,
    curious: Cheat,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its sum less the earlier one would be one of few; in mode drop-out the server would choose which."""
    for reply in question_again(curious, names, change, **more).values():
        assert words in str(reply.refused)
        assert reply.payloads == {}
    assert words in caplog.text


def test_names_are_not_told_of_some_units(curious: Cheat) -> None:
    """What vectors of one unit are called, the levels that it has, say, is data of it."""
    request = thinner(curious.requests["s0"])
    terms = {n: v for n, v in request.header["secure"].items() if n != "attempt"}
    for units, refused in ([0], True), (None, False):
        reply = curious.ask(
            "s0", replace(request, header={**request.header, "secure": terms, "units": units})
        )
        assert (reply.refused is not None) == refused
        assert reply.payloads == {}


def test_the_same_question_of_the_same_sites_is_answered_again(curious: Cheat) -> None:
    assert all(r.payloads for r in question_again(curious, ALL).values())
    number = last_number(curious) + 2
    assert all(r.payloads for r in question_again(curious, ALL[:5], number=number).values())


def test_an_exact_round_over_nearly_the_same_sites_is_refused(tmp_path: Path) -> None:
    grid, terms, _ = secured(tmp_path, sites(classes=False))
    run_deployment(planned("FedSOUL", 2, terms, classes=False), transport_on(grid))
    asked = [(name, request_from_record(sent.content)) for name, sent, _ in grid.traffic]
    cheat = Cheat(grid, {n: r for n, r in asked if r.kind == "train"})
    assert cheat.attempt.mode is Mode.EVERYONE
    now = replace(cheat.next, index=cheat.attempt.index)
    fewer = replace(now, offers=now.offers[:4])
    number = cheat.requests["s0"].header["round"]
    del cheat.requests["s4"]  # type: ignore[attr-defined]
    for reply in cheat.train(fewer, number).values():
        assert "differs by s4 only" in str(reply.refused)


def heard_by(cheat: Cheat) -> tuple[Attempt, dict[str, secure.Masked]]:
    replies = cheat.train(cheat.next)
    attempt = cheat.last
    return attempt, {n: secure.read(m.payloads["masked"].data, attempt, n) for n, m in replies.items()}


def test_a_list_that_is_too_short_a_second_list_and_one_without_its_reader_are_refused(
    cheat: Cheat, caplog: pytest.LogCaptureFixture
) -> None:
    attempt, masked = heard_by(cheat)
    for name in ("s0", "s1"):
        shares = secure.shares_for(name, masked)
        short = cheat.unmask(name, attempt, ["s0", "s1", "s2"], shares)
        assert "the list has 3 sites, and 4 must be heard" in str(short.refused)
        assert cheat.unmask(name, attempt, sorted(masked), shares).refused is None
        other = [n for n in sorted(masked) if n != "s4"]
        assert "was unmasked by another list" in str(cheat.unmask(name, attempt, other, shares).refused)
    without = cheat.unmask("s4", attempt, ["s0", "s1", "s2", "s3"], secure.shares_for("s4", masked))
    assert "has nothing to open" in str(without.refused)
    assert caplog.text.count("unmask refused") == 5


def test_a_share_and_a_pair_key_of_one_site_are_not_both_given(cheat: Cheat) -> None:
    """Who names s4 first among the heard and then among the lost has s4's share and not its key."""
    attempt, masked = heard_by(cheat)
    everyone = sorted(masked)
    for name in everyone[:4]:
        shares = secure.shares_for(name, masked)
        assert cheat.unmask(name, attempt, everyone, shares).refused is None
        assert cheat.unmask(name, attempt, everyone[:4], shares).payloads == {}


def test_two_halves_that_are_told_different_lists_open_neither(cheat: Cheat) -> None:
    attempt, masked = heard_by(cheat)
    one, other = ["s1", "s2", "s3", "s4"], ["s0", "s2", "s3", "s4"]
    lists = {"s1": one, "s2": one, "s0": other, "s3": other, "s4": other}
    answers = {}
    for name, named in lists.items():
        reply = cheat.unmask(name, attempt, named, secure.shares_for(name, masked))
        answers[name] = reply.payloads["unmasked"].data
    for named in (one, other):
        with pytest.raises(SecureSumError, match="the sum cannot be opened"):
            secure.opened(attempt, {n: masked[n] for n in named}, answers)


def test_shares_of_another_attempt_are_refused(cheat: Cheat) -> None:
    first, old = heard_by(cheat)
    cheat.requests = {
        n: replace(r, header={**r.header, "round": first.index}) for n, r in cheat.requests.items()
    }
    later = replace(cheat.next, index=first.index + 1, number=first.number + 1)
    replies = cheat.train(later)
    assert all(m.refused is None for m in replies.values())
    reply = cheat.unmask("s0", cheat.last, sorted(old), secure.shares_for("s0", old))
    assert "is not one of this attempt" in str(reply.refused)


def test_two_halves_that_are_told_two_thetas_have_no_common_sum(cheat: Cheat) -> None:
    """Neither half's replies are to the other's attempt, and each half is too small a list."""
    theta = {n: t + 1 if t.is_floating_point() else t for n, t in cheat.requests["s0"].tensors.items()}
    told = dict(cheat.requests)
    for name in ("s3", "s4"):
        its = replace(told[name], tensors=theta)
        digest = digest_for(digest_of(theta), its.header["units"])
        told[name] = replace(its, header={**its.header, "digest": digest})
    attempts, masked = dict[str, Attempt](), dict[str, secure.Masked]()
    for name, request in told.items():
        one = Cheat(cheat.grid, {name: request})
        reply = one.train(cheat.next)[name]
        attempts[name] = one.last
        masked[name] = secure.read(reply.payloads["masked"].data, one.last, name)
        with pytest.raises(SecureSumError, match="another attempt"):
            secure.read(reply.payloads["masked"].data, cheat.next, name)
    assert len({a.digest for a in attempts.values()}) == 2
    for name in told:
        reply = cheat.unmask(name, attempts["s0"], sorted(told), secure.shares_for(name, masked))
        assert reply.payloads == {}


def test_a_site_that_confirmed_a_list_answers_in_secure_sums_only(cheat: Cheat) -> None:
    for name, request in cheat.requests.items():
        header = {n: v for n, v in request.header.items() if n != "secure"}
        reply = cheat.ask(name, replace(request, header=header))
        assert "answers in secure sums only" in str(reply.refused)
        assert reply.payloads == {}
