"""Compressors are unbiased, and as noisy as omega says.

Where nothing is random the tests are exact: all words of a generator are tried, all choices of rand-k listed.
Where draws are needed the tolerance is six standard errors over independent clients, at most a few hundred
comparisons, so that a false alarm has a chance below 1e-6.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpop as fp
from fedpop.message.compressors.natural import rounded_bits
from fedpop.message.compressors.qsgd import rounded
from fedpop.message.compressors.rand_k import chosen, draw, prime_to
from tests.message.every_compressor import COMPRESSORS, KEY, TINY, every, many, vectors
from tests.oracles import DOUBLE, assert_mean, gaussian_noise

SIX = 6.0
CLIENTS = 20_000


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
