"""Compressors: what is decoded is what was compressed, bit for bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fedpop as fp
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key
from fedpop.message.compressors.bits import pack, packed_bytes, unpack
from tests.message.every_compressor import (
    COMPRESSORS,
    KEY,
    LARGEST,
    TINY,
    every,
    many,
    one,
    same_bits,
    vectors,
)
from tests.oracles import DOUBLE, gaussian_noise

# --- encode and decode -----------------------------------------------------------------------


@every
@settings(max_examples=60, deadline=None)
@given(v=vectors)
@example(v=torch.zeros(0))
@example(v=torch.zeros(1))
@example(v=torch.tensor([-0.0]))
@example(v=torch.tensor([TINY, -TINY, 3 * TINY, 0.0, 1.0]))
@example(v=torch.tensor([2.0**-126 - TINY, 2.0**-126]))
@example(v=torch.tensor([2.0**127]))
@example(v=torch.tensor([LARGEST, 1.0]))
def test_what_is_decoded_is_what_was_compressed(name, v):
    compressor = COMPRESSORS[name]
    sent = one(compressor, v)
    if not bool(torch.isfinite(sent).all()):
        assert bool(torch.isnan(sent).all())
        with pytest.raises(PayloadError, match="cannot be sent"):
            compressor.encode(v, KEY, 9)
        return
    payload = compressor.encode(v, KEY, 9)
    assert same_bits(compressor.decode(payload, len(v)), sent)
    assert len(payload) == compressor.sent_bytes(sent[None])
    if not bool(((sent != 0) & (sent.abs() < 2.0**-126)).any()):  # natural takes a tenth bit for those
        assert len(payload) == compressor.encoded_bytes(len(v))
    # A second pass changes nothing but the entries that rand-k drops.
    if not isinstance(compressor, fp.compressors.RandK | fp.compressors.QSGD):
        assert same_bits(one(compressor, sent), sent)


@every
@pytest.mark.parametrize("d", [0, 1, 2, 7, 8, 9, 255, 256, 65535, 65536, 65537, 200_001])
def test_every_length(name, d):
    compressor = COMPRESSORS[name]
    v = gaussian_noise(d, d).float()
    payload = compressor.encode(v, KEY, 4)
    assert len(payload) == compressor.encoded_bytes(d)
    assert same_bits(compressor.decode(payload), one(compressor, v, 4))


def test_the_encoded_forms_are_as_small_as_promised():
    d, frame = 80_000, 12
    assert fp.compressors.Identity().encoded_bytes(d) == frame + 1 + 4 * d
    for s, bits in ((1, 2), (2, 3), (3, 3), (7, 4), (127, 8), (128, 9), (32767, 16)):
        assert fp.compressors.QSGD(levels=s).width == 1 + math.ceil(math.log2(s + 1)) == bits
        assert fp.compressors.QSGD(levels=s).encoded_bytes(d) == frame + 6 + bits * d // 8
    assert fp.compressors.RandK(k=100).encoded_bytes(d) == frame + 13 + 400
    assert fp.compressors.Natural().encoded_bytes(d) == frame + 1 + 9 * d // 8
    wide = torch.full((1, d), TINY)
    assert (
        fp.compressors.Natural().sent_bytes(wide)
        == len(fp.compressors.Natural().encode(wide[0], KEY))
        == frame + 1 + 10 * d // 8
    )


@every
def test_doubles_are_accepted(name):
    compressor = COMPRESSORS[name]
    v = gaussian_noise(1, 50)
    sent = one(compressor, v)
    assert sent.dtype == DOUBLE
    decoded = compressor.decode(compressor.encode(v, KEY, 9))
    torch.testing.assert_close(decoded.to(DOUBLE), sent, rtol=0, atol=0)
    assert compressor.sent_bytes(sent[None]) == len(compressor.encode(v, KEY, 9)) or name == "identity"
    with pytest.raises(PayloadError, match="cannot be sent"):
        compressor.encode(torch.full((3,), 1e300, dtype=DOUBLE), KEY) if name != "identity" else (
            compressor.encode(torch.full((3,), torch.inf, dtype=DOUBLE), KEY)
        )


@every
def test_a_client_does_not_depend_on_its_cohort(name):
    compressor = COMPRESSORS[name]
    ids = torch.tensor([3, 11, 4, 900_000])
    v = gaussian_noise(2, 4, 70_000).float() * torch.tensor([1.0, 1e-30, 1e30, 1e-42])[:, None]
    together = compressor.compress(v, KEY, ids)
    for i, client in enumerate(ids.tolist()):
        assert same_bits(one(compressor, v[i], client), together[i])
        assert same_bits(compressor.decode(compressor.encode(v[i], KEY, client)), together[i])
    narrow = compressor.compress(v[:, :33].expand(4, 33).repeat(3000, 1), KEY, ids.repeat(3000))
    assert same_bits(narrow[-4:], compressor.compress(v[:, :33], KEY, ids))


@pytest.mark.parametrize("name", [n for n in COMPRESSORS if n not in ("identity", "rand-k-all")])
def test_draws_differ_between_clients_rounds_and_messages(name):
    compressor = COMPRESSORS[name]
    v = gaussian_noise(3, 1, 400).float()
    seen = [
        compressor.compress(v, key, torch.tensor([client]))
        for key in (KEY, KEY.at(round=6), KEY.at(purpose="other"), Key(4, 5, KEY.purpose))
        for client in (0, 1)
    ]
    assert len({tuple(s[0].tolist()) for s in seen}) == len(seen)
    assert same_bits(compressor.compress(v, KEY, torch.tensor([0])), seen[0])


# --- what cannot be sent ---------------------------------------------------------------------


@every
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_values_that_are_not_finite_are_refused(name, value):
    if name == "identity":
        return
    v = torch.ones(3, 70_000)
    v[1, 69_999] = value
    sent = COMPRESSORS[name].compress(v, KEY, torch.arange(3))
    assert torch.isnan(sent[1]).all()
    assert torch.isfinite(sent[[0, 2]]).all()
    with pytest.raises(PayloadError, match="NaN or infinite"):
        COMPRESSORS[name].encode(v[1], KEY)


@pytest.mark.parametrize("name", ["qsgd-1", "qsgd-7", "qsgd-127", "rand-k", "natural"])
@pytest.mark.parametrize("d", [1, 10])
def test_the_largest_vectors_that_decode_within_float32(name, d):
    """A vector is refused just where one of its possible decoded forms is not finite."""
    compressor = COMPRESSORS[name]
    low, high = 1.0, LARGEST
    ones = torch.ones(d)
    accepted = lambda x: bool(torch.isfinite(one(compressor, x * ones)).all())  # noqa: E731
    if not accepted(high):
        while np.nextafter(np.float32(low), np.float32(np.inf)) < high:
            middle = float(np.float32((low + high) / 2))
            low, high = (middle, high) if accepted(middle) else (low, middle)
    else:
        low = high
    at = low * ones
    drawn = many(compressor, at, 3000)
    assert torch.isfinite(drawn).all()
    top = drawn.abs().max()
    if low < high:  # refused beyond: some entry could have come out above the largest number
        reach = {
            "natural": 2 * high,
            "rand-k": high * d / fp.compressors.RandK(share=0.3).count(d),
        }.get(name)
        if reach is None:
            unit = d**0.5 * high / compressor.levels
            reach = unit * math.ceil(high / unit * (1 - 1e-7))
        assert reach > LARGEST * (1 - 1e-6)
    assert top <= LARGEST


# --- settings --------------------------------------------------------------------------------

WRONG = {
    "s=0": (lambda: fp.compressors.QSGD(levels=0), r"levels must be a whole number in \[1, 32,767\], not 0"),
    "s too large": (lambda: fp.compressors.QSGD(levels=2**15), "not 32768"),
    "s a fraction": (lambda: fp.compressors.QSGD(levels=1.5), "not 1.5"),
    "k=0": (lambda: fp.compressors.RandK(k=0), "k must be a whole number, 1 or more, or None, not 0"),
    "share 0": (lambda: fp.compressors.RandK(share=0.0), r"\(0, 1\], or None, not 0"),
    "share above 1": (lambda: fp.compressors.RandK(share=1.5), "not 1.5"),
    "both": (lambda: fp.compressors.RandK(k=3, share=0.5), "not both"),
    "k too large to compress": (
        lambda: one(fp.compressors.RandK(k=5), torch.ones(4)),
        "k = 5 entries of a vector of 4",
    ),
    "k too large to encode": (
        lambda: fp.compressors.RandK(k=5).encode(torch.ones(4), KEY),
        "k = 5 entries of a vector of 4",
    ),
    "k too large for omega": (lambda: fp.compressors.RandK(k=5).omega(4), "k = 5 entries of a vector of 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_impossible_settings(case):
    make, message = WRONG[case]
    with pytest.raises(SettingsError, match=message):
        make()


# --- packing ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 16), data=st.data())
def test_packing(width, data):
    count = data.draw(st.integers(0, 40))
    low = data.draw(arrays.arrays(np.int16, count, elements=st.integers(-(2**15), 2**15 - 1)))
    codes = low if width > 8 else low.astype(np.int8)
    packed = b"".join(pack(codes, width))
    assert len(packed) == packed_bytes(count, width)
    assert packed_bytes(count, width) * 8 < count * width + 8 * max(width % 8, 1)
    out = unpack(memoryview(packed), count, width)
    assert (out.astype(np.int64) == codes.astype(np.int64) % 2**width).all()
