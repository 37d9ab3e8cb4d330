"""Compression inside a run: which vectors, whose bytes, who is left out."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.evaluation.oracle import exact_optimum
from fedpop.keys import Key, unit_of
from fedpop.message import resolve_compressor
from fedpop.methods import rebuild
from fedpop.methods.base import Facts
from fedpop.run.run import Run, Settings
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


@pytest.mark.slow
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
