"""The way of a vector: what is encoded decodes to what the simulator says would arrive, to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedpop as fp
from fedpop.errors import PayloadError, SettingsError
from fedpop.keys import Key, unit_of, units_of
from fedpop.message import Channel, resolve_compressor
from tests.helpers import (
    FRAME,
)
from tests.oracles import gaussian_noise

KEY = Key(1, round=3, purpose="site")
NAMES = ["anna", "ben", "cara", "dora"]
UNITS = units_of(NAMES)
COMPRESSORS = [
    fp.compressors.Identity(),
    fp.compressors.Natural(),
    fp.compressors.QSGD(),
    fp.compressors.QSGD(levels=1),
    fp.compressors.QSGD(levels=1000),
    fp.compressors.RandK(),
    fp.compressors.RandK(share=1.0),
    fp.compressors.RandK(k=1),
]
EACH = {"anna": "identity", "ben": "natural", "cara": fp.compressors.QSGD(levels=7), "dora": "natural"}
compressors = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
changing = pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if not c.identity], ids=repr)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def vectors(length: int = 50, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of four units: one large, one tiny, one with zeros in it, one ordinary."""
    v = gaussian_noise(0, 4, length)
    v[0] *= 1e20
    v[1] *= 1e-20
    v[2, ::3] = 0
    return v.to(dtype)


def as_sent(channel: Channel, name: str, v: Tensor, units: Tensor = UNITS) -> tuple[Tensor, int]:
    """Unit by unit through bytes: what the server decodes, and how many there were."""
    payloads = [channel.encode(name, row, int(u), KEY) for row, u in zip(v, units, strict=True)]
    out = [channel.decode(name, p, int(u)) for p, u in zip(payloads, units, strict=True)]
    return torch.stack([o.to(v.dtype) for o in out]), sum(len(p.data) for p in payloads)


# --- bytes, and what would arrive -------------------------------------------------------------


@compressors
@dtypes
@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("length", [1, 50, 3001])
def test_what_is_encoded_decodes_to_what_is_carried(compressor, dtype, clip, length):
    channel, v = Channel(compressor, ("J",), clip), vectors(length, dtype)
    seen, size = channel.carry("J", v, UNITS, KEY)
    decoded, sent = as_sent(channel, "J", v)
    assert torch.equal(decoded, seen)
    assert sent == size
    # In any company.
    alone, _ = channel.carry("J", v[2:3], UNITS[2:3], KEY)
    assert torch.equal(alone[0], seen[2])


@compressors
def test_vectors_longer_than_a_block(compressor):
    channel, v = Channel(compressor, ("J",)), vectors(70_001)
    seen, size = channel.carry("J", v, UNITS, KEY)
    decoded, sent = as_sent(channel, "J", v)
    assert torch.equal(decoded, seen)
    assert sent == size


@dtypes
def test_a_compressor_for_each_by_name(dtype):
    channel, v = Channel(EACH, ("J",)), vectors(40, dtype)
    seen, size = channel.carry("J", v, UNITS, KEY)
    decoded, sent = as_sent(channel, "J", v)
    assert torch.equal(decoded, seen)
    assert sent == size
    key = KEY.at(purpose="compress.J")
    for i, name in enumerate(NAMES):
        own = resolve_compressor(EACH[name])
        assert channel.of(unit_of(name)) == own
        assert torch.equal(seen[i], own.compress(v[i : i + 1], key, UNITS[i : i + 1])[0])
    natural, levels = fp.compressors.Natural().encoded_bytes(40), fp.compressors.QSGD(levels=7)
    assert size == FRAME + 40 * v.element_size() + 2 * natural + levels.encoded_bytes(40)
    # Whoever is there, in whatever order.
    some, _ = channel.carry("J", v[[2, 0]], UNITS[[2, 0]], KEY)
    assert torch.equal(some, seen[[2, 0]])


def test_who_has_no_compressor_is_told():
    channel = Channel(EACH, ("J",))
    stranger = units_of(["emil"])
    with pytest.raises(SettingsError, match="a client without a compressor"):
        channel.carry("J", torch.ones(1, 5), stranger, KEY)
    with pytest.raises(SettingsError, match="a client without a compressor"):
        channel.encode("J", torch.ones(5), int(stranger), KEY)
    assert channel.encode("I", torch.ones(5), int(stranger), KEY).codec == "identity"


@dtypes
@pytest.mark.parametrize("length", [0, 1, 7])
def test_raw_vectors_travel_in_their_own_type(dtype, length):
    """What is not to be compressed is neither changed nor clipped."""
    v = vectors(length, dtype)
    for channel in (Channel(), Channel("qsgd", ("J",), clip=1e-3), Channel(EACH, ("J",))):
        seen, size = channel.carry("I", v, UNITS, KEY)
        assert seen is v
        assert size == 4 * (FRAME + length * v.element_size())
        for row, unit in zip(v, UNITS.tolist(), strict=True):
            payload = channel.encode("I", row, unit, KEY)
            assert (payload.codec, payload.length) == ("identity", length)
            assert payload.data[FRAME:] == row.numpy().tobytes()
            decoded = channel.decode("I", payload, unit)
            assert decoded.dtype == dtype
            assert torch.equal(decoded, row)


