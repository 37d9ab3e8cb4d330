"""Fixed effects beside random ones: closed forms by hand, the optimum in numpy, other engines and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import DataError, ModelError
from tests.helpers import cohort_of, generator, seeded


def data(b: int = 20, seed: int = 0) -> list[tuple[dict[str, Tensor], Tensor]]:
    """y = 2 + z_i + 1.5 x_1 - x_2 + noise, in groups of unequal size."""
    g = generator(seed)
    clients = []
    for i in range(b):
        n = 3 + i % 4
        x = torch.randn(n, 2, generator=g) * torch.tensor([1.0, 5.0]) + 3.0
        y = 2 + 0.8 * torch.randn((), generator=g) + x @ torch.tensor([1.5, -1.0])
        y = y + 0.5 * torch.randn(n, generator=g)
        clients.append(({"fixed": x, "random": torch.ones(n, 1)}, y))
    return clients


def model(likelihood: str = "normal") -> fp.Composition:
    slopes, intercept = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    return fp.Composition(None, seeded(intercept, 1), likelihood, fixed=seeded(slopes, 2))


def maximum(clients: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[float, np.ndarray]:
    """The maximum likelihood of a random intercept: generalised least squares given sd^2 / s2, and a search
    over that one number."""
    groups = [
        (np.column_stack((np.ones(len(y)), x["fixed"].double().numpy())), y.double().numpy())
        for x, y in clients
    ]
    n = sum(len(y) for _, y in groups)

    def profile(ratio: float) -> tuple[float, np.ndarray]:
        inverse = [np.linalg.inv(np.eye(len(y)) + ratio) for _, y in groups]
        pairs = list(zip(groups, inverse, strict=True))
        left = sum(x.T @ v @ x for (x, _), v in pairs)
        b = np.linalg.solve(left, sum(x.T @ v @ y for (x, y), v in pairs))
        s2 = sum((y - x @ b) @ v @ (y - x @ b) for (x, y), v in pairs) / n
        log_det = -sum(np.linalg.slogdet(v)[1] for v in inverse)
        return -0.5 * (n * np.log(2 * np.pi * s2) + n + log_det), b

    low, high = -6.0, 6.0  # of log ratio
    for _ in range(200):  # golden section
        a, c = high - (high - low) * 0.6180339887, low + (high - low) * 0.6180339887
        low, high = (low, c) if profile(np.exp(a))[0] > profile(np.exp(c))[0] else (a, high)
    return profile(np.exp((low + high) / 2))


def test_the_optimum_is_numpy_s() -> None:
    clients = data()
    best, b = maximum(clients)
    population = fp.FedSOUL(model()).fit(clients, progress=False)
    assert population.engine.startswith("exact: ")
    assert population.log_likelihood().value == pytest.approx(best, abs=1e-4)
    found = [float(population.prior_mean), *population.phi["fixed.weight"].flatten().tolist()]
    assert found == pytest.approx(b.tolist(), abs=1e-3)


def test_chains_reach_the_same() -> None:
    clients = data()
    population = fp.FedSOUL(model(), engine="sampled").fit(clients, rounds=300, progress=False)
    assert population.log_likelihood().value == pytest.approx(maximum(clients)[0], abs=0.2)


def test_posteriors_and_predictions_by_hand() -> None:
    clients = data()
    population = fp.FedSOUL(model()).fit(clients, progress=False)
    (x, y), b = clients[4], population.phi["fixed.weight"][0]
    mu, tau, s2 = (
        population.prior_mean,
        population.prior_sd**2,
        population.phi["likelihood.log_variance"].exp(),
    )
    precision = len(y) / s2 + 1 / tau
    mean = ((y - x["fixed"] @ b).sum() / s2 + mu / tau) / precision
    draws = population.posterior(4).draws
    assert float(draws.mean()) == pytest.approx(float(mean), abs=5 * float(precision**-0.5) / 1000**0.5)
    assert float(draws.var()) == pytest.approx(float(1 / precision), rel=0.25)
    new = {"fixed": torch.tensor([[1.0, 2.0]]), "random": torch.ones(1, 1)}
    expected = draws.mean() + torch.tensor([1.0, 2.0]) @ b
    torch.testing.assert_close(population.predict(4, new).mean.squeeze(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("likelihood", ["normal", "poisson", "bernoulli"])
def test_the_native_path_is_the_general_one(likelihood: str) -> None:
    """The same model with its head hidden in a Sequential goes through vmap."""
    clients = [(x, (y > 0).float()) for x, y in data(4)]
    native = model(likelihood)
    hidden = nn.Sequential(nn.Linear(1, 1, bias=False))
    general = fp.Composition(None, hidden, likelihood, fixed=seeded(nn.Linear(2, 1, bias=False), 2))
    assert native.linear
    assert not general.linear
    cohort, z = cohort_of(native, clients), torch.randn(4, 3, 1, generator=generator(3))
    phi = native.initial_phi()
    values = [m.bind(phi, m.features(phi, cohort), cohort).value_and_grad(z) for m in (native, general)]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


def test_a_pair_or_one_tensor_will_do() -> None:
    clients = data()
    named = fp.FedSOUL(model()).fit(clients, progress=False)
    pairs = fp.FedSOUL(model()).fit([((x["fixed"], x["random"]), y) for x, y in clients], progress=False)
    torch.testing.assert_close(named.published, pairs.published)
    both = fp.Composition(None, nn.Linear(2, 1), "normal", fixed=nn.Linear(2, 1, bias=False))
    assert fp.FedSOUL(both).fit([(x["fixed"], y) for x, y in clients], rounds=2, progress=False).rounds == 2


def test_what_does_not_fit_is_said() -> None:
    clients = [({"fixed": x["fixed"], "groups": x["random"]}, y) for x, y in data(3)]
    with pytest.raises(DataError, match=r"takes x as .*'fixed': X, 'random': Z"):
        fp.FedSOUL(model()).fit(clients, rounds=1, progress=False)
    wide = fp.Composition(None, nn.Linear(1, 1), "normal", fixed=nn.Linear(2, 3))
    with pytest.raises(ModelError, match="expected 1 output"):
        fp.FedSOUL(wide).fit(data(3), rounds=1, progress=False)


def test_other_methods_and_files(tmp_path: Path) -> None:
    clients = data(6)
    for method in (fp.FedAvg(model()), fp.FedRep(model()), fp.FedSOUL(model(), prior="mixture")):
        population = method.fit(clients, rounds=2, progress=False)
        assert all(bool(torch.isfinite(t).all()) for t in population.published.values())
    population = fp.FedSOUL(model()).fit(clients, progress=False)
    loaded = fp.load(population.save(tmp_path / "saved"))
    x = {"fixed": torch.tensor([[1.0, 2.0]]), "random": torch.ones(1, 1)}
    torch.testing.assert_close(loaded.predict(1, x).mean, population.predict(1, x).mean)
    assert "engine   exact" in str(loaded)
