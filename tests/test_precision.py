"""float32 unless a child process has shown that bfloat16 works, agrees and pays, for models worth it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop import precision
from fedpop.errors import SettingsError
from fedpop.models import modules as network
from fedpop.models.modules import RowKeys
from fedpop.precision import ProbeVerdict  # as it is before the tests' own fixture replaces it
from tests.helpers import generator, linear_model, ragged, seeded, train_key

CPU = torch.device("cpu")


class QuietConv(nn.Conv2d):
    """A convolution that notes how it is called and runs in float32: bfloat16 may kill the process."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.seen: list[tuple[int, bool, torch.dtype | None]] = []

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.append((len(x), x.is_contiguous(memory_format=torch.channels_last), rounded))
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def convolutional(**settings: Any) -> fp.Composition:
    images = seeded(nn.Sequential(QuietConv(1, 2, 3), nn.Flatten()), 1)
    return fp.Composition(images, seeded(nn.Linear(8, 1), 2), "normal", **settings)


def wide() -> fp.Composition:
    return fp.Composition(nn.Linear(400, 300), nn.Linear(300, 1), "normal")  # 120,300 parameters


def split() -> fp.Split:
    return fp.Split(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)), "2.*", "normal")


def no_child() -> ProbeVerdict:
    pytest.fail("a child process was started")


# --- which models ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [convolutional, wide, split])
def test_networks_follow_the_verdict_when_they_are_run_and_not_before(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(precision, "probed", no_child)
    model = make()
    assert (model.precision, model.autocast) == ("auto", None)
    for verdict in (True, False):
        monkeypatch.setattr(precision, "probed", lambda v=verdict: ProbeVerdict(v, "given"))
        chosen = model.chosen_precision()
        assert chosen == ("bfloat16" if verdict else "float32")
        copy = model.at_precision(chosen)
        assert type(copy) is type(model)
        assert copy.autocast is (torch.bfloat16 if verdict else None)
        assert copy.precision == "auto"  # what was given: what is saved asks again where it is read
        monkeypatch.setattr(precision, "probed", no_child)
        assert copy.chosen_precision() == chosen  # it is settled
        assert model.autocast is None


def test_small_models_and_double_precision_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "probed", no_child)
    assert linear_model().chosen_precision() == "float32"
    small = fp.Composition(nn.Linear(20, 20), nn.Linear(20, 10), "categorical")
    assert small.chosen_precision() == "float32"
    double = fp.Composition(nn.Linear(400, 300).double(), nn.Linear(300, 1).double(), "normal")
    assert double.chosen_precision() == "float64"
    assert double.at_precision("float64").autocast is None
    fp.FedAvg(linear_model()).fit(ragged(), rounds=1)


def test_a_split_without_a_backbone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole module runs at every step of the chain, in the parameters' own type."""
    monkeypatch.setattr(precision, "probed", no_child)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    assert fp.Split(module, "0.*", "normal").chosen_precision() == "float32"


def test_a_function_computes_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "probed", no_child)
    model = fp.CustomModel(outputs=lambda phi, z, x: z["a"] * x, likelihood="normal", z={"a": 1.0})
    assert model.chosen_precision() == "float64"
    assert model.at_precision("float64").autocast is None
    with pytest.raises(SettingsError, match="no network"):
        model.at_precision("bfloat16")


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_what_is_asked_for_is_done_without_a_probe(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(precision, "probed", no_child)
    model = convolutional(precision=asked)
    assert model.autocast is (torch.bfloat16 if asked == "bfloat16" else None)
    assert model.chosen_precision() == asked
    assert precision.choose(asked, CPU, worth=True) == asked
    other = "float32" if asked == "bfloat16" else "bfloat16"
    assert model.at_precision(other).chosen_precision() == other


def test_other_devices_do_not_ask_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "probed", no_child)
    assert precision.choose("auto", torch.device("mps"), worth=True) == "float32"
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, a=answer: a)
        chosen = precision.choose("auto", torch.device("cuda"), worth=True)
        assert chosen == ("bfloat16" if answer else "float32")
    assert precision.choose("auto", torch.device("cuda"), worth=False) == "float32"


def test_an_unknown_precision_is_refused_at_once() -> None:
    with pytest.raises(SettingsError, match="auto, float32, bfloat16"):
        fp.Composition(nn.Linear(2, 1), nn.Linear(1, 1), "normal", precision="half")
    for model in (linear_model(), fp.CustomModel(lambda phi, z, x, y: y, z={"a": 1.0})):
        with pytest.raises(SettingsError, match="auto, float32, bfloat16"):
            model.at_precision("half")


