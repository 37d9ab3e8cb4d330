"""One z for everyone by least squares: against closed forms, against scipy, and in other coordinates."""

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import fedpop as fp
from fedpop.keys import Key
from fedpop.message import Tensors
from fedpop.questions import pooled
from fedpop.questions.features import LEAST_EXAMPLES
from tests.helpers import asked, cohort_of, generator

Rows = list[tuple[Tensor, Tensor]]
LEARNED = fp.likelihoods.Normal("learned")


def line(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
    return z["a"] + z["b"] * x[:, 0]


def decay(phi: dict[str, Tensor], z: dict[str, Tensor], x: Tensor) -> Tensor:
    return z["height"] * torch.exp(-z["rate"] * x[:, 0])


def straight(sizes: tuple[int, ...] = (3, 7, 1, 5)) -> Rows:
    g = generator(3)
    xs = [8 + 6 * torch.rand(n, 1, generator=g, dtype=torch.float64) for n in sizes]
    return [(x, 17 + 0.6 * x[:, 0] + torch.randn(len(x), generator=g, dtype=torch.float64)) for x in xs]


def found(model: fp.CustomModel, clients: Rows) -> Tensors:
    known: Tensors = {}
    for question in pooled.questions(model, model.initial_phi()):
        known |= asked(question, cohort_of(model, clients), known, Key(0))[0]
    return known


def test_outputs_that_are_linear_in_z_are_fitted_by_pooled_least_squares() -> None:
    """Those with a single row, whose sums would be the row, are not among them."""
    clients = straight()
    large = [c for c in clients if len(c[1]) >= LEAST_EXAMPLES]
    assert len(large) == 3
    x, y = torch.cat([x for x, _ in large]), torch.cat([y for _, y in large])
    design = torch.cat((torch.ones_like(x), x), 1)
    best = torch.linalg.lstsq(design, y.unsqueeze(1)).solution.squeeze(1)
    model = fp.CustomModel(outputs=line, likelihood=LEARNED, z={"a": 0.0, "b": 0.0})
    known = found(model, clients)
    torch.testing.assert_close(known["centre"], best, rtol=1e-5, atol=0)
    left = float((y - design @ best).square().mean())
    assert float(known["left"]) == pytest.approx(left, rel=1e-6)
    wide = (0.5 * left * len(y) / 2 * torch.linalg.inv(design.T @ design).diagonal()).sqrt()
    torch.testing.assert_close(known["spread"], wide, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("height", "rate"), [(1.0, 1.0), (30.0, 0.05), (3.0, 3.0)])
def test_a_curve_is_fitted_as_by_scipy_from_near_and_far(height: float, rate: float) -> None:
    g = generator(5)
    clients = []
    for n in (4, 6, 5, 8):
        x = torch.linspace(0.2, 6, n, dtype=torch.float64).unsqueeze(1)
        y = 9 * torch.exp(-0.4 * x[:, 0]) + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)
        clients.append((x, y))
    x, y = (torch.cat(parts).numpy() for parts in zip(*clients, strict=True))
    best = scipy.optimize.least_squares(lambda p: p[0] * np.exp(-p[1] * x[:, 0]) - y, (9, 0.4), xtol=1e-14)
    z = {"height": height, "rate": fp.links.positive(rate)}
    known = found(fp.CustomModel(outputs=decay, likelihood=LEARNED, z=z), clients)
    assert float(known["left"]) == pytest.approx(2 * best.cost / len(y), rel=1e-3)
    assert float(known["centre"][0]) == pytest.approx(best.x[0], rel=1e-2)
    assert float(known["centre"][1].exp()) == pytest.approx(best.x[1], rel=1e-2)
    assert float(known["spread"][1]) <= 1.0


def test_it_is_the_same_fit_in_other_coordinates() -> None:
    """x from elsewhere and in other units: the same outputs and noise, and the same spread of the slope."""
    model = fp.CustomModel(outputs=line, likelihood=LEARNED, z={"a": 0.0, "b": 0.0})
    plain, other = found(model, straight()), found(model, [(24 * x - 100, y) for x, y in straight()])
    assert float(other["left"]) == pytest.approx(float(plain["left"]), rel=1e-5)
    assert float(other["centre"][1]) == pytest.approx(float(plain["centre"][1]) / 24, rel=1e-4)
    assert float(other["spread"][1]) == pytest.approx(float(plain["spread"][1]) / 24, rel=1e-2)


def test_other_models_are_not_asked() -> None:
    poisson = fp.CustomModel(outputs=line, likelihood="poisson", z={"a": 0.0, "b": 0.0})
    linear = fp.Composition(None, torch.nn.Linear(1, 1), LEARNED)
    for model in (poisson, linear):
        assert not pooled.questions(model, model.initial_phi())


def test_the_prior_starts_there_unless_told_otherwise() -> None:
    model = fp.CustomModel(outputs=line, likelihood=LEARNED, z={"a": 0.0, "b": 0.0})
    clients = [(x, y) for x, y in straight((4, 4, 4)) for _ in range(2)]
    centre = found(model, clients)["centre"]
    short = fp.chains.Final(draws=2, burn_in=0)
    method = fp.FedSOUL(model, final=short, chain=fp.chains.Chain(burn_in=0), local_steps=1)
    begun = method.fit(clients, rounds=1, progress=False).prior_mean
    torch.testing.assert_close(begun, centre, rtol=0.1, atol=0)
    random = method.replace(start="random").fit(clients, rounds=1, progress=False).prior_mean
    assert float(random[0]) < 0.5 * float(centre[0])
