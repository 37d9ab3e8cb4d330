"""Noise that sites add to secure sums, across sites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import SecureSumError
from fedpop.flower.deployment import Deployment, run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.secure_site import SecureSite
from fedpop.flower.secure_sums import SecureTerms
from fedpop.privacy.secure import Attempt, Policy
from fedpop.privacy.site_noise import PrivateRound, honest
from fedpop.run.settings import Settings
from tests.flower.secured import SITES, secured
from tests.flower.sites import deployment, transport_on
from tests.helpers import generator, linear_model

pytest.importorskip("dp_accounting")
pytest.importorskip("Crypto")
pytestmark = pytest.mark.filterwarnings("ignore::fedpop.errors.FedpopWarning")
BUDGET: dict[str, Any] = {"noise": 1.0, "delta": 1e-3, "insecure_seed": 3}


def data(units: int = 6) -> dict[str, Any]:
    """Sites of several clients each."""
    g, out = generator(0), {}
    for i in range(SITES):
        xs = [torch.randn(5, 3, generator=g) for _ in range(units)]
        out[f"s{i}"] = {f"s{i}-{k}": (x, x.sum(1)) for k, x in enumerate(xs)}
    return out


def planned(terms: SecureTerms, **more: Any) -> Deployment:
    waits = RoundTerms(sites=SITES, timeout=20.0)
    made = deployment(fp.FedAvg(linear_model()), 4, terms=waits, secure=terms)
    given = fp.privacy.Gaussian(**BUDGET | more)
    settings = Settings(4, 0, fp.participation.Everyone(), checkpoint_every=1, privacy=given)
    return replace(made, settings=settings)


def test_a_private_secure_run_is_the_simulators_to_the_bit_with_the_tests_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PrivateRound.of
    monkeypatch.setattr(PrivateRound, "of", lambda plain: replace(real(plain), seed=3))
    grid, terms, _ = secured(tmp_path / "sites", data())
    found = run_deployment(planned(terms), transport_on(grid), tmp_path / "run")
    everyone = {name: client for site in data().values() for name, client in site.items()}
    here = fp.FedAvg(linear_model()).fit(
        everyone,
        rounds=4,
        sites={site: list(of) for site, of in data().items()},
        precision="float32",
        secure=True,
        privacy=fp.privacy.Gaussian(**BUDGET),
    )
    for name, tensor in here.published.items():
        assert found.published[name].equal(tensor), name
    last, simulated = found.history[-1], here.history[-1]
    assert last["epsilon"] == simulated["epsilon"]
    assert last["epsilon_server"] == simulated["epsilon_server"]
    assert isinstance(last["epsilon_server"], float)


def test_noise_is_every_sites_own_and_no_sum_has_less_of_it_than_was_promised(tmp_path: Path) -> None:
    """Without the tests' seed each run has other noise; sums are opened over so many sites that the honest
    ones among them are those that it is shared by, and a server that asks for less is refused."""
    thetas = []
    for run in ("one", "other"):
        grid, terms, _ = secured(tmp_path / run / "sites", data())
        thetas.append(run_deployment(planned(terms), transport_on(grid)).published["phi"])
    assert not thetas[0].equal(thetas[1])
    asked = [request_from_record(m.content) for _, m, _ in grid.traffic]
    rounds = [r.header for r in asked if r.kind == "train"]
    assert {r["secure"]["attempt"]["minimum"] - 1 for r in rounds} == {honest(SITES)}
    replies = [message_from_record(reply.content) for _, m, reply in grid.traffic
               if request_from_record(m.content).kind == "train"]  # fmt: skip
    assert all(reply.numbers == {} and int(reply.units.sum()) == 0 for reply in replies)
    attempt = Attempt.of(rounds[0]["secure"]["attempt"])
    site = SecureSite("s0", tmp_path, "test", tmp_path, Policy())
    private = PrivateRound.of(rounds[0]["private"])
    site.require_shared(attempt, private)
    with pytest.raises(SecureSumError, match="noise is shared by 3 honest sites"):
        site.require_shared(replace(attempt, minimum=3), private)


def test_a_round_that_is_given_up_is_charged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid, terms, _ = secured(tmp_path / "sites", data())

    def fault(site: str, request: Any, reply: Any) -> Any:
        read = request_from_record(request.content)
        gone = read.kind == "train" and read.header["round"] == 1 and site in ("s1", "s2")
        return None if gone else [reply]

    grid.fault = fault
    found = run_deployment(planned(terms), transport_on(grid))
    assert "given up: 3 of 5 sites were heard, and 4 must be" in caplog.text
    assert found.history[-1]["epsilon"] > found.history[-2]["epsilon"] > found.history[0]["epsilon"]
