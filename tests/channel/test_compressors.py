"""Compressors: what is decoded is what was compressed, bit for bit; unbiased; as noisy as omega says.

Where nothing is random the tests are exact: all words of a generator are tried, all choices of rand-k listed.
Where draws are needed the tolerance is six standard errors over independent clients, at most a few hundred
comparisons, so that a false alarm has a chance below 1e-6.
"""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fedpop as fp
from fedpop.channel.compressors.base import sealed
from fedpop.channel.compressors.bits import pack, packed_bytes, unpack
from fedpop.channel.compressors.natural import rounded_bits
from fedpop.channel.compressors.qsgd import rounded
from fedpop.channel.compressors.rand_k import chosen, draw, prime_to
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key
from tests.oracles import DOUBLE, assert_mean, gaussian_noise

KEY = Key(3, round=5, purpose="compress/J")
SIX = 6.0
CLIENTS = 20_000
COMPRESSORS = {
    "identity": fp.compressors.Identity(),
    "qsgd-1": fp.compressors.QSGD(levels=1),
    "qsgd-7": fp.compressors.QSGD(levels=7),
    "qsgd-127": fp.compressors.QSGD(),
    "qsgd-128": fp.compressors.QSGD(levels=128),
    "qsgd-32767": fp.compressors.QSGD(levels=32767),
    "rand-k": fp.compressors.RandK(share=0.3),
    "rand-k-all": fp.compressors.RandK(share=1.0),
    "natural": fp.compressors.Natural(),
}
every = pytest.mark.parametrize("name", COMPRESSORS)
LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-149

vectors = arrays.arrays(
    np.float32,
    st.integers(0, 70),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
).map(torch.from_numpy)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())


def one(compressor: fp.compressors.Compressor, v: torch.Tensor, client: int = 9) -> torch.Tensor:
    return compressor.compress(v[None], KEY, torch.tensor([client]))[0]


def many(compressor: fp.compressors.Compressor, v: torch.Tensor, clients: int) -> torch.Tensor:
    """The same vector as sent by so many clients, in double precision."""
    return compressor.compress(v.expand(clients, -1), KEY, torch.arange(clients)).to(DOUBLE)


# --- encode and decode -----------------------------------------------------------------------


@every
@settings(max_examples=150, deadline=None)
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


# --- unbiased, and omega ---------------------------------------------------------------------


def test_rounding_to_levels_is_exactly_unbiased():
    """Over all words: the mean of floor(x + r) is x, for every fixed-point number x."""
    fraction = 10
    words = torch.arange(2**fraction, dtype=torch.int32)
    for level in range(-3 * 2**fraction, 3 * 2**fraction + 1, 7):
        q = rounded(torch.full_like(words, level), words.clone(), fraction)
        assert int(q.sum()) == level
        assert int(q.max()) - int(q.min()) <= 1
    whole = torch.full_like(words, -3 * 2**fraction)
    assert (rounded(whole, words.clone(), fraction) == -3).all()


@pytest.mark.parametrize("value", [1.0, 4 / 3, 1.999999, -3.7e30, 1e-37, 2.0**127])
def test_rounding_to_powers_is_exactly_unbiased(value):
    words, value = torch.arange(2**23, dtype=torch.int32), float(torch.tensor(value))
    bits = torch.tensor([value]).view(torch.int32)
    powers = rounded_bits(bits.expand_as(words), words).view(torch.float32).to(DOUBLE)
    assert float(powers.mean()) == value
    assert float((powers - value).square().mean()) <= 0.125 * value**2 * (1 + 1e-12)


def test_every_choice_of_rand_k():
    """All a and c: each entry is chosen with probability k/d; for a prime d, each pair as it should be."""
    for d in range(1, 24):
        p = prime_to(d)
        a, c = (
            t.flatten() for t in torch.meshgrid(torch.arange(1, max(p, 2)), torch.arange(d), indexing="ij")
        )
        for k in range(1, d + 1):
            index = chosen(a, c, d, k)
            hits = torch.zeros(len(a), d, dtype=DOUBLE).scatter_add_(
                1, index, torch.ones(len(a), k, dtype=DOUBLE)
            )
            assert hits.max() == 1
            torch.testing.assert_close(hits.mean(0), torch.full((d,), k / d, dtype=DOUBLE))
            pairs = hits.mT @ hits / len(a)
            wanted = torch.full((d, d), k * (k - 1) / (d * max(d - 1, 1)), dtype=DOUBLE).fill_diagonal_(k / d)
            if p == d:
                torch.testing.assert_close(pairs, wanted)
            elif k > 1:
                assert (pairs - wanted).abs().max() <= 3 * (d - p + 1) / d


