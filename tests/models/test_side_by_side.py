"""Whether several clients are worked on side by side is tried, not guessed; elsewhere they go one after the
other, to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import ModelError
from fedpop.models import probe
from tests.helpers import seeded

METHODS: dict[str, Any] = {
    "fedavg": lambda m: fp.FedAvg(m, local=fp.LocalSGD(batch=3, rate=0.05)),
    "ditto": fp.Ditto,
    "per-fedavg": lambda m: fp.PerFedAvg(m, variant="hessian-free"),
    "pfedme": fp.PFedMe,
    "apfl": fp.APFL,
    "fedrep": fp.FedRep,
    "qlsd": fp.QLSD,
    "fedsoul": lambda m: fp.FedSOUL(m, local_steps=1, final=fp.chains.Final(1, 4, burn_in=2)),
    "one gradient each": lambda m: fp.FedSOUL(
        m, local_steps=1, compressor="qsgd", final=fp.chains.Final(1, 4, burn_in=2)
    ),
}


class Recurrent(nn.Module):
    """The last state of a recurrent layer; with lengths, of packed sequences."""

    def __init__(self, layer: type[nn.RNNBase], size: int = 4) -> None:
        super().__init__()
        self.layer = layer(3, size, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.layer(x)
        return (state[0] if isinstance(state, tuple) else state)[-1]


class Branching(nn.Module):
    """A layer that looks at values, which vmap does not let it do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return torch.tanh(out) if bool((out.sum() < 1e9).item()) else out


def sequences(packed: bool) -> list[tuple[Any, Tensor]]:
    g = torch.Generator().manual_seed(0)
    out: list[tuple[Any, Tensor]] = []
    for n in (4, 6, 5):
        x, y = torch.randn(n, 5, 3, generator=g), torch.arange(n) % 2
        out.append(((x, torch.randint(1, 6, (n,), generator=g)) if packed else x, y))
    return out


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_backbones_run_under_every_kind_of_work(name: str, packed: bool) -> None:
    model = fp.Composition(seeded(Recurrent(nn.GRU)), seeded(nn.Linear(4, 2)), "categorical")
    clients = sequences(packed)
    population = METHODS[name](model).fit(clients, rounds=1)
    assert population.model.rows_side_by_side == 0
    assert torch.isfinite(population.predict(1, clients[1][0]).probs).all()


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_trains_as_by_hand(layer: type[nn.RNNBase]) -> None:
    backbone, head = seeded(Recurrent(layer)), seeded(nn.Linear(4, 2))
    (x, y), *_ = clients = sequences(False)[:1]
    model = fp.Composition(backbone, head, "categorical")
    learned = fp.FedAvg(model, local=fp.LocalSGD(epochs=3, rate=0.1)).fit(clients, rounds=1)
    net = nn.Sequential(backbone, head)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    own = torch.cat([p.detach().flatten() for p in backbone.parameters()])
    torch.testing.assert_close(learned.published["phi"], own)


@pytest.mark.parametrize("head", [nn.Sequential(Recurrent(nn.GRU), nn.Linear(4, 2)), Branching()])
def test_a_head_that_vmap_refuses_is_sampled_one_client_after_the_other(head: nn.Module) -> None:
    """Values and gradients as of the module itself; chains, heads of others and predictions run."""
    clients = sequences(False) if not isinstance(head, Branching) else [
        (x[:, 0], y) for x, y in sequences(False)
    ]  # fmt: skip
    model = fp.Composition(None, seeded(head), "categorical")
    method = fp.FedSOUL(model, local_steps=1, final=fp.chains.Final(2, 3, burn_in=2))
    population = method.fit(clients, rounds=1)
    model = population.model
    assert not model.heads_side_by_side
    assert torch.isfinite(population.predict(0, clients[0][0]).probs).all()
    federation = model.checked(fp.Federation.of(clients))
    cohort = federation.cohort(torch.arange(3), torch.device("cpu"))
    z = torch.stack([model.initial_z() + 0.1 * k for k in range(6)]).reshape(3, 2, -1)
    value, grad = model.bind(model.initial_phi(), model.features(model.initial_phi(), cohort), cohort).value_and_grad(z)  # fmt: skip  # noqa: E501
    for c, (x, y) in enumerate(clients):
        for k in range(2):
            at = z[c, k].clone().requires_grad_()
            out = -nn.functional.cross_entropy(
                torch.func.functional_call(head, model.z_layout.views(at), (x,)), y, reduction="sum"
            )
            torch.testing.assert_close(value[c, k], out.detach())
            torch.testing.assert_close(grad[c, k], torch.autograd.grad(out, at)[0])
    fp.FedRep(fp.Composition(None, head, "categorical")).fit(clients, rounds=1).predict(0, clients[0][0])