def test_other_types_do_not_travel():
    for channel, name in ((Channel(), "I"), (Channel("qsgd", ("J",)), "J")):
        with pytest.raises(PayloadError, match="expected a vector of real numbers"):
            channel.encode(name, torch.ones(3, dtype=torch.int64), 0, KEY)
    half = Channel().encode("I", torch.ones(3, dtype=torch.float16), 0, KEY)
    assert Channel().decode("I", half, 0).dtype == torch.float32  # as wide as it is counted


def test_the_server_needs_neither_the_key_nor_the_vector():
    """And the noise is the unit's own: another name, unit, round or seed gives another."""
    channel, v = Channel(fp.compressors.QSGD(levels=1), ("J", "K")), gaussian_noise(0, 1, 200).float()
    payload = channel.encode("J", v[0], 5, KEY)
    assert torch.equal(Channel(fp.compressors.QSGD(levels=1), ("J",)).decode("J", payload, 5),
                       channel.carry("J", v, torch.tensor([5]), KEY)[0][0])  # fmt: skip
    same = [channel.encode("J", v[0], 5, KEY).data for _ in range(2)]
    assert same[0] == same[1]
    others = [
        channel.encode("K", v[0], 5, KEY),
        channel.encode("J", v[0], 6, KEY),
        channel.encode("J", v[0], 5, KEY.at(round=4)),
        channel.encode("J", v[0], 5, Key(2, round=3, purpose="site")),
    ]
    assert all(other.data != payload.data for other in others)


# --- clip ---------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("compressor", ["identity", fp.compressors.RandK(share=1.0), EACH], ids=str)
def test_clip_bounds_the_norm_of_what_is_compressed(dtype, compressor):
    channel = Channel(compressor, ("J",), clip=3.0)
    assert not channel.transparent
    v = gaussian_noise(1, 4, 60).to(dtype)
    v[1] *= 2 / v[1].norm()
    v[3] = 0
    exact = [0, 2]
    seen, _ = channel.carry("J", v, UNITS, KEY)
    if compressor is not EACH:
        norms = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        torch.testing.assert_close(seen[exact], v[exact] * 3 / norms[exact])
        assert torch.equal(seen[[1, 3]], v[[1, 3]])  # shorter ones to the bit
    else:
        torch.testing.assert_close(seen[0], v[0] * 3 / v[0].norm())
    assert torch.equal(channel.carry("I", v, UNITS, KEY)[0], v)
    assert torch.equal(as_sent(channel, "J", v)[0], seen)


def test_clip_comes_before_compression():
    clipped = Channel(fp.compressors.QSGD(levels=3), ("J",), clip=1.0)
    plain = Channel(fp.compressors.QSGD(levels=3), ("J",))
    v = gaussian_noise(1, 4, 60).float()
    short = v / torch.linalg.vector_norm(v, dim=1, keepdim=True, dtype=torch.float64).float()
    torch.testing.assert_close(clipped.carry("J", v, UNITS, KEY)[0], plain.carry("J", short, UNITS, KEY)[0])


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_norms_are_refused(clip):
    with pytest.raises(SettingsError, match="clip must be a positive finite number"):
        Channel("qsgd", ("J",), clip)


# --- what it is, before anything is sent ---------------------------------------------------------


def test_transparent_is_what_changes_nothing():
    assert Channel().transparent
    assert Channel("identity", ("J",)).transparent
    assert Channel(dict.fromkeys(NAMES, "identity"), ("J",)).transparent
    for channel in (
        Channel("qsgd", ("J",)),
        Channel(EACH, ("J",)),
        Channel("identity", ("J",), clip=1.0),
    ):
        assert not channel.transparent
    assert set(Channel(EACH).compressors) == {resolve_compressor(c) for c in EACH.values()}


def test_omega_is_that_of_each():
    own = [resolve_compressor(EACH[n]).omega(40) for n in NAMES]
    assert Channel(EACH, ("J",)).omega(UNITS, 40).tolist() == own
    assert Channel("qsgd", ("J",)).omega(UNITS, 40).tolist() == [fp.compressors.QSGD().omega(40)] * 4
    assert Channel().omega(UNITS[:0], 40).tolist() == []


@pytest.mark.parametrize("name", ["qsgd", "QSGD", "rand-k", "RandK", "rand_k", "natural", "identity"])
def test_names(name):
    assert Channel(name).compressors == (resolve_compressor(name),)


