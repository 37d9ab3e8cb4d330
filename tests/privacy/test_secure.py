"""The protocol of secure sums, between honest sites, a server that cheats, and crashes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
import pytest

from fedpop.errors import SecureSumError
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt, Layout, Memory, Mode, Policy, Session

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

LAYOUT: Layout = ((4, 5), (24, 3), (2, 3))
THETA = sha256(b"theta").digest()


def identity(name: str) -> bytes:
    return sha256(b"identity of " + name.encode()).digest()


def entropy(seed: str):
    """Random bytes that a test can repeat."""
    state = [0]

    def draw(count: int) -> bytes:
        state[0] += 1
        return sha256(f"{seed}/{state[0]}".encode()).digest()[:count]

    return draw


def words(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(secure.size_of(LAYOUT))


def numbers(data: bytes) -> list[int]:
    """The words as whole numbers, read independently of the code."""
    out, start = [], 0
    for width, count in LAYOUT:
        for _ in range(count):
            out.append(int.from_bytes(data[start : start + width], "little"))
            start += width
    return out


def plain_sum(parts: Sequence[bytes]) -> list[int]:
    widths = [width for width, count in LAYOUT for _ in range(count)]
    return [
        sum(each) % 2 ** (8 * w)
        for each, w in zip(zip(*map(numbers, parts), strict=True), widths, strict=True)
    ]


@dataclass
class Site:
    """A site with its disk: ``memory`` is what would be there after a crash."""

    name: str
    admitted: Mapping[str, bytes]
    policy: Policy = field(default_factory=Policy)
    memory: Memory = field(default_factory=Memory)
    seed: str = ""

    def __post_init__(self) -> None:
        self.session = Session.begin(
            "run", self.name, identity(self.name), entropy(f"{self.seed}{self.name}")
        )

    def send(self, attempt: Attempt, data: bytes, layout: Layout = LAYOUT) -> bytes:
        self.memory, reply = secure.send(
            attempt, data, layout, self.session, self.memory, self.policy, self.admitted
        )
        self.memory = Memory.unpacked(self.memory.packed())
        return reply

    def opened_share(self, attempt: Attempt, of: str) -> bytes:
        """Its share of another site's secret, as it has answered."""
        blobs = secure._unpacked(self.memory.answer)[1]
        return blobs[attempt.sites.index(of)]

    def unmask(self, attempt: Attempt, heard: Sequence[str], replies: Mapping[str, secure.Masked]) -> bytes:
        shares = secure.shares_for(self.name, replies)
        self.memory, answer = secure.unmask(attempt, heard, shares, self.session, self.memory)
        self.memory = Memory.unpacked(self.memory.packed())
        return answer


def federation(count: int, policy: Policy | None = None) -> dict[str, Site]:
    names = [f"s{i:02d}" for i in range(count)]
    admitted = {name: secure.public_key(identity(name)) for name in names}
    return {name: Site(name, admitted, policy or Policy()) for name in names}


def attempt(sites: Mapping[str, Site], mode: Mode = Mode.DROP_OUT, number: int = 0, **more) -> Attempt:
    offers = tuple(sites[name].session.offer for name in sorted(sites))
    given = {"run": "run", "kind": "train", "index": 0, "number": number, "mode": mode, "broadcast": THETA,
             "offers": offers, "colluders": Policy().colluders(len(sites)), "minimum": 3}  # fmt: skip
    return Attempt(**given | more)


def exchanged(sites: Mapping[str, Site], now: Attempt, lost: Sequence[str] = ()) -> tuple[dict, dict]:
    """Who was heard, and what they unmask."""
    replies = {
        name: secure.read(site.send(now, words(i)), now, name)
        for i, (name, site) in enumerate(sites.items())
        if name not in lost
    }
    heard = sorted(replies)
    return replies, {name: sites[name].unmask(now, heard, replies) for name in heard}


@pytest.mark.parametrize(("count", "lost"), [(2, 0), (3, 0), (4, 0), (4, 1), (7, 2), (10, 3)])
def test_the_sum_is_that_of_who_was_heard(count: int, lost: int) -> None:
    sites = federation(count, Policy(minimum_sites=2))
    now = attempt(sites, minimum=2)
    gone = sorted(sites)[1 : 1 + lost]
    replies, answers = exchanged(sites, now, gone)
    expected = plain_sum([words(i) for i, name in enumerate(sites) if name not in gone])
    assert numbers(secure.opened(now, replies, answers)) == expected


