"""Whole numbers for secure sums: unbiased, exact where they must be, refused where they do not fit."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from fedpop.errors import SettingsError
from fedpop.keys import Key
from fedpop.message import Aggregate, Message, Tensors
from fedpop.message.fixed_point import FALLS, SCALE, FixedPoint, learned
from fedpop.message.words import SumWords
from fedpop.privacy import secure
from tests.privacy.test_secure import Site, attempt, federation


def message(**vectors: torch.Tensor) -> Message:
    count = len(next(iter(vectors.values())))
    return Message(torch.arange(count), torch.ones(count, dtype=torch.int64), vectors, checked=True)


def worded(
    given: Message, scale: float | None = None, bits: int = 32, seed: int = 0, sites: int = 0
) -> Message:
    broadcast = {} if scale is None else {SCALE + "J": torch.tensor(scale)}
    ones = torch.ones(len(given.sites))
    form = FixedPoint(bits)
    return form.words(given, ones, sites or len(given.sites), ("J",), broadcast, Key(seed, 3, "train"))


def total(given: Message) -> Tensors:
    aggregate = Aggregate()
    aggregate.add(given, torch.ones(len(given.sites)))
    return aggregate.total(len(given.sites), ratio=True).plain


def exact(column: np.ndarray) -> Fraction:
    return sum((Fraction(float(x)) for x in column), Fraction(0))


def test_float64_sums_agree_with_exact_ones() -> None:
    rng = np.random.default_rng(0)
    v = rng.standard_normal((50, 300)) * 10.0 ** rng.uniform(-5, 20, (50, 300))
    v[:, :20] = 0
    v[1:, 20:40] = -v[:1, 20:40] / 49  # cancels
    found = total(worded(message(moments=torch.from_numpy(v))))["moments"]
    for j in range(300):
        size = float(np.abs(v[:, j]).sum())
        assert abs(Fraction(float(found[j])) - exact(v[:, j])) <= Fraction(1e-12 * size)


LARGEST = 2.0**83


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(
        st.lists(st.floats(-LARGEST, LARGEST, allow_subnormal=True), min_size=3, max_size=3),
        min_size=1,
        max_size=9,
    )
)
@hypothesis.example([[5e-324, -0.0, LARGEST], [-5e-324, 0.0, -LARGEST], [2.0**-105, -(2.0**-104), 1e-30]])
def test_words_are_the_exact_whole_numbers_of_any_doubles(rows: list[list[float]]) -> None:
    """By whole numbers of any length: each is cut off at 2^-104, and sums are modulo 2^192."""
    given = worded(message(moments=torch.tensor(rows, dtype=torch.float64)))
    data = given.words["moments"].summed(torch.ones(len(rows), dtype=torch.bool)).packed()
    for j in range(3):
        expected = sum(int(Fraction(row[j]) * 2**104) for row in rows)
        assert int.from_bytes(data[24 * j : 24 * j + 24], "little") == expected % 2**192


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**87])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_what_is_no_number_or_too_large_is_withheld_by_its_row(bad: float, kind: torch.dtype) -> None:
    v = torch.tensor([[1.0, 2.0], [bad, 0.0], [3.0, 4.0]], dtype=kind)
    for scale in (None, 4.0):
        sent = worded(message(J=v), scale)
        assert sent.withheld is not None
        assert sent.withheld.tolist() == [False, True, False]
        assert total(sent)["J"].double().tolist() == pytest.approx([4.0, 6.0], abs=1e-4)


def test_a_number_that_a_double_holds_comes_back_to_the_bit() -> None:
    v = torch.tensor([[0.0, 1.5, -2.25, 2.0**-104, -(2.0**-104), 2.0**80, -(2.0**80) + 2.0**30, 1 / 3]])
    v = v.double()
    assert total(worded(message(moments=v)))["moments"].equal(v[0])


def test_the_order_of_rows_and_how_they_are_cut_change_no_bit() -> None:
    g = torch.Generator().manual_seed(1)
    v = torch.randn(9, 1000, generator=g) * torch.logspace(-3, 3, 9).unsqueeze(1)
    for given, scale in ((message(J=v), 12.0), (message(J=v.double()), None)):
        done = worded(given, scale)
        whole = total(done)["J"]
        parts = Aggregate()
        for rows in ([7, 1], [8], [0, 2, 3, 4, 5, 6]):
            part = message(J=given.vectors["J"][rows])
            part = Message(torch.tensor(rows), part.units, part.vectors, checked=True)
            parts.add(worded(part, scale, sites=9), torch.ones(len(rows)))
        assert parts.total(9, ratio=True).plain["J"].equal(whole)


def test_rounding_is_unbiased() -> None:
    v = torch.tensor([[0.3, -0.3, 1.7, -2.9, 0.0, 1.0]])
    seen = torch.stack([worded(message(J=v), 10.0, 16, seed, 8).vectors["J"][0] for seed in range(4000)])
    step = 2.0 ** (10 - FixedPoint(16).payload(8))
    error = (seen - v).abs().amax(0)
    assert bool((error < step).all())
    assert bool((seen[:, 4:] == v[0, 4:]).all())  # whole multiples stay
    deviation = step / 2 / math.sqrt(4000)
    assert bool(((seen.mean(0) - v[0]).abs() < 5 * deviation).all())


def test_what_does_not_fit_is_refused_and_nothing_wraps() -> None:
    v = torch.zeros(4, 3)
    v[1, 2], v[2, 0] = 1024.0, 1023.0
    done = worded(message(J=v), 10.0)
    assert done.units.tolist() == [1, 0, 1, 1]
    assert done.withheld is not None
    assert done.withheld.tolist() == [False, True, False, False]
    assert total(done)["J"].tolist() == [1023.0, 0.0, 0.0]
    wide = torch.tensor([[1e30], [2.0**84]], dtype=torch.float64)
    assert worded(message(moments=wide)).units.tolist() == [0, 1]


def test_all_sites_at_the_bound_fit_together() -> None:
    for bits, sites in ((16, 9), (32, 1000)):
        most = 2.0**10 - 2.0 ** (11 - FixedPoint(bits).payload(sites))
        for sign in (1, -1):
            done = worded(message(J=torch.full((sites, 1), sign * most)), 10.0, bits)
            assert done.units.sum() == sites
            packed = SumWords(done.words["J"].digits.sum(0, keepdim=True), -1, torch.float32, bits).packed()
            wrapped = np.frombuffer(packed, dtype=f"<i{bits // 8}")
            assert int(wrapped[0]) == int(done.words["J"].digits.sum())


def test_bits_are_checked() -> None:
    with pytest.raises(SettingsError, match="16 or 32 bits, not 8"):
        FixedPoint(8)
    with pytest.raises(SettingsError, match="use bits = 32"):
        FixedPoint(16).payload(1000)


@pytest.mark.parametrize("lost", [[], [2], [0, 4]])
def test_the_masked_sum_is_the_simulators_to_the_bit(lost: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    given = message(J=torch.randn(7, 50, generator=g), moments=torch.randn(7, 4, generator=g).double())
    done = worded(given, 5.0)
    gone = torch.zeros(7, dtype=torch.bool)
    gone[lost] = True
    simulated = Aggregate()
    simulated.add(done, torch.ones(7), gone)
    expected = simulated.total(7, ratio=True).plain
    sites: dict[str, Site] = federation(7)
    now = attempt(sites)
    layout = tuple((w.width, w.digits.shape[1]) for w in done.words.values())
    replies = {}
    for row, (name, site) in enumerate(sites.items()):
        if row not in lost:
            one = [SumWords(w.digits[row : row + 1], w.step, w.kind, w.bits) for w in done.words.values()]
            data = b"".join(each.packed() for each in one)
            replies[name] = secure.read(site.send(now, data, layout), now, name)
    answers = {name: sites[name].unmask(now, sorted(replies), replies) for name in replies}
    opened, start = secure.opened(now, replies, answers), 0
    for name, words in done.words.items():
        size = words.digits.shape[1] * words.width
        assert words.unpacked(opened[start : start + size]).value()[0].equal(expected[name])
        start += size


def test_the_scale_follows_the_norms() -> None:
    counts = {"norms.J.whole.3": 8.0, "norms.J.whole.5": 2.0, "norms.J.whole.40": 1.0, "norms.J.each.9": 11.0}
    first = learned(("J",), counts, {}, 2)
    assert float(first[SCALE + "J"]) == 5 + 2  # the outlier at 2^40 does not count
    later = learned(("J",), {"norms.J.whole.-3": 5.0}, first, 2)
    assert float(later[SCALE + "J"]) == 5 + 2 - FALLS
    assert float(learned(("J",), {}, first, 2)[SCALE + "J"]) == 5 + 2 - FALLS
    assert learned(("J",), {}, {}, 2) == {}
