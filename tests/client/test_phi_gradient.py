"""J of each client, whichever way it is computed: fused, side by side, one by one, with a graph each."""

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.client import phi_step
from fedpop.client.phi_step import PhiGradient, embedded, finite_rows, vectorises
from tests.helpers import cohort_of, generator, seeded, train_key

WIDE = torch.float64
SIZES = (3, 0, 5, 1, 3, 5, 3)
RAGGED = (3, 0, 5, 1, 2, 7, 6)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0], dtype=WIDE)


class Doubled(nn.Module):
    """A head that is not linear."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x):
        return torch.tanh(self.inner(x)) * 2


class Recurrent(nn.Module):
    """A layer that vmap does not know."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, 2, batch_first=True)

    def forward(self, x):
        return self.cell(x.unsqueeze(-1))[0][:, -1]


def wide(*modules: nn.Module) -> nn.Module:
    return seeded(modules[0] if len(modules) == 1 else nn.Sequential(*modules), 3).to(WIDE)


NORMAL = fp.likelihoods.Normal()
CASES = {
    "linear": lambda: fp.Composition(wide(nn.Linear(4, 2)), wide(nn.Linear(2, 3)), NORMAL),
    "no biases": lambda: fp.Composition(
        wide(nn.Linear(4, 2, bias=False)), wide(nn.Linear(2, 3, bias=False)), fp.likelihoods.Normal(0.5)
    ),
    "fixed effects": lambda: fp.Composition(
        wide(nn.Linear(4, 2)), wide(nn.Linear(2, 3)), NORMAL, fixed=wide(nn.Linear(4, 3))
    ),
    "network": lambda: fp.Composition(
        wide(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)),
        wide(nn.Linear(2, 3)),
        "categorical",
    ),
    "dropout": lambda: fp.Composition(
        wide(nn.Linear(4, 2), nn.Dropout(0.4)), wide(nn.Linear(2, 3)), "categorical"
    ),
    "general head": lambda: fp.Composition(wide(nn.Linear(4, 2)), wide(Doubled()), "categorical"),
    "dropout in the head": lambda: fp.Composition(
        wide(nn.Linear(4, 2)), wide(nn.Dropout(0.4), nn.Linear(2, 3)), "categorical"
    ),
    "split": lambda: fp.Split(wide(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), "0.bias", "categorical"),
    "frozen": lambda: fp.Composition(
        wide(nn.Linear(4, 2)).requires_grad_(False), wide(nn.Linear(2, 3)), NORMAL
    ),
    "nothing shared": lambda: fp.Composition(None, wide(nn.Linear(4, 3)), "categorical"),
    "recurrent": lambda: fp.Composition(wide(Recurrent()), wide(nn.Linear(2, 3)), "categorical"),
}


def problem(name: str, sizes=SIZES):
    model, g = CASES[name](), generator(4)
    clients = []
    for n in sizes:
        x = torch.randn(n, 4, generator=g, dtype=WIDE)
        classes = torch.randint(3, (n,), generator=g)
        clients.append((x, classes if model.likelihood.name == "categorical" else x[:, :3] + 1))
    cohort = cohort_of(model, clients)
    draws = torch.randn(len(SIZES), 4, model.z_layout.size, generator=g, dtype=WIDE)
    return model, cohort, draws


def each(estimate, phi, cohort, key, features=None):
    """Who is finite, values, and the sum of J over those who are, from J of each client."""
    value, total = phi.detach().new_zeros(len(cohort)), torch.zeros_like(phi.detach())
    good, seen = torch.zeros(len(cohort), dtype=torch.bool), []
    for rows, own, j in estimate.each(phi, cohort, key, None, features):
        value[rows], good[rows] = own, torch.isfinite(own) & finite_rows(j)
        total += WEIGHTS[rows][good[rows]] @ j[good[rows]]
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(cohort)))
    return good, value, total