def test_everyone_needs_one_trip() -> None:
    sites = federation(5)
    now = attempt(sites, Mode.EVERYONE)
    replies = {n: secure.read(s.send(now, words(i)), now, n) for i, (n, s) in enumerate(sites.items())}
    assert numbers(secure.opened(now, replies)) == plain_sum([words(i) for i in range(5)])
    del replies["s01"]
    with pytest.raises(SecureSumError, match="4 sites were heard, and 5 must be"):
        secure.opened(now, replies)


def test_with_nobody_lost_the_threshold_of_answers_will_do() -> None:
    sites = federation(6)
    now = attempt(sites)
    replies, answers = exchanged(sites, now)
    few = dict(list(answers.items())[: now.threshold])
    assert numbers(secure.opened(now, replies, few)) == plain_sum([words(i) for i in range(6)])
    few.popitem()
    with pytest.raises(SecureSumError, match="4 sites unmasked, and 5 must"):
        secure.opened(now, replies, few)


def test_with_somebody_lost_all_heard_must_answer() -> None:
    sites = federation(6)
    now = attempt(sites)
    replies, answers = exchanged(sites, now, ["s03"])
    del answers["s05"]
    with pytest.raises(SecureSumError, match="s05 did not unmask, and s03 was lost"):
        secure.opened(now, replies, answers)


def test_what_travels_says_nothing_of_the_words() -> None:
    """Each masked word is uniform: bytes of a reply over many attempts, for words that are all zero."""
    sites = federation(4)
    zeros, seen = bytes(secure.size_of(LAYOUT)), []
    for number in range(300):
        now = attempt(sites, number=number, index=number)
        seen.append(np.frombuffer(secure.read(sites["s00"].send(now, zeros), now, "s00").words, np.uint8))
    counts = np.bincount(np.concatenate(seen), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)


def test_every_part_of_an_attempt_changes_every_mask() -> None:
    sites = federation(4)
    zeros, first = bytes(secure.size_of(LAYOUT)), attempt(sites, Mode.EVERYONE)
    others = [
        replace(first, kind="ask"), replace(first, index=1), replace(first, number=1),
        replace(first, mode=Mode.DROP_OUT), replace(first, broadcast=sha256(b"other").digest()),
        replace(first, colluders=2), replace(first, minimum=4),
        replace(first, offers=first.offers[:3]),
    ]  # fmt: skip
    masks = []
    for now in (first, *others):
        site = federation(4)["s00"]
        masks.append(secure.read(site.send(now, zeros), now, "s00").words)
    assert len({m[i : i + 8] for m in masks for i in (0, 20, 80)}) == 3 * len(masks)


# --- a server that cheats --------------------------------------------------------------------


def test_a_server_that_tells_two_halves_different_lists_opens_neither_or_one() -> None:
    for count in (4, 5, 6, 7, 9, 10):
        for seed in range(20):
            sites, rng = federation(count), np.random.default_rng(seed)
            now = attempt(sites)
            replies = {
                n: secure.read(s.send(now, words(i)), now, n) for i, (n, s) in enumerate(sites.items())
            }
            names = sorted(sites)
            lists = [names, [n for n in names if n != names[int(rng.integers(count))]]]
            colluding = set(rng.choice(names, Policy().colluders(count), replace=False).tolist())
            answers: list[dict[str, bytes]] = [{}, {}]
            for name in names:
                for k in [0, 1] if name in colluding else [int(rng.integers(2))]:
                    before = sites[name].memory
                    try:
                        chosen = {n: replies[n] for n in lists[k]}
                        answers[k][name] = sites[name].unmask(now, lists[k], chosen)
                    except SecureSumError:
                        pass
                    if name in colluding:
                        sites[name].memory = before
            opened = 0
            for k in (0, 1):
                try:
                    secure.opened(now, {n: replies[n] for n in lists[k]}, answers[k])
                    opened += 1
                except SecureSumError:
                    pass
            assert opened <= 1
            # Shares of two lists do not join either: no list's secrets are known by t sites.
            assert sum(len(a) >= now.threshold for a in answers) <= 1


def test_a_second_list_is_refused_and_the_same_one_answered_alike() -> None:
    sites = federation(6)
    now = attempt(sites)
    replies, answers = exchanged(sites, now)
    names = sorted(sites)
    assert sites["s00"].unmask(now, names, replies) == answers["s00"]
    without = {n: replies[n] for n in names if n != "s05"}
    with pytest.raises(SecureSumError, match="unmasked by another list"):
        sites["s00"].unmask(now, sorted(without), without)


