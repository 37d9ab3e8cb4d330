"""Compression inside a run: which messages, whose bytes, who is left out; the same bits again."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.algorithms import rebuild
from fedpop.channel import Channel, resolve_compressor
from fedpop.errors import SettingsError
from fedpop.evaluation.oracle import exact_optimum
from fedpop.keys import Key
from fedpop.runtime.run import Run, Settings
from tests.helpers import cohort_of, linear_model, population_data, ragged, seeded, train_key
from tests.oracles import gaussian_noise


def soul(compressor, **options) -> fp.FedSOUL:
    return fp.FedSOUL(linear_model(), compressor=compressor, **options)


def one_round(method: fp.FedSOUK, clients, weights=None, key: Key | None = None):
    """The message of everyone's first round, and the bytes it took."""
    key = train_key() if key is None else key
    cohort = cohort_of(method.model, clients, weights)
    server = method._server(method.model.initial_phi(), method.prior.init(torch.zeros(2), 1.0))
    broadcast = method.broadcast("train", server)
    channel = method.channel(key)
    local = method.enter(cohort.ids, broadcast, key)
    _, message, info = method.local_round("train", broadcast, cohort, local, channel, key)
    return message, channel.bytes_up, info


# --- the channel itself ----------------------------------------------------------------------


def test_only_named_messages_are_compressed():
    v, ids = gaussian_noise(0, 3, 50).float(), torch.arange(3)
    channel = Channel(fp.compressors.QSGD(levels=3), key=Key(1))
    assert not channel.fusable
    assert channel("I", v) is v
    assert channel.bytes_up == 3 * 50 * 4
    sent = channel("J", v, ids)
    assert torch.equal(sent, fp.compressors.QSGD(levels=3).compress(v, Key(1).at(purpose="compress.J"), ids))
    assert channel.bytes_up == 3 * (50 * 4 + fp.compressors.QSGD(levels=3).encoded_bytes(50))


def test_without_compression_vectors_are_plain():
    channel = Channel()
    v = torch.ones(3, 50)
    assert channel.fusable
    assert channel("J", v, torch.arange(3)) is v
    assert channel.fused("J", v[0], 3) is not None
    assert channel.bytes_up == 2 * 3 * 50 * 4


def test_each_client_may_have_its_own_compressor():
    each = resolve_compressor(["identity", "natural", fp.compressors.QSGD(levels=7), "natural"])
    v, ids = gaussian_noise(1, 3, 40).float(), torch.tensor([3, 0, 2])
    channel = Channel(each, key=Key(1))
    sent = channel("J", v, ids)
    key = Key(1).at(purpose="compress.J")
    for row, client in enumerate(ids.tolist()):
        assert torch.equal(sent[row], each[client].compress(v[row : row + 1], key, ids[row : row + 1])[0])
    sizes = fp.compressors.Natural().encoded_bytes(40) + 4 * 40 + fp.compressors.QSGD(levels=7).encoded_bytes(40)
    assert channel.bytes_up == sizes
    assert Channel(resolve_compressor(["identity"] * 4)).fusable


def test_a_vector_that_cannot_be_sent_costs_nothing():
    channel = Channel(fp.compressors.Natural(), key=Key(1))
    v = torch.ones(3, 40)
    v[1, 7] = torch.inf
    sent = channel("J", v, torch.arange(3))
    assert torch.isnan(sent[1]).all()
    assert channel.bytes_up == 2 * fp.compressors.Natural().encoded_bytes(40)


# --- in a round ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qsgd", "rand-k", "natural"])
def test_the_server_gets_the_weighted_sum_of_compressed_vectors(name):
    clients, weights = ragged((3, 0, 5, 1, 3)), torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0])
    method = soul(name)
    (compressor,) = method.compressors
    message, sent_bytes, info = one_round(method, clients, weights)
    key = train_key().at(purpose="compress.J")
    expected = torch.zeros(6)
    for i in range(5):
        alone = torch.zeros(5)
        alone[i] = 1.0
        j = one_round(soul("identity"), clients, alone)[0].sums["J"]
        expected += weights[i] * compressor.compress(j[None], key, torch.tensor([i]))[0]
    # J alone and J in a batch differ by rounding; a level may flip where one lies on an edge.
    torch.testing.assert_close(message.sums["J"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(message.sums["I"], one_round(soul("identity"), clients, weights)[0].sums["I"])
    assert sent_bytes == 5 * (compressor.encoded_bytes(6) + 4 * 3 + 4)  # J, I and the curvature
    assert info.sums["backbone_passes"] == pytest.approx(12 * 4 / 3)  # once more, forward, for J


def test_bytes_of_a_run():
    up = {}
    for name in ("identity", "qsgd"):
        population = soul(name, beta_step=fp.steps.Adam(), start="random", prior=fp.priors.Normal(scale=1.0)).fit(
            ragged((3, 0, 5, 1)), rounds=3
        )
        up[name] = population.totals["bytes_up"]
    assert up == {"identity": 3 * 4 * 4 * (6 + 3), "qsgd": 3 * 4 * (fp.compressors.QSGD().encoded_bytes(6) + 4 * 3)}


@dataclass(frozen=True)
class Picky(fp.compressors.QSGD):
    """Refuses client 2, as it would an update that is too large."""

    def compress(self, v: Tensor, key: Key, ids: Tensor) -> Tensor:
        sent = super().compress(v, key, ids)
        sent[ids == 2] = torch.nan
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
        method = fp.FedSOUL(model, compressor=compressor)
        population = method.fit(clients, rounds=300, seed=1)
        best = exact_optimum(
            method, population.federation, [(population.published["phi"], population.published["beta"])]
        )
        gap[name] = best.log_likelihood - population.log_likelihood().value
        sent[name] = population.totals["bytes_up"]
    assert sent["qsgd"] < sent["identity"]
    # Of some 300 units of likelihood; half a unit is well inside theta's own uncertainty.
    assert all(0 <= g < 0.5 for g in gap.values()), gap


# --- settings --------------------------------------------------------------------------------


def test_settings_are_rebuilt_from_their_description():
    for compressor in ("qsgd", fp.compressors.RandK(k=2), "natural", ["identity", fp.compressors.QSGD(levels=3)]):
        method = soul(compressor)
        again = rebuild(method.describe(), "FedSOUL", method.model)
        assert again.compressor == method.compressor == resolve_compressor(compressor)


def test_a_saved_population_knows_its_compressor(tmp_path):
    population = soul(fp.compressors.QSGD(levels=7)).fit(ragged(), rounds=2)
    population.save(tmp_path)
    assert fp.load(tmp_path).algorithm.compressor == fp.compressors.QSGD(levels=7)


WRONG = {
    "unknown name": (
        lambda: soul("zip"),
        "unknown compressor 'zip'; known are identity, qsgd, rand-k, natural",
    ),
    "unknown among several": (lambda: soul(["qsgd", "zip"]), "unknown compressor 'zip'"),
    "not a compressor": (lambda: soul(7), "not 7"),
    "k too large": (lambda: soul(fp.compressors.RandK(k=7)), "k = 7 entries of a vector of 6"),
    "too few": (lambda: soul(["qsgd"]).fit(ragged(), rounds=1), "1 compressors for 4 clients"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case):
    make, message = WRONG[case]
    with pytest.raises(SettingsError, match=message):
        make()


# --- whole runs ------------------------------------------------------------------------------


def run_of(method: fp.FedSOUK, clients, memory: str) -> Run:
    federation = method.model.prepare(fp.Federation.of(clients))
    run = Run(method, federation, Settings(4, 0, fp.participation.Bernoulli(0.7), memory, 50), None, [])
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
