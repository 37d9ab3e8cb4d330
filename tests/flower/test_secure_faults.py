"""What can go wrong in secure sums: late, lost, doubled and damaged replies, and who is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

import fedpop as fp
from fedpop.errors import EstimateError, FedpopWarning
from fedpop.files import writable_folder
from fedpop.flower import secure_site
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, message_to_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.flower.secure_site import SecureSite
from fedpop.flower.secure_sums import SecureSums
from fedpop.privacy import secure
from fedpop.privacy.secure import Policy
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import planned, run_over, same_theta, secured, simulated, sites
from tests.flower.sites import transport_on

pytest.importorskip("Crypto")
WAITS = RoundTerms(sites=5, quorum=0.8, timeout=20.0)


class Killed(BaseException):
    """Somebody killed the process."""


def read(message: Message) -> Request:
    return request_from_record(message.content)


def in_round(message: Message, number: int, kind: str = "train") -> bool:
    found = read(message)
    if found.kind == "unmask" == kind:
        return bool(found.header["attempt"]["index"] == number)
    return found.kind == kind == "train" and bool(found.header["round"] == number)


def faulty(fault: Any) -> Callable[[LocalGrid], None]:
    def prepare(grid: LocalGrid) -> None:
        grid.fault = fault

    return prepare


# --- replies -------------------------------------------------------------------------------------


def test_a_late_reply_is_as_a_lost_one(tmp_path: Path) -> None:
    def prepare(grid: LocalGrid) -> None:
        grid.delay = lambda site, request: 25.0 if site == "s1" and in_round(request, 0) else 0.0

    found, _ = run_over(tmp_path, "FedAvg", prepare=prepare, waits=WAITS)
    same_theta(found, simulated("FedAvg", lost=lambda k, site: (k, site) == (0, "s1")))


def test_a_doubled_reply_counts_once(tmp_path: Path) -> None:
    def doubled(site: str, request: Message, reply: Message) -> list[Message]:
        return [reply, reply] if site == "s2" else [reply]

    found, _ = run_over(tmp_path, "FedAvg", prepare=faulty(doubled))
    same_theta(found, simulated("FedAvg"))


def damaged(reply: Message, cut: int = 5) -> Message:
    message = message_from_record(reply.content)
    payloads = {
        n: type(p)(p.codec, max(0, p.length - cut), p.data[: len(p.data) - cut])
        for n, p in message.payloads.items()
    }
    from dataclasses import replace

    return Message(message_to_record(replace(message, payloads=payloads)), reply_to=reply)


def test_a_damaged_reply_is_as_a_lost_one_and_its_sender_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cut(site: str, request: Message, reply: Message) -> list[Message]:
        return [damaged(reply)] if site == "s4" and in_round(request, 1) else [reply]

    found, _ = run_over(tmp_path, "FedAvg", prepare=faulty(cut), waits=WAITS)
    same_theta(found, simulated("FedAvg", lost=lambda k, site: (k, site) == (1, "s4")))
    assert "s4 was left out: bytes of a secure sum" in caplog.text


def test_words_that_mean_nothing_are_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site whose mask is another one than it should be: the sum says so, and no step is made of it."""
    real = SecureSite.reply

    def lying(self: SecureSite, attempt: Any, *more: Any) -> bytes:
        reply = real(self, attempt, *more)
        if self.name != "s3" or attempt.kind != "train" or attempt.index != 1:
            return reply
        return reply[:-400] + bytes(b ^ 1 for b in reply[-400:])

    monkeypatch.setattr(SecureSite, "reply", lying)
    seen: list[torch.Tensor] = []
    real_round = SecureSums.round

    def noted(self: SecureSums, *more: Any) -> Any:
        found = real_round(self, *more)
        seen.append(torch.tensor(found.message is None))
        return found

    monkeypatch.setattr(SecureSums, "round", noted)
    run_over(tmp_path, "FedAvg")
    assert [bool(s) for s in seen] == [False, True, False]
    assert "given up" in caplog.text


# --- who dies between the trips ------------------------------------------------------------------