@pytest.mark.parametrize(
    ("heard", "words_"),
    [
        (["s00", "s01"], "2 sites, and 5 must be heard"),
        (["s00", "s01", "s02", "s03"], "4 sites, and 5 must be heard"),
        (["s00", "s00", "s01", "s02", "s03", "s04"], "twice"),
        (["s00", "s01", "s02", "s03", "s04", "x"], "not in the cohort"),
        (["s01", "s02", "s03", "s04", "s05"], "list of the lost"),
    ],
)
def test_lists_that_a_site_refuses(heard: list[str], words_: str) -> None:
    sites = federation(6)
    now = attempt(sites)
    replies = {n: secure.read(s.send(now, words(0)), now, n) for n, s in sites.items()}
    with pytest.raises(SecureSumError, match=words_):
        sites["s00"].unmask(now, heard, replies)


def test_a_share_and_a_pair_key_of_one_site_are_not_both_had() -> None:
    """Nor by putting a site on the list whose share is not there."""
    sites = federation(6)
    now = attempt(sites)
    replies, answers = exchanged(sites, now, ["s05"])
    late = secure.read(sites["s05"].send(now, words(5)), now, "s05")
    for name in answers:
        with pytest.raises(SecureSumError, match="another list"):
            sites[name].unmask(now, sorted(sites), {**replies, "s05": late})
    with pytest.raises(SecureSumError, match="0 sites unmasked"):
        secure.opened(now, {**replies, "s05": late}, answers)


def test_no_key_of_an_attempt_of_everyone_is_revealed() -> None:
    sites = federation(5)
    now = attempt(sites, Mode.EVERYONE)
    replies = {n: secure.read(s.send(now, words(0)), now, n) for n, s in sites.items() if n != "s04"}
    with pytest.raises(SecureSumError, match="no key"):
        secure.unmask(now, sorted(replies), {}, sites["s00"].session, sites["s00"].memory)
    pretended = replace(now, mode=Mode.DROP_OUT)
    with pytest.raises(SecureSumError, match="not the one"):
        secure.unmask(pretended, sorted(replies), {}, sites["s00"].session, sites["s00"].memory)


def test_a_swapped_key_and_an_invented_site_are_refused() -> None:
    sites = federation(5)
    now = attempt(sites)
    stranger = Session.begin("run", "s01", identity("the server"))
    swapped = replace(now, offers=(now.offers[0], stranger.offer, *now.offers[2:]))
    with pytest.raises(SecureSumError, match="'s01' is not signed by 's01'"):
        sites["s00"].send(swapped, words(0))
    invented = Session.begin("run", "t", identity("t"))
    with pytest.raises(SecureSumError, match="'t' is not on this site's list"):
        sites["s00"].send(replace(now, offers=(*now.offers, invented.offer)), words(0))
    mine = Session.begin("run", "s00", identity("s00"))
    with pytest.raises(SecureSumError, match="not in the cohort with the key"):
        sites["s00"].send(replace(now, offers=(mine.offer, *now.offers[1:])), words(0))
    with pytest.raises(SecureSumError, match="twice"):
        sites["s00"].send(replace(now, offers=(*now.offers, now.offers[-1])), words(0))
    earlier = Session.begin("yesterday", "s01", identity("s01"))
    with pytest.raises(SecureSumError, match="not signed"):
        sites["s00"].send(replace(now, offers=(now.offers[0], earlier.offer, *now.offers[2:])), words(0))
    low = replace(now.offers[1], key=bytes(32))
    with pytest.raises(SecureSumError, match="not signed"):
        sites["s00"].send(replace(now, offers=(now.offers[0], low, *now.offers[2:])), words(0))


def test_a_key_of_low_order_is_refused_even_signed() -> None:
    sites = federation(4)
    signer = secure._identity(identity("s01"))
    low = secure.Offer(
        "s01", bytes(32), signer.sign(secure._signed("run", "s01", bytes(32)), secure._ecdsa())
    )
    now = attempt(sites)
    with pytest.raises(SecureSumError, match="no X25519 key"):
        sites["s00"].send(replace(now, offers=(now.offers[0], low, *now.offers[2:])), words(0))


def test_a_server_can_ask_for_more_never_for_less() -> None:
    sites = federation(6, Policy(minimum_sites=4, colluding=0.5))
    strict = attempt(sites, colluders=3, minimum=4)
    sites["s00"].send(strict, words(0))
    for less, why in [
        ({"colluders": 2, "minimum": 4}, "assumes 3"),
        ({"colluders": 3, "minimum": 3}, "minimum_sites is 4"),
    ]:
        with pytest.raises(SecureSumError, match=why):
            sites["s01"].send(attempt(sites, **less), words(0))
    few = {n: sites[n] for n in ("s00", "s01", "s02")}
    with pytest.raises(SecureSumError, match="the cohort has 3 sites"):
        sites["s01"].send(attempt(few, colluders=1, minimum=4), words(0))
    with pytest.raises(SecureSumError, match="assumes 6 colluding"):
        sites["s01"].send(attempt(sites, colluders=6, minimum=4), words(0))