# --- what it changes ----------------------------------------------------------------------------------


def images(n: int) -> Tensor:
    return torch.randn(n, 1, 4, 4, generator=generator(3))


@pytest.mark.parametrize("verdict", [True, False])
def test_a_run_and_what_is_read_back_follow_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: bool
) -> None:
    monkeypatch.setattr(precision, "probed", lambda: ProbeVerdict(verdict, "given"))
    model, wanted = convolutional(), torch.bfloat16 if verdict else None
    clients = [(images(3), torch.ones(3))]
    population = fp.FedAvg(model).fit(clients, rounds=1)
    assert population.model.autocast is wanted
    conv = population.model.modules()[0][0]
    assert isinstance(conv, QuietConv)
    # Two examples of zeros, and what a row takes of memory, are looked at in the parameters' own type.
    assert {seen[2] for seen in conv.seen} <= {None, wanted}
    assert conv.seen[-1][2] is wanted
    population.save(tmp_path)
    again = fp.load(tmp_path, model=model)
    assert again.model.autocast is wanted
    assert model.autocast is None


def test_a_model_that_chose_for_itself_is_saved_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 on this machine must not be an order on the next one, which it might kill."""
    monkeypatch.setattr(network, "LEAST_ROUNDED", 1)
    monkeypatch.setattr(precision, "probed", lambda: ProbeVerdict(True, "given"))
    model = fp.Composition(nn.Linear(2, 2), nn.Linear(2, 1), "normal")
    clients = [(torch.ones(2, 2), torch.ones(2))]
    population = fp.FedAvg(model).fit(clients, rounds=1)
    assert population.model.autocast is torch.bfloat16
    population.save(tmp_path)
    monkeypatch.setattr(precision, "probed", lambda: ProbeVerdict(False, "given"))
    again = fp.load(tmp_path).model
    assert (again.precision, again.autocast) == ("auto", None)


def test_bfloat16_on_request_rounds_the_backbone_and_nothing_else() -> None:
    backbone, head = seeded(nn.Linear(16, 8), 1), nn.Linear(8, 1)
    x = torch.randn(5, 16, generator=generator(2))
    exact = fp.Composition(backbone, head, "normal", precision="float32")
    rounded = fp.Composition(backbone, head, "normal", precision="bfloat16")
    phi = exact.initial_phi()
    one, other = exact.embed(phi, x), rounded.embed(phi, x)
    assert other.dtype == torch.float32
    assert torch.equal(other, other.to(torch.bfloat16).float())
    torch.testing.assert_close(other, one, rtol=2**-6, atol=2**-6)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("threads", "blocks"), [(1, (3, 3, 1)), (2, (6, 1))])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_split_runs_its_network_as_a_composition_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, threads: int, blocks: tuple[int, ...]
) -> None:
    """Same type, same memory format, same blocks, so many images for each thread: the same bits, forward and
    backward."""
    monkeypatch.setattr(network, "IMAGES_PER_THREAD", 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layers = seeded(nn.Sequential(QuietConv(1, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)), 4)
    x = images(7)
    rows = RowKeys(train_key(), torch.zeros(7, dtype=torch.int64), torch.arange(7))
    both = fp.Composition(layers[:3], layers[3], "categorical", precision=kind)
    phi = both.initial_phi().requires_grad_()
    results = []
    for model in (fp.Split(layers, "3.*", "categorical", precision=kind), both):
        conv = model.modules()[0][0]
        assert isinstance(conv, QuietConv)
        conv.seen.clear()
        features = model.embed(phi, x, rows)
        rounded = torch.bfloat16 if kind == "bfloat16" else None
        assert conv.seen == [(n, True, rounded) for n in blocks]
        assert isinstance(features, Tensor)
        results.append((features.detach(), *torch.autograd.grad(features.square().sum(), phi)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_split_is_read_back_with_its_precision(tmp_path: Path) -> None:
    model = fp.Split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "1.*", "normal", precision="bfloat16")
    clients = [(torch.ones(2, 2), torch.ones(2))]
    fp.FedAvg(model).fit(clients, rounds=1).save(tmp_path)
    again = fp.load(tmp_path).model
    assert isinstance(again, fp.Split)
    assert again.precision == "bfloat16"
    assert again.autocast is torch.bfloat16
