"""FedDBE: torch's SGD on model and shift, the pull of mean features in it, and FedAvg where neither is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.client import local_sgd
from fedpop.errors import SettingsError
from fedpop.methods.base import Facts
from tests.helpers import answers, begun, cohort_of, ragged, seeded, states, train_key

WIDE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
SIZES = (6, 2, 0)


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    return seeded(nn.Linear(3, 2).to(WIDE), 1), seeded(nn.Linear(2, 3, bias=bias).to(WIDE), 2)


def model(bias: bool = True) -> fp.Composition:
    return fp.Composition(*layers(bias), "categorical")


def clients(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(WIDE), torch.arange(len(x)) % 3) for x, _ in ragged(sizes)]


def reference(rounds: int, kappa: float, bias: bool) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """Body, head and everyone's shift, by modules."""
    body, head = layers(bias)
    shifts, g = [torch.zeros(2, dtype=WIDE) for _ in SIZES], None
    for _ in range(rounds):
        ends, means = [], []
        for i, (x, y) in enumerate(clients()):
            own_body, own_head = layers(bias)
            own_body.load_state_dict(body.state_dict())
            own_head.load_state_dict(head.state_dict())
            t = shifts[i].clone().requires_grad_(g is not None)
            trained = [*own_body.parameters(), *own_head.parameters(), *([] if g is None else [t])]
            optimiser = torch.optim.SGD(trained, lr=0.3)
            for _ in range(2 if len(y) else 0):
                optimiser.zero_grad()
                f = own_body(x)
                loss = nn.functional.cross_entropy(own_head(f + t), y)
                if g is not None:
                    loss = loss + kappa * (0.5 * (f.mean(0) - g) ** 2).mean()
                loss.backward()
                optimiser.step()
            shifts[i] = t.detach()
            ends.append({**own_body.state_dict(prefix="b."), **own_head.state_dict(prefix="h.")})
            means.append(own_body(x).mean(0).detach() if len(y) else torch.zeros(2, dtype=WIDE))
        share = [n / sum(SIZES) for n in SIZES]
        mean = {k: sum(s * e[k] for s, e in zip(share, ends, strict=True)) for k in ends[0]}
        body.load_state_dict({k[2:]: v for k, v in mean.items() if k.startswith("b.")})
        head.load_state_dict({k[2:]: v for k, v in mean.items() if k.startswith("h.")})
        if g is None:
            g = sum(s * m for s, m in zip(share, means, strict=True))
    return body, head, shifts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("largest", [local_sgd.LARGEST_BATCHED, 0])
def test_model_and_shifts_are_those_of_torch(
    largest: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sgd, "LARGEST_BATCHED", largest)
    method = fp.FedDBE(model(bias), kappa=3.0, local=fp.LocalSGD(epochs=2, rate=0.3))
    population = method.fit(clients(), rounds=4, progress=False)
    body, head, shifts = reference(4, 3.0, bias)
    torch.testing.assert_close(population.phi["backbone.weight"], body.weight.detach(), **CLOSE)
    torch.testing.assert_close(states(population, "t", 3), torch.stack(shifts), **CLOSE)
    assert bool(shifts[0].any())
    x = clients((5,))[0][0]
    for i, t in enumerate(shifts):
        torch.testing.assert_close(population.predict(i, x).probs, head(body(x) + t).softmax(-1), **CLOSE)
    torch.testing.assert_close(population.new_client().predict(x).probs, head(body(x)).softmax(-1), **CLOSE)


def test_its_first_round_is_fedavgs() -> None:
    """To the bit."""
    local = fp.LocalSGD(epochs=3, rate=0.2)
    ours = fp.FedDBE(model(), local=local).fit(clients(), rounds=1, progress=False)
    theirs = fp.FedAvg(model(), local=local).fit(clients(), rounds=1, progress=False)
    for name in ("phi", "z"):
        assert torch.equal(ours.published[name], theirs.published[name])


