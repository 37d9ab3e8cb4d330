"""Every method on a device that is not the CPU, emulated: nothing mixes devices, and where there is no double
precision none is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop import devices
from fedpop.errors import SettingsError
from fedpop.federation.clients import Federation
from tests.emulated import DEVICE, Functions, There, emulated
from tests.helpers import linear_model, ragged, seeded
from tests.test_devices import METHODS, softmax

FINAL = fp.chains.Final(chains=2, draws=2, burn_in=1)
OTHERS: dict[str, Any] = {
    "apfl": lambda: fp.APFL(linear_model()),
    "dg-lmc": lambda: fp.DGLMC(linear_model()),
    "ditto": lambda: fp.Ditto(linear_model()),
    "fedavg, fine-tuned": lambda: fp.FedAvgFT(linear_model()),
    "fedbabu": lambda: fp.FedBABU(linear_model()),
    "feddbe": lambda: fp.FedDBE(linear_model()),
    "fedper": lambda: fp.FedPer(linear_model()),
    "fedprox": lambda: fp.FedProx(linear_model()),
    "fsgld": lambda: fp.FSGLD(linear_model()),
    "lg-fedavg": lambda: fp.LGFedAvg(linear_model()),
    "local": lambda: fp.LocalOnly(linear_model()),
    "pfedvem": lambda: fp.PFedVEM(linear_model()),
    "pfedfda": lambda: fp.PFedFDA(softmax()),
    "scaffold": lambda: fp.SCAFFOLD(linear_model()),
}
SLOW = ("energy", "mixture, jumps", "network head")  # thousands of small steps, each of them watched


def clients_of(method: Any) -> list[Any]:
    name = method.model.likelihood.name
    if name == "normal":
        return ragged()
    kind = (lambda n: torch.arange(n) % 3) if name == "categorical" else (lambda n: torch.arange(n).float())
    return [(x, kind(len(x))) for x, _ in ragged()]


def quick(method: Any) -> Any:
    return method.replace(final=FINAL) if getattr(method, "final", None) is not None else method


@pytest.mark.filterwarnings("ignore:.*have one example")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in METHODS | OTHERS]
)
def test_nothing_mixes_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = quick((METHODS | OTHERS)[name]())
    clients = clients_of(method)
    plain = method.fit(clients, rounds=2)
    with emulated(monkeypatch) as mode:
        population = method.fit(clients, rounds=2, device=DEVICE)
        assert {t.device for n, t in population.published.items() if n in ("phi", "w")} <= {DEVICE}
        found = population.predict(0, clients[0][0])
        mean = found.mean.cpu()
        found.interval(0.9), found.sd, found.log_prob(clients[0][1])
    assert mode.count > 100
    torch.testing.assert_close(mean, plain.predict(0, clients[0][0]).mean, rtol=1e-2, atol=1e-2)


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 1, 6, 6, generator=g), torch.arange(n) % 3) for n in (4, 7, 1)]


def network() -> nn.Sequential:
    frozen = seeded(nn.Conv2d(1, 2, 3), 0).requires_grad_(False)
    return nn.Sequential(
        frozen, nn.BatchNorm2d(2).eval(), nn.Conv2d(2, 4, 3), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 4)
    )


SINGLE: dict[str, Any] = {
    "FedSOUL": lambda m: fp.FedSOUL(m, final=FINAL, local_steps=2),
    "FedAvg": lambda m: fp.FedAvg(m, local=fp.LocalSGD(batch=2)),
    "Ditto": fp.Ditto,
    "FedRep": fp.FedRep,
    "PFedMe": lambda m: fp.PFedMe(m, local=fp.LocalSGD(rate=0.01)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_without_double_precision_the_network_runs_there_and_all_else_here(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the digits that it has on the CPU, with dropout keyed the same."""
    seeded(net := network(), 3)
    model = fp.Composition(net, seeded(nn.Linear(4, 3), 1), "categorical", precision="float32")
    x = images()[1][0]
    plain = SINGLE[name](model).fit(images(), rounds=2)
    with emulated(monkeypatch, double=False) as mode:
        population = SINGLE[name](model).fit(images(), rounds=2, device=DEVICE)
        mean = population.predict(1, x).mean
        assert "the network alone runs there" in str(population)
    assert mode.count > 100
    assert not isinstance(mean, There)
    torch.testing.assert_close(mean, plain.predict(1, x).mean, rtol=1e-5, atol=1e-6)


def test_a_deep_split_too_and_double_precision_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    split = fp.Split(net, "0.bias", fp.likelihoods.Normal(1.0))
    with emulated(monkeypatch, double=False) as mode:
        fp.FedAvg(split).fit(ragged(), rounds=1, device=DEVICE)
        assert mode.count > 50
        with pytest.raises(
            SettingsError, match=r"no double precision, and the model is of float64.*float\(\)"
        ):
            fp.FedAvg(fp.Split(net.double(), "0.bias", "normal")).fit(ragged(), rounds=1, device=DEVICE)


def test_data_stay_on_a_device_with_room_and_are_copied_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation.of(ragged())
    size = sum(v.nbytes for p in federation.splits.values() for v in (p.x, p.y))
    with emulated(monkeypatch):
        for free, kept in ((2 * size, True), (2 * size - 2, False), (None, False)):
            monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
            here = federation.kept_on(DEVICE)
            assert isinstance(here.train.x, There) == kept
            assert here.fingerprint() == federation.fingerprint()
            cohort = here.cohort(torch.tensor([2, 0]), DEVICE)
            assert cohort.x.device == cohort.y.device == DEVICE
            assert torch.equal(cohort.x.cpu(), federation.cohort(torch.tensor([2, 0]), torch.device("cpu")).x)
    assert devices.free_memory(torch.device("cpu")) is None


def test_the_emulation_refuses_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would pass for the wrong reason."""
    with emulated(monkeypatch, double=False), Functions():
        there = torch.ones(3, device=DEVICE)
        assert isinstance(there + 1, There)
        with pytest.raises(AssertionError, match="mixes devices"):
            there + torch.ones(3)
        with pytest.raises(AssertionError, match=r"no numpy\(\)"):
            there.numpy()
        with pytest.raises(TypeError, match="no float64"):
            there.double()
        with pytest.raises(TypeError, match="no float64"):
            torch.zeros(2, dtype=torch.float64, device=DEVICE)
