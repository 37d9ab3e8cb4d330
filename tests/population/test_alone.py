"""Nobody's draws depend on who else is there, or on the order in which clients are given."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.files import read_tensors
from fedpop.population import Population
from tests.helpers import federation_of, linear_model, ragged, seeded

ROOT = Path(__file__).parents[2]
NAMES = [f"site-{i}" for i in range(6)]
SHUFFLED = [NAMES[i] for i in (4, 1, 5, 0, 3, 2)]
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # of single precision, over a few hundred operations


def data(names: list[str], binary: bool = False) -> dict[str, Any]:
    all_of_them = dict(zip(NAMES, ragged((3, 0, 5, 1, 2, 4)), strict=True))
    return {n: (x, (y > 0).float() if binary else y) for n in names for x, y in [all_of_them[n]]}


def logistic() -> fp.Composition:
    return fp.Composition(seeded(nn.Linear(3, 2), 1), seeded(nn.Linear(2, 1), 2), fp.likelihoods.Bernoulli())


def curved() -> fp.Composition:
    head = nn.Sequential(seeded(nn.Linear(2, 1), 2), nn.Tanh())
    return fp.Composition(seeded(nn.Linear(3, 2), 1), head, fp.likelihoods.Normal(0.5))


BURN_IN = fp.chains.Chain(burn_in=5)
SHORT = fp.chains.Final(chains=2, draws=20, burn_in=20)
SGD = fp.LocalSGD(epochs=2, rate=0.02, batch=2)
CHAINS: dict[str, Any] = {
    "exact": lambda: fp.FedSOUL(linear_model()),
    "paper": lambda: fp.FedSOUL.paper(linear_model(), rate=1e-2),
    "mixture": lambda: fp.FedSOUL(linear_model(), prior=fp.priors.Mixture(2)),
    "mini-batches": lambda: fp.FedSOUL(linear_model(), phi_step=fp.steps.PhiStep(batch=2)),
    "compressed": lambda: fp.FedSOUL(linear_model(), compressor="qsgd"),
    "mass matrix": lambda: fp.FedSOUL(curved(), local_steps=2, chain=BURN_IN, final=SHORT),
    "hmc": lambda: fp.FedSOUL(logistic(), local_steps=3, final=SHORT),
}
POINTS: dict[str, Any] = {
    "FedAvg": lambda: fp.FedAvg(linear_model(), local=SGD),
    "FedAvgFT": lambda: fp.FedAvgFT(linear_model(), local=SGD, fine_tune=SGD),
    "FedRep": lambda: fp.FedRep(linear_model(), head=SGD, body=SGD),
    "SCAFFOLD": lambda: fp.SCAFFOLD(linear_model(), local=SGD),
    "Ditto": lambda: fp.Ditto(linear_model(), local=SGD, personal=SGD),
}


def fits(build: Any, participation: Any, binary: bool) -> list[fp.Population]:
    """The same run with its clients in two orders."""
    settings = {"rounds": 5, "seed": 3, "participation": participation}
    return [build().fit(data(names, binary), **settings) for names in (NAMES, SHUFFLED)]


@pytest.mark.parametrize("participation", [None, 3, 0.5], ids=["everyone", "three", "half"])
@pytest.mark.parametrize("name", CHAINS)
def test_clients_in_another_order_learn_the_same_and_draw_the_same(name: str, participation: Any) -> None:
    """theta is a sum, which rounds in its order. At one theta a client's draws are the same bits."""
    one, other = fits(CHAINS[name], participation, name == "hmc")
    assert other.names == SHUFFLED
    torch.testing.assert_close(other.published, one.published, **ROUNDING)
    assert [line["active"] for line in one.history] == [line["active"] for line in other.history]
    assert one.store is not None
    assert other.store is not None
    took_part = {n for n, there in zip(NAMES, one.store.entered.tolist(), strict=True) if there}
    assert took_part == {n for n, there in zip(SHUFFLED, other.store.entered.tolist(), strict=True) if there}
    same = Population(one.algorithm, one.published, one.key, other.federation, other.store)
    for population in (one, same):
        population.sample_all()
    for client in NAMES:
        draws, again = one.posterior(client).draws, same.posterior(client).draws
        if name == "hmc":  # sigmoids of a block round differently in its last few entries
            torch.testing.assert_close(again, draws, **ROUNDING)
        else:
            assert torch.equal(again, draws)


@pytest.mark.parametrize("participation", [None, 3], ids=["everyone", "three"])
@pytest.mark.parametrize("name", POINTS)
def test_point_methods_do_not_depend_on_the_order_either(name: str, participation: Any) -> None:
    one, other = fits(POINTS[name], participation, False)
    torch.testing.assert_close(other.published, one.published, **ROUNDING)
    x = torch.ones(2, 3)
    for client in (n for n in NAMES if n != "site-1"):  # which has no data, so that some have no model for it
        torch.testing.assert_close(other.predict(client, x).mean, one.predict(client, x).mean, **ROUNDING)


def test_another_name_is_another_client() -> None:
    """It is the name that a client's draws go by, and nothing else."""
    x, y = ragged((4,))[0]
    method = fp.FedSOUL(linear_model())
    theta = method.fit({"anna": (x, y), "ben": (x, y)}, rounds=2)
    draws = {name: theta.posterior(name).draws for name in theta.names}
    assert not torch.equal(draws["anna"], draws["ben"])
    here = federation_of(theta.model, {"ben": (x, y), "anna": (x, y), "carla": (x, y)})
    again = Population(theta.algorithm, theta.published, theta.key, here)
    for name, own in draws.items():
        torch.testing.assert_close(again.posterior(name).draws, own, **ROUNDING)


@pytest.mark.parametrize("name", CHAINS)
def test_a_client_alone_draws_what_the_whole_federation_draws_for_it(name: str) -> None:
    binary = name == "hmc"
    whole = CHAINS[name]().fit(data(NAMES, binary), rounds=4, seed=5).sample_all()
    for client in NAMES:
        federation = federation_of(whole.model, data([client], binary))
        cohort = federation.cohort(torch.tensor([0]), whole.device)
        alone = whole.algorithm.personalise(whole.published, cohort, None, whole.key)["draws"][0]
        torch.testing.assert_close(alone, whole.posterior(client).draws, **ROUNDING)


def test_a_process_that_holds_one_client_alone_makes_its_draws(tmp_path: Path) -> None:
    """theta travels as a file; the client's data are in no other process."""
    whole = fp.FedSOUL(linear_model()).fit(data(NAMES), rounds=4, seed=5)
    whole.save(tmp_path / "theta", posteriors="computed")
    code = (
        "import sys, fedpop as fp; from tests.population.test_alone import data; "
        "here = fp.load(sys.argv[1], clients=data(['site-4'])); "
        "here.save(sys.argv[2], posteriors='all')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "theta"), str(tmp_path / "one")]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    (file,) = (tmp_path / "one").glob("clients-*.safetensors")
    draws = read_tensors(file)["model.draws"][0]
    torch.testing.assert_close(draws, whole.posterior("site-4").draws, **ROUNDING)
