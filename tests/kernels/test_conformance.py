"""What every kernel must do, whatever it samples. No oracle but exact equality."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedpop.kernels import HMC, ULA, Exponential, JumpHMC, Kernel, MixtureDraw, Target, Tuning, run
from fedpop.kernels.base import Noise
from fedpop.models.local import LocalLikelihood
from fedpop.runtime.random import Key
from tests.oracles import DOUBLE, make_case, normal_prior

KERNELS = [ULA(), Exponential(), Exponential(h=0.3), HMC(), HMC(leapfrog=1), JumpHMC()]
CASES = [make_case("bernoulli", "diagonal"), make_case("normal", "full", outputs=2)]
KEY = Key(3, purpose="test")

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=repr)
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def start(case, ids, chains=2):
    d = case.prior.dimension(case.beta)
    return case.prior.sample(
        case.beta, KEY.at(purpose="start").normal(torch.tensor(ids), (chains, d), DOUBLE)
    )


def go(kernel, target, z, ids, steps=6, key=KEY, adapt=False, log_step=None):
    first = kernel.initial_log_step if log_step is None else log_step
    tuning = Tuning.fresh(len(ids), first, z)
    return run(kernel, target, z, tuning, steps, key, torch.tensor(ids), adapt=adapt)


def test_every_kernel_is_here():
    # MixtureDraw needs posteriors that are mixtures of Gaussians: test_mixture_draw.py has its own.
    assert {type(k) for k in KERNELS} - {JumpHMC} == set(Kernel.__subclasses__()) - {MixtureDraw}


@kernels
@cases
def test_shapes_and_state(kernel, case):
    z = start(case, [0, 1, 2])
    trace = go(kernel, case.target(), z, [0, 1, 2])
    assert trace.draws.shape == trace.grads.shape == (3, 6, *z.shape[1:])
    assert trace.acceptance.shape == trace.diverged.shape == (3,)
    assert trace.draws.dtype == z.dtype
    assert ((trace.acceptance > 0) & (trace.acceptance <= 1)).all()
    # The last draw is the state, and each draw carries the gradient at itself.
    assert torch.equal(trace.draws[:, -1], trace.state.z)
    for m in range(6):
        value, grad = case.target().value_and_grad(trace.draws[:, m])
        torch.testing.assert_close(trace.grads[:, m], grad)
    torch.testing.assert_close(trace.state.value, value)


@kernels
@cases
def test_same_key_same_draws_and_another_key_others(kernel, case):
    z = start(case, [0, 1, 2])
    one, two = (go(kernel, case.target(), z, [0, 1, 2]) for _ in range(2))
    assert torch.equal(one.draws, two.draws)
    later = go(kernel, case.target(), z, [0, 1, 2], key=KEY.at(round=1))
    assert not (one.draws == later.draws).any()


@kernels
def test_noise_fetched_in_chunks_is_the_same(kernel, monkeypatch):
    case, ids = CASES[0], [0, 1, 2]
    z = start(case, ids)
    whole = go(kernel, case.target(), z, ids)
    monkeypatch.setattr(Noise, "CHUNK", 2 * z.numel())
    assert torch.equal(whole.draws, go(kernel, case.target(), z, ids).draws)


@kernels
@cases
@pytest.mark.parametrize("ids", [[1], [2, 1], [0, 1]], ids=str)
def test_draws_do_not_depend_on_who_else_is_there(kernel, case, ids):
    everyone = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], adapt=True)
    some = go(kernel, case.target(ids), start(case, ids), ids, adapt=True)
    # Sums over other padding round differently, nothing else changes.
    torch.testing.assert_close(some.draws, everyone.draws[ids], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(some.tuning.log_step, everyone.tuning.log_step[ids])


@kernels
def test_adaptation_is_on_or_off(kernel):
    case, ids = CASES[0], [0, 1, 2]
    trace = go(kernel, case.target(), start(case, ids), ids, adapt=False)
    assert (trace.tuning.log_step == kernel.initial_log_step).all()
    assert (trace.tuning.updates == 0).all()
    # A step far too large and one far too small, for kernels that listen to acceptance.
    for log_step in (kernel.initial_log_step, kernel.initial_log_step - 3):
        trace = go(kernel, case.target(), start(case, ids, 50), ids, adapt=True, log_step=log_step)
        assert (trace.tuning.updates == 1).all()
        if kernel.target_acceptance is None:
            assert (trace.tuning.log_step == log_step).all()
        else:
            wanted = log_step + trace.acceptance - kernel.target_acceptance
            torch.testing.assert_close(trace.tuning.log_step, wanted.clamp(max=kernel.largest_log_step))


@kernels
@cases
def test_gradient_evaluations_are_what_is_reported(kernel, case, monkeypatch):
    calls = []
    plain = Target.value_and_grad

    def counted(self, z):
        calls.append(z.shape)
        return plain(self, z)

    monkeypatch.setattr(Target, "value_and_grad", counted)
    trace = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], steps=7)
    assert len(calls) == trace.gradient_evaluations == 1 + 7 * kernel.gradients_per_step
    assert kernel.gradients_per_step == getattr(kernel, "leapfrog", 1) + isinstance(kernel, JumpHMC)


# --- divergence ------------------------------------------------------------------------------


@dataclass
class Cliff(LocalLikelihood):
    """Flat, but undefined where norm(z) exceeds a client's radius."""

    radius: Tensor

    def value(self, z: Tensor) -> Tensor:
        return self.value_and_grad(z)[0]

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        outside = z.norm(dim=-1, keepdim=True) > self.radius[:, None, None]
        grad = torch.where(outside, torch.full_like(z, math.nan), torch.zeros_like(z))
        return grad.sum(-1), grad


@dataclass
class Quartic(LocalLikelihood):
    """-50 norm(z)^4: curvature grows without bound, so no step is small enough everywhere."""

    def value(self, z: Tensor) -> Tensor:
        return -50 * z.square().sum(-1).square()

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        square = z.square().sum(-1, keepdim=True)
        return self.value(z), -200 * square * z


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
    tuning = Tuning.fresh(1, kernel.initial_log_step, z)
    events = []
    for k in range(40):
        trace = run(kernel, target, z, tuning, 10, KEY.at(round=k), torch.tensor([0]), adapt=True)
        z, tuning = trace.state.z, trace.tuning
        assert torch.isfinite(trace.draws).all()
        events.append(float(trace.diverged.sum()))
    assert (z.norm(dim=-1) < 1).all()  # the density at 1 is e^-50 of that at 0
    assert sum(events[-10:]) == 0
    # ULA measures the curvature where it stands; the others find out.
    assert events[0] > 0 or isinstance(kernel, ULA)


@kernels
def test_a_chain_without_density_starts_over(kernel):
    case = make_case("poisson", "isotropic")
    z = start(case, [0, 1, 2])
    z[2, 0] = 1e4  # exp(eta) overflows
    trace = go(kernel, case.target(), z, [0, 1, 2], steps=3)
    assert torch.isfinite(trace.draws).all()
    assert torch.isfinite(trace.grads).all()
    assert (trace.draws[2, :, 0] - case.mu).abs().max() < 10
    untouched = go(kernel, case.target(), start(case, [0, 1, 2]), [0, 1, 2], steps=3)
    assert torch.equal(trace.draws[2, :, 1], untouched.draws[2, :, 1])
    assert torch.equal(trace.draws[:2], untouched.draws[:2])
