"""What every kernel does where a density ends, or a step is far too long."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedpop.kernels import (
    SGLD,
    ULA,
    Exponential,
    Target,
    run,
)
from fedpop.models.local import LocalLikelihood
from tests.kernels.every_kernel import KEY, first, go, kernels, start
from tests.oracles import (
    DOUBLE,
    cohort_of,
    gaussian_noise,
    make_case,
    normal_prior,
)


class Rowless(LocalLikelihood):
    """A density without examples, of which a mini-batch is all."""

    @property
    def sizes(self) -> Tensor:
        return torch.ones(2)

    def subset(self, size, uniform):
        return self

    def value(self, z: Tensor) -> Tensor:
        return self.value_and_grad(z)[0]


@dataclass
class Cliff(Rowless):
    """Flat, but undefined where norm(z) exceeds a client's radius."""

    radius: Tensor

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        outside = z.norm(dim=-1, keepdim=True) > self.radius[:, None, None]
        grad = torch.where(outside, torch.full_like(z, math.nan), torch.zeros_like(z))
        return grad.sum(-1), grad


@dataclass
class Quartic(Rowless):
    """-50 norm(z)^4: curvature grows without bound, so no step is small enough everywhere."""

    @property
    def sizes(self) -> Tensor:
        return torch.ones(1)

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        square = z.square().sum(-1, keepdim=True)
        return -50 * square.squeeze(-1).square(), -200 * square * z


def on(likelihood: LocalLikelihood) -> Target:
    prior, beta = normal_prior("isotropic", torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE))
    return Target(likelihood, prior, beta)


@kernels
def test_divergence_is_caught_counted_and_halves_the_step(kernel):
    target = on(Cliff(torch.tensor([0.4, math.inf], dtype=DOUBLE)))
    z = torch.zeros(2, 3, 2, dtype=DOUBLE)
    trace = go(kernel, target, z, [0, 1], steps=20, adapt=True)
    assert torch.isfinite(trace.draws).all()
    assert (trace.draws[0].norm(dim=-1) <= 0.4).all()
    # Counted: with a step this large most proposals of client 0 leave the disc.
    assert 20 <= trace.diverged[0] <= 60
    torch.testing.assert_close(
        trace.tuning.log_step[0], torch.tensor(kernel.initial_log_step - math.log(2), dtype=DOUBLE)
    )
    # The client beside it neither diverges nor loses its step.
    assert trace.diverged[1] == 0
    assert trace.tuning.log_step[1] > trace.tuning.log_step[0] + 0.5
    # Without adaptation it is still caught and counted.
    still = go(kernel, target, z, [0, 1], steps=20, adapt=False)
    assert torch.equal(still.diverged, trace.diverged)
    assert (still.tuning.log_step == kernel.initial_log_step).all()


@kernels
def test_a_chain_recovers_from_a_bad_start(kernel):
    target = on(Quartic())
    z = torch.full((1, 4, 2), 3.0, dtype=DOUBLE)
    tuning = first(kernel, target, 1, z)
    events = []
    for k in range(40):
        trace = run(kernel, target, z, tuning, 10, KEY.at(round=k), torch.tensor([0]), adapt=True)
        z, tuning = trace.state.z, trace.tuning
        assert torch.isfinite(trace.draws).all()
        events.append(float(trace.diverged.sum()))
    assert (z.norm(dim=-1) < 1).all()  # the density at 1 is e^-50 of that at 0
    if isinstance(kernel, ULA | SGLD):
        # They measure the curvature where they stand, once a pass, so they start well. Where all chains
        # happen to stand near 0 it is the prior's alone, and such a step leaves: it is halved for good, and
        # a quarter of it needs four chains within 0.1 of 0, one pass in ten thousand.
        assert sum(event > 0 for event in events) <= 3
    else:
        assert events[0] > 0
        assert sum(events[-10:]) == 0


@kernels
@pytest.mark.parametrize("head", ["linear", "vmap"])
def test_a_chain_without_density_starts_over(kernel, head):
    if head == "vmap" and isinstance(kernel, Exponential):
        pytest.skip("with the prior's scale as its only unit it does not get far on such heads")
    case = make_case("poisson", "isotropic", head=head)
    z = start(case, [0, 1, 2])
    z[2, 0] = 1e4  # exp(eta) overflows
    trace = go(kernel, case.target(), z, [0, 1, 2], steps=3)
    assert torch.isfinite(trace.draws).all()
    assert torch.isfinite(trace.grads).all()
    assert (trace.draws[2, :, 0] - case.mu).abs().max() < 10
    untouched = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], steps=3)
    # The curvature that sets the step of a head through vmap is the worst over a client's chains.
    if head == "linear" or not isinstance(kernel, ULA | SGLD):
        assert torch.equal(trace.draws[2, :, 1], untouched.draws[2, :, 1])
    assert torch.equal(trace.draws[:2], untouched.draws[:2])


@kernels
def test_an_estimate_scaled_up_from_a_batch_is_no_divergence(kernel):
    """Values that fluctuate by n/|B| times those of a batch are plausible; a runaway is not."""
    model = make_case("bernoulli", "isotropic", features=1).model
    n = 20_000
    x = gaussian_noise(1, n, 1)
    cohort = cohort_of(model, [(x, (x[:, 0] > 0).to(DOUBLE))])
    prior, beta = normal_prior("isotropic", torch.zeros(1, dtype=DOUBLE), torch.eye(1, dtype=DOUBLE))
    target = Target(model.bind(model.initial_phi(), cohort.x, cohort), prior, beta)
    z = torch.full((1, 1, 1), 2.0, dtype=DOUBLE)
    trace = go(kernel, target, z, [0], steps=50)
    assert float(trace.diverged) == 0