@pytest.mark.parametrize("sizes", [SIZES, RAGGED], ids=["few sizes", "many sizes"])
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_j(name, sizes, monkeypatch):
    model, cohort, draws = problem(name, sizes)
    monkeypatch.setattr(phi_step, "LEAST_CLIENTS_FOR_VMAP", 0)
    key, good = train_key(), torch.ones(len(SIZES), dtype=torch.bool)
    estimate = PhiGradient(model, None, draws)
    phi = model.initial_phi().requires_grad_(model.phi_layout.size > 0)
    keys = model.dropout_keys(cohort, key)
    features, _ = embedded(model, phi, cohort, keys, graph=True, separate=False)
    _, value, j = estimate.fused(phi, features, cohort, keys, good, WEIGHTS)
    ways = {"side by side": each(estimate, phi, cohort, key)}
    assert vectorises(model, phi)
    monkeypatch.setattr(phi_step, "GRADIENT_NUMBERS_AT_ONCE", 1)
    ways["side by side, one at a time"] = each(estimate, phi, cohort, key)
    joined, parts = embedded(model, phi, cohort, keys, graph=False, separate=True)
    torch.testing.assert_close(joined, features.detach() if isinstance(features, torch.Tensor) else features)
    ways["a graph each"] = each(estimate, phi, cohort, key, parts)
    monkeypatch.setattr(phi_step, "LARGEST_PHI_SIDE_BY_SIDE", -1)
    assert not vectorises(model, phi)
    ways["one by one"] = each(estimate, phi, cohort, key)
    for way, (still_good, own, total) in ways.items():
        assert still_good.all(), way
        torch.testing.assert_close(own, value, msg=lambda text, way=way: f"{way}: {text}")
        torch.testing.assert_close(total, j, msg=lambda text, way=way: f"{way}: {text}")


def test_expected_values_in_closed_form():
    model, cohort, draws = problem("linear")
    d = model.z_layout.size
    cov = torch.randn(len(SIZES), d, d, generator=generator(6), dtype=WIDE)
    moments = (draws[:, 0], cov @ cov.mT)
    estimate = PhiGradient(model, moments, draws)
    phi = model.initial_phi().requires_grad_()
    good = torch.ones(len(SIZES), dtype=torch.bool)
    _, value, j = estimate.fused(phi, model.features(phi, cohort), cohort, None, good, WEIGHTS)
    _, own, total = each(estimate, phi, cohort, train_key())
    torch.testing.assert_close(own, value)
    torch.testing.assert_close(total, j)


@pytest.mark.parametrize("separate", [True, False])
def test_one_broken_client_is_left_out(separate):
    model, cohort, draws = problem("network")
    cohort.x[0] = 1e200  # of the first client: its squares overflow
    phi = model.initial_phi().requires_grad_()
    draws = draws.clone()
    draws[4] = torch.nan
    parts = embedded(model, phi, cohort, None, graph=False, separate=separate)[1]
    estimate = PhiGradient(model, None, draws)
    still_good, _, total = each(estimate, phi, cohort, train_key(), parts)
    assert torch.isfinite(total).all()
    assert not still_good[4]
    assert still_good[[1, 2, 3, 5, 6]].all()


@pytest.mark.parametrize("name", ["linear", "no biases", "fixed effects", "network"])
def test_one_broken_client_is_left_out_of_the_sum(name):
    model, cohort, draws = problem(name)
    phi, everyone = model.initial_phi().requires_grad_(), torch.ones(len(SIZES), dtype=torch.bool)
    others = torch.arange(len(SIZES)) != 2
    features = model.features(phi, cohort)
    weights = torch.where(others, WEIGHTS, 0.0)
    _, _, expected = PhiGradient(model, None, draws).fused(phi, features, cohort, None, everyone, weights)
    draws = draws.clone()
    draws[2, 1] = torch.inf
    features = model.features(phi, cohort)
    good, _, j = PhiGradient(model, None, draws).fused(phi, features, cohort, None, everyone, WEIGHTS)
    assert torch.equal(good, others)
    torch.testing.assert_close(j, expected)


def test_a_linear_backbone_needs_no_graph():
    model, cohort, draws = problem("linear")
    phi, good = model.initial_phi().requires_grad_(), torch.ones(len(SIZES), dtype=torch.bool)
    assert model.pulls_back(cohort)
    with torch.no_grad():
        bare = model.features(phi, cohort)
    estimate = PhiGradient(model, None, draws)
    j = estimate.fused(phi, bare, cohort, None, good, WEIGHTS)[2]
    torch.testing.assert_close(j, each(estimate, phi, cohort, train_key())[2])
    assert not problem("network")[0].pulls_back(cohort)
    assert not problem("fixed effects")[0].pulls_back(cohort)


def test_convolutions_go_one_by_one():
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    model = fp.Composition(convolution, nn.Linear(2, 2), "categorical")
    assert not vectorises(model, model.initial_phi())
    clients = [(torch.randn(n, 1, 4, 4, generator=generator(n)), torch.arange(n) % 2) for n in (3, 1, 4)]
    plain = fp.FedSOUL(model).fit(clients, rounds=2)
    packed = fp.FedSOUL(model, compressor=fp.compressors.QSGD(levels=32767)).fit(clients, rounds=2)
    torch.testing.assert_close(plain.published["phi"], packed.published["phi"], rtol=1e-2, atol=1e-3)
    assert plain.totals["backbone_passes"] == packed.totals["backbone_passes"] == 2 * 8