def test_a_heard_site_that_dies_while_another_is_lost_ends_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Round 1 makes no step, whoever sent in it has the states of before, and round 2 goes on."""

    def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
        lost = site == "s1" and in_round(request, 1)
        return None if lost or (site == "s2" and in_round(request, 1, "unmask")) else [reply]

    found, _ = run_over(tmp_path, "SCAFFOLD", prepare=faulty(fault), waits=WAITS)
    assert "did not unmask, and s1 was lost" in caplog.text
    same_theta(found, simulated("SCAFFOLD", lost=lambda k, site: k == 1))


def test_a_heard_site_that_dies_when_nobody_is_lost_is_not_missed(tmp_path: Path) -> None:
    def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
        return None if site == "s2" and in_round(request, 1, "unmask") else [reply]

    found, _ = run_over(tmp_path, "FedAvg", prepare=faulty(fault))
    same_theta(found, simulated("FedAvg"))


# --- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "unmask"])
@pytest.mark.parametrize("site", ["s0", "s3"])
@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg"])
def test_a_server_that_is_killed_goes_on_to_the_same_theta(
    name: str, site: str, kind: str, tmp_path: Path
) -> None:
    """Whoever was asked before it died answers with the bytes that it had sent."""
    grid, terms, _ = secured(tmp_path / "sites")
    killed: list[str] = []

    def fault(where: str, request: Message, reply: Message) -> list[Message]:
        if where == site and in_round(request, 1, kind) and not killed:
            killed.append(where)
            raise Killed
        return [reply]

    grid.fault = fault
    run = planned(name, 3, terms)
    with pytest.raises(Killed):
        run_deployment(run, transport_on(grid), tmp_path / "run")
    found = run_deployment(planned(name, 3, terms), transport_on(grid), tmp_path / "run")
    same_theta(found, simulated(name))
    sent: dict[str, set[bytes]] = {}
    for where, request, reply in grid.traffic:
        if in_round(request, 1):
            payloads = message_from_record(reply.content).payloads
            sent.setdefault(where, set()).add(payloads["masked"].data)
    assert {len(each) for each in sent.values()} == {1}


def test_a_server_that_is_killed_before_anybody_was_asked_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that it had recorded is asked, and later ones have other numbers."""
    grid, terms, _ = secured(tmp_path / "sites")
    heard, killed = SecureSums._heard, list[str]()

    def dying(self: SecureSums, attempt: Any, *more: Any) -> Any:
        if attempt.index == 1 and not killed:
            killed.append("server")
            raise Killed
        return heard(self, attempt, *more)

    monkeypatch.setattr(SecureSums, "_heard", dying)
    with pytest.raises(Killed):
        run_deployment(planned("FedAvg", 4, terms), transport_on(grid), tmp_path / "run")
    found = run_deployment(planned("FedAvg", 4, terms), transport_on(grid), tmp_path / "run")
    same_theta(found, simulated("FedAvg", 4))