def test_the_pull_alone_brings_everyones_features_to_one_mean() -> None:
    """Without labels to fit, as the head is zero: one step of the right size lands on g."""
    body, head = layers()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    frozen = fp.Composition(body, head, "categorical")
    x, y = clients((6,))[0]
    far = x + 2.0
    kappa = 4.0
    method = fp.FedDBE(frozen, kappa=kappa)
    g, w = torch.tensor([0.4, -0.2], dtype=WIDE), method.initial_w()
    both = torch.cat((w, w.new_zeros(2))).requires_grad_()
    loss = method.shifted_loss(g, False)(both, both[:0], far, y, None, None)
    mean = body(far).mean(0)
    entropy = torch.log(torch.tensor(3.0, dtype=WIDE))
    torch.testing.assert_close(loss, entropy + kappa / 2 * ((mean - g) ** 2).mean(), **CLOSE)
    (slope,) = torch.autograd.grad(loss, both)
    bias = method.model.phi_layout.spans()["backbone.bias"]
    torch.testing.assert_close(slope[bias], kappa / 2 * (mean - g), **CLOSE)


def test_a_newcomer_finds_its_shift_with_all_else_standing_still() -> None:
    method = fp.FedDBE(model(), newcomer=fp.LocalSGD(epochs=4, rate=0.3))
    population = method.fit(clients(), rounds=2, progress=False)
    held = population.published
    x, y = clients((7,))[0]
    body, head = layers()
    parts = method.model.phi_layout.views(held["phi"])
    body.load_state_dict({"weight": parts["backbone.weight"], "bias": parts["backbone.bias"]})
    head.load_state_dict(dict(method.model.z_layout.views(held["z"])))
    t = torch.zeros(2, dtype=WIDE, requires_grad=True)
    optimiser = torch.optim.SGD([t], lr=0.3)
    for _ in range(4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(body(x) + t), y).backward()
        optimiser.step()
    expected = head(body(x) + t).softmax(-1)
    torch.testing.assert_close(population.new_client(x, y).predict(x).probs, expected, **CLOSE)


def test_shifts_are_never_in_the_message() -> None:
    method = fp.FedDBE(model())
    cohort = cohort_of(method.model, clients((6,)))
    server, local = begun(method, cohort, Facts(1, 5), train_key())
    done = answers(method, cohort, local, method.broadcast(server), train_key())
    assert set(done.total.plain) == {"dw", "n", "mean"}
    server = method.server_round(server, done.total, Facts(1, 5), train_key())
    done = answers(method, cohort, done.local, method.broadcast(server), train_key(1))
    assert {n: t.numel() for n, t in done.total.plain.items()} == {"dw": method.size, "n": 1}
    assert bool(done.local["t"].any())


def test_a_head_that_is_not_linear_is_refused() -> None:
    head = nn.Sequential(nn.Tanh(), nn.Linear(2, 3))
    with pytest.raises(SettingsError, match="FedDBE shifts the features that a linear head sees"):
        fp.FedDBE(fp.Composition(nn.Linear(3, 2), head, "categorical"))


def test_fixed_effects_are_not_shifted() -> None:
    """What phi adds to outputs stands beside the features."""
    slope, intercept = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    method = fp.FedDBE(fp.Composition(None, intercept, fp.likelihoods.Normal(1.0), fixed=slope))
    f = torch.tensor([[1.0, 5.0], [2.0, 6.0]])
    assert torch.equal(method.shifted(f, torch.tensor([10.0])), torch.tensor([[11.0, 5.0], [12.0, 6.0]]))


def test_saved_and_loaded(tmp_path: Any) -> None:
    population = fp.FedDBE(model(), kappa=1.0).fit(clients(), rounds=3, progress=False)
    again = fp.load(population.save(tmp_path))
    x, y = clients((5,))[0]
    for i in range(3):
        assert torch.equal(again.predict(i, x).probs, population.predict(i, x).probs)
    assert torch.equal(again.new_client(x, y).predict(x).probs, population.new_client(x, y).predict(x).probs)
