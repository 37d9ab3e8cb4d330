"""Every method, and every question, across sites: the same as on one machine, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.evaluation.information import Information
from fedpop.files import read_tensors
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.site_state import SiteState
from fedpop.methods import METHODS
from fedpop.site.store import LocalStore
from tests.flower.sites import across, here, same_bits
from tests.helpers import generator, linear_model
from tests.methods.conformance import FOUR, every, four, made, partial

CPU = torch.device("cpu")


@every("linear", "softmax")
def test_every_method_learns_the_same(name: str, kind: str, tmp_path: Path) -> None:
    method, rule = made(name, kind), partial(name)
    elsewhere, _ = across(method, four(kind), tmp_path, rounds=3, rule=rule)
    simulated = here(method, four(kind), rounds=3, rule=rule)
    same_bits(elsewhere.published, simulated.published)
    assert [m["active"] for m in elsewhere.history] == [m["active"] for m in simulated.history]
    # What sites keep, once they know which of their rounds counted.
    assert simulated.store is not None
    for i, site in enumerate(FOUR):
        file = tmp_path / site / "experiments" / "test" / "chain.safetensors"
        if not file.exists():
            assert not bool(simulated.store.entered[i])
            assert int(simulated.store.slots[i]) < 0
            continue
        stored = SiteState.read(file).after.get(torch.tensor([0]), CPU)
        theirs = simulated.store.get(torch.tensor([i]), CPU)
        for n in stored:
            assert torch.equal(stored[n], theirs[n]), (site, n)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.compressed])
@pytest.mark.parametrize("compressor", ["qsgd", "natural"])
def test_compressed_vectors_arrive_as_in_the_simulator(name: str, compressor: str, tmp_path: Path) -> None:
    method = made(name, "softmax", compressor=compressor)
    elsewhere, _ = across(method, four("softmax"), tmp_path, rounds=3, rule=partial(name))
    simulated = here(method, four("softmax"), rounds=3, rule=partial(name))
    same_bits(elsewhere.published, simulated.published)
    assert elsewhere.totals["bytes_up"] == simulated.totals["bytes_up"]


def test_rates_change_over_the_rounds_as_in_the_simulator(tmp_path: Path) -> None:
    """A site does not know how many rounds there are."""
    method = made("FedAvg", "softmax", schedule=fp.steps.Cosine())
    elsewhere, _ = across(method, four("softmax"), tmp_path, rounds=4)
    same_bits(elsewhere.published, here(method, four("softmax"), rounds=4).published)


def test_weights_of_unequal_probabilities(tmp_path: Path) -> None:
    rule = fp.participation.Bernoulli([0.9, 0.5, 0.8, 0.7])
    method = made("FedSOUL", "softmax")
    elsewhere, _ = across(method, four("softmax"), tmp_path, rounds=5, rule=rule)
    same_bits(elsewhere.published, here(method, four("softmax"), rounds=5, rule=rule).published)


# --- questions ---------------------------------------------------------------------------------


def with_validation(kind: str) -> dict[str, Any]:
    held_out = four(kind, seed=5)
    return {n: fp.Client(x, y, validation=held_out[n]) for n, (x, y) in four(kind).items()}


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_questions_after_training(kind: str, tmp_path: Path) -> None:
    """Marginal likelihood, standard errors and diagnostics from sums over sites, to rounding."""
    method = made("FedSOUL", kind, final=fp.chains.Final(2, 40, 20))
    elsewhere, _ = across(method, four(kind), tmp_path, rounds=6)
    simulated = here(method, four(kind), rounds=6)
    one, other = elsewhere.diagnostics(), simulated.diagnostics()
    assert one.chains == other.chains
    for which in ("phi_gradient", "beta_gradient"):
        assert getattr(one.theta, which) == pytest.approx(getattr(other.theta, which), rel=1e-6)
    if kind == "linear":  # with draws as few as these nobody can estimate it for a softmax
        assert elsewhere.log_likelihood().value == pytest.approx(simulated.log_likelihood().value, rel=1e-9)
        hierarchy = simulated.algorithm.hierarchy
        torch.testing.assert_close(
            elsewhere.ask(Information(hierarchy)), simulated.ask(Information(hierarchy))
        )


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "Ditto"])
def test_validation_scores_choose_theta(name: str, tmp_path: Path) -> None:
    """Early stopping by scores that are summed over sites, and what sites go back to."""
    settings = {"final": fp.chains.Final(2, 5, 5), "local_steps": 3} if name == "FedSOUL" else {}
    method, data = made(name, "softmax", **settings), with_validation("softmax")

    def stop() -> fp.callbacks.EarlyStop:
        return fp.callbacks.EarlyStop(every=2, patience=2)

    elsewhere, _ = across(method, data, tmp_path, rounds=6, callbacks=[stop()])
    sites = {n: [n] for n in data}
    simulated = method.fit(data, rounds=6, callbacks=[stop()], sites=sites, progress=False)
    name = "validation_log_likelihood"
    scores = [[m[name] for m in p.history if name in m] for p in (elsewhere, simulated)]
    assert len(scores[0]) > 1
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)
    assert elsewhere.best_round == simulated.best_round
    same_bits(elsewhere.published, simulated.published)
    assert simulated.store is not None
    for i, site in enumerate(FOUR):
        final = tmp_path / site / "experiments" / "test" / "final.safetensors"
        stored = LocalStore.restore(read_tensors(final)).get(torch.tensor([0]), CPU)
        theirs = simulated.store.get(torch.tensor([i]), CPU)
        for n in stored:
            assert torch.equal(stored[n], theirs[n]), (site, n)


def test_a_run_without_rounds_ends_by_itself(tmp_path: Path) -> None:
    """The verdict on theta is a question, too."""
    g = generator(1)
    data = {n: (x := torch.randn(8, 3, generator=g), (i + 1) * x.sum(1)) for i, n in enumerate("ab")}
    method = fp.FedSOUL(linear_model(3, 1))  # one dimension, which few rounds find
    elsewhere, _ = across(method, data, tmp_path, rounds=None)
    simulated = here(method, data, rounds=None)
    assert elsewhere.rounds == simulated.rounds
    assert elsewhere.convergence is not None
    assert simulated.convergence is not None
    assert elsewhere.convergence.converged == simulated.convergence.converged
    same_bits(elsewhere.published, simulated.published)


# --- several groups at a site --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "SCAFFOLD", "QLSD"])
def test_a_site_of_several_groups_sends_their_sum(name: str, tmp_path: Path) -> None:
    stored = four("softmax")
    data = {
        "north": {"ada": stored["ada"], "bea": stored["bea"]},
        "south": {"cem": stored["cem"], "dag": stored["dag"]},
    }
    method = made(name, "softmax")
    elsewhere, grid = across(method, data, tmp_path, rounds=3, terms=RoundTerms(sites=2))
    units = {f"{site}/{group}": data[site][group] for site in data for group in data[site]}
    sites = {site: [f"{site}/{group}" for group in data[site]] for site in data}
    simulated = method.fit(units, rounds=3, sites=sites, progress=False)
    assert elsewhere.learned_from == 4
    same_bits(elsewhere.published, simulated.published)
    requests = [m for m in grid.traffic if m[1].metadata.message_type == "train"]
    assert len(requests) == 2 * 3


# --- before the rounds ---------------------------------------------------------------------------


def test_trial_rounds_find_the_simulators_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is a separate experiment at the sites, which forget it at the end; to the bit."""
    monkeypatch.setattr("fedpop.methods.fedsouk.RATE_TRIAL_ROUNDS", 3)
    method, data = fp.FedSOUL.paper(linear_model(), local_steps=2), four("linear")
    assert method.rate() is None
    elsewhere, grid = across(method, data, tmp_path, rounds=2)
    simulated = here(method, data, rounds=2)
    assert elsewhere.algorithm.rate() == simulated.algorithm.rate()
    same_bits(elsewhere.published, simulated.published)
    assert elsewhere.totals["head_steps"] == simulated.totals["head_steps"]
    names = {request_from_record(m.content).header["experiment"] for _, m, _ in grid.traffic}
    assert {"test", "test.trial-1"} <= names
    assert [p.name for p in (tmp_path / "ada" / "experiments").iterdir()] == ["test"]
