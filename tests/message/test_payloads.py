"""Payloads that were damaged on their way, or are of something else."""

import math
import struct

import numpy as np
import pytest
import torch

import fedpop as fp
from fedpop.errors import PayloadError
from fedpop.message.compressors.base import sealed
from fedpop.message.compressors.bits import pack
from tests.message.every_compressor import COMPRESSORS, KEY, every
from tests.oracles import gaussian_noise


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