def test_replayed_rounds_are_refused() -> None:
    sites = federation(4)
    first, second = attempt(sites), attempt(sites, number=1, index=1)
    sites["s00"].send(first, words(0))
    sites["s00"].send(second, words(1))
    with pytest.raises(SecureSumError, match="take a new number"):
        sites["s00"].send(first, words(0))
    with pytest.raises(SecureSumError, match="another one here"):
        sites["s00"].send(replace(second, broadcast=sha256(b"x").digest()), words(1))
    with pytest.raises(SecureSumError, match="train 1 was answered in another attempt"):
        sites["s00"].send(attempt(sites, number=2, index=1), words(1))
    with pytest.raises(SecureSumError, match="train 0 was answered in another attempt"):
        sites["s00"].send(attempt(sites, number=3, index=0), words(1))
    with pytest.raises(SecureSumError, match="of run 'other'"):
        sites["s00"].send(replace(second, run="other", number=4, index=4), words(1))


def test_shares_of_two_attempts_swapped_are_refused() -> None:
    sites = federation(4)
    first, second = attempt(sites), attempt(sites, number=1, index=1)
    early = {n: secure.read(s.send(first, words(0)), first, n) for n, s in sites.items()}
    late = {n: secure.read(s.send(second, words(0)), second, n) for n, s in sites.items()}
    mixed = late | {"s01": early["s01"]}
    with pytest.raises(SecureSumError, match="share from 's01' is not one of this attempt"):
        sites["s00"].unmask(second, sorted(sites), mixed)
    with pytest.raises(SecureSumError, match="not the one that this site answered last"):
        sites["s00"].unmask(first, sorted(sites), early)
    crossed = dict(secure.shares_for("s02", late)) | {"s02": b""}
    with pytest.raises(SecureSumError, match="not one of this attempt for this site"):
        secure.unmask(second, sorted(sites), crossed, sites["s00"].session, sites["s00"].memory)


# --- what arrives damaged --------------------------------------------------------------------


def test_damaged_replies_are_refused() -> None:
    sites = federation(4)
    now = attempt(sites)
    reply = sites["s00"].send(now, words(0))
    for damaged in (reply[:-1], reply + b"x", reply[:3], b"", struct.pack("<I", 4) + b"[1]"):
        with pytest.raises(SecureSumError):
            secure.read(damaged, now, "s00")
    with pytest.raises(SecureSumError, match="somebody else"):
        secure.read(reply, now, "s01")
    with pytest.raises(SecureSumError, match="cannot be read"):
        Attempt.of(json.loads(json.dumps(now.plain())) | {"mode": "sometimes"})
    assert Attempt.of(json.loads(json.dumps(now.plain()))).digest == now.digest


def test_a_false_share_is_found() -> None:
    sites = federation(7)
    now = attempt(sites)
    replies, answers = exchanged(sites, now)
    header, blobs = secure._unpacked(answers["s02"])
    answers["s02"] = secure._packed(dict(header), bytes(16), *blobs[1:])
    assert numbers(secure.opened(now, replies, answers)) == plain_sum([words(i) for i in range(7)])
    few = {n: answers[n] for n in sorted(answers)[: now.threshold]}
    with pytest.raises(SecureSumError, match="do not join"):
        secure.opened(now, replies, few)


# --- crashes ---------------------------------------------------------------------------------


def test_a_repetition_sends_the_stored_bytes_whatever_the_data_are_now() -> None:
    sites = federation(4)
    now = attempt(sites)
    reply = sites["s00"].send(now, words(0))
    assert sites["s00"].send(now, words(99)) == reply


def test_a_site_that_was_killed_before_it_wrote_sends_other_bytes_and_nothing_was_sent_twice() -> None:
    """The memory of before: what was made had not left."""
    sites = federation(4)
    now, before = attempt(sites), sites["s00"].memory
    first = sites["s00"].send(now, words(0))
    sites["s00"].memory = before
    again = sites["s00"].send(now, words(0))
    assert first != again  # another self mask
    replies = {n: secure.read(s.send(now, words(i)), now, n) for i, (n, s) in enumerate(sites.items())}
    answers = {n: sites[n].unmask(now, sorted(sites), replies) for n in sites}
    assert numbers(secure.opened(now, replies, answers)) == plain_sum([words(i) for i in range(4)])


