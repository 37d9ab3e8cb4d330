"""The quasi-Newton method against functions whose minima are known, and its state against interruption."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedpop.server.quasi_newton import SearchState, begun_again, tell
from tests.helpers import generator

TOLERANCE = 1e-10


def rosenbrock(x: Tensor) -> Tensor:
    """A bent valley; its only minimum is 0 at (1, ..., 1)."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def told(
    state: SearchState, f: Callable[[Tensor], Tensor], unit: Tensor, tolerance: float = TOLERANCE
) -> SearchState:
    """One evaluation, with the Hessian where it is asked for."""
    x = state.trial.clone().requires_grad_()
    value = f(x)
    (g,) = torch.autograd.grad(value, x)
    hessian = torch.autograd.functional.hessian(f, state.trial) if state.wants_curvature else None
    return tell(state, value.item(), g, hessian, unit, tolerance)


def minimised(f: Callable[[Tensor], Tensor], x: Tensor, evaluations: int = 300) -> tuple[SearchState, int]:
    state, unit = SearchState.at(x), torch.ones_like(x)
    for k in range(evaluations):
        if state.over:
            return state, k
        state = told(state, f, unit)
    return state, evaluations


@pytest.mark.parametrize("size", [2, 6])
def test_the_bent_valley(size: int) -> None:
    x = torch.linspace(-1.2, 1.0, size, dtype=torch.float64)
    state, evaluations = minimised(rosenbrock, x)
    assert state.converged
    assert evaluations < 100
    torch.testing.assert_close(state.x, torch.ones_like(x), atol=1e-5, rtol=0)


def test_a_quadratic_takes_one_step_whatever_its_units() -> None:
    scale = torch.tensor([1e-4, 1.0, 1e5], dtype=torch.float64)
    root = torch.randn(3, 3, generator=generator(0), dtype=torch.float64) / scale
    curvature, centre = root.mT @ root, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) * scale
    state, unit = SearchState.at(centre + 0.5 * scale), scale
    for _ in range(4):
        state = told(state, lambda x: 0.5 * (x - centre) @ curvature @ (x - centre), unit)
    assert state.converged
    torch.testing.assert_close(state.x / scale, centre / scale, atol=1e-6, rtol=0)


def test_a_saddle_is_left() -> None:
    """F = (x^2 - 1)^2 + y^2 from x = 0, where its gradient is zero."""
    state, _ = minimised(lambda v: (v[0] ** 2 - 1) ** 2 + v[1] ** 2, torch.zeros(2, dtype=torch.float64))
    assert state.converged
    assert float(state.x[0].abs()) == pytest.approx(1.0, abs=1e-5)


def test_outside_the_domain_the_step_is_shortened() -> None:
    """F = x - log x is NaN for x < 0; Newton's first step from 3 ends at -3."""
    state, _ = minimised(lambda v: (v - v.log()).sum(), torch.full((2,), 3.0, dtype=torch.float64))
    assert state.converged
    torch.testing.assert_close(state.x, torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0)


def test_directions_without_curvature_are_left_alone() -> None:
    """F depends on x + y alone."""
    start = torch.tensor([3.0, -1.0], dtype=torch.float64)
    state, _ = minimised(lambda v: torch.cosh(v.sum() - 1), start)
    assert state.converged
    assert float(state.x.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float(state.x[0] - state.x[1]) == pytest.approx(4.0, abs=1e-6)


def test_every_accepted_step_goes_down_and_satisfies_strong_wolfe() -> None:
    state, unit = (
        SearchState.at(torch.tensor([-1.2, 1.0], dtype=torch.float64)),
        torch.ones(2, dtype=torch.float64),
    )
    accepted = 0
    while not state.over:
        new = told(state, rosenbrock, unit)
        if new.iterations > state.iterations:
            accepted += 1
            assert new.f <= state.f + 1e-4 * state.t * state.slope + 1e-12
            assert abs(float(new.g @ state.direction)) <= 0.9 * abs(state.slope)
        state = new
    assert accepted > 10


def test_a_state_written_and_read_goes_on_to_the_same_bits() -> None:
    unit = torch.ones(4, dtype=torch.float64)
    state = other = SearchState.at(torch.linspace(-1.2, 1.0, 4, dtype=torch.float64))
    while not state.over:
        state = told(state, rosenbrock, unit)
        other = SearchState.of(told(SearchState.of(other.tensors()), rosenbrock, unit).tensors())
        for name, value in state.tensors().items():
            assert torch.equal(value, other.tensors()[name]), name


def test_another_function_begins_where_the_last_one_ended() -> None:
    state, _ = minimised(rosenbrock, torch.zeros(2, dtype=torch.float64))
    again = begun_again(state, curved=False)
    assert torch.equal(again.trial, state.x)
    assert not again.over
    assert begun_again(state, curved=True).wants_curvature
    other = told(again, lambda v: 2 * rosenbrock(v) + v.sum(), torch.ones(2, dtype=torch.float64))
    assert other.slope < 0  # it has a direction at once, by the curvature that it knows