def test_rand_k_draws_its_two_numbers_evenly():
    d, clients = 6, 60_000
    a, c = draw(KEY, torch.arange(clients), d)
    for numbers, low, high in ((a, 1, 5), (c, 0, 6)):
        counts = torch.bincount(numbers, minlength=high)[low:].to(DOUBLE)
        expected = clients / (high - low)
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert chi2 < 45  # five degrees of freedom at most: 1e-8
    assert len(torch.unique(a * 10 + c)) == 4 * 6


def spread(d: int) -> torch.Tensor:
    """Entries of very different sizes, zeros among them."""
    v = gaussian_noise(d, d).float() * torch.logspace(-3, 1, d)
    v[d // 3] = 0
    return v


def variances(compressor: fp.compressors.Compressor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The variance of every decoded entry, in closed form, and the distance between its values."""
    size, d = v.to(DOUBLE).abs(), len(v)
    if isinstance(compressor, fp.compressors.QSGD):
        exact = np.float64(size.norm()) / compressor.levels
        unit = np.float32(exact)  # rounded up, which matters where float32 is coarse
        unit = torch.tensor(
            float(unit if unit >= exact else np.nextafter(unit, np.float32(np.inf))), dtype=DOUBLE
        )
        f = size / unit - (size / unit).floor()
        return unit**2 * f * (1 - f), unit.expand(d)
    if isinstance(compressor, fp.compressors.Natural):
        low = torch.where(size > 0, 2.0 ** size.log2().floor(), 0.0)
        return (2 * low - size) * (size - low), low
    many_times = d / compressor.count(d) if isinstance(compressor, fp.compressors.RandK) else 1.0
    return size**2 * (many_times - 1), size * many_times


def assert_unbiased(compressor: fp.compressors.Compressor, v: torch.Tensor, rounding: float) -> None:
    """Bernstein's inequality: the mean is this near but for a chance of 2 exp(-22) = 6e-10 per entry."""
    drawn = many(compressor, v, CLIENTS)
    variance, width = variances(compressor, v)
    tolerance = (2 * 22 * variance / CLIENTS).sqrt() + 2 / 3 * 22 * width / CLIENTS + rounding
    off = (drawn.mean(0) - v.to(DOUBLE)).abs()
    assert (off <= tolerance).all(), off / tolerance


@every
@pytest.mark.parametrize("d", [1, 40])
def test_the_mean_is_the_vector(name, d):
    v = spread(d) if d > 1 else torch.tensor([-1.7])
    assert_unbiased(COMPRESSORS[name], v, rounding=2.0**-22 * float(v.abs().max()))


@pytest.mark.parametrize("name", ["qsgd-1", "qsgd-7", "qsgd-127", "natural", "rand-k"])
def test_denormals_are_unbiased_to_one_ulp(name):
    v = torch.tensor([3.0, -5.0, 7.0, 100.0, 0.0, 1e6]) * TINY
    assert_unbiased(COMPRESSORS[name], v, rounding=TINY)
    if name == "natural":  # and as quiet as larger numbers
        error = (many(fp.compressors.Natural(), v, CLIENTS) - v.to(DOUBLE)).square() / v.to(
            DOUBLE
        ).square().clamp(min=TINY**2)
        assert (error.mean(0) <= 0.125 + SIX * error.std(0) / CLIENTS**0.5).all()


@every
@pytest.mark.parametrize("d", [1, 40])
def test_the_variance_is_at_most_omega(name, d):
    compressor = COMPRESSORS[name]
    v = spread(d) if d > 1 else torch.tensor([-4 / 3])
    size = float(v.to(DOUBLE).square().sum())
    error = (many(compressor, v, CLIENTS) - v.to(DOUBLE)).square().sum(1) / size
    at_most = compressor.omega(d)
    standard_error = float(error.std()) / len(error) ** 0.5
    assert float(error.mean()) <= at_most + SIX * standard_error + 1e-12
    # Where the bound is reached.
    if isinstance(compressor, fp.compressors.RandK) or (name == "natural" and d == 1):
        assert float(error.mean()) >= at_most - SIX * standard_error - 1e-12


@settings(max_examples=200, deadline=None)
@given(v=vectors.filter(lambda v: bool(v.any())), s=st.sampled_from([1, 2, 7, 127]))
def test_the_closed_form_of_qsgds_variance_is_below_omega(v, s):
    wide = v.to(DOUBLE) / float(v.abs().max())
    variance = float(variances(fp.compressors.QSGD(levels=s), wide)[0].sum())
    assert variance <= fp.compressors.QSGD(levels=s).omega(len(v)) * float(wide.square().sum()) * (1 + 1e-6)


@pytest.mark.parametrize("name", ["qsgd-7", "qsgd-127", "natural", "rand-k"])
def test_the_variance_is_that_of_the_closed_form(name):
    v = gaussian_noise(8, 20).float()
    error = (many(COMPRESSORS[name], v, CLIENTS) - v.to(DOUBLE)).square()
    assert_mean(error, variances(COMPRESSORS[name], v)[0], "variance", sigmas=SIX)


def test_known_omegas():
    assert fp.compressors.Identity().omega(10) == 0
    assert fp.compressors.QSGD(levels=2).omega(4) == 1.0
    assert fp.compressors.QSGD(levels=10).omega(4) == 0.04
    assert fp.compressors.RandK(k=5).omega(40) == 7.0
    assert fp.compressors.RandK(share=0.25).omega(40) == 3.0
    assert fp.compressors.Natural().omega(7) == 0.125


# --- broken payloads -------------------------------------------------------------------------


@every
def test_any_flipped_bit_is_noticed(name):
    compressor = COMPRESSORS[name]
    payload = compressor.encode(gaussian_noise(5, 11).float(), KEY)
    for bit in range(8 * len(payload)):
        broken = bytearray(payload)
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(PayloadError):
            compressor.decode(bytes(broken))


@every
def test_any_other_length_is_noticed(name):
    compressor = COMPRESSORS[name]
    payload = compressor.encode(gaussian_noise(5, 11).float(), KEY)
    for cut in range(len(payload)):
        with pytest.raises(PayloadError):
            compressor.decode(payload[:cut])
    with pytest.raises(PayloadError):
        compressor.decode(payload + b"\0")
    with pytest.raises(PayloadError, match="11 entries where 12 were expected"):
        compressor.decode(payload, 12)


@every
def test_a_payload_of_other_settings_is_refused(name):
    v = gaussian_noise(6, 16).float()
    for other, compressor in COMPRESSORS.items():
        if other != name:
            with pytest.raises(PayloadError):
                COMPRESSORS[name].decode(compressor.encode(v, KEY))


BROKEN = {
    "nothing": (fp.compressors.QSGD(), b"", "truncated"),
    "text": (fp.compressors.QSGD(), b"this is not a payload", "not an encoded vector"),
    "version": (fp.compressors.QSGD(), struct.pack("<2sBBII", b"fp", 7, 1, 0, 0), "version 7"),
    "a level beyond": (
        fp.compressors.QSGD(levels=4),
        sealed(1, 8, struct.pack("<Hf", 4, 1.0), *pack(np.full(8, 5, np.int8), 4)),
        "beyond 4",
    ),
    "an infinite unit": (
        fp.compressors.QSGD(),
        sealed(1, 1, struct.pack("<Hf", 127, math.inf), b"\1"),
        "unit is inf",
    ),
    "levels": (
        fp.compressors.QSGD(levels=5),
        fp.compressors.QSGD(levels=6).encode(torch.ones(4), KEY),
        "6 levels where 5",
    ),
    "an infinite power": (fp.compressors.Natural(), sealed(3, 8, b"\x09", b"\xff" * 8, b"\0"), "infinite"),
    "bits": (fp.compressors.Natural(), sealed(3, 8, b"\x0a", b"\1" * 8, b"\0"), "10 bits where 9"),
    "an exponent": (
        fp.compressors.Natural(),
        sealed(3, 8, b"\x0a", b"\x17" * 8, b"\0\xff"),
        "does not exist",
    ),
    "nan": (fp.compressors.Identity(), sealed(0, 1, b"\4", struct.pack("<f", math.nan)), "NaN"),
    "size of an entry": (
        fp.compressors.Identity(),
        sealed(0, 1, b"\2", struct.pack("<f", 1.0)),
        "2 bytes where 4",
    ),
    "too few bytes": (
        fp.compressors.Identity(),
        sealed(0, 5, b"\4", struct.pack("<f", 1.0)),
        "5 bytes where 21",
    ),
    "k": (
        fp.compressors.RandK(k=2),
        sealed(2, 4, struct.pack("<BIII", 4, 3, 1, 0), b"\0" * 8),
        "keeps 3 of 4",
    ),
    "no such choice": (
        fp.compressors.RandK(k=1),
        sealed(2, 4, struct.pack("<BIII", 4, 1, 9, 0), b"\0" * 4),
        "does not exist",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_payloads_that_make_no_sense(case):
    compressor, payload, message = BROKEN[case]
    with pytest.raises(PayloadError, match=message):
        compressor.decode(payload)


@pytest.mark.parametrize(
    "v", [torch.ones(2, 2), torch.ones(3, dtype=torch.int64)], ids=["matrix", "integers"]
)
def test_only_vectors_of_real_numbers_are_encoded(v):
    with pytest.raises(PayloadError, match="expected a vector of real numbers"):
        fp.compressors.QSGD().encode(v, KEY)


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
