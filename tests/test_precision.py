"""bfloat16 where the processor computes it natively and the model is worth it, nowhere else."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop import precision
from fedpop.models import network
from fedpop.models.modules import RowKeys
from tests.helpers import generator, linear_model, seeded, train_key

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("processor : 0\nflags : fpu avx2 avx512f\n", False),
        ("processor : 0\nflags : fpu avx512_bf16 avx2\n", True),
        ("processor : 0\nflags\t\t: fpu amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures : fp asimd bf16\n", True),
        ("model name : a machine with bf16 in its name\nflags : fpu\n", False),
        ("", False),
    ],
)
def test_flags_of_the_processor(tmp_path: Path, text: str, native: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert precision._flags_have_bfloat16(cpuinfo) is native


def test_no_file_of_flags_means_no(tmp_path: Path) -> None:
    assert precision._flags_have_bfloat16(tmp_path / "missing") is False


def test_the_processor_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    for answer in (True, False):
        monkeypatch.setattr(precision, "_flags_have_bfloat16", lambda _, a=answer: a)
        assert precision.native_bfloat16(CPU) is answer
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert precision.native_bfloat16(CPU) is True


def test_other_devices_do_not_inherit_the_answer_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_flags_have_bfloat16", lambda _: True)
    assert precision.native_bfloat16(torch.device("mps")) is False


@pytest.mark.parametrize("native", [True, False])
def test_auto_follows_the_processor_for_networks(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(precision, "native_bfloat16", lambda _: native)
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    model = fp.Composition(images, nn.Linear(8, 1), "normal")
    assert model.autocast is (torch.bfloat16 if native else None)
    wide = fp.Composition(nn.Linear(400, 300), nn.Linear(300, 1), "normal")  # 120,300 parameters
    assert wide.autocast is (torch.bfloat16 if native else None)
    split = fp.Split(nn.Sequential(images, nn.Linear(8, 1)), "1.*", "normal")
    assert split.autocast is (torch.bfloat16 if native else None)


def test_small_models_are_never_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "native_bfloat16", lambda _: True)
    assert linear_model().autocast is None
    assert fp.Composition(nn.Linear(20, 20), nn.Linear(20, 10), "categorical").autocast is None


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


def test_an_unknown_precision_is_refused_at_once() -> None:
    with pytest.raises(fp.errors.SettingsError, match="auto, float32, bfloat16"):
        fp.Composition(nn.Linear(2, 1), nn.Linear(1, 1), "normal", precision="half")
    assert precision.autocast_dtype("float32", CPU) is None


def images(n: int) -> torch.Tensor:
    return torch.randn(n, 1, 4, 4, generator=generator(3))


def test_a_split_runs_its_network_as_a_composition_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same type, same memory format, same blocks: the same bits, forward and backward."""
    monkeypatch.setattr(network, "BLOCK", 3)
    layers = seeded(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)), 4)
    x = images(7)
    seen: list[tuple[int, bool]] = []
    layers[0].register_forward_hook(
        lambda _m, args, _o: seen.append(
            (len(args[0]), args[0].is_contiguous(memory_format=torch.channels_last))
        )
    )
    rows = RowKeys(train_key(), torch.zeros(7, dtype=torch.int64), torch.arange(7))
    results = []
    for kind in ("float32", "bfloat16"):
        split = fp.Split(layers, "3.*", "categorical", precision=kind)
        both = fp.Composition(layers[:3], layers[3], "categorical", precision=kind)
        phi = both.initial_phi().requires_grad_()
        for model in (split, both):
            seen.clear()
            features = model.embed(phi, x, rows)
            assert seen == [(3, True), (3, True), (1, True)]
            assert isinstance(features, torch.Tensor)
            results.append((features.detach(), *torch.autograd.grad(features.square().sum(), phi)))
        for one, other in zip(*results[-2:], strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(results[0][0], results[2][0])


def test_a_split_is_read_back_with_its_precision(tmp_path: Path) -> None:
    model = fp.Split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "1.*", "normal", precision="bfloat16")
    clients = [(torch.ones(2, 2), torch.ones(2))]
    fp.FedAvg(model).fit(clients, rounds=1).save(tmp_path)
    again = fp.load(tmp_path).model
    assert isinstance(again, fp.Split)
    assert again.precision == "bfloat16"
