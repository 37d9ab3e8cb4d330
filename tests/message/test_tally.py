"""Adding up: plain, weighted and named sums of whoever was heard, and nothing of anybody else.

Whatever the way (the short one of a channel that changes nothing, the long one), sums are compared with sums
over units, or over sites, that are written out here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.keys import Key, units_of
from fedpop.message import Answer, Channel
from tests.helpers import FRAME
from tests.oracles import gaussian_noise
from tests.tally import Heard, Tally

KEY = Key(1, round=3, purpose="site")
NAMES = ["anna", "ben", "cara", "dora", "emil"]
UNITS = units_of(NAMES)
WEIGHTS = torch.tensor([2.0, 0.5, 4.0, 1.0, 3.0])
ONES = torch.ones(5)
EVERYONE = torch.ones(5, dtype=torch.bool)
NOBODY = ~EVERYONE
QSGD = fp.compressors.QSGD(levels=3)
CHANNELS = {
    "plain": Channel(),
    "compressed": Channel(QSGD, ("J",)),
    "clipped": Channel(clip=1.5, compressed=("J",)),
    "each": Channel(dict(zip(NAMES, ["qsgd", "identity", "natural", "rand-k", "qsgd"], strict=True)), ("J",)),
}
channels = pytest.mark.parametrize("channel", CHANNELS.values(), ids=CHANNELS)
weights_of = pytest.mark.parametrize("weights", [ONES, WEIGHTS], ids=["ones", "weights"])


def answer(good: Tensor = EVERYONE, **more: Any) -> Answer:
    """Five units with J ``[5, 20]`` in single and n ``[5, 1]`` in double precision."""
    return Answer(good, {"J": gaussian_noise(0, 5, 20).float(), "n": gaussian_noise(1, 5, 1)}, **more)


def arrived(channel: Channel, name: str, v: Tensor, who: Tensor = UNITS) -> tuple[Tensor, int]:
    return channel.carry(name, v, who, KEY)


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


# --- units that send for themselves --------------------------------------------------------------


@channels
@weights_of
@pytest.mark.parametrize("good", [EVERYONE, torch.tensor([True, False, True, True, False])], ids=str)
def test_sums_over_those_who_are_fit(channel: Channel, weights: Tensor, good: Tensor) -> None:
    tally, given = Tally(channel, KEY), answer(good)
    heard = tally.add(given, UNITS, weights)
    assert torch.equal(heard.heard, good)
    assert heard.seen == {}  # nobody asked for it
    total, size = tally.total(of=9, ratio=True), 0
    for name, v in given.vectors.items():
        seen, more = arrived(channel, name, v[good], UNITS[good])
        close(total.plain[name], seen.sum(0))
        close(total.weighted[name], weights[good].to(v.dtype) @ seen)
        assert total.plain[name].dtype == total.weighted[name].dtype == v.dtype
        size += more
    assert tally.bytes_up == size
    assert total.named == {}
    assert (total.count, total.weight) == (int(good.sum()), float(weights[good].sum()))
    assert (total.of, total.ratio) == (9, True)


@channels
@weights_of
def test_one_answer_or_many_it_is_the_same(channel: Channel, weights: Tensor) -> None:
    """Blocks of units as they are ready, in any order."""
    given, one, many = answer(torch.tensor([True, True, False, True, True])), Tally(channel, KEY), None
    one.add(given, UNITS, weights)
    many = Tally(channel, KEY)
    for rows in ([4], [0, 2], [3, 1]):
        part = Answer(given.good[rows], {n: v[rows] for n, v in given.vectors.items()})
        many.add(part, UNITS[rows], weights[rows])
    whole, pieces = (t.total(5, ratio=False) for t in (one, many))
    for kind in ("plain", "weighted"):
        for name in ("J", "n"):
            close(getattr(pieces, kind)[name], getattr(whole, kind)[name])
    assert (pieces.count, pieces.weight) == (whole.count, whole.weight)
    assert one.bytes_up == many.bytes_up


@weights_of
def test_the_short_way_and_the_long_way_are_the_same(weights: Tensor) -> None:
    """Nobody lost is said in words here, which takes the long way."""
    short, long = Tally(Channel(), KEY), Tally(Channel(), KEY)
    sums = {"gradient": torch.arange(3.0)}
    first, second = (
        t.add(answer(sums=sums), UNITS, weights, None, lost) for t, lost in ((short, None), (long, NOBODY))
    )
    assert torch.equal(first.heard, second.heard)
    assert short.bytes_up == long.bytes_up
    one, other = (t.total(5, ratio=True) for t in (short, long))
    assert (one.count, one.weight) == (other.count, other.weight)
    for kind in ("plain", "weighted"):
        assert getattr(one, kind).keys() == getattr(other, kind).keys()
        for name, value in getattr(one, kind).items():
            close(value, getattr(other, kind)[name])


@channels
def test_named_sums_have_coefficients_of_their_own(channel: Channel) -> None:
    """Of any sign, whatever the weights; of those who were heard only."""
    own = torch.tensor([0.5, -1.0, 0.25, 7.0, 0.0], dtype=torch.float64)
    good = torch.tensor([True, True, True, False, True])
    tally = Tally(channel, KEY)
    tally.add(answer(good, named={"memory": ("J", own), "twice": ("n", 2 * own)}), UNITS, WEIGHTS)
    total = tally.total(5, ratio=True)
    for name, (of, coefficients) in {"memory": ("J", own), "twice": ("n", 2 * own)}.items():
        v = answer().vectors[of]
        seen, _ = arrived(channel, of, v[good], UNITS[good])
        close(total.named[name], coefficients[good].to(v.dtype) @ seen)
    assert set(total.plain) == {"J", "n"}


def test_those_who_are_not_fit_may_hold_anything() -> None:
    """NaN times zero is NaN: rows that are left out never meet a sum, and cost nothing."""
    good = torch.tensor([True, False, True, True, True])
    for channel in CHANNELS.values():
        for value in (float("nan"), float("inf"), 7.0):
            given, tally = answer(good), Tally(channel, KEY)
            given.vectors["J"][1] = value
            tally.add(given, UNITS, WEIGHTS)
            exact, other = Tally(channel, KEY), answer(good)
            exact.add(
                Answer(good[good], {n: v[good] for n, v in other.vectors.items()}), UNITS[good], WEIGHTS[good]
            )
            close(tally.total(5, True).weighted["J"], exact.total(5, True).weighted["J"])
            assert tally.bytes_up == exact.bytes_up


@channels
@pytest.mark.parametrize("name", ["J", "n"])
def test_who_says_to_be_fit_and_is_not_is_found_out(channel: Channel, name: str) -> None:
    """It is not heard at all, not even with the vectors of it that are finite."""
    given, tally = answer(), Tally(channel, KEY)
    given.vectors[name][2, 0] = float("nan")
    heard = tally.add(given, UNITS, WEIGHTS).heard
    fit = torch.tensor([True, True, False, True, True])
    assert torch.equal(heard, fit)
    total = tally.total(5, ratio=True)
    for each, v in answer().vectors.items():
        seen, _ = arrived(channel, each, v[fit], UNITS[fit])
        close(total.plain[each], seen.sum(0))
        close(total.weighted[each], WEIGHTS[fit].to(v.dtype) @ seen)
    assert (total.count, total.weight) == (4, float(WEIGHTS[fit].sum()))


def test_a_vector_that_a_compressor_refuses_costs_only_what_else_was_sent() -> None:
    given, tally = answer(), Tally(CHANNELS["compressed"], KEY)
    given.vectors["J"][2] = 3e38
    assert tally.add(given, UNITS, ONES).heard.tolist() == [True, True, False, True, True]
    assert tally.bytes_up == 4 * QSGD.encoded_bytes(20) + 5 * (FRAME + 8)  # its n was sent before


def test_messages_that_are_lost_were_sent() -> None:
    lost = torch.tensor([False, True, False, False, True])
    for channel in CHANNELS.values():
        tally, sent = Tally(channel, KEY), Tally(channel, KEY)
        sent.add(answer(), UNITS, WEIGHTS)
        heard = tally.add(answer(), UNITS, WEIGHTS, lost=lost).heard
        assert torch.equal(heard, ~lost)
        total = tally.total(5, ratio=True)
        seen, _ = arrived(channel, "J", answer().vectors["J"])
        close(total.plain["J"], seen[~lost].sum(0))
        close(total.weighted["J"], WEIGHTS[~lost] @ seen[~lost])
        assert (total.count, total.weight) == (3, float(WEIGHTS[~lost].sum()))
        assert tally.bytes_up == sent.bytes_up


@channels
def test_units_are_told_what_was_seen_of_them(channel: Channel) -> None:
    tally = Tally(channel, KEY, remembered=("J",))
    good = torch.tensor([True, True, False, True, True])
    told = tally.add(answer(good), UNITS, WEIGHTS)
    assert isinstance(told, Heard)
    assert set(told.seen) == {"J"}
    seen, _ = arrived(channel, "J", answer().vectors["J"][good], UNITS[good])
    assert torch.equal(told.seen["J"][good], seen)
    close(tally.total(5, True).plain["J"], told.seen["J"][told.heard].sum(0))


def test_nobody_at_all() -> None:
    for channel in CHANNELS.values():
        tally = Tally(channel, KEY)
        tally.add(answer(NOBODY), UNITS, WEIGHTS)
        total = tally.total(5, ratio=True)
        assert (total.count, total.weight, tally.bytes_up) == (0, 0.0, 0)
        assert total.no_step
        assert not any(bool(v.any()) for v in (total.plain | total.weighted).values())
    empty = Tally(Channel(), KEY).total(5, ratio=False)
    assert (empty.count, empty.weight) == (0, 0.0)
    assert empty.plain == empty.weighted == empty.named == {}


# --- sums that were made by one backward pass ------------------------------------------------------


@pytest.mark.parametrize("good", [EVERYONE, torch.tensor([True, False, True, True, False])], ids=str)
def test_a_fused_sum_counts_as_one_vector_of_each(good: Tensor) -> None:
    """Each unit would have sent its own: bytes are those of count x size."""
    tally = Tally(Channel(), KEY)
    fused = torch.arange(7.0)
    tally.add(Answer(good, sums={"J": fused}), UNITS, WEIGHTS)
    tally.add(Answer(good, sums={"J": 2 * fused}), UNITS, WEIGHTS)
    total = tally.total(5, ratio=True)
    assert torch.equal(total.weighted["J"], 3 * fused)
    assert tally.bytes_up == 2 * int(good.sum()) * (FRAME + 7 * 4)
    assert total.count == 2 * int(good.sum())
    # Weights are in it already: what it would be without them nobody knows.
    assert "J" not in total.plain
    with pytest.raises(SettingsError, match="the plain sum of 'J' was not formed"):
        total.plain_sum("J", fused)


def test_a_fused_sum_with_weights_of_one_is_a_plain_one_too() -> None:
    tally = Tally(Channel(), KEY)
    tally.add(Answer(EVERYONE, sums={"J": torch.arange(7.0)}), UNITS, ONES)
    assert torch.equal(tally.total(5, True).plain_sum("J", torch.zeros(7)), torch.arange(7.0))


def test_a_sum_cannot_lose_a_unit_afterwards() -> None:
    given = answer(sums={"gradient": torch.ones(2)})
    given.vectors["n"][3] = float("inf")
    with pytest.raises(SettingsError, match="refused after its vectors had been added to a sum"):
        Tally(Channel(), KEY).add(given, UNITS, ONES)
    with pytest.raises(SettingsError, match="refused after its vectors had been added to a sum"):
        Tally(Channel(), KEY).add(answer(sums={"gradient": torch.ones(2)}), UNITS, ONES, lost=~NOBODY)


# --- units of one site ------------------------------------------------------------------------------

NORTH, SOUTH = units_of(["north", "south"]).tolist()
SITES = torch.tensor([NORTH, SOUTH, NORTH, SOUTH, NORTH])
BY_SITE = torch.tensor([2.0, 5.0, 2.0, 5.0, 2.0])
COMPRESSED = Channel(QSGD, ("J",))
site_channels = pytest.mark.parametrize("channel", [Channel(), COMPRESSED], ids=["plain", "compressed"])


def site_sums(v: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
    """Of both sites, over their units that are fit; and under which names they travel."""
    rows = [
        torch.stack([v[i] for i in range(5) if int(SITES[i]) == s and good[i]]).sum(0) for s in (NORTH, SOUTH)
    ]
    return torch.stack(rows), torch.tensor([NORTH, SOUTH])


@site_channels
@pytest.mark.parametrize("weights", [ONES, BY_SITE], ids=["ones", "weights"])
@pytest.mark.parametrize("good", [EVERYONE, torch.tensor([True, False, True, True, False])], ids=str)
def test_units_of_one_site_send_one_sum(channel: Channel, weights: Tensor, good: Tensor) -> None:
    tally, given = Tally(channel, KEY), answer(good)
    assert torch.equal(tally.add(given, UNITS, weights, SITES).heard, good)
    total, size = tally.total(5, ratio=True), 0
    for name, v in given.vectors.items():
        sums, where = site_sums(v, good)
        seen, more = arrived(channel, name, sums, where)
        close(total.plain[name], seen.sum(0))
        each = torch.tensor([1.0, 1.0]) if weights is ONES else torch.tensor([2.0, 5.0])
        close(total.weighted[name], each.to(v.dtype) @ seen)
        size += more
    assert tally.bytes_up == size
    # Units are counted, not sites.
    assert (total.count, total.weight) == (int(good.sum()), float(weights[good].sum()))


def test_without_compression_sites_do_not_matter() -> None:
    one, other = Tally(Channel(), KEY), Tally(Channel(), KEY)
    one.add(answer(), UNITS, BY_SITE)
    other.add(answer(), UNITS, BY_SITE, SITES)
    for name in ("J", "n"):
        close(other.total(5, True).weighted[name], one.total(5, True).weighted[name])
    assert other.bytes_up * 5 == one.bytes_up * 2


@site_channels
def test_a_site_of_which_nobody_is_fit_sends_nothing(channel: Channel) -> None:
    tally, good = Tally(channel, KEY), torch.tensor([True, False, True, False, True])
    tally.add(answer(good), UNITS, BY_SITE, SITES)
    v = answer().vectors
    sums = v["J"][good].sum(0, keepdim=True)
    seen, size = arrived(channel, "J", sums, torch.tensor([NORTH]))
    close(tally.total(5, True).plain["J"], seen[0])
    close(tally.total(5, True).weighted["J"], 2 * seen[0])
    assert tally.bytes_up == size + FRAME + 8


def test_weights_that_differ_within_a_site_are_refused() -> None:
    with pytest.raises(SettingsError, match="units of one site take part with different probabilities"):
        Tally(Channel(), KEY).add(answer(), UNITS, WEIGHTS, SITES)


@site_channels
def test_named_sums_of_sites(channel: Channel) -> None:
    """One coefficient for each site, of any sign, also where one of its units was not heard."""
    good = torch.tensor([True, True, False, True, True])
    own = torch.where(SITES == NORTH, -0.5, 3.0)
    tally = Tally(channel, KEY)
    tally.add(answer(good, named={"memory": ("J", own)}), UNITS, BY_SITE, SITES)
    sums, where = site_sums(answer().vectors["J"], good)
    seen, _ = arrived(channel, "J", sums, where)
    close(tally.total(5, True).named["memory"], -0.5 * seen[0] + 3 * seen[1])
    other = answer(named={"memory": ("J", torch.arange(5.0))})
    with pytest.raises(SettingsError, match="units of one site count differently in 'memory'"):
        Tally(channel, KEY).add(other, UNITS, BY_SITE, SITES)


@site_channels
def test_what_was_seen_of_a_site_is_shared_evenly(channel: Channel) -> None:
    """By its units that spoke, so that what they remember adds up to what the server has of them."""
    good = torch.tensor([True, True, False, True, True])
    tally = Tally(channel, KEY, remembered=("J",))
    told = tally.add(answer(good), UNITS, ONES, SITES)
    sums, where = site_sums(answer().vectors["J"], good)
    seen, _ = arrived(channel, "J", sums, where)
    for i, share in ((0, seen[0] / 2), (4, seen[0] / 2), (1, seen[1] / 2), (3, seen[1] / 2)):
        close(told.seen["J"][i], share)
    close(told.seen["J"][told.heard].sum(0), tally.total(5, True).plain["J"])


@site_channels
def test_the_message_of_one_unit_is_that_of_its_site(channel: Channel) -> None:
    lost = torch.tensor([False, False, True, False, False])  # cara, in the north
    tally = Tally(channel, KEY)
    heard = tally.add(answer(), UNITS, BY_SITE, SITES, lost).heard
    assert heard.tolist() == [False, True, False, True, False]
    sums, where = site_sums(answer().vectors["J"], EVERYONE)
    seen, size = arrived(channel, "J", sums, where)
    total = tally.total(5, ratio=True)
    close(total.plain["J"], seen[1])
    close(total.weighted["J"], 5 * seen[1])
    assert (total.count, total.weight) == (2, 10.0)
    assert tally.bytes_up == size + 2 * (FRAME + 8)


def test_a_sum_that_cannot_be_sent_leaves_all_of_its_site_out() -> None:
    given, tally = answer(), Tally(COMPRESSED, KEY)
    given.vectors["J"][0] = 3e38
    heard = tally.add(given, UNITS, ONES, SITES).heard
    assert heard.tolist() == [False, True, False, True, False]
    assert tally.bytes_up == QSGD.encoded_bytes(20) + 2 * (FRAME + 8)
    assert tally.total(5, True).count == 2


def test_fused_sums_of_sites_take_the_bytes_of_those_that_speak() -> None:
    tally = Tally(Channel(), KEY)
    tally.add(Answer(EVERYONE, sums={"gradient": torch.ones(3)}), UNITS, ONES, SITES)
    assert tally.bytes_up == 2 * (FRAME + 3 * 4)
    assert torch.equal(tally.total(5, False).plain["gradient"], torch.ones(3))
