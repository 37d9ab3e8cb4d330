"""The way of a vector: what is encoded decodes to what the simulator says would arrive, to the bit.

And compression inside a run: which vectors, whose bytes, who is left out.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms import rebuild
from fedpop.algorithms.base import Facts
from fedpop.channel import Channel, resolve_compressor
from fedpop.errors import PayloadError, SettingsError
from fedpop.evaluation.oracle import exact_optimum
from fedpop.keys import Key, unit_of, units_of
from fedpop.runtime.run import Run, Settings
from tests.helpers import (
    FRAME,
    answers,
    begun,
    by_name,
    cohort_of,
    federation_of,
    linear_model,
    population_data,
    ragged,
    seeded,
    train_key,
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


# --- in a round ---------------------------------------------------------------------------------


def soul(compressor, **options) -> fp.FedSOUL:
    return fp.FedSOUL(linear_model(), compressor=compressor, **options)


def one_round(compressor, clients, weights):
    """Everyone's first round from where the model stands, through the method's channel."""
    method = soul(compressor, start="random", prior=fp.priors.Normal(scale=1.0))
    cohort = cohort_of(method.model, clients)
    server, local = begun(method, cohort, Facts(len(cohort), 10), train_key())
    return answers(method, cohort, local, method.broadcast(server), train_key(), weights)


@pytest.mark.parametrize("name", ["qsgd", "rand-k", "natural"])
def test_the_server_gets_the_weighted_sum_of_compressed_vectors(name):
    clients, weights = ragged((3, 0, 5, 1, 3)), torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0])
    compressor = resolve_compressor(name)
    done = one_round(name, clients, weights)
    key, units = train_key().at(purpose="compress.J"), fp.Federation.of(clients).units
    expected = torch.zeros(6)
    for i in range(5):
        alone = torch.zeros(5)
        alone[i] = 1.0
        j = one_round("identity", clients, alone).total.weighted["J"]
        expected += weights[i] * compressor.compress(j[None], key, units[i : i + 1])[0]
    # J alone and J in a batch differ by rounding; a level may flip where one lies on an edge.
    torch.testing.assert_close(done.total.weighted["J"], expected, rtol=1e-4, atol=1e-4)
    plain = one_round("identity", clients, weights)
    torch.testing.assert_close(done.total.weighted["I"], plain.total.weighted["I"])
    assert done.bytes_up == 5 * (
        compressor.encoded_bytes(6) + 2 * FRAME + 4 * 3 + 4
    )  # J, I and the curvature
    assert done.cost["backbone_passes"] == pytest.approx(12 * 4 / 3)  # once more, forward, for J


def test_bytes_of_a_run():
    up = {}
    for name in ("identity", "qsgd"):
        method = soul(name, beta_step=fp.steps.Adam(), start="random", prior=fp.priors.Normal(scale=1.0))
        population = method.fit(ragged((3, 0, 5, 1)), rounds=3)
        up[name] = population.totals["bytes_up"]
    size = fp.compressors.QSGD().encoded_bytes(6)
    asked = 4 * (FRAME + 8 * 2)  # before the rounds, in double precision: the size of y
    rounds = {
        "identity": 3 * 4 * (2 * FRAME + 4 * (6 + 3)),
        "qsgd": 3 * 4 * (size + FRAME + 4 * 3),
    }
    assert up == {name: asked + sent for name, sent in rounds.items()}


@dataclass(frozen=True)
class Picky(fp.compressors.QSGD):
    """Refuses client c, as it would an update that is too large."""

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        sent = super().compress(v, key, ids)
        sent[ids == unit_of("c")] = torch.nan
        return sent


def test_a_client_whose_vector_cannot_be_sent_is_left_out_and_named():
    population = soul(Picky()).fit(dict(zip("abcd", ragged((3, 1, 5, 2)), strict=True)), rounds=3)
    assert [line["left_out"] for line in population.history] == [["c"]] * 3
    assert torch.isfinite(population.published["phi"]).all()


def test_the_fit_reaches_the_optimum_with_fewer_bytes():
    clients, _, _ = population_data(40, 8, 6, 2, 0.1)
    model = linear_model(6, 2, 0.1)
    gap, sent = {}, {}
    for name, compressor in (("identity", "identity"), ("qsgd", fp.compressors.QSGD(levels=7))):
        method = fp.FedSOUL(model, compressor=compressor, engine="sampled")
        population = method.fit(clients, rounds=300, seed=1)
        best = exact_optimum(
            method, population.federation, [(population.published["phi"], population.published["beta"])]
        )
        gap[name] = best.log_likelihood - population.log_likelihood().value
        sent[name] = population.totals["bytes_up"]
    assert sent["qsgd"] < sent["identity"]
    # Of some 300 units of likelihood; half a unit is well inside theta's own uncertainty.
    assert all(0 <= g < 0.5 for g in gap.values()), gap


# --- settings -----------------------------------------------------------------------------------


def test_settings_are_rebuilt_from_their_description():
    each = by_name(["identity", fp.compressors.QSGD(levels=3), "qsgd"])
    for compressor in ("qsgd", fp.compressors.RandK(k=2), "natural", each):
        method = soul(compressor, clip=2.0)
        again = rebuild(method.describe(), "FedSOUL", method.model)
        assert again.compressor == method.compressor == compressor
        assert again.channel == method.channel


def test_a_saved_population_knows_its_compressor(tmp_path):
    population = soul(fp.compressors.QSGD(levels=7)).fit(ragged(), rounds=2)
    population.save(tmp_path)
    assert fp.load(tmp_path).algorithm.compressor == fp.compressors.QSGD(levels=7)


WRONG = {
    "unknown name": (lambda: soul("zip"), "unknown compressor 'zip'; known are"),
    "unknown among several": (lambda: soul(by_name(["qsgd", "zip"])), "unknown compressor 'zip'"),
    "not a compressor": (lambda: soul(7), "not 7"),
    "by position": (
        lambda: soul(["qsgd", "qsgd"]),
        r"a mapping from names to .*, not \['qsgd', 'qsgd'\]",
    ),
    "k too large": (lambda: soul(fp.compressors.RandK(k=7)), "k = 7 entries of a vector of 6"),
    "k too large for one": (
        lambda: soul(by_name(["qsgd", fp.compressors.RandK(k=7)])),
        "k = 7 entries of a vector of 6",
    ),
    "too few": (
        lambda: soul(by_name(["qsgd"])).fit(ragged(), rounds=1),
        "compressor: no value for client 'client-1'",
    ),
    "a stranger": (
        lambda: soul(by_name(["qsgd"] * 5)).fit(ragged(), rounds=1),
        "compressor: there is no client 'client-4'",
    ),
    "clip": (lambda: soul("qsgd", clip=0.0), "clip"),
    "where nothing is compressed": (
        lambda: fp.LocalOnly(linear_model(), compressor="qsgd"),
        "does not compress or clip",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case):
    make, message = WRONG[case]
    with pytest.raises(SettingsError, match=message):
        make()


# --- whole runs ---------------------------------------------------------------------------------


def run_of(method: fp.FedSOUK, clients, memory: str) -> Run:
    settings = Settings(4, 0, fp.participation.Bernoulli(0.7), memory)
    run = Run(method, federation_of(method.model, clients), settings)
    run.execute(resume=False, progress=False)
    return run


@pytest.mark.parametrize("name", ["qsgd", "rand-k", "natural"])
def test_cohorts_do_not_matter(name):
    """In double precision rounding is too small to move an entry to another level."""
    model = fp.Composition(
        seeded(nn.Linear(3, 2).double(), 1), seeded(nn.Linear(2, 1).double(), 2), fp.likelihoods.Normal(0.5)
    )
    clients = [(x.double(), y.double()) for x, y in ragged((3, 0, 5, 1, 3, 5, 4))]
    method = fp.FedSOUL(model, compressor=name)
    one, many = run_of(method, clients, "1GiB"), run_of(method, clients, "1KiB")
    assert many.plan.budget < one.plan.budget
    torch.testing.assert_close(one.server["phi"], many.server["phi"], rtol=1e-6, atol=1e-9)
    assert one.totals["bytes_up"] == many.totals["bytes_up"]