@pytest.mark.parametrize("step", ["before the state", "before the reply", "after the reply"])
def test_a_site_that_is_killed_between_two_steps_masks_nothing_twice(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was on its disk when it died, theta is that of an undisturbed run."""
    from fedpop.flower.site_state import SiteState

    killed: list[str] = []
    write, state = SecureSite._write, SiteState.write

    def dying(self: SecureSite, name: str, data: bytes) -> None:
        last = name == secure_site.MEMORY and self.name == "s2" and len(data) > 300
        if last and step == "before the reply" and not killed:
            killed.append(step)
            raise RuntimeError("killed")
        write(self, name, data)
        if last and step == "after the reply" and not killed:
            killed.append(step)
            raise RuntimeError("killed")

    def dying_state(self: SiteState, path: Path) -> None:
        if step == "before the state" and "s2" in str(path) and not killed:
            killed.append(step)
            raise RuntimeError("killed")
        state(self, path)

    monkeypatch.setattr(SecureSite, "_write", dying)
    monkeypatch.setattr(SiteState, "write", dying_state)

    def prepare(grid: LocalGrid) -> None:
        def fault(site: str, request: Message, reply: Message) -> list[Message]:
            found = message_from_record(reply.content)
            if found.refused is not None and "RuntimeError" in found.refused:
                again = grid.app(request, grid.nodes[grid.first + int(site[1:])])
                grid.traffic.append((site, request, again))
                return [again]  # its node is started again, and has the request again
            return [reply]

        grid.fault = fault

    found, _ = run_over(tmp_path, "FedAvg", prepare=prepare)
    assert killed
    same_theta(found, simulated("FedAvg"))


def test_a_site_put_back_from_a_copy_begins_another_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid, terms, folders = secured(tmp_path / "sites")
    killed: list[str] = []

    def fault(where: str, request: Message, reply: Message) -> list[Message]:
        if where == "s4" and in_round(request, 1, "unmask") and not killed:
            killed.append(where)
            raise Killed
        return [reply]

    grid.fault = fault
    with pytest.raises(Killed):
        run_deployment(planned("FedAvg", 3, terms), transport_on(grid), tmp_path / "run")
    shutil.copytree(folders["s2"], tmp_path / "copy")
    shutil.rmtree(folders["s2"])
    shutil.copytree(tmp_path / "copy", folders["s2"])
    before = (tmp_path / "copy" / "experiments" / "test" / "secure" / "session").read_bytes()
    again = planned("FedAvg", 3, terms, WAITS)
    run_deployment(again, transport_on(grid), tmp_path / "run")
    assert "a new session" in caplog.text
    after = (folders["s2"] / "experiments" / "test" / "secure" / "session").read_bytes()
    assert before.partition(b"\n")[2] != after.partition(b"\n")[2]
    for name in ("session", "memory"):
        mode = (folders["s2"] / "experiments" / "test" / "secure" / name).stat().st_mode
        assert mode & 0o077 == 0


def test_a_data_file_that_changes_between_two_repetitions_changes_no_byte(tmp_path: Path) -> None:
    from tests.flower.sites import DATA

    grid, terms, _ = secured(tmp_path / "sites")
    replies: list[bytes] = []

    def fault(where: str, request: Message, reply: Message) -> list[Message]:
        if where == "s1" and in_round(request, 1):
            kept, DATA["s1"] = DATA["s1"], DATA["s0"]
            again = grid.app(request, grid.nodes[grid.first + 1])
            DATA["s1"] = kept
            replies.extend(message_from_record(m.content).payloads["masked"].data for m in (reply, again))
        return [reply]

    grid.fault = fault
    run_deployment(planned("FedAvg", 2, terms), transport_on(grid))
    assert replies[0] == replies[1]


def test_a_server_that_is_killed_once_the_sum_is_open_opens_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, terms, _ = secured(tmp_path / "sites")
    opened, killed = secure.opened, list[str]()

    def dying(attempt: Any, *more: Any) -> bytes:
        words = opened(attempt, *more)
        if attempt.kind == "train" and attempt.index == 1 and not killed:
            killed.append("server")
            raise Killed
        return words

    monkeypatch.setattr(secure, "opened", dying)
    with pytest.raises(Killed):
        run_deployment(planned("SCAFFOLD", 3, terms), transport_on(grid), tmp_path / "run")
    found = run_deployment(planned("SCAFFOLD", 3, terms), transport_on(grid), tmp_path / "run")
    same_theta(found, simulated("SCAFFOLD"))


def test_a_question_is_asked_in_a_new_attempt_where_a_site_has_begun_another_session(tmp_path: Path) -> None:
    """And everyone masks the words of before anew."""
    grid, terms, folders = secured(tmp_path / "sites")
    real, gone = grid.app, list[str]()

    def losing(request: Message, node: Any) -> Message:
        if not gone and node.node_id == grid.first + 2 and read(request).kind == "ask":
            gone.append("s2")
            shutil.rmtree(folders["s2"] / "experiments" / "test" / "secure")
        return real(request, node)

    grid.app = losing
    found = run_deployment(planned("QLSD", 3, terms), transport_on(grid))
    same_theta(found, simulated("QLSD"))
    terms_of = [read(m).header["secure"] for _, m, _ in grid.traffic if read(m).kind == "ask"]
    asked = [about["attempt"] for about in terms_of if "attempt" in about]
    assert gone
    assert len({a["number"] for a in asked}) == 1 + len({a["index"] for a in asked})


def test_a_session_whose_beginning_is_cut_short_is_never_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old session beside an empty memory would answer an attempt of before once more."""
    _, _, folders = secured(tmp_path / "sites")
    place = folders["s0"] / "experiments" / "test"
    site = SecureSite("s0", folders["s0"], "test", writable_folder(place), Policy())
    old = site.session
    (place / "secure" / "memory").unlink()
    write, written = SecureSite._write, list[str]()

    def dying(self: SecureSite, name: str, data: bytes) -> None:
        if written:
            raise Killed
        written.append(name)
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(SecureSite, "_write", dying)
        with pytest.raises(Killed):
            site.session  # noqa: B018
    assert site.session.secret != old.secret


def test_a_score_that_cannot_be_had_ends_no_run(tmp_path: Path) -> None:
    """A site's answers to a question are always lost: without it the sum is refused, and rounds go on."""
    data = {n: fp.Client(c.x, c.y, validation=(c.x, c.y)) for n, c in sites().items()}
    grid, terms, _ = secured(tmp_path / "sites", data)

    def fault(site: str, request: Message, reply: Message) -> list[Message] | None:
        return (
            None if site == "s1" and read(request).header.get("question") == "validation score" else [reply]
        )

    grid.fault = fault
    run = planned("FedAvg", 3, terms, WAITS, callbacks=[fp.callbacks.EarlyStop(every=2)])
    with pytest.warns(FedpopWarning, match="round 2: no validation score"):
        found = run_deployment(run, transport_on(grid))
    assert found.rounds == 3
    same_theta(found, simulated("FedAvg"))


def test_a_site_with_few_rows_says_what_to_do(tmp_path: Path) -> None:
    data = sites(classes=False)
    data["s2"] = fp.Client(data["s2"].x[:5], data["s2"].y[:5])
    grid, terms, folders = secured(tmp_path / "sites", data)
    settings = folders["s2"] / "site.toml"
    settings.write_text(settings.read_text().replace("spectral_rows = 2\n", ""))
    with pytest.raises(EstimateError, match="needs everyone: lower spectral_rows"):
        run_deployment(planned("FedSOUL", 3, terms, classes=False), transport_on(grid))
