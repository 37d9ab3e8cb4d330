"""Models that cannot be federated: refused when they are made or first used, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedpop as fp
from fedpop.errors import FedpopError, ModelError
from fedpop.federation.inputs import Example
from fedpop.keys import Key

NORMAL = fp.likelihoods.Normal(1.0)


class Does(nn.Module):
    """A linear layer and something before or after it."""

    def __init__(self, before: Any = None, after: Any = None, inputs: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.before, self.after = before or (lambda x: x), after or (lambda x: x)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(self.before(x)))


class Sequence(nn.Module):
    """A recurrent or attention layer over [n, time, columns], its last step."""

    def __init__(self, layer: nn.Module, outputs: int = 4) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.last((out[0] if isinstance(out, tuple) else out)[:, -1])


def written(x: Tensor) -> Tensor:
    x += 1
    return x


def first_written(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def backbone(module: nn.Module) -> fp.Composition:
    return fp.Composition(module, nn.Linear(2, 1), NORMAL)


def head(module: nn.Module) -> fp.Composition:
    return fp.Composition(nn.Linear(3, 3), module, NORMAL)


def split(module: nn.Module, personal: str) -> fp.Split:
    return fp.Split(module, personal, NORMAL)


MIX = "another output by itself than in a batch"
WRITES = "writes into its input.*write x = x"
CASES: dict[str, tuple[Any, str]] = {
    "a batch mean": (lambda: backbone(Does(after=lambda h: h - h.mean(0))), MIX),
    "a batch mean before": (lambda: backbone(Does(before=lambda x: x - x.mean(0, keepdim=True))), MIX),
    "a batch maximum": (lambda: backbone(Does(after=lambda h: h / h.abs().max())), MIX),
    "a batch softmax": (lambda: backbone(nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=0))), MIX),
    "a running sum": (lambda: backbone(Does(after=lambda h: h.cumsum(0))), MIX),
    "neighbours": (lambda: backbone(Does(after=lambda h: h + h.roll(1, 0))), MIX),
    "a batch mean in the head": (lambda: head(Does(after=lambda h: h - h.mean(0), outputs=1)), MIX),
    "a batch mean in a split": (
        lambda: split(nn.Sequential(Does(after=lambda h: h - h.mean(0)), nn.Linear(2, 1)), "0.layer.bias"),
        MIX,
    ),
    "written": (lambda: backbone(Does(before=written)), WRITES),
    "partly written": (lambda: backbone(Does(before=first_written)), WRITES),
    "a layer in place": (lambda: backbone(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))), WRITES),
    "a head that writes": (
        lambda: head(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1))),
        "writes into the features|cannot be run for many clients",
    ),
    "a pair of outputs": (lambda: head(Does(after=lambda h: (h, h), outputs=1)), "returned a tuple"),
    "a dict of outputs": (lambda: head(Does(after=lambda h: {"h": h}, outputs=1)), "returned a dict"),
    "a number": (lambda: head(Does(after=lambda h: 1.0, outputs=1)), "returned a float"),
    "nothing": (lambda: head(Does(after=lambda h: None, outputs=1)), "returned a NoneType"),
    "a list in a split": (
        lambda: split(nn.Sequential(nn.Linear(3, 3), Does(after=lambda h: [h], outputs=1)), "0.*"),
        "returned a list",
    ),
    "a value taken out": (
        lambda: head(Does(after=lambda h: h * float(h.abs().max().item()), outputs=1)),
        "the model lets examples see each other",
    ),
    "functional dropout": (
        lambda: backbone(Does(after=lambda h: nn.functional.dropout(h, 0.5))),
        "draws from torch's global generator.*nn.Dropout",
    ),
    "noise": (lambda: backbone(Does(after=lambda h: h + torch.randn_like(h))), "global generator"),
    "noise of a layer": (
        lambda: backbone(nn.Sequential(nn.Linear(3, 2), Noise())),
        r"1 \(Noise\) draws from torch's global generator",
    ),
    "noise in a head": (
        lambda: head(Does(after=lambda h: h + torch.randn_like(h), outputs=1)),
        "global generator",
    ),
    "a lazy layer": (
        lambda: backbone(nn.Sequential(nn.LazyLinear(2))),
        r"0 \(LazyLinear\) is lazy.*run module",
    ),
    "a lazy head": (lambda: head(nn.LazyLinear(1)), "is lazy"),
    "weight norm": (
        lambda: backbone(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
        "made of others.*remove_parametrizations",
    ),
    "spectral norm": (
        lambda: head(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1))),
        "made of others.*remove_parametrizations",
    ),
    "batch statistics": (
        lambda: backbone(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))),
        "replace_batchnorm",
    ),
    "written after a layer needs it": (
        lambda: backbone(Does(after=written_after_relu)),
        "backward pass fails: one of the variables.*in-?place",
    ),
    "the same in a head": (lambda: head(Does(after=written_after_relu, outputs=1)), "backward pass fails"),
    "computed again": (
        lambda: backbone(Again()),
        r"layer \(Linear\) is computed again in the backward pass.*gradient_checkpointing_disable",
    ),
    "a script": (
        lambda: backbone(torch.jit.script(nn.Linear(3, 2))),
        "torch.jit.*the module that it was made",
    ),
    "a script in a head": (
        lambda: head(nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 1))),
        r"0 \(RecursiveScriptModule\) was made by torch.jit",
    ),
    "spread over devices": (
        lambda: backbone(nn.DataParallel(nn.Linear(3, 2))),
        r"give what it wraps, its \.module",
    ),
    "pruned": (lambda: backbone(pruned(nn.Linear(3, 2))), r"being pruned.*prune\.remove"),
    "batches of one size": (lambda: backbone(Does(after=pairs)), "takes two examples and not 1.*any size"),
    "alpha dropout": (lambda: backbone(nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout())), "use nn.Dropout"),
}


def written_after_relu(h: Tensor) -> Tensor:
    h = h.relu()
    h[:, 0] = 0
    return h


def pairs(h: Tensor) -> Tensor:
    assert len(h) == 2, "two at a time"
    return h


def pruned(layer: nn.Linear) -> nn.Linear:
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.3)
    return layer


class Again(nn.Module):
    """Saves memory by computing again what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda h: torch.tanh(self.layer(h)), x, use_reentrant=False)
        return out


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("case", CASES)
def test_refused_with_the_way_out(tmp_path: Path, case: str) -> None:
    make, message = CASES[case]
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(5)
    before = x.clone()
    with pytest.raises(ModelError, match=message):
        fp.FedAvg(make()).fit([(x, y)], rounds=1, out=tmp_path / "run")
    assert torch.equal(x, before)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_the_older_weight_norm() -> None:
    with pytest.raises(ModelError, match=r"made of others.*remove_weight_norm"):
        backbone(nn.utils.weight_norm(nn.Linear(3, 2)))


