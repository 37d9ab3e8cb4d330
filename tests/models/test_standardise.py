"""Images as bytes: the same numbers as standardised floats, in every type and through every path."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import DataError, SettingsError
from fedpop.layers import CropFlip, Standardise
from fedpop.models.spec import module_from, module_spec
from tests.helpers import cohort_of, generator, seeded, train_key

MEAN, SD = (0.4, 0.5, 0.3), (0.2, 0.25, 0.3)


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, 8, 8), generator=generator(seed), dtype=torch.uint8)


def standardised(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mean, sd = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, SD))
    return ((x.double() / 255 - mean) / sd).to(dtype)


def backbone(first: nn.Module) -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), nn.Tanh())
    return nn.Sequential(first, *seeded(nn.Sequential(*layers), 1))


def models(likelihood: str = "categorical", dtype: torch.dtype = torch.float32) -> list[fp.Composition]:
    """The same network on bytes and on floats."""
    head = seeded(nn.Linear(5, 3 if likelihood == "categorical" else 1), 2)
    both = (nn.Sequential(Standardise(MEAN, SD), CropFlip(1)), nn.Sequential(nn.Identity(), CropFlip(1)))
    return [fp.Composition(backbone(first).to(dtype), head.to(dtype), likelihood) for first in both]


def clients(as_bytes: bool, dtype: torch.dtype = torch.float32) -> list[fp.Client]:
    out = []
    for i, n in enumerate((6, 3, 5)):
        x, y = images(n + 4, i), torch.arange(n + 4) % 3
        x = x if as_bytes else standardised(x, dtype)
        out.append(fp.Client(x[:n], y[:n], test=(x[n:], y[n:])))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_standardised_in_the_networks_own_type(dtype: torch.dtype) -> None:
    x = images(4)
    found = Standardise(MEAN, SD).to(dtype)(x)
    assert found.dtype == dtype
    # Two roundings of numbers up to 5 in magnitude, and the constants' own in float32.
    assert (
        float((found - standardised(x, torch.float64)).abs().max()) < 5 * 3 * torch.finfo(torch.float32).eps
    )
    assert x.dtype == torch.uint8  # left as it was


def test_the_memory_format_is_kept() -> None:
    x = images(4).contiguous(memory_format=torch.channels_last)
    assert Standardise(MEAN, SD)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "method",
    [
        lambda m: fp.FedSOUL(m),
        lambda m: fp.FedAvg(m, local=fp.LocalSGD(epochs=2, batch=2, rate=0.05)),
        lambda m: fp.FedRep(m),
        lambda m: fp.FedAvgFT(m),
        lambda m: fp.Ditto(m),
        lambda m: fp.LocalOnly(m),
    ],
    ids=["FedSOUL", "FedAvg", "FedRep", "FedAvgFT", "Ditto", "LocalOnly"],
)
def test_bytes_and_floats_give_the_same_fit(method) -> None:
    found = []
    for model, as_bytes in zip(models(), (True, False), strict=True):
        population = method(model).fit(clients(as_bytes), rounds=2, seed=0, progress=False)
        x = clients(as_bytes)[0].test[0]
        found.append((population.predict(0, x).probs, fp.evaluate(population, "test").pooled["nll"]))
    # Inputs differ by roundings (1e-6), which two rounds of a smooth network multiply by less than a hundred.
    assert float((found[0][0] - found[1][0]).abs().max()) < 1e-4
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


def test_clients_side_by_side_shift_the_bytes_that_they_shift_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network without convolutions is trained through vmap, layers before it included."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Tanh())
    first = nn.Sequential(Standardise(MEAN, SD), CropFlip(1))
    model = fp.Composition(
        nn.Sequential(first, *seeded(layers, 1, 0.05)), seeded(nn.Linear(4, 3)), "categorical"
    )
    assert model.rows_side_by_side
    ends = []
    for largest in (local_sgd.LARGEST_BATCHED, 0):
        monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
        method = fp.FedAvg(model, local=fp.LocalSGD(epochs=2, batch=2, rate=0.05))
        ends.append(method.fit(clients(True), rounds=2, progress=False).published["phi"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)
    assert float((ends[0] - model.initial_phi()).norm()) > 0.01


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_precision_takes_bytes(precision: str) -> None:
    one, other = (m.at_precision(precision) for m in models())
    phi = one.initial_phi()
    a, b = one.embed(phi, images(5)), other.embed(phi, standardised(images(5)))
    assert a.dtype == phi.dtype
    assert float((a - b).abs().max()) < (1e-5 if precision == "float32" else 0.02)


def test_a_double_network_and_a_double_pass_take_bytes() -> None:
    model, floats = models(dtype=torch.float64)
    phi = model.initial_phi()
    assert phi.dtype == torch.float64
    a, b = model.embed(phi, images(5)), floats.embed(phi, standardised(images(5), torch.float64))
    assert float((a - b).abs().max()) < 1e-5
    single = models()[0]
    wide = single.embed(single.initial_phi().double(), images(5))
    assert wide.dtype == torch.float64
    assert float((wide - single.embed(single.initial_phi(), images(5))).abs().max()) < 1e-5
    split = fp.Split(
        nn.Sequential(backbone(Standardise(MEAN, SD)), seeded(nn.Linear(5, 3))), "1.*", "categorical"
    )
    split = split.prepared(fp.Federation.of(clients(True)).example)
    assert split.embed(split.initial_phi().double(), images(5)).dtype == torch.float64


def test_clients_stay_bytes_and_the_whole_federation_is_not_copied() -> None:
    model = models()[0]
    federation = model.checked(fp.Federation.of(clients(True)))
    assert federation.train.x.dtype == torch.uint8
    cohort = federation.cohort(torch.arange(3), torch.device("cpu"))
    assert cohort.x.data_ptr() == federation.train.x.data_ptr()
    keys = model.dropout_keys(cohort_of(model, clients(True)), train_key())
    assert keys is not None  # shifts are on in training


def test_it_survives_saving(tmp_path: Path) -> None:
    spec = module_spec(backbone(Standardise(MEAN, SD)))
    assert spec is not None
    again = module_from(spec)[0]
    assert isinstance(again, Standardise)
    assert (again.mean, again.sd) == (MEAN, SD)
    population = fp.FedAvg(models()[0]).fit(clients(True), rounds=1, progress=False)
    population.save(tmp_path)
    x = clients(True)[0].test[0]
    loaded = fp.load(tmp_path, clients=clients(True))
    assert torch.equal(loaded.predict(0, x).probs, population.predict(0, x).probs)


def test_running_statistics_are_still_no_part_of_a_file() -> None:
    assert module_spec(nn.Sequential(nn.Sequential(nn.BatchNorm2d(3).eval()))) is None


def test_bad_input() -> None:
    layer = Standardise(MEAN, SD)
    with pytest.raises(DataError, match=r"takes bytes \(torch.uint8\), not torch.float32"):
        layer(torch.zeros(2, 3, 8, 8))
    with pytest.raises(DataError, match=r"images \[n, 3, height, width\], not \(2, 1, 8, 8\)"):
        layer(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    for mean, sd in (((), ()), ((0.5,), (0.0,)), ((0.5,), (0.1, 0.2))):
        with pytest.raises(SettingsError, match="for each channel"):
            Standardise(mean, sd)
    with pytest.raises(DataError, match="takes bytes"):
        fp.FedAvg(models()[0]).fit(clients(False), rounds=1, progress=False)
