"""The engine across sites: the server chooses, and sites are told what runs."""

from __future__ import annotations

from pathlib import Path

import fedpop as fp
from fedpop.files import read_json
from fedpop.flower.remote import RoundTerms
from tests.flower.sites import across, here, same_bits
from tests.helpers import linear_model
from tests.methods.conformance import FOUR, four, made


def test_sites_are_told_what_runs(tmp_path: Path) -> None:
    method, data = fp.FedSOUL(linear_model()), four("linear")
    elsewhere, _ = across(method, data, tmp_path, rounds=4)
    simulated = here(method, data, rounds=4)
    same_bits(elsewhere.published, simulated.published)
    assert elsewhere.engine == simulated.engine != ""
    for name in FOUR:
        told = read_json(tmp_path / name / "experiments" / "test" / "method.json")
        assert told["study"]["method"]["class"] == "MaximumMarginalLikelihood"

        own = fp.load(tmp_path / name / "experiments" / "test" / "population")
        assert own.engine == simulated.engine
        assert type(own.algorithm) is fp.MaximumMarginalLikelihood


def test_a_quorum_is_sampled(tmp_path: Path) -> None:
    """Rounds that may close without somebody cannot have everyone's sums."""
    method = made("FedSOUL", "linear").replace(local_steps=10, chain=fp.chains.Chain())
    elsewhere, _ = across(method, four("linear"), tmp_path, rounds=2, terms=RoundTerms(sites=4, quorum=0.75))
    assert elsewhere.engine.startswith("sampled: rounds close on a quorum, without everyone's sums")