SEQUENCES: dict[str, tuple[Any, str]] = {
    "a GRU over examples": (lambda: fp.Composition(Sequence(nn.GRU(3, 4)), nn.Linear(4, 1), NORMAL), MIX),
    "attention over examples": (
        lambda: fp.Composition(Sequence(encoder(0.0, False)), nn.Linear(4, 1), NORMAL),
        "batch_first=True",
    ),
    "a Transformer's dropout": (
        lambda: fp.Composition(Sequence(encoder(0.1, True)), nn.Linear(4, 1), NORMAL),
        r"layer.1.self_attn \(MultiheadAttention\) has a dropout of 0.1.*dropout = 0.0",
    ),
    "a GRU's dropout": (
        lambda: fp.Composition(
            Sequence(nn.GRU(3, 4, 2, batch_first=True, dropout=0.2)), nn.Linear(4, 1), NORMAL
        ),
        r"layer \(GRU\) has a dropout of 0.2",
    ),
}


def encoder(dropout: float, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=batch_first)
    return nn.Sequential(nn.Linear(3, 4), layer)


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences(tmp_path: Path, case: str) -> None:
    make, message = SEQUENCES[case]
    with pytest.raises(ModelError, match=message):
        fp.FedAvg(make()).fit([(torch.ones(5, 6, 3), torch.zeros(5))], rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Named(nn.Module):
    """Takes its parts by name or in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, age: Tensor, word: Tensor) -> Tensor:
        return self.layer(torch.cat((age, word.float()), 1))


SOUND: dict[str, tuple[Any, Any]] = {
    "a GRU within each example": (
        lambda: fp.Composition(Sequence(nn.GRU(3, 4, batch_first=True)), nn.Linear(4, 1), NORMAL),
        torch.ones(5, 6, 3),
    ),
    "attention within each example": (
        lambda: fp.Composition(Sequence(encoder(0.0, True)), nn.Linear(4, 1), NORMAL),
        torch.ones(5, 6, 3),
    ),
    "a head that is a network": (
        lambda: head(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))),
        torch.ones(5, 3),
    ),
    "frozen statistics": (
        lambda: backbone(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())),
        torch.ones(5, 3),
    ),
    "normalised within each example": (
        lambda: backbone(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))),
        torch.ones(5, 3),
    ),
    "words": (lambda: backbone(nn.Sequential(nn.Embedding(1, 2), nn.Flatten())), torch.zeros(5, 1).long()),
    "convolutions": (
        lambda: backbone(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten())),
        torch.ones(5, 1, 3, 3),
    ),
    "parts by name": (lambda: backbone(Named()), {"age": torch.ones(5, 1), "word": torch.ones(5, 2).long()}),
    "parts in order": (lambda: backbone(Named()), (torch.ones(5, 1), torch.ones(5, 2).long())),
    "starts at zero": (lambda: backbone(zeroed(nn.Linear(3, 2))), torch.ones(5, 3)),
}


def zeroed(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


@pytest.mark.parametrize("case", SOUND)
def test_what_is_sound_is_taken(case: str) -> None:
    make, x = SOUND[case]
    model = make().prepared(Example.of(x))
    assert model.outputs == 1


class Attends(nn.Module):
    """Fused attention, which has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.last(self.attention(h, h, h, need_weights=False)[0][:, 0])


class Single(nn.Module):
    """A pass in single precision, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.float()))


NOT_TWICE: dict[str, tuple[Any, Any]] = {
    "fused attention": (Attends, torch.ones(5, 6, 3)),
    "bags of words": (lambda: nn.EmbeddingBag(7, 2), torch.arange(15).reshape(5, 3) % 7),
    "single precision": (Single, torch.linspace(-1, 1, 15).reshape(5, 3)),
}


@pytest.mark.parametrize("case", NOT_TWICE)
def test_without_second_derivatives_chains_take_the_place_of_the_exact_engine(case: str) -> None:
    make, x = NOT_TWICE[case]
    clients = [(x, torch.linspace(-1, 1, 5)), (x[:3], torch.zeros(3))]
    final = fp.chains.Final(chains=2, draws=2, burn_in=1)
    population = fp.FedSOUL(backbone(make()), final=final).fit(clients, rounds=1)
    assert population.engine.startswith("sampled: a layer has no second derivatives")
    assert population.log_likelihood().value < 0
    with pytest.raises(FedpopError, match="engine='exact' cannot be used here: a layer has no second"):
        fp.FedSOUL(backbone(make()), engine="exact").fit(clients, rounds=1)
    with pytest.raises(FedpopError, match="second derivatives"):
        population.predict(0, x, theta_uncertainty=True)


def test_second_derivatives_that_are_not_batched_are_taken_one_by_one() -> None:
    norm = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    population = fp.FedSOUL(backbone(norm)).fit([(x, x[:, 0, 0]), (x[:2], x[:2, 0, 1])], rounds=2)
    assert population.engine.startswith("exact")


def test_a_model_that_starts_at_zero_is_seen_through() -> None:
    """A head that hides the features, too."""
    mixed = nn.Sequential(zeroed(nn.Linear(3, 2)), Does(after=lambda h: h - h.mean(0), inputs=2))
    hiding = nn.Linear(2, 1)
    key = Key(0, purpose="probe.z")
    shaken = 0.1 * key.normal(key.server(hiding.weight.device), (3,))[0]
    nn.utils.vector_to_parameters(-shaken, hiding.parameters())
    for head in (nn.Linear(2, 1), hiding):
        with pytest.raises(ModelError, match=MIX):
            fp.Composition(zeroed(mixed), head, NORMAL).prepared(Example.of(torch.ones(5, 3)))


def test_every_error_is_one_of_ours() -> None:
    """Whatever a module raises."""

    def fails(error: Exception) -> Any:
        def run(x: Tensor) -> Tensor:
            raise error

        return run

    for error in (KeyError("k"), ValueError("v"), TypeError("t"), IndexError("i"), AssertionError("a")):
        with pytest.raises(FedpopError, match="does not accept examples of shape"):
            backbone(Does(before=fails(error))).prepared(Example.of(torch.ones(5, 3)))