def test_a_site_without_its_reply_asks_for_a_new_number() -> None:
    sites = federation(4)
    now = attempt(sites)
    sites["s00"].send(now, words(0))
    sites["s00"].memory = replace(sites["s00"].memory, reply=b"")
    with pytest.raises(SecureSumError, match="take a new number"):
        sites["s00"].send(now, words(0))


def test_a_further_attempt_of_everyone_masks_the_same_words_anew() -> None:
    """Else two attempts of which one is completed late would tell how one site's data changed."""
    sites = federation(4)
    first = attempt(sites, Mode.EVERYONE)
    for i, name in enumerate(("s00", "s01", "s02")):
        sites[name].send(first, words(i))
    second = attempt(sites, Mode.EVERYONE, number=1)
    replies = {n: secure.read(s.send(second, words(i)), second, n) for i, (n, s) in enumerate(sites.items())}
    assert numbers(secure.opened(second, replies)) == plain_sum([words(i) for i in range(4)])
    third = attempt(sites, Mode.EVERYONE, number=2)
    again = {n: secure.read(s.send(third, words(50)), third, n) for n, s in sites.items()}
    assert secure.opened(third, again) == secure.opened(second, replies)


def stripped(sites: Mapping[str, Site], now: Attempt, reply: secure.Masked, known: set[str]) -> bytes:
    """A site's words without its self mask, which the server has when a sum is opened, and without the masks
    that it shares with sites whose secrets are ``known``."""
    total = secure._Words(LAYOUT, reply.words)
    shares = [(i, sites[n].opened_share(now, reply.site)) for i, n in enumerate(now.sites, 1)]
    secret = secure._joined(shares, now, reply.proof)
    assert secret is not None
    size = secure.size_of(LAYOUT)
    total.add(secure._stream(secure._self_key(secret, now), size), -1)
    for name in known - {reply.site}:
        offer = next(o for o in now.offers if o.site == reply.site)
        key = secure._pair_key(sites[name].session, offer, now)
        total.add(secure._stream(key, size), -secure._sign(reply.site, name))
    return total.data


def test_exchanged_vectors_cannot_be_told_apart() -> None:
    """Runs with one total in which two honest sites' vectors were exchanged, against a server that two other
    sites collude with, and that knows both vectors: less whichever of them, a site's words are as any bytes
    are. With the key of that pair, too, it can tell."""
    honest, both = ("s00", "s02"), (bytes(secure.size_of(LAYOUT)), words(7))
    right = {known: np.zeros((2, 2)) for known in (2, 3)}
    runs = 30
    for number in range(runs):
        for order in (0, 1):
            sites = federation(4)
            now = attempt(sites, number=number, index=number)
            each = {honest[0]: both[order], honest[1]: both[1 - order], "s01": words(1), "s03": words(3)}
            replies = {n: secure.read(s.send(now, each[n]), now, n) for n, s in sites.items()}
            answers = {n: sites[n].unmask(now, sorted(sites), replies) for n in sites}
            expected = plain_sum(list(each.values()))
            assert numbers(secure.opened(now, replies, answers)) == expected
            for known, names in ((2, {"s01", "s03"}), (3, {"s01", "s03", honest[1]})):
                left = stripped(sites, now, replies[honest[0]], names)
                for guess in (0, 1):
                    words_left = secure._Words(LAYOUT, left)
                    words_left.add(both[guess], -1)
                    right[known][order, guess] += np.mean(np.frombuffer(words_left.data, np.uint8) == 0)
    assert np.diag(right[3]).tolist() == [runs, runs]
    size, chance = secure.size_of(LAYOUT), 1 / 256
    apart = (right[2] / runs - chance) / np.sqrt(chance * (1 - chance) / (size * runs))
    assert float(np.abs(apart).max()) < 5


# --- no differencing -------------------------------------------------------------------------


def test_cohorts_that_differ_by_a_few_are_refused() -> None:
    five, past = ("a", "b", "c", "d", "e"), [("a", "b", "c", "d", "e")]
    secure.require_apart(five, past, 3)
    secure.require_apart(("a", "b", "c", "d", "e", "f", "g", "h"), past, 3)
    for near in (("a", "b", "c", "d"), (*five, "f"), ("a", "b", "c", "d", "f"), (*five, "f", "g")):
        with pytest.raises(SecureSumError, match="differ"):
            secure.require_apart(near, past, 3)


def test_settings_of_a_policy_are_checked() -> None:
    with pytest.raises(SecureSumError, match="at least 2"):
        Policy(minimum_sites=1)
    with pytest.raises(SecureSumError, match="below 1"):
        Policy(colluding=1.0)