def test_unknown_names_are_refused_at_once():
    with pytest.raises(SettingsError, match=r"unknown compressor 'zip'; known are identity, natural, .*qsgd"):
        Channel("zip")
    with pytest.raises(SettingsError, match="unknown compressor 'zip'"):
        Channel({"anna": "qsgd", "ben": "zip"})
    for wrong in (7, None, ["qsgd"]):
        with pytest.raises(SettingsError, match=r"Channel: compressor must be a Compressor or a text"):
            Channel(wrong)


# --- what is refused ----------------------------------------------------------------------------


@changing
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_vector_that_cannot_be_sent_is_nan_and_costs_nothing(compressor, value):
    """The largest number overflows only where a compressor may round it up or scale it."""
    channel, v = Channel(compressor, ("J",)), vectors(40)
    v[0] /= 1e20
    v[1, 7] = value
    seen, size = channel.carry("J", v, UNITS, KEY)
    others = [0, 2, 3]
    ordinary, less = channel.carry("J", v[others], UNITS[others], KEY)
    assert torch.equal(seen[others], ordinary)
    if value == 3e38 and not torch.isnan(seen[1]).any():
        assert torch.isfinite(seen[1]).all()
        assert size > less
        return
    assert torch.isnan(seen[1]).all()
    assert size == less
    with pytest.raises(PayloadError, match="cannot be sent"):
        channel.encode("J", v[1], int(UNITS[1]), KEY)


def test_refused_rows_among_compressors_by_name_cost_nothing():
    channel, v = Channel(EACH, ("J",)), vectors(40)
    v[1, 0] = v[2, 39] = float("nan")
    seen, size = channel.carry("J", v, UNITS, KEY)
    assert torch.isnan(seen[1:3]).all()
    assert torch.isfinite(seen[[0, 3]]).all()
    assert size == FRAME + 4 * 40 + fp.compressors.Natural().encoded_bytes(40)


@changing
def test_truncated_and_corrupt_payloads_are_refused(compressor):
    channel, unit = Channel(compressor, ("J",)), int(UNITS[0])
    payload = channel.encode("J", vectors(9)[3], unit, KEY)
    for cut in range(len(payload.data)):
        with pytest.raises(PayloadError):
            channel.decode("J", replace(payload, data=payload.data[:cut]), unit)
    with pytest.raises(PayloadError):
        channel.decode("J", replace(payload, data=payload.data + b"\0"), unit)
    for at in range(len(payload.data)):
        turned = bytearray(payload.data)
        turned[at] ^= 1
        with pytest.raises(PayloadError):
            channel.decode("J", replace(payload, data=bytes(turned)), unit)


@pytest.mark.parametrize("cut", [0, 1, FRAME + 35, FRAME + 37])
def test_truncated_raw_payloads_are_refused(cut):
    payload = Channel().encode("I", torch.ones(9), 0, KEY)
    with pytest.raises(PayloadError, match="truncated payload"):
        Channel().decode("I", replace(payload, data=(payload.data + b"\0")[:cut]), 0)


@changing
def test_the_length_that_is_told_must_be_the_length_that_is_there(compressor):
    channel = Channel(compressor, ("J",))
    payload = channel.encode("J", vectors(9)[3], 0, KEY)
    for length in (0, 8, 10, -9):
        with pytest.raises(PayloadError):
            channel.decode("J", replace(payload, length=length), 0)


def test_a_codec_that_was_not_agreed_on_is_refused():
    qsgd, natural = Channel("qsgd", ("J",)), Channel("natural", ("J",))
    v = vectors(9)[3]
    payload = qsgd.encode("J", v, 0, KEY)
    for channel, name, other in (
        (natural, "J", payload),
        (natural, "J", replace(payload, codec="natural")),  # it says so, but it is not
        (Channel(), "J", payload),
        (qsgd, "I", payload),  # not a vector that may be compressed
        (qsgd, "J", Channel().encode("J", v, 0, KEY)),  # as it is, where compression was agreed on
        (qsgd, "J", replace(payload, codec="zip")),
        (Channel(), "I", replace(payload, codec="identity")),
    ):
        with pytest.raises(PayloadError):
            channel.decode(name, other, 0)
    with pytest.raises(PayloadError, match="J came as 'qsgd', which was not agreed on"):
        natural.decode("J", payload, 0)
    # Each by its own agreement.
    channel = Channel(EACH, ("J",))
    ben, cara = int(UNITS[1]), int(UNITS[2])
    with pytest.raises(PayloadError, match="J came as 'natural', which was not agreed on"):
        channel.decode("J", channel.encode("J", v, ben, KEY), cara)
    with pytest.raises(PayloadError):  # the same codec with other settings
        channel.decode("J", Channel(fp.compressors.QSGD(levels=3), ("J",)).encode("J", v, cara, KEY), cara)