def test_small_convolutions_go_side_by_side_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 1, 8, 8, generator=g), torch.arange(n) % 3) for n in (7, 4, 6)]
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5))
    model = fp.Composition(seeded(body), seeded(nn.Linear(5, 3)), "categorical")
    assert model.rows_side_by_side == 0  # unknown before it has seen an example
    prepared = model.prepared(fp.Federation.of(clients).example)
    assert 50 < prepared.rows_side_by_side < 10_000
    assert prepared.knowing(prepared.known()).rows_side_by_side == prepared.rows_side_by_side
    ends, ways = [], []
    together = local_sgd.LocalSGD._batched
    monkeypatch.setattr(local_sgd.LocalSGD, "_batched", lambda *a: ways.append(1) or together(*a))
    for largest in (probe.LARGEST_STEP_SIDE_BY_SIDE, 1):
        monkeypatch.setattr(probe, "LARGEST_STEP_SIDE_BY_SIDE", largest)
        method = fp.Ditto(model, local=fp.LocalSGD(epochs=2, batch=3, rate=0.1))
        population = method.fit(clients, rounds=2)
        ends.append(torch.cat((population.published["phi"], *population.personal(1).values())[:1]))
        ways.append(0)
    assert ways == [1, 1, 1, 1, 0, 0]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_functional_dropout_is_named_with_what_to_do() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x), 0.5, self.training)

    clients = [(torch.ones(4, 3), torch.arange(4) % 2)]
    for model in (
        fp.Composition(Dropping(), nn.Linear(2, 2), "categorical"),
        fp.Composition(nn.Linear(3, 3), Dropping(), "categorical"),
        fp.Split(Dropping(), "linear.bias", "categorical"),
    ):
        with pytest.raises(ModelError, match=r"functional dropout.*nn\.Dropout.*\.eval\(\)"):
            fp.FedAvg(model).fit(clients, rounds=1)
    fp.FedAvg(fp.Composition(Dropping().eval(), nn.Linear(2, 2), "categorical")).fit(clients, rounds=1)


def test_chains_deep_inside_a_large_network_are_short() -> None:
    """What a step costs decides how many there are; what was asked for is obeyed."""
    wide = nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 2))
    small = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    deep = fp.FedSOUL(fp.Split(wide, personal="2.bias", likelihood="categorical"))
    assert deep.model.deep
    assert (deep.steps, deep.sampler.kernel, deep.sampler.burn_in) == (1, fp.kernels.HMC(leapfrog=2), 10)
    assert fp.FedSOUL(deep.model, local_steps=7).steps == 7
    for model in (fp.Split(wide, "4.*", "categorical"), fp.Split(small, "0.bias", "categorical")):
        assert not model.deep
        assert fp.FedSOUL(model).steps == 10
        assert fp.FedSOUL(model).sampler.kernel == fp.kernels.HMC()
    clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(2)]
    deep = deep.replace(final=fp.chains.Final(1, 4, burn_in=2))
    population = deep.fit(clients, rounds=3, callbacks=())
    # After the first round, whose chains have ten transitions more: a first look, four gradients, and J.
    later = population.history[-1]["gradient_evaluations"] / 2
    assert later <= 5
